"""`kvpool demo`: a made-up workload through an embedded pool from two threads, policy by policy.

Needs no file and 650 MiB of memory. The policies without foresight move real bytes, and every hit
is compared; Belady, which knows the future, is simulated beside them as the bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from kvpool.config import format_size
from kvpool.replay import report
from kvpool.replay.run import Watch
from kvpool.replay.score import ONLINE_POLICIES, ORACLE, Score, json_fields
from kvpool.replay.simulate import simulate
from kvpool.replay.through_pool import PoolOptions, through_pool
from kvpool.replay.trace import batches
from kvpool.replay.workload import WorkloadOptions, generate

THREADS = 2
BLOCK_BYTES = 64 << 10
CAPACITY_BLOCKS = 4096  # 256 MiB: several times any last-level cache of 2 cores


def demo(workload: WorkloadOptions, watch: Watch) -> Iterator[Score]:
    """Yields Belady's score, then each policy's as soon as it has run."""
    requests = watch(ORACLE, generate(workload))
    yield from simulate(batches(requests), [ORACLE], [CAPACITY_BLOCKS])
    for policy in ONLINE_POLICIES:
        options = PoolOptions(policy, CAPACITY_BLOCKS, BLOCK_BYTES, threads=THREADS)
        yield through_pool(watch(policy, generate(workload)), options)


def json_line(workload: WorkloadOptions, score: Score) -> str:
    """As `kvpool replay --json`, and what the demo's table shows besides."""
    fields = json_fields(f"workload, seed {workload.seed}", score)
    if score.copied is not None:
        fields |= {
            "hit_tokens": score.hit_tokens,
            "evictions": score.evictions,
            "GBps": round(score.copied.bytes_per_s / 1e9, 3),
            "memcpy_GBps": round(score.copied.memcpy_bytes_per_s / 1e9, 3),
        }
    return json.dumps(fields)


def summary(workload: WorkloadOptions, scores: Sequence[Score]) -> list[RenderableType]:
    """What to print, in order, once all scores are known."""
    first = scores[0]
    size = format_size(CAPACITY_BLOCKS * BLOCK_BYTES)
    heading = (
        f"[bold]{first.requests:,} requests for {first.blocks:,} blocks of"
        f" {format_size(BLOCK_BYTES)}, a pool of {size}, {THREADS} threads, seed {workload.seed}[/]"
    )
    return [heading, _table(scores), report.HIT_NOTE, report.COPY_NOTE]


def _table(scores: Sequence[Score]) -> Table:
    grid = {(score.policy, score.capacity_blocks): score for score in scores}
    table = report.plain_table(gap=1)
    table.add_column("policy", no_wrap=True)
    table.add_column("hit rate, gap", no_wrap=True)
    for header in report.COPY_HEADERS[1:]:  # all but the capacity, which is one for all
        table.add_column(header, justify="right", vertical="bottom")
    for score in scores:
        hit = report.hit_cell(grid, score.policy, score.capacity_blocks)
        moved = report.copy_cells(score)[2:] if score.copied else []
        table.add_row(score.policy, hit, *moved, end_section=score.policy == ORACLE)
    return table
