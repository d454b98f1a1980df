"""From a daemon's part of its cluster to what is told about it.

Thread rule: every function from any thread but the event loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.cluster.joined import Joined
from kvpool.observe import cluster as model


def cluster_of(joined: Joined) -> model.Cluster:
    """All of it."""
    roster = joined.roster
    links: dict[str, list[model.Link]] = {}
    directories = []
    for tenant, core in joined.cores.items():
        directories.append(model.directory_of(tenant, core.stats()))
        for each in core.peers():
            links.setdefault(_hex(each), []).append(model.link_of(tenant, each))
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


def _hex(counted: Mapping[str, Any]) -> str:
    id = counted.get("id", b"")
    return id.hex() if isinstance(id, bytes) else str(id)
