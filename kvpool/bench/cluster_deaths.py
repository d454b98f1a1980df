"""How long a client waits when the node dies that has what it wants.

A client gets block after block that only the other node has, when that one is killed, stopped
(SIGSTOP) or loses its cable: from then on until the first get that says that there is nothing.
Beside it the deadline, by which a get ends whatever happens, and what the gets after that one cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvpool.bench.rows import Row, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import percentile
from kvpool.cluster.core import FETCH_S
from kvpool.lab.child import until
from kvpool.lab.cluster import Lab
from kvpool.lab.node import Node
from kvpool.replay.payload import Keys, Payload, keys_of

DRAM = "192MiB"
BLOCK_BYTES = 64 << 10
BLOCKS = 2000
NEXT = 50  # gets after the first miss
ROUNDS = 15
_PUT_BLOCKS = 100
_SLACK_MS = 100.0  # of a timer that is late
_AFTER_S = (0.05, 0.15)  # the gets have begun


def misses(scale: Scale, lab: Lab) -> Iterator[Row]:
    """A row per kind of death."""
    gone = lab.nodes[0]
    kinds: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "miss_after_kill": (gone.kill, gone.start),
        "miss_after_stop": (gone.pause, gone.go_on),
        "miss_after_cut": (lambda: lab.pull(gone), lambda: lab.plug(gone)),
    }
    rng = np.random.default_rng(scale.seed)
    first_id = 0
    for work, (die, live) in kinds.items():
        first_ms, next_ms = [], []
        for _ in range(scale.of(ROUNDS, quick=1)):
            delay_s = float(rng.uniform(*_AFTER_S))
            waited = _round(lab, first_id, die, delay_s)
            first_id += BLOCKS
            first_ms.append(waited[0])
            next_ms += waited[1:]
            live()
            lab.meet()
        yield at_most(
            "max_ms",
            FETCH_S * 1e3 + _SLACK_MS,
            {
                "work": work,
                "rounds": len(first_ms),
                "p50_ms": percentile(first_ms, 0.5),
                "max_ms": max(first_ms),
                "deadline_ms": FETCH_S * 1e3,
                "next_p50_ms": percentile(next_ms, 0.5),
                "next_p99_ms": percentile(next_ms, 0.99),
            },
        )


def _round(lab: Lab, first_id: int, die: Callable[[], None], delay_s: float) -> list[float]:
    """Milliseconds from the death to the first miss; then those of the gets behind it."""
    keys = keys_of(range(first_id, first_id + BLOCKS))
    with lab.nodes[1].connect() as pool:
        wanted = namespace(pool, BLOCK_BYTES)
        _put_all(lab.nodes[0], keys)
        until(lambda: wanted.lookup(keys).blocks == BLOCKS, "all are known")
        died: list[float] = []

        def end_it() -> None:
            died.append(time.perf_counter())
            die()

        timer = threading.Timer(delay_s, end_it)
        out, at = np.empty(BLOCK_BYTES, np.uint8), 0
        timer.start()
        while wanted.get_into(keys[at : at + 1], out):
            at += 1
            expect(at < BLOCKS - NEXT, "all blocks came before the node died")
        ended = time.perf_counter()
        timer.join()
        expect(died[0] < ended, "a block was missing before the node died")
        costs = [(ended - died[0]) * 1e3]
        for number in range(at + 1, at + 1 + NEXT):
            started = time.perf_counter()
            expect(wanted.get_into(keys[number : number + 1], out) == 0, "the dead gave a block")
            costs.append((time.perf_counter() - started) * 1e3)
        wanted.drop()
    return costs


def _put_all(node: Node, keys: Keys) -> None:
    payload, data = Payload(BLOCK_BYTES), np.empty((_PUT_BLOCKS, BLOCK_BYTES // 8), np.uint64)
    with node.connect() as pool:
        space = namespace(pool, BLOCK_BYTES)
        space.drop()  # those of the round before
        for at in range(0, BLOCKS, _PUT_BLOCKS):
            payload.write(keys[at : at + _PUT_BLOCKS], data)
            result = space.put(keys[at : at + _PUT_BLOCKS], data)
            expect(result.stored == _PUT_BLOCKS, f"a put into a pool with room: {result}")
