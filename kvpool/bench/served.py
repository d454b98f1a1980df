"""A daemon of the bench's own: `kvpool serve` as a user starts it, and what it costs the machine.

Promises:  1. it listens in a new folder and on a loopback port that the system chose: nobody else's
              daemon is met or disturbed;
           2. it runs this package, whichever one is installed elsewhere;
           3. it is gone when the `with` ends, also where a bench failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import kvpool
from kvpool.bench.rows import BenchError, expect
from kvpool.config import format_size

READY_S_MAX = 30.0
END_S_MAX = 15.0
MEMORY_LEFT_BYTES = 1 << 30  # for the system and whoever else runs
_READY = re.compile(r"kvpool: ready socket=(\S+) listen=(\S+)(?: http=(\S+))? pid=\d+")


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A daemon that is ready. `unix` and `tcp` are addresses for kvpool.connect()."""

    pid: int
    unix: str
    tcp: str
    http: str = ""  # http://HOST:PORT, where it was asked for

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, to the nanosecond; a thread that ended is left out.

        Its threads last: two are kept, and what a connection needs beyond them idles for 10 s.
        """
        spent_ns = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # ended meanwhile
                spent_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        return spent_ns / 1e9


@contextlib.contextmanager
def served(dram_bytes: int, **options: object) -> Iterator[Served]:
    """Starts a daemon with these options of `kvpool serve`. Raises BenchError if it cannot."""
    require_memory(dram_bytes)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        told = {
            "socket": f"{folder}/node.sock",
            "listen": "127.0.0.1:0",
            "dram": dram_bytes,
            "log-level": "warning",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        flags = [part for name, value in told.items() for part in (f"--{name}", str(value))]
        with (
            open(f"{folder}/log", "w+b") as log,
            subprocess.Popen(
                [sys.executable, "-m", "kvpool.cli", "serve", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment_of_child(),
            ) as process,
        ):
            try:
                yield _ready(process, Path(log.name))
            finally:
                _end(process)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """What a child says when it is ready; empty if it did not in time, and is killed then."""
    assert process.stdout is not None
    watch = threading.Timer(READY_S_MAX, process.kill)  # closes the pipe, which ends the read
    watch.start()
    try:
        return process.stdout.readline()
    finally:
        watch.cancel()


def environment_of_child() -> dict[str, str]:
    """Ours, with this package before any other, and without options for a daemon."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    package = str(Path(kvpool.__file__).resolve().parents[1])
    paths = [kept["PYTHONPATH"], package] if kept.get("PYTHONPATH") else [package]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def memory_available_bytes() -> int:
    """What the system would give without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def require_memory(needed_bytes: int) -> None:
    """Raises BenchError where the machine has not so much left, rather than being killed later."""
    left = memory_available_bytes()
    expect(
        left >= needed_bytes + MEMORY_LEFT_BYTES,
        f"a daemon with {format_size(needed_bytes)} needs more memory than there is:"
        f" {format_size(left)} are left, of which {format_size(MEMORY_LEFT_BYTES)} stay free",
    )


def _ready(process: subprocess.Popen[bytes], log: Path) -> Served:
    found = _READY.match(first_line(process).decode(errors="replace"))
    if found is None:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        said = last[0] if last else "it said nothing"
        raise BenchError(f"`kvpool serve` did not become ready: {said}")
    return Served(process.pid, f"unix:{found[1]}", f"tcp://{found[2]}", found[3] or "")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
