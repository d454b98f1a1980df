"""What a pool behind vLLM is worth, by real engines: `kvpool bench vllm`.

Promises:  1. engines, daemons and servers are the bench's own, on loopback, and end with it;
           2. compared engines differ in their connector alone, and are measured in turn;
           3. what is said to come from a pool is proven by the engine's own counters.
Not part of `kvpool bench all`: it needs a Python with vLLM, and minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kvpool.bench import vllm_model, vllm_plan
from kvpool.bench.rows import Row
from kvpool.bench.scale import Scale
from kvpool.bench.vllm_overhead import overhead
from kvpool.bench.vllm_plan import BLOCK_TOKENS, EngineOptions, Plan
from kvpool.bench.vllm_ttft import ttft
from kvpool.bench.vllm_turns import turns

_WORKS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "ttft": ttft,
    "overhead": overhead,
    "turns": turns,
}


def vllm(scale: Scale) -> Iterator[Row]:
    """All that was asked for, work by work. Raises BenchError before it starts what cannot run."""
    plan = plan_of(scale)
    for work in plan.works:
        yield from _WORKS[work](plan)


def plan_of(scale: Scale) -> Plan:
    """Checks what was asked; makes the model if there is none."""
    asked = scale.engines
    systems = vllm_plan.chosen(asked.systems, vllm_plan.USUAL_SYSTEMS, vllm_plan.SYSTEMS)
    works = vllm_plan.chosen(asked.works, vllm_plan.WORKS, vllm_plan.WORKS)
    usual = vllm_plan.QUICK_LENGTHS_TOKENS if scale.is_quick else vllm_plan.LENGTHS_TOKENS
    lengths = vllm_plan.lengths(asked.lengths, usual, BLOCK_TOKENS)
    python = vllm_plan.engine_python(asked.python)
    uses_kvpool = "kvpool" in systems or {"overhead", "turns"} & set(works)
    scale.say(vllm_plan.check_python(python, needs_kvpool=bool(uses_kvpool)))
    return Plan(
        python=python,
        model=vllm_model.model_at(asked.model, python, scale.say),
        systems=("none", *[name for name in systems if name != "none"]),
        lengths_tokens=lengths,
        works=works,
        rounds=asked.rounds or scale.of(vllm_plan.ROUNDS, quick=1),
        threads=asked.threads or len(os.sched_getaffinity(0)),
        installs=_installs(asked),
        seed=scale.seed,
        is_quick=scale.is_quick,
        say=scale.say,
    )


def _installs(asked: EngineOptions) -> dict[str, Path]:
    named = {"mooncake": asked.mooncake, "lmcache": asked.lmcache}
    return {name: folder.absolute() for name, folder in named.items() if folder is not None}
