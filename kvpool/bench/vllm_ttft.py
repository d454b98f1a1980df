"""How long until the first token of a prompt whose KV somebody has stored?

A prompt is stored once by each system, then asked for again, by each system in turn, round by
round. Before every request the engine forgets its own prefix cache, so that a system's tokens come
from outside or are computed. A round that was not served as the first one promised is an error,
never a sample. TTFT is the wall time of LLM.generate for one request and one token.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvpool.bench.rows import BenchError, Row, Value, at_least, at_most, expect
from kvpool.bench.vllm_child import Answer
from kvpool.bench.vllm_engines import Pair, Sizes, fit_together, pairs, quiet
from kvpool.bench.vllm_plan import BLOCK_TOKENS, Plan

STORE_TRIES, STORE_PAUSE_S = 10, 0.5  # the first try stores
PHRASE_TOKENS = 97
SPEEDUP_AT_TOKENS, SPEEDUP_MIN = 4096, 10.0


@dataclasses.dataclass(slots=True)
class Samples:
    """Of one system and one prompt."""

    ms: list[float] = dataclasses.field(default_factory=list)
    external: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)

    def add(self, answer: Answer) -> None:
        self.ms.append(answer.seconds * 1e3)
        self.external.append(answer.external)
        self.tokens.append(answer.outputs[0][0])

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


Measured = dict[tuple[str, int], Samples]  # by system and prompt length


def ttft(plan: Plan) -> Iterator[Row]:
    """Rows of every system at every length."""
    prompts = [prompt_of(plan, tokens) for tokens in plan.lengths_tokens]
    positions = max(plan.lengths_tokens) + BLOCK_TOKENS
    # A client may pin a quarter of a pool, and a prompt is pinned as a whole while it is loaded.
    kept = max(2 * sum(plan.lengths_tokens), 5 * max(plan.lengths_tokens))
    kv_bytes = kept * plan.model.token_bytes
    sizes = Sizes(positions=positions, step_tokens=positions, kv_bytes=kv_bytes)
    measured: Measured = {
        (name, len(prompt)): Samples() for prompt in prompts for name in plan.systems
    }
    passes: list[tuple[str, ...]] = [plan.systems]
    if not fit_together(plan, len(plan.systems), sizes):
        plan.say("too little memory for all engines at once: one after the other, there and back")
        passes = [(name,) for name in (*plan.systems, *reversed(plan.systems))]
    rounds = plan.rounds if len(passes) == 1 else -(-plan.rounds // 2)
    for number, names in enumerate(passes, 1):
        with pairs(plan, names, sizes) as engines:
            for prompt in prompts:
                plan.say(f"{len(prompt)} tokens: {', '.join(names)}")
                _measure(engines, prompt, rounds, measured)
                if number == len(passes):
                    yield from _rows(plan, measured, len(prompt))


def prompt_of(plan: Plan, tokens: int) -> list[int]:
    """A phrase of its own, said over and over.

    No two lengths share a first block. A model goes on with what repeats itself, so that its next
    token is no close call, which another order of the same additions could decide otherwise.
    """
    made = np.random.default_rng([plan.seed, tokens])
    phrase = made.integers(100, plan.model.vocabulary, PHRASE_TOKENS)
    return [int(token) for token in np.resize(phrase, tokens)]


def _measure(engines: list[Pair], prompt: list[int], rounds: int, measured: Measured) -> None:
    for pair in engines:
        _store(pair, prompt)
    order = list(engines)
    for _ in range(rounds):
        for pair in order:
            answer = pair.engine.generate([prompt], 1)
            check(pair, len(prompt), answer)
            measured[pair.system.name, len(prompt)].add(answer)
        order.reverse()


def served_min(pair: Pair, prompt_tokens: int) -> int:
    """What a system must serve of a stored prompt: whole chunks before its last two tokens.

    vLLM wants the last token computed, and its own example leaves out one more.
    """
    if pair.system.transfer is None:
        return 0
    return max(1, (prompt_tokens - 2) // pair.system.chunk_tokens * pair.system.chunk_tokens)


def check(pair: Pair, prompt_tokens: int, answer: Answer) -> None:
    """Raises BenchError for a round that was not served by the system, or not by it alone."""
    name, wanted = pair.system.name, served_min(pair, prompt_tokens)
    _expect_forgotten(pair, answer)
    expect(
        answer.external >= wanted,
        f"{name} served {answer.external} of {prompt_tokens} tokens, not {wanted}: no sample",
    )
    most = prompt_tokens if wanted else 0
    expect(answer.external <= most, f"{name} served {answer.external} of {most} tokens")


def _expect_forgotten(pair: Pair, answer: Answer) -> None:
    told = f"{pair.system.name}: the engine's own cache served {answer.local} tokens"
    expect(answer.local == 0, told)


def _store(pair: Pair, prompt: list[int]) -> None:
    """Asks until the system serves the prompt, which it may store in the background."""
    wanted = served_min(pair, len(prompt))
    for _ in range(STORE_TRIES):
        answer = pair.engine.generate([prompt], 1)
        quiet(pair.system.daemon)
        if answer.external >= wanted:
            return
        _expect_forgotten(pair, answer)
        time.sleep(STORE_PAUSE_S)
    raise BenchError(
        f"{pair.system.name} does not serve {wanted} of the {len(prompt)} tokens of a prompt,"
        f" after it was asked for {STORE_TRIES} times"
    )


def _rows(plan: Plan, measured: Measured, tokens: int) -> Iterator[Row]:
    """Of one length."""
    others = [
        measured[name, tokens].median_ms for name in plan.systems if name not in ("none", "kvpool")
    ]
    for name in plan.systems:
        fields = _fields(measured, name, tokens)
        is_held = name == "kvpool" and others
        yield at_most("ttft_ms", min(others), fields) if is_held else Row(fields)
    if "kvpool" in plan.systems and tokens == SPEEDUP_AT_TOKENS:
        yield _speedup(measured)


def _fields(measured: Measured, name: str, tokens: int) -> dict[str, Value]:
    found, computed = measured[name, tokens], measured["none", tokens]
    return {
        "work": "ttft",
        "system": name,
        "prompt_tokens": tokens,
        "ttft_ms": found.median_ms,
        "lowest_ms": min(found.ms),
        "highest_ms": max(found.ms),
        "rounds": len(found.ms),
        "external_tokens": min(found.external),
        "times_recompute": computed.median_ms / found.median_ms,
        "same_token": _agreeing(found.tokens, computed.tokens),
    }


def _agreeing(tokens: Sequence[int], computed: Sequence[int]) -> int:
    """In how many rounds the first token was the one that is usual without a connector."""
    return sum(token == statistics.mode(computed) for token in tokens)


def _speedup(measured: Measured) -> Row:
    medians = [measured[name, SPEEDUP_AT_TOKENS].median_ms for name in ("none", "kvpool")]
    fields: dict[str, Value] = {
        "work": "ttft_speedup",
        "system": "kvpool",
        "prompt_tokens": SPEEDUP_AT_TOKENS,
        "times_recompute": medians[0] / medians[1],
    }
    return at_least("times_recompute", SPEEDUP_MIN, fields)
