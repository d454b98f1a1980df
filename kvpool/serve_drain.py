"""The request `drain`: begins a drain, and says how far it is.

{"op": "drain", "timeout": seconds} begins one, if there was none; without a timeout it only asks.
Thread rule: as Operation.
"""

from __future__ import annotations

from kvpool.cluster.draining import Draining
from kvpool.cluster.joined import Joined
from kvpool.errors import BadArgument
from kvpool.serve_control import Operation
from kvpool.serve_log import EventLog
from kvpool.tenants.tenant import Client
from kvpool.wire import Map

TIMEOUT_S_MAX = 86_400.0


def drain_operations(joined: Joined | None, log: EventLog) -> dict[str, Operation]:
    """By the name of the request. joined: None where the daemon is in no cluster."""
    draining = None if joined is None else Draining(joined, log)

    def drain(request: Map, _: Client) -> Map:
        if draining is None:
            raise BadArgument("this daemon is in no cluster: nobody could take its blocks")
        timeout_s = request.get("timeout")
        if timeout_s is not None:
            is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
            if not is_number or not 0 < timeout_s <= TIMEOUT_S_MAX:
                raise BadArgument(
                    f"timeout is {timeout_s!r:.64}; it must be seconds, at most {TIMEOUT_S_MAX:g}"
                )
            draining.begin(float(timeout_s))
        return {"drain": draining.progress()}

    return {"drain": Operation(drain, needs_admin=True, is_slow=True)}
