"""A daemon of this host by shared memory, beside memcpy: get_into, view, put and staged put.

Floor `memcpy`: one memmove of as many bytes between two numpy buffers, each as large as the pool's
working set, both sides as cold as the pool's; numpy asks for huge pages and puts its data 16 bytes
past a cache line. `same_copy` is our own copy of the same blocks out of this process's own map of
the arena, one call for all: what is left between it and get_into is index, checks and Python.
Works and floors run in turn, each step on other blocks in a random order; `view_hot` alone shows
the same blocks every time. The pages of every map were touched before.

A put is one of fresh blocks into a full pool: its source is cold, and it takes the place of the
coldest block, so the destination is cold too, as memcpy's is. A staged put is timed from where the
payload lies in staging memory; the two paces of a put are of one block that the caller has in its
cache. Round trips are those of 64 bytes over a unix socket to a process
that sleeps, or is awake, as the daemon does. CPU is that of all threads of each side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool import _core
from kvpool.bench import served_works
from kvpool.bench.buffers import Buffers, Memory, groups
from kvpool.bench.raw_sockets import RawSockets, raw_peer
from kvpool.bench.rows import Row, Value, at_least, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.served import Served, served
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import Timing, Work, interleaved
from kvpool.replay.payload import Words

BLOCK_BYTES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
QUICK_BLOCK_BYTES = (4 << 10, 64 << 10)
BATCHES = (1, 16)
WORKING_SET_BYTES = 512 << 20
STEP_BYTES = 512 << 20  # per work and row, as far as the bounds on rounds allow
ROUNDS_MIN, ROUNDS_MAX = 100, 2000
GET_SINGLE_US_MAX = 7.0
# A get asks the node for nothing; afterwards, in the background, that one notes which blocks were
# used: some 0.3 us for each.
NODE_CPU_S_PER_GIB_MAX = 0.01
VIEW_US_MAX = 3.0
PUT_BLOCK_BYTES = 64 << 10
PUT_AWAKE_US_MAX = 20.0
PUT_ASLEEP_US_MAX = 30.0  # beyond a round trip
PAUSE_S = 0.005
IDLE_SHARE_MAX = 0.005
SAME_COPY_RATIO_MIN = {(64 << 10, 16): 0.85, (1 << 20, 16): 0.95}
PUT_RATIO_MIN = {
    ("put_from", 64 << 10, 16): 0.5,
    ("put_from", 1 << 20, 16): 0.6,
    ("put_staged", 64 << 10, 16): 0.9,
    ("put_staged", 1 << 20, 16): 0.9,
}
_SLACK_BYTES = 64 << 20
_STAGING_BYTES = 64 << 20


def shm(scale: Scale) -> Iterator[Row]:
    """Reading and writing rows of every block size and batch, paces of a put, an idle daemon."""
    memory = Memory(scale.of(WORKING_SET_BYTES, quick=16 << 20))
    with raw_peer(1 << 20) as peer:
        raw = peer.by_unix()
        for block_bytes in QUICK_BLOCK_BYTES if scale.is_quick else BLOCK_BYTES:
            buffers = Buffers(memory, block_bytes)
            dram_bytes = buffers.source.nbytes + _SLACK_BYTES
            # What a client has by default, besides what is held here for staged puts.
            staging_bytes = _STAGING_BYTES + 2 * BATCHES[-1] * block_bytes
            with (
                served(dram_bytes, prefault="all", staging=staging_bytes) as daemon,
                kvpool.connect(daemon.unix) as pool,
            ):
                shape = _Shape(scale, daemon, pool, buffers, raw)
                yield from shape.rows()
                if block_bytes == PUT_BLOCK_BYTES:
                    yield from shape.pace_rows()
                    yield idle_row(scale, daemon, "shm")


def idle_row(scale: Scale, daemon: Served, channel: str) -> Row:
    """What a daemon takes that has a client which asks for nothing."""
    served_works.idle_share(daemon, scale.of(2, quick=0))  # what it still had to do
    share = served_works.idle_share(daemon, 5 if not scale.is_quick else 0.1)
    fields: dict[str, Value] = {"work": "idle", "channel": channel, "node_core_share": share}
    return at_most("node_core_share", IDLE_SHARE_MAX, fields)


class _Shape:
    """All rows of one block size, in one daemon."""

    def __init__(
        self,
        scale: Scale,
        daemon: Served,
        pool: kvpool.Pool,
        buffers: Buffers,
        raw: RawSockets,
    ) -> None:
        expect(pool.stats()["client"]["shares_memory"], "the client has no shared memory")
        self._scale, self._daemon, self._pool = scale, daemon, pool
        self._buffers, self._raw = buffers, raw
        self._space = namespace(pool, buffers.block_bytes)

    def rows(self) -> Iterator[Row]:
        served_works.fill(self._space, self._buffers)
        for batch in BATCHES:
            yield from self._reading_rows(batch)
        served_works.check_reads(self._space, self._buffers)
        served_works.make_full(self._pool, self._space, self._buffers)
        for batch in BATCHES:
            yield from self._writing_rows(batch)

    def _reading_rows(self, batch: int) -> Iterator[Row]:
        buffers, seed = self._buffers, self._scale.seed
        own = served_works.reads(self._space, buffers, batch, seed)
        hot = buffers.keys[:batch]

        def view_hot() -> None:
            with self._space.view(hot) as blocks:
                expect(len(blocks) == batch, "a block is gone")

        works = {
            "memcpy": buffers.memcpy(batch, seed),
            "same_copy": _same_copy(self._space, buffers, batch, seed),
            "round_trip": self._raw.round_trip,
            **own,
        }
        timings = interleaved(works, self._rounds(batch))
        # By itself: the memory that the others move is what makes a view cold.
        timings["view_hot"] = interleaved({"view_hot": view_hot}, self._rounds(batch))["view_hot"]
        for work, step in (*own.items(), ("view_hot", view_hot)):
            fields = self._fields(work, batch, timings)
            fields["same_copy_ratio"] = timings["same_copy"].p50_us / timings[work].p50_us
            yield self._barred(fields | self._cpu(step, batch))

    def _writing_rows(self, batch: int) -> Iterator[Row]:
        buffers, seed = self._buffers, self._scale.seed
        with self._space.staging(batch) as staged:
            for number, block in enumerate(staged):
                block[:] = buffers.source[number].view(np.uint8).data
            own = {
                "put_from": served_works.put_from(self._space, buffers, batch, seed),
                "put_staged": served_works.put_staged(self._space, staged),
            }
            floors = {
                "memcpy": buffers.memcpy(batch, seed),
                "round_trip": self._raw.round_trip,
            }
            timings = interleaved({**floors, **own}, self._rounds(batch))
            for work, step in own.items():
                yield self._barred(self._fields(work, batch, timings) | self._cpu(step, batch))
            served_works.check_staged(self._space, staged, buffers)
        served_works.check_put(self._space, buffers, batch)

    def _fields(self, work: str, batch: int, timings: dict[str, Timing]) -> dict[str, Value]:
        step_bytes = batch * self._buffers.block_bytes
        timing, floor = timings[work], timings["memcpy"]
        return {
            "work": work,
            "block_bytes": self._buffers.block_bytes,
            "batch": batch,
            "GBps": timing.gb_per_s(step_bytes),
            "p50_us": timing.p50_us,
            "p99_us": timing.p99_us,
            "memcpy_GBps": floor.gb_per_s(step_bytes),
            "ratio": floor.p50_us / timing.p50_us,
            "round_trip_us": timings["round_trip"].p50_us,
        }

    def _cpu(self, step: Work, batch: int) -> dict[str, Value]:
        step_bytes = batch * self._buffers.block_bytes
        seconds = 0.02 if self._scale.is_quick else 0.4
        return served_works.cpu_of_both_sides(step, step_bytes, self._daemon, seconds)

    def _rounds(self, batch: int) -> int:
        wanted = STEP_BYTES // (batch * self._buffers.block_bytes)
        return self._scale.of(min(max(wanted, ROUNDS_MIN), ROUNDS_MAX), quick=4)

    def _barred(self, fields: dict[str, Value]) -> Row:
        work, block_bytes, batch = fields["work"], self._buffers.block_bytes, fields["batch"]
        shape = (block_bytes, int(batch))
        if work == "get_into" and shape == (64 << 10, 1):
            holds = (
                float(fields["p50_us"]) <= GET_SINGLE_US_MAX
                and float(fields["node_cpu_s_per_GiB"]) <= NODE_CPU_S_PER_GIB_MAX
            )
            return Row(fields, f"p50_us <= {GET_SINGLE_US_MAX:g}, node CPU 0", holds)
        if work == "get_into" and shape in SAME_COPY_RATIO_MIN:
            return at_least("same_copy_ratio", SAME_COPY_RATIO_MIN[shape], fields)
        if work == "view_hot" and batch == BATCHES[-1]:
            return at_most("p50_us", VIEW_US_MAX, fields)
        bar = PUT_RATIO_MIN.get((str(work), *shape))
        return Row(fields) if bar is None else at_least("ratio", bar, fields)

    def pace_rows(self) -> Iterator[Row]:
        """Puts of one block: back to back, and so rarely that both sides sleep in between."""
        own = {
            "put_from": served_works.put_hot(self._space, self._buffers),
            "round_trip": self._raw.round_trip,
        }
        awake = served_works.paced(own, self._scale.of(2000, quick=5), 0)
        asleep = served_works.paced(own, self._scale.of(300, quick=5), PAUSE_S)
        yield at_most("p50_us", PUT_AWAKE_US_MAX, self._pace_fields("awake", awake))
        fields = self._pace_fields("asleep", asleep)
        yield at_most("beyond_us", PUT_ASLEEP_US_MAX, fields)

    def _pace_fields(self, sides: str, timings: dict[str, Timing]) -> dict[str, Value]:
        put, trip = timings["put_from"], timings["round_trip"]
        return {
            "work": "put_from",
            "block_bytes": self._buffers.block_bytes,
            "batch": 1,
            "sides": sides,
            "p50_us": put.p50_us,
            "p99_us": put.p99_us,
            "round_trip_us": trip.p50_us,
            "beyond_us": put.p50_us - trip.p50_us,
        }


def _same_copy(space: kvpool.Namespace, buffers: Buffers, batch: int, seed: int) -> Work:
    """Per step one call that copies the blocks of a group to another place."""
    addresses = _addresses(space, buffers)
    of_group = [addresses[at : at + batch] for at in range(0, buffers.count, batch)]
    places: list[Words] = [buffers.target[at : at + batch] for at in range(0, buffers.count, batch)]
    start, end = groups(buffers.count, batch, seed + 7), groups(buffers.count, batch, seed + 8)
    block_bytes = buffers.block_bytes
    return lambda: _core.copy_blocks(places[next(end)], of_group[next(start)], block_bytes)


def _addresses(space: kvpool.Namespace, buffers: Buffers) -> Words:
    """Where this process sees each block. Nothing moves or leaves while this bench reads."""
    found = []
    for start in range(0, buffers.count, 16):
        with space.view(buffers.keys[start : start + 16]) as blocks:
            found.append([np.frombuffer(block, dtype=np.uint8).ctypes.data for block in blocks])
    addresses = np.array(list(itertools.chain.from_iterable(found)), dtype=np.uint64)
    expect(len(addresses) == buffers.count, "a block is gone")
    return addresses
