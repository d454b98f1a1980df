"""What made-up workloads draw: seeded, and the same with every version of Python.

Promises:  only `random.Random.random` is drawn from, whose sequence Python keeps from version to
           version.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence


def zipf(count: int, exponent: float) -> list[float]:
    """The popularity of `count` ranks, the first the most popular, for Draws.rank."""
    return list(itertools.accumulate((rank + 1) ** -exponent for rank in range(count)))


class Draws:
    """Random numbers of one workload, and the block ids that it has not used yet."""

    def __init__(self, seed: int) -> None:
        self.share = random.Random(seed).random  # from 0 to 1, without 1
        self._next_id = 0

    def fresh_blocks(self, mean: float) -> list[int]:
        """So many ids that nobody had, geometric with the mean given."""
        start, self._next_id = self._next_id, self._next_id + self.geometric(mean)
        return list(range(start, self._next_id))

    def rank(self, popularity: Sequence[float]) -> int:
        """A rank, by weights that are given summed up."""
        return bisect.bisect_right(popularity, self.share() * popularity[-1])

    def geometric(self, mean: float) -> int:
        """1 or more, with the mean given (1 at least)."""
        if mean <= 1:
            return 1
        return 1 + int(math.log(1 - self.share()) / math.log(1 - 1 / mean))

    def exponential(self, mean: float) -> float:
        """A time between events that happen at random."""
        return -mean * math.log(1 - self.share())
