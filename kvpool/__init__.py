"""kvpool: a KVCache pool for LLM inference. Blocks are put and got by prefix hash.

    pool = kvpool.open(dram="4GiB")
    ns = pool.namespace(kvpool.Manifest(model="llama-3-8b", layers=32, kv_heads=8, head_dim=128))
    keys = ns.keys(token_ids)
    ns.put(keys, data)
    n = ns.get_into(keys, out)

The names below are the public API; modules and other names may change.
"""

from kvpool._core import Layers, ManualClock, Region
from kvpool.config import parse_size
from kvpool.errors import (
    BadArgument,
    BadType,
    ForkedProcess,
    KvpoolError,
    ManifestMismatch,
    NoResource,
    NotAllowed,
    PoolClosed,
    Refused,
    TierBuffered,
    TierRefused,
    Unreachable,
)
from kvpool.local import open
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace, Slot, Staging, View
from kvpool.pool import Pool
from kvpool.remote import connect
from kvpool.types import Hit, Keys, Miss, Put, PutResult, Reason, Tier

__version__ = "0.5.0"

__all__ = [
    "BadArgument",
    "BadType",
    "ForkedProcess",
    "Hit",
    "Keys",
    "KvpoolError",
    "Layers",
    "Manifest",
    "ManifestMismatch",
    "ManualClock",
    "Miss",
    "Namespace",
    "NoResource",
    "NotAllowed",
    "Pool",
    "PoolClosed",
    "Put",
    "PutResult",
    "Reason",
    "Refused",
    "Region",
    "Slot",
    "Staging",
    "Tier",
    "TierBuffered",
    "TierRefused",
    "Unreachable",
    "View",
    "connect",
    "open",
    "parse_size",
]
