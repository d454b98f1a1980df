"""A made-up request stream with the shape of chat: seeded, and as long as you like.

Sessions start as a Poisson process. Each begins with one of a few system prompts (Zipf: a few are
in almost every request) and repeats its whole history at every turn, plus the user's message;
between turns people think. A share of the requests are one-shot long documents, which a cache
should not fall for.

Promises:  1. the same options give the same requests;
           2. requests come in time order, at whole milliseconds, as the trace format keeps them;
           3. memory grows with the sessions alive, not with the number of requests.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

from kvpool.replay.draws import Draws, zipf
from kvpool.replay.trace import Request


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Means are of geometric (blocks, turns) and exponential (times) distributions."""

    seed: int = 1
    requests: int = 6000
    block_tokens: int = 512
    system_prompts: int = 64
    zipf_exponent: float = 1.0
    system_blocks_mean: float = 6.0
    sessions_per_s: float = 4.0
    turns_mean: float = 6.0
    user_blocks_mean: float = 2.0
    answer_blocks_mean: float = 1.5
    think_s_mean: float = 60.0
    document_share: float = 0.1
    document_blocks_mean: float = 60.0


@dataclasses.dataclass(slots=True)
class _Session:
    block_ids: list[int]
    turns_left: int


def generate(options: WorkloadOptions) -> Iterator[Request]:
    """Yields `options.requests` requests. ValueError for options that describe no workload."""
    _check(options)
    return itertools.islice(_Stream(options).requests(), options.requests)


def _check(options: WorkloadOptions) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{field.name} is {value}; it must be 0 or more")
    for name in ("block_tokens", "system_prompts", "sessions_per_s", "turns_mean"):
        if not getattr(options, name):
            raise ValueError(f"{name} must be more than 0")
    if options.document_share > 1:
        raise ValueError(f"document_share is {options.document_share}; it is a share, at most 1")


class _Stream:
    def __init__(self, options: WorkloadOptions) -> None:
        self._options = options
        self._draws = Draws(options.seed)
        self._prompts = [
            self._draws.fresh_blocks(options.system_blocks_mean)
            for _ in range(options.system_prompts)
        ]
        self._popularity = zipf(options.system_prompts, options.zipf_exponent)

    def requests(self) -> Iterator[Request]:
        options = self._options
        order = itertools.count()  # makes the heap's entries comparable, first in first out
        arrival = (self._draws.exponential(1 / options.sessions_per_s), next(order), None)
        due: list[tuple[float, int, _Session | None]] = [arrival]
        while True:
            time_s, _, session = heapq.heappop(due)
            if session is None:  # a new session; its successor is known as soon as it is here
                gap_s = self._draws.exponential(1 / options.sessions_per_s)
                heapq.heappush(due, (time_s + gap_s, next(order), None))
                if self._draws.share() < options.document_share:
                    yield self._document(time_s)
                    continue
                session = self._new_session()
            yield self._turn(time_s, session)
            if session.turns_left:
                think_s = self._draws.exponential(options.think_s_mean)
                heapq.heappush(due, (time_s + think_s, next(order), session))

    def _new_session(self) -> _Session:
        rank = self._draws.rank(self._popularity)
        return _Session(list(self._prompts[rank]), self._draws.geometric(self._options.turns_mean))

    def _turn(self, time_s: float, session: _Session) -> Request:
        session.block_ids += self._draws.fresh_blocks(self._options.user_blocks_mean)
        asked = list(session.block_ids)
        answer = self._draws.fresh_blocks(self._options.answer_blocks_mean)
        session.block_ids += answer  # part of the prompt from the next turn on
        session.turns_left -= 1
        return self._request(time_s, asked, len(answer))

    def _document(self, time_s: float) -> Request:
        return self._request(
            time_s, self._draws.fresh_blocks(self._options.document_blocks_mean), 1
        )

    def _request(self, time_s: float, block_ids: list[int], output_blocks: int) -> Request:
        block_tokens = self._options.block_tokens
        return Request(
            round(time_s, 3), len(block_ids) * block_tokens, output_blocks * block_tokens, block_ids
        )
