"""The SSD tier beside the raw disk: durable puts and cold gets, and what it costs others.

Floor `raw_GBps`: the same bytes in the same pieces, one pwrite or pread per block with as many in
flight, past the page cache, from aligned memory into a file written before, then one fdatasync per
batch of writes. Pool and floor take turns; rates are those of the median step. A put is durable: it
returns after payload, fdatasync, index commit; its bytes come out of the caller's memory through
DRAM. A get is of blocks that lie on the SSD only (the pool was opened again, each block is read
once), checksums compared, into the caller's memory. CPU is that of all threads of the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from kvpool.bench.buffers import groups
from kvpool.bench.disk import (
    FREE_FLOOR_BYTES,
    IO_THREADS,
    RawFile,
    bench_directory,
    filesystem_of,
    forget_pages,
)
from kvpool.bench.rows import Row, Value, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import Timing, interleaved, warm_up_rounds
from kvpool.replay.payload import Payload, Words, keys_of
from kvpool.replay.ssd import tier_bytes

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
QUICK_BLOCK_BYTES = (64 << 10,)
BATCHES = (1, 16, 64)
WORKING_SET_BYTES = 1536 << 20
STEP_BYTES = 512 << 20  # per work and row, as far as the bounds on rounds allow
ROUNDS_MIN, ROUNDS_MAX = 7, 200
CPU_S_PER_GIB_MAX = 0.3
RATIO_MIN = {
    ("put", 1 << 20, 64): 0.8,
    ("get", 1 << 20, 16): 0.85,
    ("get", 1 << 20, 64): 0.85,
}
_FRESH_ID = 1 << 32  # times batch: ids that nothing else here uses
_SLACK_BYTES = 64 << 20


def rates(scale: Scale) -> Iterator[Row]:
    """Rows for puts and gets of every block size and batch."""
    for block_bytes in QUICK_BLOCK_BYTES if scale.is_quick else BLOCK_BYTES:
        # The fewest blocks: a group to warm up with, some to time and one to check.
        count = max(scale.of(WORKING_SET_BYTES, quick=1) // block_bytes, 4 * BATCHES[-1])
        with bench_directory(scale, 2 * tier_bytes(count, block_bytes)) as directory:
            shape = _Shape(scale, directory, block_bytes, count)
            shape.fill()
            if block_bytes == BLOCK_BYTES[0]:
                scale.say(shape.how_measured())
            yield from shape.rows()


class _Shape:
    """All rows of one block size: a tier full of known blocks, and a raw file as large."""

    def __init__(self, scale: Scale, directory: Path, block_bytes: int, count: int) -> None:
        self._scale, self._directory = scale, directory
        self._block_bytes, self._count = block_bytes, count
        self._keys = keys_of(range(count))
        self._payload = Payload(block_bytes)
        self._memory: Words = np.ones((BATCHES[-1], block_bytes // 8), dtype=np.uint64)
        self._is_direct = False
        self._raw = RawFile(directory / "raw", count, block_bytes, BATCHES[-1])

    def fill(self) -> None:
        with self._opened(durability="durable") as pool:
            self._fill(pool)
            self._is_direct = bool(pool.stats()["ssd_direct"])

    def how_measured(self) -> str:
        how = "past the page cache" if self._is_direct else "THROUGH THE PAGE CACHE (no O_DIRECT)"
        return (
            f"SSD files in {self._directory.parent} ({filesystem_of(self._directory)}), read and"
            f" written {how}, {IO_THREADS} in flight; cold: in no DRAM of the pool, and not in the"
            " page cache of this machine; a cache of its host is not ours to drop"
        )

    def rows(self) -> Iterator[Row]:
        for batch in BATCHES:
            yield self._get_row(batch)
        with self._opened(durability="durable") as pool:
            for batch in BATCHES:
                yield self._put_row(pool, batch)

    def _opened(self, **options: Any) -> kvpool.Pool:
        return kvpool.open(
            dram=2 * self._memory.nbytes + _SLACK_BYTES,
            prefault="all",
            ssd=self._directory / "tier",
            ssd_capacity=tier_bytes(self._count, self._block_bytes),
            ssd_free_floor=FREE_FLOOR_BYTES // 2,
            ssd_io_threads=IO_THREADS,
            **options,
        )

    def _fill(self, pool: kvpool.Pool) -> None:
        space = namespace(pool, self._block_bytes)
        for start in range(0, self._count, BATCHES[-1]):
            keys = self._keys[start : start + BATCHES[-1]]
            data = self._memory[: len(keys)]
            self._payload.write(keys, data)
            result = space.put(keys, data, timeout=60)
            expect(result.stored == len(keys), f"a durable put into a tier with room: {result}")

    def _get_row(self, batch: int) -> Row:
        keys = [self._keys[at : at + batch] for at in range(0, self._count - batch + 1, batch)]
        order = groups(self._count, batch, self._scale.seed)
        out = self._memory[:batch]
        rounds = self._rounds(batch, len(keys) - 1)
        forget_pages(self._directory / "tier")
        with self._opened() as pool:
            pool._node.settle(60)
            space = namespace(pool, self._block_bytes)
            present, tiers, _ = space.lookup(self._keys)
            expect(present == self._count, "a durable block is gone after the pool was reopened")
            expect(set(tiers) == {kvpool.Tier.SSD}, "a block is in DRAM before it was asked for")

            def get() -> None:
                expect(space.get_into(keys[next(order)], out) == batch, "a block is gone")

            works = {"raw": self._raw.reads(batch, self._scale.seed), "get": get}
            timings = interleaved(works, rounds)
            checked = keys[next(order)]
            expect(space.lookup(checked).tiers[0] == kvpool.Tier.SSD, "a group came twice")
            out.fill(0)
            get_count = space.get_into(checked, out)
            expect(get_count == batch, "a block is gone")
            expect(not self._payload.wrong(checked, out), "get gave wrong bytes")
            hits = pool.stats()["ssd_hits"]
            steps = rounds + warm_up_rounds(rounds) + 1
            expect(hits == steps * batch, f"{hits} blocks of {steps * batch} came from the SSD")
        return self._row("get", batch, timings)

    def _put_row(self, pool: kvpool.Pool, batch: int) -> Row:
        space = namespace(pool, self._block_bytes)
        ids = itertools.count(_FRESH_ID * batch, batch)
        data = self._memory[:batch]

        def put() -> None:
            first = next(ids)
            result = space.put(keys_of(range(first, first + batch)), data, timeout=60)
            expect(result.stored == batch, f"a durable put: {result}")

        timings = interleaved(
            {"raw": self._raw.writes(batch, self._scale.seed), "put": put},
            self._rounds(batch, ROUNDS_MAX),
        )
        self._check_put(space, next(ids), batch)
        return self._row("put", batch, timings)

    def _check_put(self, space: kvpool.Namespace, first: int, batch: int) -> None:
        """One more put, whose blocks come back as they were given."""
        keys = keys_of(range(first, first + batch))
        data = self._memory[:batch]
        self._payload.write(keys, data)
        expect(space.put(keys, data, timeout=60).stored == batch, "a durable put was not stored")
        data.fill(0)
        expect(space.get_into(keys, data) == batch, "a durable block is gone")
        expect(not self._payload.wrong(keys, data), "put stored wrong bytes")

    def _rounds(self, batch: int, groups_left: int) -> int:
        wanted = min(max(STEP_BYTES // (batch * self._block_bytes), ROUNDS_MIN), ROUNDS_MAX)
        rounds = self._scale.of(wanted, quick=2)
        while rounds + warm_up_rounds(rounds) > groups_left:
            rounds -= 1
        return rounds

    def _row(self, work: str, batch: int, timings: dict[str, Timing]) -> Row:
        step_bytes = batch * self._block_bytes
        done, floor = timings[work], timings["raw"]
        fields: dict[str, Value] = {
            "work": work,
            "block_bytes": self._block_bytes,
            "batch": batch,
            "GBps": done.gb_per_s(step_bytes),
            "raw_GBps": floor.gb_per_s(step_bytes),
            "ratio": floor.p50_us / done.p50_us,
            "cpu_s_per_GiB": done.cpu_s / (len(done.steps_us) * step_bytes / (1 << 30)),
        }
        bar = RATIO_MIN.get((work, self._block_bytes, batch))
        if bar is None:
            return Row(fields)
        holds = (
            float(fields["ratio"]) >= bar and float(fields["cpu_s_per_GiB"]) <= CPU_S_PER_GIB_MAX
        )
        return Row(fields, f"ratio >= {bar:g} and cpu_s_per_GiB <= {CPU_S_PER_GIB_MAX:g}", holds)


def namespace(pool: kvpool.Pool, block_bytes: int) -> kvpool.Namespace:
    return pool.namespace(
        kvpool.Manifest(model="bench", layout="opaque", block_tokens=16, block_bytes=block_bytes)
    )
