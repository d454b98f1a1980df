"""How an engine is told to use a pool."""

from collections.abc import Mapping
from typing import Any

# Long enough for a busy machine: in most tests whatever the pool has must come.
PATIENT_S = 200.0


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
            "connect_timeout_s": PATIENT_S,
            "load_timeout_s": PATIENT_S,
            "wait_s": PATIENT_S,
            "recompute_estimate": False,
            **extra,
        },
    }
