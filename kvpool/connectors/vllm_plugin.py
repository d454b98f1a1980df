"""Makes kvpool's connector and tier known to vLLM by name, in every process of an engine.

vLLM calls register() through the entry point group `vllm.general_plugins`, maybe several times.
"""

from __future__ import annotations

CONNECTOR = "KvpoolConnector"
TIER = "KvpoolTier"


def register() -> None:
    """Idempotent. Loads nothing of kvpool's but this module: names are resolved when used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvpool.connectors.vllm", CONNECTOR)
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # a vLLM without tiers has the connector all the same
        return
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvpool.connectors.vllm_tier", TIER)
