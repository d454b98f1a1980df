"""How everything here is timed: interleaved rounds, percentiles, and where it was run.

A work is a callable that does one step, each time on other data. Works that are compared run in
turn (A B, B A, A B, ...), so that what the machine does meanwhile hits all of them alike.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Work = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Times of single steps, in microseconds, and the CPU time of all threads in all of them."""

    steps_us: Sequence[float]
    cpu_s: float = 0.0

    @property
    def p50_us(self) -> float:
        return percentile(self.steps_us, 0.50)

    @property
    def p99_us(self) -> float:
        return percentile(self.steps_us, 0.99)

    def gb_per_s(self, step_bytes: int) -> float:
        """Rate at the median step: a neighbour's burst does not count."""
        return step_bytes / self.p50_us / 1e3


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` of the samples do not exceed; no interpolation."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interleaved(works: Mapping[str, Work], rounds: int) -> dict[str, Timing]:
    """Times one step of every work per round, after warm_up_rounds() that count for nothing."""
    steps_us: dict[str, list[float]] = {name: [] for name in works}
    cpu_ns = dict.fromkeys(works, 0)
    order = list(works.items())
    for _ in range(warm_up_rounds(rounds)):
        for _, step in order:
            step()
    for _ in range(rounds):
        for name, step in order:
            cpu_started = time.process_time_ns()
            started = time.perf_counter_ns()
            step()
            steps_us[name].append((time.perf_counter_ns() - started) / 1e3)
            cpu_ns[name] += time.process_time_ns() - cpu_started
        order.reverse()
    return {name: Timing(samples, cpu_ns[name] / 1e9) for name, samples in steps_us.items()}


def warm_up_rounds(rounds: int) -> int:
    """How many rounds interleaved() does before it times any: one in ten."""
    return -(-rounds // 10)


def environment(seed: int) -> str:
    """One line on machine, build and seed, to stand beside figures."""
    return (
        f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()},"
        f" Python {platform.python_version()}, commit {_commit()}, seed {seed}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    """Of the checkout that this package runs from; unknown for an installed one."""
    package = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        tracked = subprocess.run(
            ["git", "-C", str(package), "ls-files", "--error-unmatch", "config.py"],
            capture_output=True,
            timeout=10,
        )
        if tracked.returncode:
            return "unknown"
        return subprocess.run(
            command, capture_output=True, timeout=10, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
