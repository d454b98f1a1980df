"""How long it takes to find how much of a prompt is there, in a pool of a million blocks.

A step looks up a piece of a chain as it was put. The chains of all steps together are most of the
index, so that a step finds its lines in no near cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.fill import filled, open_small_blocks
from kvpool.bench.rows import Row, Value, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import Work, interleaved
from kvpool.replay.payload import Keys, keys_of

ENTRIES = 1_000_000
P50_US_MAX = {1: None, 256: 12.0, 8192: 500.0}
ROUNDS = 2000
_KEYS_HELD_MAX = 1 << 19  # of all steps' chains; then they repeat


def lookup(scale: Scale) -> Iterator[Row]:
    """A row per number of keys, all of them present."""
    entries = scale.of(ENTRIES, quick=20_000)
    rounds = scale.of(ROUNDS, quick=20)
    with open_small_blocks(entries) as pool:
        space = filled(pool, entries)
        for count, bar in P50_US_MAX.items():
            work = _work(space, count, _chains(count, entries, rounds, scale.seed))
            timing = interleaved({"lookup": work}, rounds)["lookup"]
            fields: dict[str, Value] = {
                "work": "lookup",
                "channel": "local",
                "keys": count,
                "p50_us": timing.p50_us,
                "p99_us": timing.p99_us,
            }
            yield Row(fields) if bar is None else at_most("p50_us", bar, fields)


def _chains(count: int, entries: int, rounds: int, seed: int) -> list[Keys]:
    """Keys of blocks put one after the other, from random places on."""
    rng = np.random.default_rng([seed, count])
    steps = min(rounds, max(1, _KEYS_HELD_MAX // count))
    starts = rng.integers(0, entries - count, steps, endpoint=True).tolist()
    return [keys_of(range(start, start + count)) for start in starts]


def _work(space: kvpool.Namespace, count: int, chains: list[Keys]) -> Work:
    turn = itertools.cycle(chains)

    def step() -> None:
        expect(space.lookup(next(turn)).blocks == count, "a block that was put is not found")

    return step
