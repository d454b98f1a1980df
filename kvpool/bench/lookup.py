"""How long it takes to find how much of a prompt is there, in a pool of a million blocks: one of
this process, and a daemon's by shared memory and by TCP.

A step looks up a piece of a chain as it was put. The chains of all steps together are most of the
index, so that a step finds its lines in no near cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.fill import (
    BLOCK_BYTES,
    filled,
    open_small_blocks,
    served_small_blocks,
    small_blocks_bytes,
)
from kvpool.bench.rows import Row, Value, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.served import MEMORY_LEFT_BYTES, memory_available_bytes
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import Work, interleaved
from kvpool.replay.payload import Keys, keys_of

ENTRIES = 1_000_000
ENTRIES_MIN = 10_000
P50_US_MAX = {1: None, 256: 12.0, 8192: 500.0}
BARRED_CHANNELS = ("local", "shm")
ROUNDS = 2000
_KEYS_HELD_MAX = 1 << 19  # of all steps' chains; then they repeat


def lookup(scale: Scale) -> Iterator[Row]:
    """A row per channel and number of keys, all of them present."""
    entries = scale.of(ENTRIES, quick=20_000)
    with open_small_blocks(entries) as pool:
        yield from _rows(scale, "local", filled(pool, entries), entries)
    entries = _that_fit(scale, entries)
    with served_small_blocks(entries) as daemon:
        with kvpool.connect(daemon.unix) as pool:
            yield from _rows(scale, "shm", filled(pool, entries), entries)
        with kvpool.connect(daemon.tcp) as pool:
            yield from _rows(scale, "tcp", namespace(pool, BLOCK_BYTES), entries)


def _that_fit(scale: Scale, entries: int) -> int:
    """Fewer where the machine lacks the memory for a daemon with all, which is said then."""
    wanted = entries
    while entries > ENTRIES_MIN and memory_available_bytes() < (
        small_blocks_bytes(entries) + MEMORY_LEFT_BYTES
    ):
        entries //= 2
    if entries < wanted:
        scale.say(f"lookup: too little memory for {wanted:,} blocks in a daemon: {entries:,}")
    return entries


def _rows(scale: Scale, channel: str, space: kvpool.Namespace, entries: int) -> Iterator[Row]:
    rounds = scale.of(ROUNDS, quick=20)
    for count in P50_US_MAX:
        work = _work(space, count, _chains(count, entries, rounds, scale.seed))
        timing = interleaved({"lookup": work}, rounds)["lookup"]
        fields: dict[str, Value] = {
            "work": "lookup",
            "channel": channel,
            "entries": entries,
            "keys": count,
            "p50_us": timing.p50_us,
            "p99_us": timing.p99_us,
        }
        bar = P50_US_MAX[count] if channel in BARRED_CHANNELS else None
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
