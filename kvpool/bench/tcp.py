"""A daemon by TCP over the loopback, beside raw sockets: get_into, view and put.

Floor `raw`: the same bytes by as many connections between this process and another one, both of
them Python that hands the system up to 1 MiB per call; this side reads, or writes, with one thread,
the other with one per connection; nothing is looked up or checked (raw_sockets). `ratio` compares
with it; where blocks are small the floor's interpreter is in it too. Pool and floor take turns,
each step on other blocks in a random order. A view brings the blocks here: there is no shared
memory to show them in. Puts are of fresh blocks into a full pool.
Round trips are those of 64 bytes over TCP. CPU is that of all threads of each side.
"""

from __future__ import annotations

from collections.abc import Iterator

import kvpool
from kvpool.bench import served_works
from kvpool.bench.buffers import Buffers, Memory, groups
from kvpool.bench.raw_sockets import RawPeer, RawSockets, raw_peer
from kvpool.bench.rows import Row, Value, at_least, expect
from kvpool.bench.scale import Scale
from kvpool.bench.served import Served, served
from kvpool.bench.shm import idle_row
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import Timing, Work, interleaved

BLOCK_BYTES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
QUICK_BLOCK_BYTES = (4 << 10, 64 << 10)
BATCHES = (1, 16)
CONNECTIONS = 2
WORKING_SET_BYTES = 512 << 20
STEP_BYTES = 512 << 20  # per work and row, as far as the bounds on rounds allow
ROUNDS_MIN, ROUNDS_MAX = 60, 1000
RATIO_MIN = {("get_into", 1 << 20, 16): 0.8}
_SLACK_BYTES = 64 << 20


def tcp(scale: Scale) -> Iterator[Row]:
    """Reading and writing rows of every block size and batch, and an idle daemon."""
    memory = Memory(scale.of(WORKING_SET_BYTES, quick=16 << 20))
    with raw_peer(memory.source.nbytes) as peer:
        for block_bytes in QUICK_BLOCK_BYTES if scale.is_quick else BLOCK_BYTES:
            buffers = Buffers(memory, block_bytes)
            with (
                served(buffers.source.nbytes + _SLACK_BYTES, prefault="all") as daemon,
                kvpool.connect(daemon.tcp, connections=CONNECTIONS) as pool,
            ):
                yield from _Shape(scale, daemon, pool, buffers, peer).rows()
                if block_bytes == 64 << 10:
                    yield idle_row(scale, daemon, "tcp")


class _Shape:
    """All rows of one block size, in one daemon."""

    def __init__(
        self, scale: Scale, daemon: Served, pool: kvpool.Pool, buffers: Buffers, peer: RawPeer
    ) -> None:
        self._scale, self._daemon, self._pool = scale, daemon, pool
        self._buffers, self._raw = buffers, peer.by_tcp(CONNECTIONS)
        self._space = namespace(pool, buffers.block_bytes)

    def rows(self) -> Iterator[Row]:
        expect(not self._pool.stats()["client"]["shares_memory"], "this is shared memory")
        served_works.fill(self._space, self._buffers)
        seed = self._scale.seed
        for batch in BATCHES:
            own = served_works.reads(self._space, self._buffers, batch, seed)
            raw = _raw_reads(self._raw, self._buffers, batch, seed)
            yield from self._rows(batch, raw, own)
        served_works.check_reads(self._space, self._buffers)
        puts = served_works.Puts(self._space, self._buffers)
        puts.make_full(self._pool)
        for batch in BATCHES:
            raw = _raw_writes(self._raw, self._buffers, batch, seed)
            yield from self._rows(batch, raw, {"put_from": puts.cold(batch, seed)})
            puts.check(batch)

    def _rows(self, batch: int, raw: Work, own: dict[str, Work]) -> Iterator[Row]:
        works = {"raw": raw, "round_trip": self._raw.round_trip, **own}
        timings = interleaved(works, self._rounds(batch))
        step_bytes = batch * self._buffers.block_bytes
        seconds = 0.02 if self._scale.is_quick else 0.5
        for work, step in own.items():
            fields = self._fields(work, batch, timings)
            fields |= served_works.cpu_of_both_sides(step, step_bytes, self._daemon, seconds)
            bar = RATIO_MIN.get((work, self._buffers.block_bytes, batch))
            yield Row(fields) if bar is None else at_least("ratio", bar, fields)

    def _fields(self, work: str, batch: int, timings: dict[str, Timing]) -> dict[str, Value]:
        step_bytes = batch * self._buffers.block_bytes
        timing, floor = timings[work], timings["raw"]
        return {
            "work": work,
            "block_bytes": self._buffers.block_bytes,
            "batch": batch,
            "GBps": timing.gb_per_s(step_bytes),
            "p50_us": timing.p50_us,
            "p99_us": timing.p99_us,
            "raw_GBps": floor.gb_per_s(step_bytes),
            "ratio": floor.p50_us / timing.p50_us,
            "round_trip_us": timings["round_trip"].p50_us,
        }

    def _rounds(self, batch: int) -> int:
        wanted = STEP_BYTES // (batch * self._buffers.block_bytes)
        return self._scale.of(min(max(wanted, ROUNDS_MIN), ROUNDS_MAX), quick=4)


def _raw_reads(raw: RawSockets, buffers: Buffers, batch: int, seed: int) -> Work:
    step_bytes = batch * buffers.block_bytes
    places = [buffers.target[at : at + batch] for at in range(0, buffers.count, batch)]
    start, end = groups(buffers.count, batch, seed), groups(buffers.count, batch, seed + 1)
    return lambda: raw.read(next(start) * step_bytes, places[next(end)])


def _raw_writes(raw: RawSockets, buffers: Buffers, batch: int, seed: int) -> Work:
    step_bytes = batch * buffers.block_bytes
    places = [buffers.source[at : at + batch] for at in range(0, buffers.count, batch)]
    start, end = groups(buffers.count, batch, seed), groups(buffers.count, batch, seed + 1)
    return lambda: raw.write(next(end) * step_bytes, places[next(start)])
