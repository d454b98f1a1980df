"""`kvpool demo`: a made-up workload through an embedded pool from two threads, policy by policy.

Needs 650 MiB of memory. The policies without foresight move real bytes, and every hit is compared;
Belady, which knows the future, is simulated beside them as the bound. Then a pool of a quarter of
that memory with an SSD tier below it, in a directory for temporary files that is removed again, is
closed halfway and opened again, beside a pool of that memory alone, which is not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from kvpool.config import format_size
from kvpool.errors import NoResource
from kvpool.replay import report, tier_table
from kvpool.replay.run import Watch
from kvpool.replay.score import ONLINE_POLICIES, ORACLE, Score, json_fields
from kvpool.replay.simulate import simulate
from kvpool.replay.ssd import FREE_FLOOR_BYTES, TierOptions, tier_bytes
from kvpool.replay.through_pool import PoolOptions, through_pool
from kvpool.replay.trace import batches
from kvpool.replay.workload import WorkloadOptions, generate

THREADS = 2
BLOCK_BYTES = 64 << 10
CAPACITY_BLOCKS = 4096  # 256 MiB: several times any last-level cache of 2 cores
WITH_SSD_BLOCKS = CAPACITY_BLOCKS // 4
SSD_BLOCKS = 2 * CAPACITY_BLOCKS


class NoRoom(Exception):
    """The folder for temporary files has no room for the part with an SSD tier."""


def demo(workload: WorkloadOptions, watch: Watch) -> Iterator[Score]:
    """Yields Belady's score, then each policy's as soon as it has run."""
    requests = watch(ORACLE, generate(workload))
    yield from simulate(batches(requests), [ORACLE], [CAPACITY_BLOCKS])
    for policy in ONLINE_POLICIES:
        options = PoolOptions(policy, CAPACITY_BLOCKS, BLOCK_BYTES, threads=THREADS)
        yield through_pool(watch(policy, generate(workload)), options)


def with_ssd(workload: WorkloadOptions, watch: Watch) -> Score:
    """The score of a pool with an SSD tier, restarted halfway. Raises NoRoom."""
    needed = tier_bytes(SSD_BLOCKS, BLOCK_BYTES)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed + FREE_FLOOR_BYTES:
        raise NoRoom(
            f"{tempfile.gettempdir()} has {format_size(free)} free, and the part with an SSD tier"
            f" needs {format_size(needed)} and leaves {format_size(FREE_FLOOR_BYTES)}"
        )
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as folder:
        tier = TierOptions(
            Path(folder) / "tier", SSD_BLOCKS, "second_use", restart_after=workload.requests // 2
        )
        options = PoolOptions("temperature", WITH_SSD_BLOCKS, BLOCK_BYTES, ssd=tier)
        try:
            return through_pool(watch("temperature, with SSD", generate(workload)), options)
        except NoResource as error:
            raise NoRoom(str(error)) from None


def without_ssd(workload: WorkloadOptions, watch: Watch) -> Score:
    """The score of a pool that has the DRAM of the one with an SSD tier, and no restart."""
    options = PoolOptions("temperature", WITH_SSD_BLOCKS, BLOCK_BYTES)
    return through_pool(watch("temperature, without SSD", generate(workload)), options)


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
    in_dram = [score for score in scores if score.capacity_blocks == CAPACITY_BLOCKS]
    smaller = [score for score in scores if score.capacity_blocks == WITH_SSD_BLOCKS]
    return [heading, _table(in_dram), report.HIT_NOTE, report.COPY_NOTE, *_ssd_parts(smaller)]


def _ssd_parts(scores: Sequence[Score]) -> list[RenderableType]:
    if not scores:
        return []
    heading = (
        f"\n[bold]The same requests, {format_size(WITH_SSD_BLOCKS * BLOCK_BYTES)} of DRAM over"
        f" {format_size(SSD_BLOCKS * BLOCK_BYTES)} of SSD, restarted halfway, 1 thread[/]"
    )
    alone = [score for score in scores if score.on_ssd is None]
    table, *notes = tier_table.tier_parts(scores, BLOCK_BYTES, alone=alone)
    rates = [
        f"{score.hit_rate:.4f} {'with' if score.on_ssd else 'without'} the SSD" for score in scores
    ]
    return [heading, table, f"Hits in all: {', '.join(rates)}", *notes]


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
