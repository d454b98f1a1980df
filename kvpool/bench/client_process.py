"""One of several client processes of `kvpool bench shm` and `tcp`, told by lines on its stdin.

    python -m kvpool.bench.client_process '{"address": ..., ...}'      fields of Setup

It connects, says `ready`, and answers each line `WORK SECONDS` with what it moved by it, as
`BYTES SECONDS CPU_SECONDS`. WORK is `floor`, `same` or `different`: the blocks that all clients
read, or those that this one alone does. At the end of its stdin it compares every block that it
has read and says `whole`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator

import kvpool
from kvpool.bench.buffers import Buffers, Memory, groups
from kvpool.bench.raw_sockets import connect_tcp
from kvpool.bench.rows import expect
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import Work
from kvpool.replay.payload import Keys, Words, keys_of


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """Where to connect, and which of the blocks to read. `raw_port`: of the floor, 0 for memcpy."""

    address: str
    connections: int
    raw_port: int
    block_bytes: int
    batch: int
    blocks: int  # of the set that all read, and of this one's own
    first_own: int  # id of its first own block; those that all read begin at 0
    seed: int


class Client:
    """What this process can be told to do."""

    def __init__(self, setup: Setup, pool: kvpool.Pool) -> None:
        self._setup = setup
        self._space = namespace(pool, setup.block_bytes)
        self._buffers = Buffers(Memory(setup.blocks * setup.block_bytes), setup.block_bytes)
        self._keys = {
            "same": keys_of(range(setup.blocks)),
            "different": keys_of(range(setup.first_own, setup.first_own + setup.blocks)),
        }
        self.works: dict[str, Work] = {"floor": self._floor()}
        for name, keys in self._keys.items():
            self.works[name] = self._reads(keys)
            self._compare(keys)  # touches every page that will be read

    def compare_all(self) -> None:
        """Raises BenchError if a block that this client reads is not what was put."""
        for keys in self._keys.values():
            self._compare(keys)

    def _floor(self) -> Work:
        setup, buffers = self._setup, self._buffers
        if not setup.raw_port:
            return buffers.memcpy(setup.batch, setup.seed)
        raw = connect_tcp(setup.raw_port, setup.connections)
        step_bytes = setup.batch * setup.block_bytes
        start, end = self._groups(1), self._groups(2)
        return lambda: raw.read(next(start) * step_bytes, self._place(next(end)))

    def _reads(self, keys: Keys) -> Work:
        batch, start, end = self._setup.batch, self._groups(3), self._groups(4)

        def step() -> None:
            at = next(start) * batch
            got = self._space.get_into(keys[at : at + batch], self._place(next(end)))
            expect(got == batch, "a block is gone")

        return step

    def _compare(self, keys: Keys) -> None:
        for at in range(0, len(keys), self._setup.batch):
            some, out = keys[at : at + self._setup.batch], self._place(0)[: len(keys) - at]
            out.fill(0)
            expect(self._space.get_into(some, out) == len(some), "a block is gone")
            expect(not self._buffers.wrong(some, out), "get_into gave wrong bytes")

    def _groups(self, number: int) -> Iterator[int]:
        return groups(self._setup.blocks, self._setup.batch, self._setup.seed + number)

    def _place(self, group: int) -> Words:
        batch = self._setup.batch
        return self._buffers.target[group * batch : (group + 1) * batch]


def run(step: Work, step_bytes: int, seconds: float) -> tuple[int, float, float]:
    """Bytes moved, seconds and CPU seconds."""
    steps, started, cpu_started = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        step()
        steps += 1
    return (
        steps * step_bytes,
        time.perf_counter() - started,
        time.process_time() - cpu_started,
    )


def main(told: str) -> None:
    setup = Setup(**json.loads(told))
    with kvpool.connect(setup.address, connections=setup.connections) as pool:
        client = Client(setup, pool)
        print("ready", flush=True)
        for line in sys.stdin:
            work, seconds = line.split()
            done = run(client.works[work], setup.batch * setup.block_bytes, float(seconds))
            print(*done, flush=True)
        client.compare_all()
        print("whole", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
