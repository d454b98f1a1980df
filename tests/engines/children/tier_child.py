"""KvpoolTier by itself, as vLLM's manager of tiers calls it, told by lines of JSON: see engine.py.

There is no engine: the configuration is a real one, the CPU tier is some memory of this process,
and keys are numbers.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402

from kvpool.connectors import vllm_tier_jobs, vllm_tier_rows  # noqa: E402

BLOCK_TOKENS = 32
WAIT_S = 30.0


class Spec:
    """What a tier reads of a TieringOffloadingSpec."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config


def offloading_config(name: str, chunk: int, layout: str, workers: int) -> OffloadingConfig:
    layers = tuple(f"model.layers.{number}.self_attn.attn" for number in range(4))
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK_TOKENS, layers, 0),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(name, "float32"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, chunk),
        parallel=OffloadingParallelConfig(0, workers, workers, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout=layout,
    )


class Tier:
    """The operations, by their names."""

    def open(
        self,
        folder: str,
        options: dict[str, Any],
        rows: int = 8,
        row_bytes: int = 8192,
        engine: dict[str, Any] | None = None,
        **told: Any,
    ) -> str:
        """Begin anew; returns the namespace's id. told: of offloading_config()."""
        if hasattr(self, "tier"):
            self.close()
        arguments = {"model": folder, "dtype": "float32", "skip_tokenizer_init": True}
        self.config = EngineArgs(**arguments | (engine or {})).create_engine_config()
        self.memory = np.zeros((rows, row_bytes), np.uint8)
        self.view = memoryview(self.memory)
        facts = {"name": folder, "chunk": 1, "layout": "LBHNC", "workers": 1, **told}
        spec = Spec(offloading_config(**facts))
        config = {
            "type": "KvpoolTier",
            "module_path": "kvpool.connectors.vllm_tier",
            **options,
        }
        self.tier = made(config, self.view, spec, self.config)
        self.jobs, self.requests = 0, dict[str, ReqContext]()
        return str(self.tier._rows._manifest.namespace_id.hex())

    def refused(self, folder: str, options: dict[str, Any], **more: Any) -> str:
        try:
            self.open(folder, options, **more)
        except ValueError as error:
            return str(error)
        return ""

    def refused_without_config(self) -> str:
        view = memoryview(np.zeros((2, 64), np.uint8))
        config = {"type": "KvpoolTier", "module_path": "kvpool.connectors.vllm_tier"}
        try:
            SecondaryTierFactory.create_secondary_tier(config, view, Spec(None))
        except ValueError as error:
            return str(error)
        return ""

    # --- as the manager calls it ------------------------------------------------------------------

    def begin(self, request: str) -> None:
        self.requests[request] = ReqContext(request)
        self.tier.on_new_request(self.requests[request])

    def end(self, request: str) -> None:
        self.tier.on_request_finished(self.requests.pop(request))

    def lookup(self, request: str, keys: list[int]) -> list[str]:
        return [self.tier.lookup(key_of(key), self.requests[request]).name for key in keys]

    def end_step(self) -> None:
        self.tier.on_schedule_end(ScheduleEndContext((), ()))

    def submit(
        self, request: str, keys: list[int], chunks: list[int], load: bool, group: int = 0
    ) -> int:
        """Keys of a store come in the wrong order; where they stand in the prompt is known."""
        self.jobs += 1
        context = self.requests[request]
        made = [key_of(key, group) for key in keys]
        for key, number in zip(made, keys, strict=True):
            context.set_offload_key_position(key, number)
        job = TransferJob(self.jobs, made, np.array(chunks, np.int32), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def finished(self, drain: bool = True) -> list[dict[str, Any]]:
        if drain:
            self.tier.drain_jobs()
        return [
            {
                "job": result.job_id,
                "success": result.success,
                "keys": sorted(number_of(key) for key in result.successful_keys or ()),
                "bytes": result.transfer_bytes,
            }
            for result in self.tier.get_finished_jobs()
        ]

    def has_pending_work(self) -> bool:
        return bool(self.tier.has_pending_work())

    def counts(self) -> dict[str, float]:
        """Since the last call; names without what all have in common."""
        reduced = self.tier.get_stats().reduce()
        return {name.removeprefix("vllm:kvpool_tier_"): value for name, value in reduced.items()}

    def defined(self) -> list[str]:
        return sorted(type(self.tier).build_metric_definitions({}))

    def close(self) -> None:
        """Afterwards vLLM unmaps the memory, so no reference to it may be left."""
        self.tier.shutdown()
        del self.tier._primary_kv_view
        self.view.release()
        del self.tier

    def wait_lost(self) -> None:
        """Until this process knows that the node is gone; shared memory can be read until then."""
        end = time.monotonic() + WAIT_S
        while self.tier._attachment.pool.stats()["client"]["connected"]:
            assert time.monotonic() < end
            time.sleep(0.01)

    def forget(self) -> None:
        assert not hasattr(self, "tier")

    # --- the memory -------------------------------------------------------------------------------

    def fill(self, chunks: dict[str, int]) -> None:
        """Every byte of a row, by its number."""
        for chunk, byte in chunks.items():
            self.memory[int(chunk)] = byte

    def rows(self) -> list[int]:
        """The byte that a row has; -1 where it has several."""
        return [int(row[0]) if (row == row[0]).all() else -1 for row in self.memory]

    # --- what goes wrong --------------------------------------------------------------------------

    def block(self, jobs_max: int) -> None:
        """Loads wait in the middle of it, until go()."""
        self.gate = threading.Event()
        vllm_tier_jobs.JOBS_MAX = jobs_max
        self.load = vllm_tier_rows.Rows.load
        gate, load = self.gate, self.load

        def waiting(rows: Any, keys: Any, chunks: Any) -> Any:
            assert gate.wait(60.0)
            return load(rows, keys, chunks)

        vllm_tier_rows.Rows.load = waiting  # type: ignore[method-assign]

    def wait_late(self) -> None:
        """Until whoever waits since before this call has waited for longer than a load may."""
        threading.Event().wait(10 * self.tier._timeout_s)

    def go(self) -> None:
        self.gate.set()
        vllm_tier_rows.Rows.load = self.load  # type: ignore[method-assign]
        vllm_tier_jobs.JOBS_MAX = 1024

    def break_store(self) -> None:
        """The next store raises what nobody expects."""
        store = vllm_tier_rows.Rows.store

        def raising(*arguments: Any) -> Any:
            vllm_tier_rows.Rows.store = store  # type: ignore[method-assign]
            raise ZeroDivisionError("of a test")

        vllm_tier_rows.Rows.store = raising  # type: ignore[method-assign]


def made(config: dict[str, Any], view: memoryview, spec: Any, vllm_config: Any) -> Any:
    """Where the tier looks for it, the configuration stands in this frame."""
    return SecondaryTierFactory.create_secondary_tier(config, view, spec)


def key_of(number: int, group: int = 0) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), group)


def number_of(key: bytes) -> int:
    return int.from_bytes(key[:-4], "big")


def main() -> None:
    def say(message: dict[str, Any]) -> None:
        ANSWERS.write(json.dumps(message) + "\n")

    tier = Tier()
    say({"ok": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        operation: Callable[..., Any] = getattr(tier, request.pop("op"))
        try:
            say({"ok": operation(**request)})
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
