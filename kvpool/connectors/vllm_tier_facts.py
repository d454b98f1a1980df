"""What the rows of vLLM's CPU tier depend on, as a manifest.

A row has one chunk: its blocks of all layers and groups, of all workers one after the other. A tier
is told little of the engine (names, sizes, the layout); what else changes the bytes is taken from
the engine's configuration, which stands in a caller's frame while tiers are made. Where it does
not, there is no tier: a namespace that leaves out a quantisation or a rope is wrong output.

Of the attention kernels, which are chosen elsewhere, only what chooses them is known: the platform,
what the GPU can do or how CPUs pack keys, and what was asked for.
"""

from __future__ import annotations

import platform
import sys
from types import SimpleNamespace
from typing import Any

from kvpool.connectors.facts import Group, Shard, manifest_of
from kvpool.connectors.options import Options
from kvpool.connectors.vllm_prefixes import require_prefixes
from kvpool.errors import BadArgument
from kvpool.manifest import Manifest

CONFIG_NAME = "vllm_config"
CONFIG_CLASS = "VllmConfig"


def engine_config() -> Any:
    """The configuration of the engine that is being made by a caller. Raises BadArgument."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get(CONFIG_NAME)
        if type(found).__name__ == CONFIG_CLASS:
            return found
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    raise BadArgument(
        "KvpoolTier was made where no engine's configuration is seen: this version of vLLM is not"
        " known to kvpool; see docs/engines.md for those that are"
    )


def tier_manifest(spec: Any, row_bytes: int, config: Any, options: Options) -> Manifest:
    """The namespace of the rows of a TieringOffloadingSpec. config: the engine's VllmConfig.

    Raises BadArgument where something that changes the bytes cannot be known.
    """
    require_prefixes(config)
    told = spec.config
    names = tuple(name for group in told.groups for name in group.layer_names)
    parallel = told.parallel
    # Such rows are the same whatever number of workers wrote them.
    is_free = parallel.is_parallelism_agnostic or told.replicated_layout
    group = Group(
        index=0,
        kind="row",
        window=None,
        block_tokens=told.cache.tokens_per_hash * told.cache.blocks_per_chunk,
        block_bytes=row_bytes,
        layout=_layout(told, is_free),
        layers=names,
    )
    # The rank is 0 where there is none: a row has all of them.
    shard = Shard() if is_free else Shard(tp=(0, parallel.tp_size), pp=(0, parallel.pp_size))
    return manifest_of(_AsWritten(config, names), group, shard, options)


def _layout(told: Any, is_free: bool) -> str:
    groups = ",".join(
        f"{group.group_id}:{group.tokens_per_block}x{len(group.layer_names)}"
        for group in told.groups
    )
    facts = {
        "layout": told.kv_cache_layout,
        "groups": groups,
        "chunk": f"{told.cache.blocks_per_chunk}x{told.cache.tokens_per_hash}",
        "worker_block": told.worker_kv_bytes_per_block,
        "workers": "any" if is_free else told.parallel.world_size,
        "dcp": told.parallel.dcp_size,
        "canonical": _canonical_format(told) if told.canonical_layout else "no",
        "replicated": told.replicated_layout,
    }
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _canonical_format(told: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        canonical_format_id,
    )

    return str(canonical_format_id(told.kv_cache_layout))


class _AsWritten:
    """An engine's configuration whose layers say by which kernels their pages are written."""

    def __init__(self, config: Any, names: tuple[str, ...]) -> None:
        self._config = config
        layer = _Layer(config)
        self.compilation_config = SimpleNamespace(
            static_forward_context=dict.fromkeys(names, layer)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Layer:
    """Stands for every attention layer of a worker that is not in this process."""

    def __init__(self, config: Any) -> None:
        from vllm.platforms import current_platform

        asked = getattr(config.attention_config, "backend", None)
        kind = "cpu" if current_platform.is_cpu() else str(current_platform.device_type)
        can = _cpu_packing() if kind == "cpu" else str(current_platform.get_device_capability())
        self._name = f"{kind} {can} asked {asked}"
        self.kv_cache_dtype = str(config.cache_config.cache_dtype)

    def get_attn_backend(self) -> _Layer:
        return self

    def get_name(self) -> str:
        return self._name


def _cpu_packing() -> str:
    """Under one shape, keys lie as the machine's matrix instructions want them."""
    import torch

    return f"{platform.machine()} {'amx' if torch.cpu._is_amx_tile_supported() else 'vectors'}"
