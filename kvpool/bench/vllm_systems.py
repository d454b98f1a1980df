"""The systems that `kvpool bench vllm` compares: what an engine is told, and what runs beside it.

Every system begins empty, keeps its blocks in this host's memory, and is gone with the `with`.
What the two that vLLM does not bring need, they find below a folder that the user installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvpool.bench import vllm_peers
from kvpool.bench.rows import BenchError
from kvpool.bench.served import Served, served
from kvpool.bench.vllm_plan import BLOCK_TOKENS, Plan

MEMORY_FOLDER = Path("/dev/shm")
DRAM_BYTES_MIN = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """What an engine is started with. `chunk_tokens`: what it serves is a multiple of so many.

    daemon: kvpool's, for what is measured of it.
    """

    name: str
    transfer: Mapping[str, object] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chunk_tokens: int = BLOCK_TOKENS
    hides_numba: bool = False
    daemon: Served | None = None


@contextlib.contextmanager
def running(name: str, plan: Plan, kv_bytes: int) -> Iterator[System]:
    """One system, with room for this many bytes of KV. Raises BenchError if it cannot run."""
    with contextlib.ExitStack() as stack:
        if name == "none":
            yield System(name)
        elif name == "kvpool":
            yield stack.enter_context(_kvpool(kv_bytes))
        elif name == "example":
            yield stack.enter_context(_example())
        elif name in plan.installs:
            start = vllm_peers.mooncake if name == "mooncake" else vllm_peers.lmcache
            peer = stack.enter_context(start(plan.python, plan.installs[name], kv_bytes))
            yield System(
                name,
                transfer={"kv_role": "kv_both", **peer.transfer},
                environment=peer.environment,
                chunk_tokens=peer.chunk_tokens,
                hides_numba=peer.loads_numba,
            )
        else:
            raise BenchError(f"{name} needs --{name} DIR, the folder that it is installed in")


@contextlib.contextmanager
def _kvpool(kv_bytes: int) -> Iterator[System]:
    """A daemon as `kvpool serve` starts it, reached by shared memory."""
    with served(max(kv_bytes, DRAM_BYTES_MIN), prefault="all") as daemon:
        transfer = {
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": daemon.unix},
        }
        yield System("kvpool", transfer, daemon=daemon)


@contextlib.contextmanager
def _example() -> Iterator[System]:
    """vLLM's own connector that writes files: here to memory, so that no disk is in its figures."""
    place = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=place) as folder:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        yield System("example", transfer)
