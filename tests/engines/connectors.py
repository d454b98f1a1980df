"""How an engine is told to use a pool."""

from collections.abc import Mapping
from typing import Any

LOAD_TIMEOUT_S = 2.0


def kvpool_connector(
    address: str, role: str = "kv_both", policy: str = "recompute", **extra: Any
) -> Mapping[str, Any]:
    """A kv_transfer_config. What the engine could compute as fast is loaded all the same."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "address": address,
            "load_timeout_s": LOAD_TIMEOUT_S,
            "recompute_estimate": False,
            **extra,
        },
    }
