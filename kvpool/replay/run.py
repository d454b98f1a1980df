"""One `kvpool replay`: which passes over the trace it takes, and what each is asked.

Promises:  1. without bytes, one pass over the file whatever is asked;
           2. with bytes, one pass per (policy, capacity) that a pool can run, and one more for
              what only the simulator can (Belady, references);
           3. a trace that held no request is an error, never a table of zeros;
           4. with an SSD tier, what is simulated has both tiers' capacities as one: what a pool of
              DRAM alone, as large as the two, would hit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvpool.config import format_size
from kvpool.replay.score import ONLINE_POLICIES, Score
from kvpool.replay.simulate import simulate
from kvpool.replay.ssd import SsdOptions, TierOptions, check_folder, directory
from kvpool.replay.through_pool import PoolOptions, pool_bytes, through_pool
from kvpool.replay.trace import Request, Trace, TraceError, batches

# Wraps a pass over the trace, to show how far it is: (what the pass does, requests) -> requests.
Watch = Callable[[str, Iterable[Request]], Iterable[Request]]


class ReplayError(Exception):
    """What was asked cannot be replayed on this machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to replay. `block_bytes` None: policies only, no payload."""

    trace: Trace
    policies: tuple[str, ...]
    capacities_blocks: tuple[int, ...]
    tau_s: float = 0.0
    block_bytes: int | None = None
    threads: int = 1
    ssd: SsdOptions | None = None  # only with block_bytes


def replay(plan: Plan, watch: Watch, *, references: Sequence[str] = ()) -> Iterator[Score]:
    """Yields a Score per (policy, capacity), each as soon as it is known.

    references: policies to simulate as well, unless the plan has them anyway; they come first.
    Raises TraceError, ReplayError (too little memory), KvpoolError.
    """
    in_pool = [name for name in plan.policies if plan.block_bytes and name in ONLINE_POLICIES]
    simulated = [name for name in (*references, *plan.policies) if name not in in_pool]
    simulated = list(dict.fromkeys(simulated))
    counts = plan.ssd is not None and plan.ssd.restart_at is not None
    _check_passes(plan, len(in_pool) * len(plan.capacities_blocks) + bool(simulated or counts))
    if plan.ssd:
        check_folder(plan.ssd.folder)
    if simulated:
        yield from _not_empty(plan, _simulate(plan, watch("policies", plan.trace), simulated))
    elif counts:  # a simulation counts, too
        for _ in watch("requests", plan.trace):
            pass
    for options in _pool_options(plan, in_pool):
        _check_memory(options)
        step = f"{options.policy}, {options.capacity_blocks:,} blocks"
        with _with_tier(options, plan) as with_tier:
            score = through_pool(watch(step, plan.trace), with_tier)
        yield from _not_empty(plan, [score])


def _simulate(plan: Plan, requests: Iterable[Request], policies: Sequence[str]) -> list[Score]:
    ssd_blocks = plan.ssd.capacity_blocks if plan.ssd else 0
    capacities = [capacity + ssd_blocks for capacity in plan.capacities_blocks]
    scores = simulate(batches(requests), policies, capacities, tau_s=plan.tau_s)
    return [
        dataclasses.replace(
            score,
            capacity_blocks=score.capacity_blocks - ssd_blocks,
            ssd_capacity_blocks=ssd_blocks,
        )
        for score in scores
    ]


def _pool_options(plan: Plan, policies: Sequence[str]) -> list[PoolOptions]:
    return [
        PoolOptions(policy, capacity, plan.block_bytes or 0, plan.tau_s, plan.threads)
        for policy in policies
        for capacity in plan.capacities_blocks
    ]


@contextlib.contextmanager
def _with_tier(options: PoolOptions, plan: Plan) -> Iterator[PoolOptions]:
    """The options with the plan's SSD tier, if it has one, whose directory is there meanwhile."""
    if plan.ssd is None:
        yield options
        return
    share = plan.ssd.restart_at
    with directory(plan.ssd, f"{options.policy}-{options.capacity_blocks}") as path:
        tier = TierOptions(
            path,
            plan.ssd.capacity_blocks,
            plan.ssd.admit,
            None if share is None else int(share * plan.trace.requests),
        )
        yield dataclasses.replace(options, ssd=tier)


def _not_empty(plan: Plan, scores: list[Score]) -> list[Score]:
    if not plan.trace.requests:
        bad = f"{plan.trace.skipped:,} bad lines" if plan.trace.skipped else "it is empty"
        raise TraceError(f"{plan.trace.path} holds no request: {bad}")
    return scores


def _check_passes(plan: Plan, passes: int) -> None:
    if passes > 1 and plan.trace.size_bytes() is None:
        raise TraceError(
            f"{plan.trace.path} is not a regular file, and this replay reads it {passes} times;"
            " save it to a file first"
        )


def _check_memory(options: PoolOptions) -> None:
    needed, available = pool_bytes(options), _available_bytes()
    if available is not None and needed > available:
        raise ReplayError(
            f"{options.capacity_blocks:,} blocks of {format_size(options.block_bytes)} need"
            f" {format_size(needed)} of memory and {format_size(available)} are available;"
            " ask for fewer blocks or smaller ones (--block-bytes)"
        )


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, as the kernel estimates it; None if it won't say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
