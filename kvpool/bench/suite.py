"""The benches by name, and how a run of them is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool.bench.keys import keys
from kvpool.bench.local import local
from kvpool.bench.lookup import lookup
from kvpool.bench.memory import memory
from kvpool.bench.policy import policy
from kvpool.bench.rows import Row
from kvpool.bench.scale import Scale
from kvpool.bench.ssd import rates
from kvpool.bench.ssd_beside import beside


def ssd(scale: Scale) -> Iterator[Row]:
    """All that is measured of the SSD tier."""
    yield from rates(scale)
    yield from beside(scale)


BENCHES: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "local": local,
    "keys": keys,
    "lookup": lookup,
    "policy": policy,
    "memory": memory,
    "ssd": ssd,
}
