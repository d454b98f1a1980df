"""Made-up request streams for questions about many nodes: which blocks are asked for how often.

Synthetic: nobody's traffic. Requests come at random times; each is a prefix that others have too,
then blocks of its own.

zipf: prefixes whose popularity falls with their rank by Zipf's law.
three-hot: nearly every request begins with one of three prompts, in the shares that the first
blocks of a published trace of agents have (10,938 to 9,203 to 3,449), then with one of that
prompt's contexts, by Zipf.

Promises:  as workload.py; memory grows with the number of prefixes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from kvpool.replay.draws import Draws, zipf
from kvpool.replay.trace import Request
from kvpool.replay.workload import WorkloadOptions, generate

CHAT, ZIPF, THREE_HOT = "chat", "zipf", "three-hot"
SHAPES = (CHAT, ZIPF, THREE_HOT)
HOT_SHARES = (10_938, 9203, 3449)


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Means are of geometric (blocks) and exponential (times) distributions."""

    seed: int = 1
    requests: int = 6000
    block_tokens: int = 512
    requests_per_s: float = 8.0
    zipf_exponent: float = 1.0
    prefixes: int = 3000  # of zipf; of three-hot: contexts of each prompt
    prefix_blocks_mean: float = 12.0
    hot_blocks_mean: float = 16.0  # of the three prompts
    own_blocks_mean: float = 4.0
    answer_tokens: int = 256


def made_up(shape: str, *, seed: int, requests: int) -> Iterator[Request]:
    """The requests of one of SHAPES; ValueError for another."""
    if shape == CHAT:
        return generate(WorkloadOptions(seed=seed, requests=requests))
    return shaped(shape, ShapeOptions(seed=seed, requests=requests))


def shaped(shape: str, options: ShapeOptions) -> Iterator[Request]:
    """Yields `options.requests` requests of the shape zipf or three-hot."""
    draws = Draws(options.seed)
    if shape == ZIPF:
        prompts: list[list[int]] = [[]]
        shares = [1.0]
    elif shape == THREE_HOT:
        prompts = [draws.fresh_blocks(options.hot_blocks_mean) for _ in HOT_SHARES]
        shares = list(itertools.accumulate(map(float, HOT_SHARES)))
    else:
        raise ValueError(f"there is no shape {shape!r}; choose from {', '.join(SHAPES)}")
    prefixes = [
        [prompt + draws.fresh_blocks(options.prefix_blocks_mean) for _ in range(options.prefixes)]
        for prompt in prompts
    ]
    return _requests(options, draws, shares, prefixes)


def _requests(
    options: ShapeOptions,
    draws: Draws,
    shares: Sequence[float],
    prefixes: Sequence[Sequence[list[int]]],
) -> Iterator[Request]:
    """Each begins with a prefix of one of the prompts, whose shares are given summed up."""
    popularity = zipf(options.prefixes, options.zipf_exponent)
    time_s = 0.0
    for _ in range(options.requests):
        time_s += draws.exponential(1 / options.requests_per_s)
        prefix = prefixes[draws.rank(shares)][draws.rank(popularity)]
        block_ids = prefix + draws.fresh_blocks(options.own_blocks_mean)
        tokens = len(block_ids) * options.block_tokens
        yield Request(round(time_s, 3), tokens, options.answer_tokens, block_ids)
