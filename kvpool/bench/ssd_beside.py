"""What the SSD tier does to its neighbours, and how fast it is there again.

get_while_writing: gets of blocks in DRAM while a burst of puts is being written back, and no put is
    under way, beside the same gets on an idle pool.
put_full: puts into a full DRAM tier whose every block is to be written, more than a disk can take:
    they must not wait for it. Beside it the same puts without a tier: what the machine does.
reopen: opening a pool on a directory with very many blocks, its files out of the page cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.bench.disk import FREE_FLOOR_BYTES, bench_directory, forget_pages, has_room
from kvpool.bench.rows import Row, Value, at_least, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import Timing, Work, interleaved, percentile
from kvpool.config import format_size
from kvpool.replay.payload import Keys, Payload, Words, keys_of
from kvpool.replay.ssd import tier_bytes

GET_BLOCK_BYTES = 1 << 20
GET_BATCH = 16
GET_RATIO_MIN = 0.7
PUT_BLOCK_BYTES = (64 << 10, 1 << 20, 4 << 20)
PUT_P99_TO_P50_MAX = 3.0
REOPEN_ENTRIES = 1_000_000
REOPEN_BLOCK_BYTES = 4096
REOPEN_S_MAX = 2.0
_DRAM_BYTES = 512 << 20
_TIER_BYTES = 2 << 30


def beside(scale: Scale) -> Iterator[Row]:
    """One row of the first kind, three of the second, one of the third unless it is quick."""
    with bench_directory(scale, scale.of(_TIER_BYTES, quick=256 << 20)) as directory:
        yield _get_while_writing(scale, directory)
    for block_bytes in PUT_BLOCK_BYTES[:1] if scale.is_quick else PUT_BLOCK_BYTES:
        with bench_directory(scale, scale.of(_TIER_BYTES, quick=256 << 20)) as directory:
            yield _put_full(scale, directory, block_bytes)
    if not scale.is_quick:
        yield from _reopen(scale)


def _open(scale: Scale, directory: Path | None, **options: Any) -> kvpool.Pool:
    of_ssd: dict[str, Any] = {}
    if directory is not None:
        of_ssd = {
            "ssd": directory / "tier",
            "ssd_capacity": scale.of(_TIER_BYTES, quick=256 << 20),
            "ssd_admit": "all",
            "ssd_free_floor": FREE_FLOOR_BYTES // 2,
        }
    dram = scale.of(_DRAM_BYTES, quick=64 << 20)
    pool = kvpool.open(dram=dram, prefault="all", **of_ssd, **options)
    pool._node.settle(60)
    return pool


# --- gets while blocks are written back ----------------------------------------------------------


def _get_while_writing(scale: Scale, directory: Path) -> Row:
    block_bytes = scale.of(GET_BLOCK_BYTES, quick=64 << 10)
    rounds = scale.of(10, quick=2)
    with _open(scale, directory) as pool:
        stream = _Stream(pool, block_bytes)
        alone: list[float] = []
        writing: list[float] = []
        for _ in range(rounds):
            expect(pool.flush(60), "the tier did not take what was put")
            alone.append(stream.rate_of(32))
            stream.burst(blocks=192)
            writing.append(stream.rate_while_writing())
            alone.append(stream.rate_of(32))  # before and after: neighbours of this machine
        stream.check()
    fields: dict[str, Value] = {
        "work": "get_while_writing",
        "block_bytes": block_bytes,
        "batch": GET_BATCH,
        "GBps": percentile(writing, 0.5),
        "alone_GBps": percentile(alone, 0.5),
        "ratio": percentile(writing, 0.5) / percentile(alone, 0.5),
    }
    return at_least("ratio", GET_RATIO_MIN, fields)


class _Stream:
    """Gets of a few hot blocks, one batch after the other, and puts of others beside them."""

    def __init__(self, pool: kvpool.Pool, block_bytes: int) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self._space = namespace(pool, block_bytes)
        self._payload = Payload(block_bytes)
        self._out: Words = np.ones((GET_BATCH, block_bytes // 8), dtype=np.uint64)
        self._next_id = 0
        self._hot = [self._put_fresh(GET_BATCH) for _ in range(8)]
        self._turn = itertools.cycle(self._hot)

    def _put_fresh(self, blocks: int) -> Keys:
        keys = keys_of(range(self._next_id, self._next_id + blocks))
        self._next_id += blocks
        self._payload.write(keys, self._out[:blocks])
        expect(self._space.put(keys, self._out[:blocks]).stored == blocks, "a put was refused")
        return keys

    def burst(self, blocks: int) -> None:
        for _ in range(0, blocks, GET_BATCH):
            self._put_fresh(GET_BATCH)

    def rate_of(self, steps: int) -> float:
        """GB/s of that many gets."""
        started = time.perf_counter()
        for _ in range(steps):
            self._get()
        return self._rate(steps, started)

    def rate_while_writing(self) -> float:
        """GB/s of gets until nothing waits for the SSD any more."""
        steps, started = 0, time.perf_counter()
        while self._pool.stats()["ssd_queue_blocks"] or not steps:
            for _ in range(4):
                self._get()
            steps += 4
        return self._rate(steps, started)

    def check(self) -> None:
        for keys in self._hot:
            tiers = self._space.lookup(keys).tiers
            expect(set(tiers) == {kvpool.Tier.DRAM}, "a hot block has left DRAM")
            self._out.fill(0)
            self._space.get_into(keys, self._out)
            expect(not self._payload.wrong(keys, self._out), "get gave wrong bytes")

    def _get(self) -> None:
        got = self._space.get_into(next(self._turn), self._out)
        expect(got == GET_BATCH, "a hot block is gone")

    def _rate(self, steps: int, started: float) -> float:
        seconds = time.perf_counter() - started
        return steps * GET_BATCH * self._block_bytes / seconds / 1e9


# --- puts into a full pool -----------------------------------------------------------------------


def _put_full(scale: Scale, directory: Path, block_bytes: int) -> Row:
    rounds = scale.of(1000, quick=50)
    with _open(scale, directory) as pool, _open(scale, None) as without:
        works = {
            "put_full": _puts_into(scale, pool, block_bytes),
            "without": _puts_into(scale, without, block_bytes),
        }
        timings = interleaved(works, rounds)
        expect(pool.stats()["ssd_written_blocks"] > 0, "nothing was written to the SSD")
    timing, without_tier = timings["put_full"], timings["without"]
    fields: dict[str, Value] = {
        "work": "put_full",
        "block_bytes": block_bytes,
        "batch": 1,
        "p50_us": timing.p50_us,
        "p99_us": timing.p99_us,
        "ratio": _spread(timing),
        "ratio_without_ssd": _spread(without_tier),
    }
    return at_most("ratio", PUT_P99_TO_P50_MAX, fields)


def _spread(timing: Timing) -> float:
    return timing.p99_us / timing.p50_us


def _puts_into(scale: Scale, pool: kvpool.Pool, block_bytes: int) -> Work:
    """One fresh block a step, into a pool that is filled before."""
    space = namespace(pool, block_bytes)
    ids = itertools.count()
    data: Words = np.ones((1, block_bytes // 8), dtype=np.uint64)
    Payload(block_bytes).write(keys_of([0]), data)

    def put() -> None:
        result = space.put(keys_of([next(ids)]), data)
        expect(result.stored == 1, f"a put into a full pool: {result}")

    for _ in range(pool.stats()["bytes_limit"] // block_bytes):
        put()
    return put


# --- opening again -------------------------------------------------------------------------------


def _reopen(scale: Scale) -> Iterator[Row]:
    capacity = tier_bytes(REOPEN_ENTRIES, REOPEN_BLOCK_BYTES)
    if not has_room(scale, capacity):
        scale.say(f"reopen left out: it needs {format_size(capacity)} of disk, see --dir")
        return
    with bench_directory(scale, capacity) as directory:
        options: dict[str, Any] = {
            "dram": "256MiB",
            "prefault": "off",
            "ssd": directory / "tier",
            "ssd_capacity": capacity,
            "ssd_free_floor": FREE_FLOOR_BYTES // 2,
        }
        with kvpool.open(**options, durability="durable") as pool:
            _fill(pool)
        forget_pages(directory)
        started = time.perf_counter()
        with kvpool.open(**options) as pool:
            seconds = time.perf_counter() - started
            stats = pool.stats()
            _check_sample(pool, scale.seed)
    expect(stats["ssd_restored_blocks"] == REOPEN_ENTRIES, "blocks are gone after reopening")
    fields: dict[str, Value] = {
        "work": "reopen",
        "entries": REOPEN_ENTRIES,
        "block_bytes": REOPEN_BLOCK_BYTES,
        "seconds": seconds,
        "books_bytes_per_entry": stats["bytes_index_and_books"] / REOPEN_ENTRIES,
    }
    yield at_most("seconds", REOPEN_S_MAX, fields)


def _fill(pool: kvpool.Pool) -> None:
    space = namespace(pool, REOPEN_BLOCK_BYTES)
    payload = Payload(REOPEN_BLOCK_BYTES)
    batch = 4096
    data: Words = np.ones((batch, REOPEN_BLOCK_BYTES // 8), dtype=np.uint64)
    for start in range(0, REOPEN_ENTRIES, batch):
        keys = keys_of(range(start, min(start + batch, REOPEN_ENTRIES)))
        payload.write(keys, data[: len(keys)])
        result = space.put(keys, data[: len(keys)], timeout=60)
        expect(result.stored == len(keys), f"a durable put: {result}")


def _check_sample(pool: kvpool.Pool, seed: int) -> None:
    space = namespace(pool, REOPEN_BLOCK_BYTES)
    payload = Payload(REOPEN_BLOCK_BYTES)
    out: Words = np.zeros((1, REOPEN_BLOCK_BYTES // 8), dtype=np.uint64)
    for number in np.random.default_rng(seed).integers(0, REOPEN_ENTRIES, 1000).tolist():
        keys = keys_of([number])
        expect(space.get_into(keys, out) == 1, "a block is gone after reopening")
        expect(not payload.wrong(keys, out), "a block came back with other bytes")
