"""The benches by name, and how a run of them is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool.bench.clients import clients
from kvpool.bench.cluster import cluster
from kvpool.bench.keys import keys
from kvpool.bench.local import local
from kvpool.bench.lookup import lookup
from kvpool.bench.memory import memory
from kvpool.bench.observed import observed
from kvpool.bench.policy import policy
from kvpool.bench.rows import Row
from kvpool.bench.scale import Scale
from kvpool.bench.shm import shm as served_by_shm
from kvpool.bench.ssd import rates
from kvpool.bench.ssd_beside import beside
from kvpool.bench.tcp import tcp as served_by_tcp
from kvpool.bench.vllm import vllm


def ssd(scale: Scale) -> Iterator[Row]:
    """All that is measured of the SSD tier."""
    yield from rates(scale)
    yield from beside(scale)


def shm(scale: Scale) -> Iterator[Row]:
    """A daemon by shared memory: one client, then several."""
    yield from served_by_shm(scale)
    yield from clients(scale, "shm")


def tcp(scale: Scale) -> Iterator[Row]:
    """A daemon by TCP: one client, then several."""
    yield from served_by_tcp(scale)
    yield from clients(scale, "tcp")


BENCHES: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "local": local,
    "keys": keys,
    "lookup": lookup,
    "policy": policy,
    "memory": memory,
    "ssd": ssd,
    "shm": shm,
    "tcp": tcp,
    "observed": observed,
    "cluster": cluster,
    "vllm": vllm,
}
NOT_IN_ALL = ("cluster", "vllm")  # they need root, and an engine
