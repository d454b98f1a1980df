"""From the table [events] to a daemon's publisher of events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from kvpool.cluster.peer_link import Own
from kvpool.events.embedded import node_id_of
from kvpool.events.publisher import Life, Place, Publisher, feed_of
from kvpool.observe.events import Events
from kvpool.serve_log import EventLog
from kvpool.serve_plan import Plan
from kvpool.tenants.plans import DEFAULT_TENANT
from kvpool.tenants.tenant import Tenant


def open_publisher(
    plan: Plan, tenants: Mapping[str, Tenant], own: Own | None, log: EventLog
) -> Publisher | None:
    """None: no events are asked for. own: who this node is in its cluster. It is begun and closed
    by the daemon. Raises NoResource."""
    if plan.events is None:
        return None
    if own is None:
        life = Life(node_id_of(plan.socket_path), time.time_ns())
    else:
        life = Life(own.node, own.incarnation)
    places = [
        Place(_name_of(each), feed_of(each.node), partial(_named, each))
        for each in tenants.values()
    ]
    return Publisher(plan.events, life, places, log)


def events_of(publisher: Publisher | None) -> Events | None:
    """What is told about it."""
    if publisher is None:
        return None
    return Events(
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        node=publisher.life.node.hex(),
        incarnation=publisher.life.incarnation,
        **publisher.stats(),
    )


def _name_of(tenant: Tenant) -> str:
    return "" if tenant.name == DEFAULT_TENANT else tenant.name


def _named(tenant: Tenant) -> Mapping[int, tuple[str, int]]:
    return {
        number: (manifest.name or "", manifest.block_tokens)
        for number, manifest in tenant.manifests().items()
    }
