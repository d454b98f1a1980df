"""Policies side by side over one trace, without payload, in one pass over the file.

Relies on: the core's Replay, which drives the very policies that a pool uses.
Promises:  all (policy, capacity) pairs see the same requests, in order. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool import _core
from kvpool.replay.score import Score
from kvpool.replay.trace import Batch

GHOSTS_FACTOR = 16.0  # remembered blocks per resident block, as a pool does by default


def simulate(
    batches: Iterable[Batch],
    policies: Sequence[str],
    capacities_blocks: Sequence[int],
    *,
    tau_s: float = 0.0,
) -> list[Score]:
    """Scores of every policy at every capacity, policy by policy, capacities as given.

    tau_s: half-life of heat in seconds; 0 lets it follow the workload. An unknown policy or a
    capacity of 0 is a ValueError. Reads `batches` once. Belady needs the future, so it keeps the
    ids of the whole trace in memory (8 bytes per block touch) and runs at the end.
    """
    pairs = [(policy, capacity) for policy in policies for capacity in capacities_blocks]
    replay = _core.Replay(pairs, ghosts_factor=GHOSTS_FACTOR, tau_s=tau_s)
    for batch in batches:
        replay.feed(batch.times_s, batch.lengths, batch.ids)
    replay.finish()
    return [
        Score(
            policy=result["policy"],
            capacity_blocks=result["capacity_blocks"],
            requests=result["requests"],
            blocks=result["blocks"],
            hit_blocks=result["hit_blocks"],
            evictions=result["evictions"],
            seconds=result["seconds"],
        )
        for result in replay.results()
    ]
