"""From a daemon's part of its cluster to what is told about it.

Thread rule: every function from any thread but the event loop's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpool.cluster.joined import Joined
from kvpool.observe import cluster as model
from kvpool.tenants.tenant import Tenant

Given = Mapping[tuple[str, bytes], int]  # tenant, node: bytes that it got by its own connections


def given_of(tenants: Iterable[Tenant], numbers: Mapping[tuple[str, bytes], int]) -> Given:
    """numbers: of the peers in the servers of these tenants."""
    counted = {
        (tenant.name, each["number"]): int(each["bytes_out"])
        for tenant in tenants
        for each in tenant.server.clients()
    }
    return {key: counted.get((key[0], number), 0) for key, number in numbers.items()}


def cluster_of(joined: Joined, given: Given) -> model.Cluster:
    """All of it."""
    roster = joined.roster
    links: dict[str, list[model.Link]] = {}
    directories = []
    for tenant, core in joined.cores.items():
        directories.append(model.directory_of(tenant, core.stats()))
        for each in core.peers():
            bytes_out = given.get((tenant, each["id"]), 0)
            links.setdefault(each["id"].hex(), []).append(model.link_of(tenant, each, bytes_out))
    own = joined.own.node.hex()
    nodes = [
        model.Node(
            id=each.id,
            address=each.addresses[0],
            state=each.state,
            incarnation=joined.life_of(each),
            weight=each.weight,
            host=each.host,
            is_own=each.id == own,
            trouble=joined.dialer.trouble(bytes.fromhex(each.id)),
            links=links.get(each.id, []),
        )
        for each in roster.members
    ]
    return model.Cluster(
        name=joined.own.cluster,
        kind=str(joined.members.status().get("kind", "")),
        own=own,
        version=roster.version,
        fingerprint=f"{roster.fingerprint:016x}",
        is_frozen=roster.is_frozen,
        is_entered=roster.is_entered,
        is_replaced=roster.is_replaced,
        left_out=0,
        nodes=nodes,
        directories=directories,
    )
