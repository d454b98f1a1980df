"""What a get costs of blocks that only another node has.

A client gets them by shared memory from its own node, which fetches them by TCP from the other, and
removes them there again, untimed: each step crosses the network. Floor `raw`: the same bytes by as
many connections as nodes have between them, from a process on the one host to this one on the
other (raw_sockets). Both take turns. Every byte of the working set is compared once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import kvpool
from kvpool.bench import served_works
from kvpool.bench.buffers import Buffers, Memory, groups
from kvpool.bench.raw_sockets import RawSockets, over, peer_command
from kvpool.bench.rows import Row, Value, at_least, expect
from kvpool.bench.scale import Scale
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import Timing, Work, warm_up_rounds
from kvpool.cluster.core import STREAMS_PER_PEER
from kvpool.lab.child import Child, until
from kvpool.lab.cluster import Lab
from kvpool.lab.network import Host

CHANNELS = ("tcp",)
BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
QUICK_BLOCK_BYTES = (64 << 10,)
BATCHES = (1, 16)
WORKING_SET_BYTES = 256 << 20
STEP_BYTES = 512 << 20  # per work and row, as far as the bounds on rounds allow
ROUNDS_MIN, ROUNDS_MAX = 40, 400
RATIO_MIN = {(1 << 20, 16): 0.8}
_SLACK_BYTES = 64 << 20


def dram_bytes(scale: Scale) -> int:
    """Of each node."""
    return scale.of(WORKING_SET_BYTES, quick=16 << 20) + _SLACK_BYTES


def remote_gets(scale: Scale, lab: Lab) -> Iterator[Row]:
    """A row per channel, block size and batch."""
    memory = Memory(scale.of(WORKING_SET_BYTES, quick=16 << 20))
    with _raw(lab.nodes[0].host, lab.nodes[1].host, lab.folder, memory.source.nbytes) as raw:
        for block_bytes in QUICK_BLOCK_BYTES if scale.is_quick else BLOCK_BYTES:
            buffers = Buffers(memory, block_bytes)
            with lab.nodes[0].connect() as here, lab.nodes[1].connect() as there:
                for channel in CHANNELS:
                    gets = _Gets(scale, here, there, buffers)
                    for batch in BATCHES:
                        yield gets.row(channel, batch, raw.sockets)
                    gets.end()


class _Gets:
    """Of blocks of one size, that the one node has and a client of the other wants."""

    def __init__(
        self, scale: Scale, here: kvpool.Pool, there: kvpool.Pool, buffers: Buffers
    ) -> None:
        self._scale, self._buffers, self._pool = scale, buffers, there
        self._ours = namespace(here, buffers.block_bytes)
        self._space = namespace(there, buffers.block_bytes)
        served_works.fill(self._ours, buffers)
        until(lambda: self._space.lookup(buffers.keys).blocks == buffers.count, "all are known")
        self._compare_all()

    def row(self, channel: str, batch: int, raw: RawSockets) -> Row:
        buffers = self._buffers
        wanted = STEP_BYTES // (batch * buffers.block_bytes)
        rounds = self._scale.of(min(max(wanted, ROUNDS_MIN), ROUNDS_MAX), quick=4)
        before = int(self._pool.stats()["far_blocks"])
        own, floor = self._timed(batch, self._raw(raw, batch), rounds)
        came = int(self._pool.stats()["far_blocks"]) - before
        expect(
            came == (rounds + warm_up_rounds(rounds)) * batch, f"{came} blocks crossed the network"
        )
        step_bytes = batch * buffers.block_bytes
        fields: dict[str, Value] = {
            "work": "remote_get",
            "channel": channel,
            "block_bytes": buffers.block_bytes,
            "batch": batch,
            "GBps": own.gb_per_s(step_bytes),
            "p50_us": own.p50_us,
            "p99_us": own.p99_us,
            "raw_GBps": floor.gb_per_s(step_bytes),
            "ratio": floor.p50_us / own.p50_us,
        }
        bar = RATIO_MIN.get((buffers.block_bytes, batch))
        return Row(fields) if bar is None else at_least("ratio", bar, fields)

    def end(self) -> None:
        """Room for the next size."""
        for each in (self._ours, self._space):
            each.drop()

    def _timed(self, batch: int, raw: Work, rounds: int) -> tuple[Timing, Timing]:
        steps_us: dict[bool, list[float]] = {True: [], False: []}
        buffers, seed = self._buffers, self._scale.seed
        got, to = groups(buffers.count, batch, seed + 2), groups(buffers.count, batch, seed + 3)
        for turn in range(-warm_up_rounds(rounds), rounds):
            for is_own in (turn % 2 == 0, turn % 2 != 0):
                first, at = next(got) * batch, next(to) * batch
                keys, out = buffers.keys[first : first + batch], buffers.target[at : at + batch]
                started = time.perf_counter_ns()
                if is_own:
                    expect(self._space.get_into(keys, out) == batch, "a block is gone")
                else:
                    raw()
                if turn >= 0:
                    steps_us[is_own].append((time.perf_counter_ns() - started) / 1e3)
                if is_own:
                    self._space.remove(keys)
        return Timing(steps_us[True]), Timing(steps_us[False])

    def _raw(self, raw: RawSockets, batch: int) -> Work:
        buffers, seed = self._buffers, self._scale.seed
        step_bytes = batch * buffers.block_bytes
        start, end = groups(buffers.count, batch, seed), groups(buffers.count, batch, seed + 1)

        def step() -> None:
            at = next(end) * batch
            raw.read(next(start) * step_bytes, buffers.target[at : at + batch])

        return step

    def _compare_all(self) -> None:
        for at in range(0, self._buffers.count, 16):
            keys, out = self._buffers.keys[at : at + 16], self._buffers.target[at : at + 16]
            out.fill(0)
            expect(self._space.get_into(keys, out) == len(keys), "a block is gone")
            expect(not self._buffers.wrong(keys, out), "a fetch gave wrong bytes")
            self._space.remove(keys)


class _raw(Child):  # noqa: N801 - a context manager, used as a function
    """A peer of raw sockets on the one host, connected from the other."""

    def __init__(self, there: Host, here: Host, folder: Path, memory_bytes: int) -> None:
        super().__init__("raw", there, folder / "raw")
        self._here, self._memory_bytes = here, memory_bytes

    def __enter__(self) -> _raw:
        address = self.host.address
        process = self._launch(peer_command(str(self.folder), self._memory_bytes, address))
        assert process.stdout is not None
        line = process.stdout.readline()
        expect(line.strip().isdigit(), f"the raw sockets did not begin: {self.said()}")
        made = [self._here.connect(address, int(line)) for _ in range(STREAMS_PER_PEER)]
        self.sockets = over(made)
        return self

    def __exit__(self, *_: object) -> None:
        self.sockets.close()
        self.close()
