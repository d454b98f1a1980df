"""How an engine is told to use a pool, and what it left there."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.engines.rig import Engine
from tests.served import Served, wait_for

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


def wait_saved(engine: Engine) -> None:
    """An engine's blocks come to the pool after its answer, from another thread."""
    raise NotImplementedError


def wait_connected(daemon: Served, engines: Sequence[Engine]) -> None:
    """Of a daemon that came back: until these, and nobody else, have found it again."""
    with daemon.connect() as pool:
        wait_for(
            lambda: pool.stats()["server"]["clients"] == len(engines) + 1,
            what="the engines are connected again",
        )
