"""From the table [cluster] to a daemon's part of the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from kvpool.cluster.core import Core, open_core
from kvpool.cluster.joined import Joined
from kvpool.cluster.lanes import open_lane
from kvpool.cluster.opening import Place
from kvpool.cluster.peer_link import Own
from kvpool.cluster.plans import ClusterPlan
from kvpool.errors import BadArgument
from kvpool.serve_listen import Listeners
from kvpool.serve_log import EventLog
from kvpool.serve_plan import Plan
from kvpool.tenants.tenant import Tenant


def open_place(plan: Plan, listeners: Listeners, log: EventLog) -> Place | None:
    """None: the node is alone. Early: what is wrong with it is told before memory is taken.

    Raises BadArgument, StateRefused.
    """
    if plan.cluster is None:
        return None
    if plan.cluster.token is None:
        _require_alone(plan, listeners)
    return Place(plan.cluster, listeners.tcp[0].getsockname()[1], log)


def join(
    plan: ClusterPlan, place: Place, tenants: Mapping[str, Tenant], log: EventLog, version: str
) -> Joined:
    """A core for each tenant's node. It is begun by the daemon. Raises KvpoolError."""
    own = Own(
        plan.name,
        bytes.fromhex(place.node.id),
        place.node.incarnation,
        plan.token,
        plan.weight,
        version,
    )
    cores: dict[str, Core] = {}
    lanes: dict[str, bytes] = {}
    with contextlib.ExitStack() as undo:
        for name, tenant in tenants.items():
            core = cores[name] = open_core(tenant.node, own, plan.limits)
            undo.callback(core.close, 0.0)
            if address := open_lane(core, plan.lane, name, log):
                lanes[name] = address
            core.serve(tenant.server)
        undo.pop_all()
    return Joined(own, cores, place, log, lanes=lanes)


def _require_alone(plan: Plan, listeners: Listeners) -> None:
    """Who comes in as a peer without a token sees what others need one for."""
    why = ""
    if listeners.is_reachable:
        why = "other machines can connect to where it listens"
    elif plan.has_tokens or plan.config.tenants:
        why = "it asks its clients for tokens"
    if why:
        raise BadArgument(
            f"this node has no token for its cluster, and {why}: set [cluster] token_file, the same"
            " for all members (openssl rand -hex 32 makes a token)"
        )
