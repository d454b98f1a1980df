"""Keeps the tenants of a daemon within one budget of memory: looks, decides (budget), resizes.

Promises:  1. the limits together never come to more than the budget;
           2. a tenant that gives memory back holds up nobody: its node goes on with it in the
              background, and the next look sees how far it came.
Thread rule: run() in the event loop; look() and resize() from any thread, one at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.errors import BadArgument, KvpoolError
from kvpool.serve_log import EventLog
from kvpool.serve_plan import Plan
from kvpool.tenants.budget import UNIT_BYTES, Need, next_limits
from kvpool.tenants.tenant import Tenant

LOOK_S = 1.0
IDLE_S = 60.0  # without a get or a put, until a tenant's blocks count as cold
PRESSED_LOOKS = 2  # in a row, until memory is looked for: a burst alone is none
RESIZE_WAIT_S = 0.2

InThread = Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class _Seen:
    """What a tenant's counters were at the last look."""

    evictions: int = 0
    puts: int = 0
    uses: int = 0
    pressed_looks: int = 0
    idle_looks: int = 0


class Sharing:
    """The budget of one daemon and its tenants' parts of it."""

    def __init__(self, plan: Plan, tenants: Mapping[str, Tenant], log: EventLog) -> None:
        self._lock = threading.Lock()
        self._tenants = tenants
        self._log = log
        self._budget_max = int(plan.node["dram_max"])
        self._is_fixed = bool(plan.node["sealed"])
        self._seen = {name: _Seen() for name in tenants}
        self._is_told = False
        self.budget = plan.budget // UNIT_BYTES * UNIT_BYTES

    async def run(self, in_thread: InThread) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await in_thread(self.look, slow=True)
            except KvpoolError as error:  # a node that closes, or has no memory for its books
                if not self._is_told:
                    self._log.warning("memory cannot be shared out", reason=error)
                self._is_told = True

    def resize(self, budget: int, wait_s: float) -> int:
        """Another budget: bytes, for all tenants together. Returns what is committed.

        It is shared out by the looks that follow. Raises BadArgument.
        """
        self.check(budget)
        with self._lock:
            self.budget = budget // UNIT_BYTES * UNIT_BYTES
        self.look(wait_s)
        return sum(int(each.node.stats()["bytes_committed"]) for each in self._tenants.values())

    def check(self, budget: int) -> None:
        """Raises BadArgument for a budget that cannot be."""
        least = sum(each.limits.dram_min for each in self._tenants.values())
        if self._is_fixed:
            raise BadArgument("dram cannot change: a sealed arena has one size")
        if not least <= budget <= self._budget_max:
            raise BadArgument(
                f"dram is {budget} bytes; it must be {least} (what the tenants have for certain) to"
                f" {self._budget_max} (dram_max)"
            )

    def look(self, wait_s: float = RESIZE_WAIT_S) -> None:
        """Once: who needs what, and the limits that follow from it. Raises KvpoolError.

        wait_s: for memory to come back, from all that give some; then they go on by themselves.
        """
        if self._is_fixed:
            return
        with self._lock:
            tenants = list(self._tenants.values())
            needs = [self._need(each) for each in tenants]
            changes = [
                (each, need.limit, limit)
                for each, need, limit in zip(
                    tenants, needs, next_limits(self.budget, needs), strict=True
                )
                if limit != need.limit
            ]
            end = time.monotonic() + wait_s
            for tenant, before, after in sorted(changes, key=lambda change: change[2] - change[1]):
                left_s = max(0.0, end - time.monotonic()) if after < before else 0.0
                tenant.node.resize(after, None, left_s)
                self._log.debug("memory shared out", tenant=tenant.name, before=before, now=after)

    def _need(self, tenant: Tenant) -> Need:
        stats, seen = tenant.node.stats(), self._seen[tenant.name]
        puts = stats["puts"] + stats["put_not_stored"]
        uses = puts + stats["put_present"] + stats["gets"] + stats["client_views"]
        # Evictions alone may be those of a tenant that is giving memory back.
        is_pressed = stats["evictions"] > seen.evictions and puts > seen.puts
        seen.pressed_looks = seen.pressed_looks + 1 if is_pressed else 0
        seen.idle_looks = 0 if uses > seen.uses else seen.idle_looks + 1
        seen.evictions, seen.puts, seen.uses = stats["evictions"], puts, uses
        limit = int(stats["bytes_limit"])
        most = min(tenant.limits.dram_max, int(stats["bytes_max"]))
        return Need(
            least=min(tenant.limits.dram_min, most),
            most=most // UNIT_BYTES * UNIT_BYTES,
            limit=limit,
            held=max(limit, int(stats["bytes_committed"])),
            taken=int(stats["bytes_taken"]),
            is_pressed=seen.pressed_looks >= PRESSED_LOOKS,
            is_idle=seen.idle_looks >= IDLE_S / LOOK_S,
        )
