"""What does a connector cost where it never helps? Every prompt is new: all is saved, nothing hit.

Two engines, one with kvpool and one without, take the same batches in turn. The pool is full when
counting begins, so that every save also evicts. What is saved in the background ends before the
other engine begins; within a batch, all but the end of it competes with the engine for the cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from kvpool.bench.rows import Row, Value, at_least, expect
from kvpool.bench.vllm_engines import Pair, Sizes, pairs, quiet
from kvpool.bench.vllm_plan import Plan

SYSTEMS = ("none", "kvpool")
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 512, 32
QUICK_PROMPT_TOKENS = 160  # more than one block
STEP_TOKENS = 2048
ROUNDS = 10
POOL_BYTES = 512 << 20
RATIO_MIN = 0.98


def overhead(plan: Plan) -> Iterator[Row]:
    """One row: throughput with kvpool by throughput without a connector."""
    prompts, outputs = plan.of(PROMPTS, quick=2), plan.of(OUTPUT_TOKENS, quick=2)
    tokens = plan.of(PROMPT_TOKENS, quick=QUICK_PROMPT_TOKENS)
    sizes = Sizes(
        positions=tokens + outputs,
        step_tokens=STEP_TOKENS,
        kv_bytes=POOL_BYTES,
        held_tokens=prompts * (tokens + outputs),
    )
    batch_bytes = prompts * tokens * plan.model.token_bytes
    fills = plan.of(-(-POOL_BYTES // batch_bytes), quick=1)
    rounds = plan.of(ROUNDS, quick=1)
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    with pairs(plan, SYSTEMS, sizes) as engines:
        plan.say(f"overhead: {fills} batches to fill the pool, then {rounds}")
        for number in range(fills + rounds):
            batch = _batch(plan, number, (prompts, tokens))
            for pair in engines if number % 2 else reversed(engines):
                rate = _rate(pair, batch, outputs)
                if number >= fills:
                    rates[pair.system.name].append(rate)
    yield _row(plan, rates, tokens)


def _batch(plan: Plan, number: int, shape: tuple[int, int]) -> list[list[int]]:
    made = np.random.default_rng([plan.seed, 1, number])
    return [list(map(int, prompt)) for prompt in made.integers(100, plan.model.vocabulary, shape)]


def _rate(pair: Pair, batch: list[list[int]], outputs: int) -> float:
    answer = pair.engine.generate(batch, outputs)
    expect(
        answer.local == answer.external == 0,
        f"{pair.system.name}: prompts that nobody had seen hit {answer.local + answer.external}"
        " tokens",
    )
    quiet(pair.system.daemon)
    return sum(len(prompt) + outputs for prompt in batch) / answer.seconds


def _row(plan: Plan, rates: dict[str, list[float]], prompt_tokens: int) -> Row:
    alone, with_kvpool = (statistics.median(rates[name]) for name in SYSTEMS)
    beside = [ours / theirs for ours, theirs in zip(rates["kvpool"], rates["none"], strict=True)]
    fields: dict[str, Value] = {
        "work": "overhead",
        "system": "kvpool",
        "prompt_tokens": prompt_tokens,
        "threads": plan.threads,
        "rounds": len(beside),
        "tokens_per_s": with_kvpool,
        "none_tokens_per_s": alone,
        "pairs_ratio": statistics.median(beside),
        "ratio": with_kvpool / alone,
    }
    return at_least("ratio", RATIO_MIN, fields)
