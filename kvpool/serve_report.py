"""From a daemon's parts to what is told about them.

Promises:  1. lists are bounded, and the busiest entries are the ones that stay;
           2. what is said of a tenant comes from its own node and server alone.
Thread rule: every function from any thread but the event loop's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvpool.manifest import Manifest
from kvpool.observe import report
from kvpool.tenants.tenant import Tenant

CLIENTS_MAX = 1000
NAMESPACES_MAX = 1000
# Reads through shared memory in namespaces beyond those that a client tells apart, all together.
OTHERS = (1 << 32) - 1
OTHERS_NAME = "(others)"


def tenant_of(tenant: Tenant) -> report.Tenant:
    """Everything of one tenant, now. Takes its node's lock a few times, shortly."""
    stats, counted = tenant.node.stats(), tenant.node.traffic()
    named = tenant.manifests()
    spaces = [_namespace(each, named.get(each["number"])) for each in counted]
    spaces.sort(key=lambda each: each.traffic.requested + each.traffic.asked, reverse=True)
    limits = tenant.limits
    return report.Tenant(
        name=tenant.name,
        dram=report.dram_of(stats),
        ssd=report.ssd_of(stats),
        policy=report.policy_of(stats),
        traffic=report.total(each.traffic for each in spaces),
        namespaces=spaces[:NAMESPACES_MAX],
        clients=_clients(tenant),
        lease_ages=list(tenant.server.lease_ages()),
        pinned_prefixes=len(tenant.pins),
        limits={
            "dram_min": limits.dram_min,
            "dram_max": limits.dram_max,
            "ssd_capacity": limits.ssd_capacity,
            "max_clients": limits.max_clients,
            "put_bytes_per_s": limits.put_bytes_per_s,
            "get_bytes_per_s": limits.get_bytes_per_s,
        },
        refused=dict(tenant.refused),
    )


def prefix_of(tenant: Tenant, found: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of Node.hottest(), with names beside its numbers."""
    manifest = tenant.manifests().get(found["number"])
    return {
        "tenant": tenant.name,
        "namespace": "" if manifest is None else label_of(manifest),
        "tokens": 0 if manifest is None else manifest.block_tokens * found["depth"],
        **{key: value for key, value in found.items() if key != "number"},
        "key": bytes(found["key"]).hex(),
    }


def reuse_of(tenant: Tenant) -> dict[str, Any]:
    """Node.reuse() by the names of namespaces, and the sizes of the tiers now."""
    counted, stats = tenant.node.reuse(), tenant.node.stats()
    named = tenant.manifests()
    spaces = {}
    for number, each in counted["spaces"].items():
        manifest = named.get(number)
        spaces[str(number) if manifest is None else label_of(manifest)] = each
    return {
        "all": counted["all"],
        "spaces": spaces,
        "dram_bytes": _room_of(stats),
        "ssd_bytes": stats["ssd_payload_bytes"],
    }


def _room_of(stats: Mapping[str, Any]) -> int:
    """Bytes of blocks that DRAM can hold now: a limit of their number may leave most of it empty.

    Then by the mean size of those that are there.
    """
    room, most, blocks = (int(stats[name]) for name in ("bytes_limit", "blocks_limit", "blocks"))
    if not most or not blocks:
        return room
    return min(room, max(1, most * int(stats["bytes_taken"]) // blocks))


def label_of(manifest: Manifest) -> str:
    """What people call a namespace: its name, or the digits of its id."""
    return manifest.name or manifest.namespace_id.hex()


def _namespace(counted: Mapping[str, Any], manifest: Manifest | None) -> report.Namespace:
    tokens = 0 if manifest is None else manifest.block_tokens
    return report.Namespace(
        name=OTHERS_NAME
        if counted["number"] == OTHERS
        else ""
        if manifest is None
        else manifest.name,
        # What the node calls it is not what the manifest is called, where there are tenants.
        id=(counted["id"] if manifest is None else manifest.namespace_id).hex(),
        number=counted["number"],
        model="" if manifest is None else manifest.model,
        block_tokens=tokens,
        block_bytes=counted["block_bytes"],
        blocks=counted["blocks"],
        traffic=report.traffic_of(counted, tokens),
    )


def _clients(tenant: Tenant) -> list[report.Client]:
    counted = {each["number"]: each for each in tenant.server.clients()}
    now = time.time()
    found = []
    for client in list(tenant.clients):
        counts = counted.get(client.number)
        if counts is None:
            continue  # it came or went between the two
        found.append(
            report.Client(
                number=client.number,
                name=client.name,
                pid=client.pid,
                peer=str(client.peer),
                age_s=round(max(0.0, now - client.since), 3),
                has_shm=counts["shm"],
                bytes_in=counts["bytes_in"],
                bytes_out=counts["bytes_out"],
                requests=counts["requests"],
                leases=counts["leases"],
                leased_bytes=counts["leased_bytes"],
                gets=counts["gets"],
                loaded=counts["get_blocks"],
                loaded_bytes=counts["get_bytes"],
            )
        )
    found.sort(key=lambda each: each.loaded_bytes + each.bytes_in, reverse=True)
    return found[:CLIENTS_MAX]
