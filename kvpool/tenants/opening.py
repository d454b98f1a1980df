"""Opens the nodes and servers of a daemon's tenants: all of them, or none is left open."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from kvpool import _core
from kvpool.errors import NoResource
from kvpool.serve_log import EventLog
from kvpool.serve_plan import Plan
from kvpool.tenants.plans import DEFAULT_TENANT, TenantPlan
from kvpool.tenants.tenant import Tenant


def open_tenants(plan: Plan, log: EventLog) -> dict[str, Tenant]:
    """By name, in the order of the plan. Raises KvpoolError."""
    opened: dict[str, Tenant] = {}
    # The default tenant's first: its tier takes the folder that the others' are in.
    order = sorted(plan.tenants.values(), key=lambda each: each.name != DEFAULT_TENANT)
    with contextlib.ExitStack() as undo:
        for each in order:
            node = _open_node(each)
            undo.callback(node.close, 0)
            tell_if_buffered(each, node.stats(), log)
            server = _core.Server.create(node, **each.server, **_rates(each))
            undo.callback(server.close)
            opened[each.name] = Tenant(each.name, node, server, each.limits)
        undo.pop_all()
    return {name: opened[name] for name in plan.tenants}


def _open_node(plan: TenantPlan) -> _core.Node:
    folder = plan.node["ssd"]
    if folder and plan.name != DEFAULT_TENANT:
        try:
            os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        except OSError as error:
            raise NoResource(f"SSD tier in {folder}: cannot be made: {error.strerror}") from None
    return _core.Node.open(**plan.node)


def _rates(plan: TenantPlan) -> dict[str, int]:
    return {
        "put_bytes_per_s": plan.limits.put_bytes_per_s,
        "get_bytes_per_s": plan.limits.get_bytes_per_s,
    }


def tell_if_buffered(plan: TenantPlan, stats: dict[str, Any], log: EventLog) -> None:
    """What kvpool.open() warns of with TierBuffered."""
    if plan.node["ssd"] and plan.node["ssd_direct"] and not stats["ssd_direct"]:
        reason = stats["ssd_buffered_reason"]
        log.warning("SSD tier goes through the page cache", ssd=plan.node["ssd"], reason=reason)
