"""Engines of several systems, of one model and with the same settings but for the connector."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

from kvpool.bench.rows import expect
from kvpool.bench.served import Served, memory_available_bytes
from kvpool.bench.vllm_child import Engine, engine
from kvpool.bench.vllm_plan import BLOCK_TOKENS, Plan
from kvpool.bench.vllm_systems import System, running

ENGINE_BYTES = 3 << 29  # an engine's interpreter and libraries, without weights and KV
QUIET_S_MAX = 30.0
_GIB = 1 << 30
# Engine and scheduler in one process: no queues, no second interpreter in what is timed.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines bound to cores bind to the same ones, and spin against each other.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Of an engine. `positions`: the longest prompt and its output. `blocks`: 0 for enough.

    held_tokens: what the engine's own cache should have room for at a time.
    """

    positions: int
    step_tokens: int  # that one step may compute
    kv_bytes: int  # that a system keeps
    held_tokens: int = 0
    blocks: int = 0  # of the engine's own cache

    def cache_gib(self, plan: Plan) -> int:
        """Of the engine's own cache, in GiB: what a CPU engine is told, and at least one."""
        held = max(self.positions, self.step_tokens, self.held_tokens, self.blocks * BLOCK_TOKENS)
        return max(1, -(-2 * held * plan.model.token_bytes // _GIB))


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """An engine, and the system that it is the engine of."""

    system: System
    engine: Engine


@contextlib.contextmanager
def pairs(plan: Plan, names: Sequence[str], sizes: Sizes) -> Iterator[list[Pair]]:
    """Starts one system after the other with its engine; all run at the same time then."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in names:
            plan.say(f"starting an engine: {name}")
            system = stack.enter_context(running(name, plan, sizes.kv_bytes))
            child = stack.enter_context(_engine(plan, system, sizes))
            found.append(Pair(system, child))
        yield found


def fit_together(plan: Plan, count: int, sizes: Sizes) -> bool:
    """Whether so many engines and what they keep fit into the memory that there is now."""
    weights = sum(file.stat().st_size for file in plan.model.folder.glob("*.safetensors"))
    each = ENGINE_BYTES + weights + sizes.cache_gib(plan) * _GIB + sizes.kv_bytes
    return memory_available_bytes() >= count * each


def quiet(daemon: Served | None) -> None:
    """Returns once a daemon has nothing to do: what was saved in the background is saved.

    Otherwise its work would be charged to whoever is measured next. Raises BenchError if it never
    rests.
    """
    if daemon is None:
        return
    deadline = time.monotonic() + QUIET_S_MAX
    spent_s = -1.0
    while (now_s := daemon.cpu_s()) - spent_s > 0.002:
        expect(time.monotonic() < deadline, "the daemon of kvpool does not come to rest")
        spent_s = now_s
        time.sleep(0.1)


@contextlib.contextmanager
def _engine(plan: Plan, system: System, sizes: Sizes) -> Iterator[Engine]:
    llm: dict[str, object] = {
        "model": str(plan.model.folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "block_size": BLOCK_TOKENS,
        "max_model_len": sizes.positions,
        "max_num_batched_tokens": sizes.step_tokens,
        "disable_log_stats": False,  # the counters that prove who served what
        "distributed_executor_backend": "uni",
    }
    if sizes.positions > plan.model.positions:  # by the output of the longest prompt
        llm["hf_overrides"] = {"max_position_embeddings": sizes.positions}
    if sizes.blocks:
        llm["num_gpu_blocks_override"] = sizes.blocks
    if system.transfer is not None:
        llm["kv_transfer_config"] = dict(system.transfer)
    environment = {
        **ENVIRONMENT,
        "VLLM_CPU_KVCACHE_SPACE": str(sizes.cache_gib(plan)),
        "OMP_NUM_THREADS": str(plan.threads),
        **system.environment,
    }
    with engine(
        plan.python,
        system.name,
        llm,
        environment=environment,
        hides_numba=system.hides_numba,
    ) as child:
        yield child
