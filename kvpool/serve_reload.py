"""Another configuration for a daemon that runs: what can change does, the rest is told.

Promises:  1. a configuration that is wrong in any way changes nothing;
           2. what has changed and needs a restart is named in the log;
           3. who would not be let in any more as who it is, is ended: a token that was taken away
              is of no use from then on.
Thread rule: run() in the event loop; asked() from a thread of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpool import wire
from kvpool.errors import BadArgument, KvpoolError
from kvpool.serve_log import open_log
from kvpool.serve_plan import Plan, changed, needs_restart
from kvpool.tenants.plans import TenantPlan
from kvpool.tenants.tenant import Client, Tenant

if TYPE_CHECKING:
    from kvpool.daemon import Daemon

RELOAD_S = 30.0  # that a request for it waits
RESIZE_WAIT_S = 1.0

Replan = Callable[[], Plan]  # raises BadArgument


class Reload:
    """Takes over what has changed."""

    def __init__(self, daemon: Daemon, replan: Replan | None) -> None:
        self._daemon = daemon
        self._replan = replan
        self._turn = asyncio.Lock()
        self._config = daemon.plan.config  # as it was read last
        self.loop: asyncio.AbstractEventLoop | None = None

    def asked(self, request: wire.Map, caller: Client) -> wire.Map:
        """As an operation: {"changed", "needs_restart", "refused": lists of text}.

        Raises BadArgument: what is wrong with it.
        """
        assert self.loop is not None  # set before anybody can ask
        future = asyncio.run_coroutine_threadsafe(self._again(), self.loop)
        return future.result(RELOAD_S)

    async def run(self) -> None:
        """What is wrong is logged, and nothing has changed then."""
        try:
            await self._again()
        except KvpoolError as error:
            self._daemon.log.error("configuration not reloaded", reason=error)

    async def _again(self) -> wire.Map:
        if self._replan is None:
            raise BadArgument("this daemon was started without a configuration to read again")
        async with self._turn:
            new = await asyncio.to_thread(self._replan)
            return await self._take_over(new)

    async def _take_over(self, new: Plan) -> wire.Map:
        daemon = self._daemon
        old = daemon.plan
        names = [name for name in old.tenants if name in new.tenants]
        if daemon.sharing is not None:
            least = sum(new.tenants[name].limits.dram_min for name in names)
            if least > new.budget:
                raise BadArgument(f"the tenants have {least} bytes for certain, which is more")
        left_out = needs_restart(old.config, new.config)
        tenants = {name: _next(name, old, new) for name in old.tenants}
        daemon.identities = daemon.identities_of(tenants, new)
        daemon.clients.clients_max = new.clients_max
        for name in names:
            pin_bytes = old.tenants[name].limits.pin_bytes
            limits = dataclasses.replace(new.tenants[name].limits, pin_bytes=pin_bytes)
            daemon.tenants[name].limits = limits
            _set_rates(daemon.tenants[name])
        open_log(new.log_format, new.log_level)
        failed = await asyncio.to_thread(self._resize, old, new, names)
        daemon.plan = dataclasses.replace(  # config stays: what runs is still of the first one
            old,
            node={**old.node, "dram": old.budget if failed else new.budget},  # to be tried again
            tenants=tenants,
            admin=new.admin,
            clients_max=new.clients_max,
        )
        if old.http is not None and new.http is not None:
            http = dataclasses.replace(old.http, token=new.http.token)
            daemon.plan = dataclasses.replace(daemon.plan, http=http)
        if daemon.web is not None:
            daemon.web.set_access(daemon.plan)
        ended = daemon.end_clients(lambda client: not self._is_known(client))
        self._log(left_out, failed, ended)
        taken, self._config = changed(self._config, new.config), new.config
        return {"changed": taken, "needs_restart": left_out, "refused": failed}

    def _resize(self, old: Plan, new: Plan, names: list[str]) -> list[str]:
        """In a thread. What the core refuses is told, and the rest is done."""
        daemon = self._daemon
        calls: list[Callable[[], Any]] = []
        for name in names:
            before, after = old.tenants[name].node, new.tenants[name].node
            node, capacity = daemon.tenants[name].node, after["ssd_capacity"]
            if capacity not in (0, before["ssd_capacity"]):
                calls.append(partial(node.resize_ssd, capacity, RESIZE_WAIT_S))
            is_own = daemon.sharing is None and new.budget != old.budget
            dram, blocks = new.budget if is_own else None, after["max_blocks"]
            if is_own or blocks != before["max_blocks"]:
                calls.append(partial(node.resize, dram, blocks, RESIZE_WAIT_S))
        if daemon.sharing is not None and new.budget != old.budget:
            calls.append(partial(daemon.sharing.resize, new.budget, RESIZE_WAIT_S))
        return [text for call in calls if (text := _attempt(call)) is not None]

    def _is_known(self, client: Client) -> bool:
        try:
            found = self._daemon.identities.of(client.claim)
        except wire.RefusedByPeer:
            return False
        name = None if client.tenant is None else client.tenant.name
        return (found.tenant, found.is_admin) == (name, client.is_admin)

    def _log(self, left_out: list[str], failed: list[str], ended: int) -> None:
        log = self._daemon.log
        for text in failed:
            log.error("a change was refused", reason=text)
        if left_out:
            log.warning("a change needs a restart", options=", ".join(left_out))
        log.info("configuration reloaded", clients_ended=ended)


def _next(name: str, old: Plan, new: Plan) -> TenantPlan:
    """Who a tenant is from now on. One whose table went is nobody: its memory stays until a
    restart, and nobody comes to it.

    Nor does every user of a socket that was to be for fewer, when it is made again.
    """
    had_table = name in old.config.tenants
    if not had_table and name not in new.tenants:  # of a daemon without tenants, until a restart
        return old.tenants[name]
    if name in new.tenants and (not had_table or name in new.config.tenants):
        told, before = new.tenants[name], old.tenants[name]
        if told.uids is None and before.uids is not None and new.socket_mode != old.socket_mode:
            return dataclasses.replace(told, uids=frozenset())
        return told
    return dataclasses.replace(old.tenants[name], uids=frozenset(), token=None, http_token=None)


def _attempt(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except KvpoolError as error:
        return str(error)
    return None


def _set_rates(tenant: Tenant) -> None:
    limits = tenant.limits
    tenant.server.set_rates(limits.put_bytes_per_s, limits.get_bytes_per_s)
