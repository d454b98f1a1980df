"""1, 2, 4 and 8 client processes that read one daemon's blocks at a time: the same ones, or others.

Rates are those of all clients together. Floor: as many processes that do memcpy each, or read from
raw sockets with as many connections each, over as much memory. Works and floor take turns, each for
a while, and the median of the turns counts. All processes are there all the time; those that are
not in a row sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.client_process import Setup
from kvpool.bench.raw_sockets import raw_peer
from kvpool.bench.rows import BenchError, Row, Value, expect
from kvpool.bench.scale import Scale
from kvpool.bench.served import Served, environment_of_child, first_line, served
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import percentile
from kvpool.replay.payload import Payload, keys_of

CLIENTS = (1, 2, 4, 8)
QUICK_CLIENTS = (1, 2)
BLOCK_BYTES = 256 << 10
BATCH = 16
SET_BYTES = 64 << 20  # of each set of blocks: beyond a last-level cache
TURNS = 5
TURN_S = 0.3
CONNECTIONS = 2
WORKS = ("same", "different")
_GIB = 1 << 30


def clients(scale: Scale, channel: str) -> Iterator[Row]:
    """A row per number of clients and kind of blocks. channel: shm or tcp."""
    counts = QUICK_CLIENTS if scale.is_quick else CLIENTS
    blocks = scale.of(SET_BYTES, quick=8 << 20) // BLOCK_BYTES
    room_bytes = (counts[-1] + 2) * blocks * BLOCK_BYTES
    with (
        served(room_bytes, prefault="all") as daemon,
        raw_peer(blocks * BLOCK_BYTES) as peer,
        contextlib.ExitStack() as stack,
    ):
        address = daemon.unix if channel == "shm" else daemon.tcp
        _put_all(daemon, (counts[-1] + 1) * blocks)
        setups = [
            Setup(
                address=address,
                connections=CONNECTIONS,
                raw_port=0 if channel == "shm" else peer.port,
                block_bytes=BLOCK_BYTES,
                batch=BATCH,
                blocks=blocks,
                first_own=(number + 1) * blocks,
                seed=scale.seed + 10 * number,
            )
            for number in range(counts[-1])
        ]
        processes = [stack.enter_context(_client(setup)) for setup in setups]
        for count in counts:
            yield from _rows(scale, channel, daemon, processes[:count])
        for process in processes:
            process.finish()


class _Process:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def tell(self, work: str, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{work} {seconds}\n".encode())
        self._process.stdin.flush()

    def hear(self) -> list[float]:
        """Bytes, seconds, CPU seconds."""
        words = self._line().split()
        expect(len(words) == 3, "a client process has ended before its time")
        return [float(word) for word in words]

    def finish(self) -> None:
        """Lets it compare what it read. Raises BenchError for a wrong byte."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        expect(self._line() == b"whole\n", "a client process found wrong bytes")

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextlib.contextmanager
def _client(setup: Setup) -> Iterator[_Process]:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvpool.bench.client_process",
            json.dumps(dataclasses.asdict(setup)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment_of_child(),
    ) as process:
        try:
            if first_line(process) != b"ready\n":
                raise BenchError("a client process did not become ready")
            yield _Process(process)
        finally:
            process.kill()


def _put_all(daemon: Served, blocks: int) -> None:
    payload = Payload(BLOCK_BYTES)
    data = np.ones((BATCH, BLOCK_BYTES // 8), dtype=np.uint64)
    with kvpool.connect(daemon.unix) as pool:
        space = namespace(pool, BLOCK_BYTES)
        for start in range(0, blocks, BATCH):
            keys = keys_of(range(start, min(start + BATCH, blocks)))
            payload.write(keys, data[: len(keys)])
            result = space.put(keys, data[: len(keys)])
            expect(result.stored == len(keys), f"a put into a pool with room: {result}")


@dataclasses.dataclass(slots=True)
class _Turns:
    """What all clients together did in each turn of one work."""

    bytes_per_s: list[float] = dataclasses.field(default_factory=list)
    moved_bytes: float = 0.0
    cpu_s: float = 0.0
    node_cpu_s: float = 0.0


def _rows(scale: Scale, channel: str, daemon: Served, processes: list[_Process]) -> Iterator[Row]:
    turns = {work: _Turns() for work in ("floor", *WORKS)}
    order = list(turns)
    for _ in range(scale.of(TURNS, quick=1)):
        for work in order:
            _take_turn(turns[work], work, daemon, processes, 0.05 if scale.is_quick else TURN_S)
        order.reverse()
    floor = percentile(turns["floor"].bytes_per_s, 0.5)
    for work in WORKS:
        done = turns[work]
        rate = percentile(done.bytes_per_s, 0.5)
        fields: dict[str, Value] = {
            "work": "clients",
            "channel": channel,
            "clients": len(processes),
            "blocks": work,
            "block_bytes": BLOCK_BYTES,
            "batch": BATCH,
            "GBps": rate / 1e9,
            "memcpy_GBps" if channel == "shm" else "raw_GBps": floor / 1e9,
            "ratio": rate / floor,
            "cpu_s_per_GiB": done.cpu_s / done.moved_bytes * _GIB,
            "node_cpu_s_per_GiB": done.node_cpu_s / done.moved_bytes * _GIB,
        }
        yield Row(fields)


def _take_turn(
    turns: _Turns, work: str, daemon: Served, processes: list[_Process], seconds: float
) -> None:
    node_cpu_s = daemon.cpu_s()
    for process in processes:
        process.tell(work, seconds)
    heard = [process.hear() for process in processes]
    turns.bytes_per_s.append(sum(moved / took for moved, took, _ in heard))
    turns.moved_bytes += sum(moved for moved, _, _ in heard)
    turns.cpu_s += sum(cpu_s for _, _, cpu_s in heard)
    turns.node_cpu_s += daemon.cpu_s() - node_cpu_s
