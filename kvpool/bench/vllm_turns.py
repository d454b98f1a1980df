"""What does a pool give many chats at once, whose KV the engine's own cache cannot hold?

Sessions take turns: each adds what a user says to all that was said, and the engine's answer
becomes part of it. All sessions of a turn are one batch. The engine keeps its own cache, which has
room for a quarter of the blocks that all sessions have at the end. Whole conversations alternate
between an engine with kvpool and one without; each has new words.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator

import numpy as np

from kvpool.bench.rows import Row, Value
from kvpool.bench.vllm_engines import Pair, Sizes, pairs, quiet
from kvpool.bench.vllm_plan import BLOCK_TOKENS, Plan

SYSTEMS = ("none", "kvpool")
ROUNDS = 3
STEP_TOKENS = 2048
CACHE_SHARE = 4  # the engine's cache holds one in so many


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of a conversation. A turn adds the user's tokens and the engine's to a session."""

    sessions: int
    turns: int
    user_tokens: int
    output_tokens: int

    @property
    def longest_tokens(self) -> int:
        return self.turns * (self.user_tokens + self.output_tokens)


USUAL = Shape(sessions=20, turns=6, user_tokens=224, output_tokens=32)
QUICK = Shape(sessions=3, turns=2, user_tokens=136, output_tokens=8)  # a turn is a whole block


@dataclasses.dataclass(slots=True)
class Talk:
    """One conversation of all sessions with one engine."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    local: int = 0
    external: int = 0

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def turns(plan: Plan) -> Iterator[Row]:
    """One row for each system: throughput, and the share of prompt tokens that were not computed.

    In words: hit_rate = (local + external) / prompt tokens, of all turns, the first one included.
    """
    shape = QUICK if plan.is_quick else USUAL
    longest = shape.longest_tokens
    all_blocks = shape.sessions * -(-longest // BLOCK_TOKENS)
    sizes = Sizes(
        positions=longest + BLOCK_TOKENS,
        step_tokens=STEP_TOKENS,
        kv_bytes=2 * all_blocks * BLOCK_TOKENS * plan.model.token_bytes,
        # One block is vLLM's own; the longest session must fit.
        blocks=1 + max(all_blocks // CACHE_SHARE, longest // BLOCK_TOKENS + 2),
    )
    talks: dict[str, list[Talk]] = {name: [] for name in SYSTEMS}
    with pairs(plan, SYSTEMS, sizes) as engines:
        for number in range(plan.of(ROUNDS, quick=1)):
            for pair in engines if number % 2 else reversed(engines):
                plan.say(f"{shape.sessions} sessions x {shape.turns} turns: {pair.system.name}")
                talks[pair.system.name].append(_talk(plan, pair, number, shape))
    for name in SYSTEMS:
        yield Row(_fields(talks, name, shape))


def _talk(plan: Plan, pair: Pair, number: int, shape: Shape) -> Talk:
    made = np.random.default_rng([plan.seed, 2, number])
    said: list[list[int]] = [[] for _ in range(shape.sessions)]
    talk = Talk()
    for turn in range(shape.turns):
        for words in said:
            words += map(int, made.integers(100, plan.model.vocabulary, shape.user_tokens))
        answer = pair.engine.generate(said, shape.output_tokens, keeps=turn > 0)
        talk.seconds += answer.seconds
        talk.prompt_tokens += sum(map(len, said))
        talk.output_tokens += shape.sessions * shape.output_tokens
        talk.local += answer.local
        talk.external += answer.external
        for words, output in zip(said, answer.outputs, strict=True):
            words += output
    quiet(pair.system.daemon)
    return talk


def _fields(talks: dict[str, list[Talk]], name: str, shape: Shape) -> dict[str, Value]:
    def median(value: str, system: str = name) -> float:
        return float(statistics.median(getattr(talk, value) for talk in talks[system]))

    prompt_tokens = median("prompt_tokens")
    rate = median("tokens_per_s")
    return {
        "work": "turns",
        "system": name,
        "sessions": shape.sessions,
        "turns": shape.turns,
        "rounds": len(talks[name]),
        "tokens_per_s": rate,
        "times_none": rate / median("tokens_per_s", "none"),
        "hit_rate": (median("local") + median("external")) / prompt_tokens,
        "local_rate": median("local") / prompt_tokens,
        "external_rate": median("external") / prompt_tokens,
    }
