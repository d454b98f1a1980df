"""What a policy costs: a made-up workload as long as a public trace, replayed without payload.

Floor: none; the bar is one second for 12,031 requests that touch 288,500 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.bench.rows import Row, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import percentile
from kvpool.replay.score import POLICIES
from kvpool.replay.simulate import simulate
from kvpool.replay.trace import Batch, batches
from kvpool.replay.workload import WorkloadOptions, generate

TOUCHES = 288_500
CAPACITY_BLOCKS = 10_000
REPEATS = 5
SECONDS_MAX = 1.0


def policy(scale: Scale) -> Iterator[Row]:
    """A row per policy: seconds of a whole replay, and nanoseconds per block touched."""
    made = _workload(scale.seed, scale.of(TOUCHES, quick=5_000))
    touches = sum(len(batch.ids) for batch in made)
    for name in POLICIES:
        scores = [simulate(made, [name], [CAPACITY_BLOCKS])[0] for _ in range(REPEATS)]
        expect(len({score.hit_blocks for score in scores}) == 1, f"{name}: hits differ by run")
        expect(scores[0].blocks == touches, f"{name}: blocks were lost")
        seconds = percentile([score.seconds for score in scores], 0.5)
        yield at_most(
            "seconds",
            SECONDS_MAX,
            {
                "work": "policy",
                "policy": name,
                "capacity_blocks": CAPACITY_BLOCKS,
                "requests": scores[0].requests,
                "blocks": touches,
                "seconds": seconds,
                "ns_per_block": seconds / touches * 1e9,
            },
        )


def _workload(seed: int, touches: int) -> list[Batch]:
    """Requests that touch at least so many blocks together."""
    seen = 0
    requests = []
    for request in generate(WorkloadOptions(seed=seed, requests=touches)):
        requests.append(request)
        seen += len(request.block_ids)
        if seen >= touches:
            break
    return list(batches(requests))
