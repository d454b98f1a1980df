"""What copies of hot prefixes are worth: a made-up (synthetic) load on four nodes, with 1, 2 and 3
members that shall have what is hot.

Requests come at their time to the nodes in turn; each gets its prefix and puts what is missing.
egress: bytes that one node gave to others, the most of any node beside the mean of all. Reads leave
copies behind as well, with any number of replicas. Every byte is compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvpool.bench.rows import Row, Value, expect
from kvpool.bench.scale import Scale
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import percentile
from kvpool.lab.cluster import Lab
from kvpool.lab.node import Node
from kvpool.replay.payload import Payload, keys_of
from kvpool.replay.shapes import THREE_HOT, ZIPF, ShapeOptions, shaped
from kvpool.replay.trace import Request

NODES = 4
BLOCK_BYTES = 64 << 10
DRAM = "48MiB"  # of each: together less than what is asked for
REQUESTS = 2400
REQUESTS_PER_S = 60.0
PREFIXES = {ZIPF: 300, THREE_HOT: 100}  # of each of the three prompts
REPLICAS = (1, 2, 3)
_MIB = 1 << 20


def cases(scale: Scale) -> Iterator[tuple[str, int]]:
    """Shapes, and how many members shall have what is hot."""
    for shape in (ZIPF,) if scale.is_quick else (ZIPF, THREE_HOT):
        for replicas in REPLICAS[1:2] if scale.is_quick else REPLICAS:
            yield shape, replicas


def options(replicas: int) -> dict[str, Any]:
    """Of the nodes."""
    return {"dram": DRAM, "cluster_max_replicas": replicas}


def hot_prefix(scale: Scale, lab: Lab, shape: str, replicas: int) -> Row:
    """One row."""
    requests = _requests(scale, shape)
    engines = [_Engine(node, requests[at::NODES]) for at, node in enumerate(lab.nodes)]
    for each in engines:
        each.start()
    for each in engines:
        each.end()
    asked = sum(each.asked for each in engines)
    far_ms = [ms for each in engines for ms in each.far_ms] or [0.0]
    egress, copied = _given(lab.nodes)
    fields: dict[str, Value] = {
        "work": "hot_prefix",
        "workload": f"synthetic {shape}",
        "nodes": NODES,
        "replicas": replicas,
        "requests": len(requests),
        "hit": sum(each.hits for each in engines) / asked,
        "egress_max_to_mean": max(egress) / max(sum(egress) / NODES, 1),
        "fetched_MiB": sum(egress) / _MIB,
        "copied_MiB": copied / _MIB,
        "fetch_p50_ms": percentile(far_ms, 0.5),
        "fetch_p99_ms": percentile(far_ms, 0.99),
    }
    return Row(fields)


class _Engine:
    """A client of one node with its share of the requests, in a thread."""

    def __init__(self, node: Node, requests: Sequence[Request]) -> None:
        self._node, self._requests = node, requests
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None
        self.asked = self.hits = 0
        self.far_ms: list[float] = []  # of gets for which other nodes were asked

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    def end(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._node.connect() as pool:
                space, payload = namespace(pool, BLOCK_BYTES), Payload(BLOCK_BYTES)
                longest = max(len(each.block_ids) for each in self._requests)
                out = np.empty((longest, BLOCK_BYTES // 8), np.uint64)
                far = 0
                for each in self._requests:
                    time.sleep(max(0.0, self._began + each.time_s - time.monotonic()))
                    keys = keys_of(each.block_ids)
                    started = time.perf_counter()
                    got = space.get_into(keys, out[: len(keys)])
                    took_ms = (time.perf_counter() - started) * 1e3
                    expect(not payload.wrong(keys[:got], out[:got]), "a get gave wrong bytes")
                    before, far = far, int(pool.stats()["far_blocks"])
                    if far > before:
                        self.far_ms.append(took_ms)
                    self.asked, self.hits = self.asked + len(keys), self.hits + got
                    payload.write(keys[got:], out[got : len(keys)])
                    parent = keys[got - 1] if got else None
                    if got < len(keys):
                        space.put(keys[got:], out[got : len(keys)], parent=parent)
        except BaseException as error:
            self._error = error


def _requests(scale: Scale, shape: str) -> list[Request]:
    made = ShapeOptions(
        seed=scale.seed,
        requests=scale.of(REQUESTS, quick=120),
        requests_per_s=REQUESTS_PER_S,
        prefixes=PREFIXES[shape],
    )
    return list(shaped(shape, made))


def _given(nodes: Sequence[Node]) -> tuple[list[int], int]:
    """Bytes that each gave to the others, and of all of them those of copies made unasked."""
    told = [each.told() for each in nodes]
    given = dict.fromkeys((each.own for each in told), 0)
    for each in told:
        for node in each.nodes:
            given[node.id] += sum(link.bytes_in for link in node.links)
    copied = sum(shard.copied_bytes for each in told for shard in each.directories)
    return list(given.values()), copied
