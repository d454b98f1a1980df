"""How long it takes to find how much of a prompt is there, in a pool of a million blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

import kvpool
from kvpool.bench.fill import filled, open_small_blocks
from kvpool.bench.rows import Row, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import interleaved
from kvpool.replay.payload import Keys, keys_of

ENTRIES = 1_000_000
P50_US_MAX = {1: None, 256: 12.0, 8192: 500.0}


def lookup(scale: Scale) -> Iterator[Row]:
    """A row per number of keys, all of them present, at random places of the index."""
    entries = scale.of(ENTRIES, quick=20_000)
    with open_small_blocks(entries) as pool:
        space = filled(pool, entries)
        works = {str(count): _work(space, count, entries, scale.seed) for count in P50_US_MAX}
        timings = interleaved(works, scale.of(2000, quick=20))
    for count, bar in P50_US_MAX.items():
        timing = timings[str(count)]
        fields: dict[str, str | int | float] = {
            "work": "lookup",
            "channel": "local",
            "keys": count,
            "p50_us": timing.p50_us,
            "p99_us": timing.p99_us,
        }
        yield Row(fields) if bar is None else at_most("p50_us", bar, fields)


def _work(space: kvpool.Namespace, count: int, entries: int, seed: int) -> Callable[[], None]:
    """Looks up `count` keys that were put apart from each other; other ones at each step."""
    rng = np.random.default_rng(seed + count)
    sets: list[Keys] = [keys_of(rng.integers(0, entries, count).tolist()) for _ in range(64)]
    turn = itertools.cycle(sets)

    def step() -> None:
        expect(space.lookup(next(turn)).blocks == count, "a block that was put is not found")

    return step
