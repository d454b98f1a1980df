"""The daemon's HTTP side: where the site's facts come from, and its place in the daemon's loop.

Promises:  1. whatever becomes of it, blocks are served on: it is told in the log, once in a while;
           2. it is gone within 1.5 s of the end of run();
           3. history is kept whether or not anybody looks: a page that is opened later shows
              what was before.
Thread rule: the event loop's. The core is asked in threads.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpool.address import host_and_port
from kvpool.errors import KvpoolError, NoResource
from kvpool.observe import curve, http_serve
from kvpool.observe import report as model
from kvpool.observe.history import History
from kvpool.observe.http import Site
from kvpool.observe.http_access import Access
from kvpool.serve_plan import HttpPlan, Plan

if TYPE_CHECKING:
    from kvpool.daemon import Daemon

SAMPLE_S = 1.0
_END_S = 1.5
_POINTS = 64  # of a curve
_POINTS_FROM, _POINTS_TO = 1 / 16, 16.0  # of the DRAM that there is


class Web:
    """HTTP of one daemon. Its socket is taken by __init__, so a start that fails fails early."""

    def __init__(self, plan: HttpPlan) -> None:
        """Raises NoResource."""
        self._plan = plan
        try:
            self._sock: socket.socket = http_serve.listen(plan.host, plan.port)
        except OSError as error:
            where = host_and_port(plan.host, plan.port)
            raise NoResource(f"http {where}: cannot be listened on: {error.strerror}") from None
        self.site: Site | None = None

    @property
    def address(self) -> str:
        return f"http://{host_and_port(*self._sock.getsockname()[:2])}"

    @property
    def refused(self) -> Mapping[str, int]:
        return {} if self.site is None else self.site.refused

    def close(self) -> None:
        """Idempotent; for a start that failed."""
        self._sock.close()

    def set_access(self, plan: Plan) -> None:
        """Who may see what from now on."""
        if self.site is not None and plan.http is not None:
            self.site.access = access_of(plan)

    async def run(self, daemon: Daemon) -> None:
        """Serves and keeps history until it is cancelled."""

        def failed(error: BaseException) -> None:
            daemon.log.often(logging.ERROR, "http failed", reason=repr(error))

        source = Facts(daemon)
        self.site = Site(source, access_of(daemon.plan), failed)
        stop = asyncio.Event()
        serving = asyncio.create_task(http_serve.serve(self.site.app(), self._sock, stop, failed))
        try:
            while True:
                await source.sample(failed)
                await asyncio.sleep(SAMPLE_S)
        finally:
            stop.set()
            await asyncio.wait([serving], timeout=_END_S)
            serving.cancel()


def access_of(plan: Plan) -> Access:
    """Who may see what, by the plan's tokens."""
    assert plan.http is not None  # where there is a Web
    return Access(
        is_loopback=plan.http.is_loopback,
        admin_token=plan.http.token or "",
        tenant_tokens={name: each.http_token or "" for name, each in plan.tenants.items()},
        has_tenants=bool(plan.config.tenants),
        is_for_all=plan.http.is_open,
    )


class Facts:
    """The site's Source."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._history = History()

    async def report(self) -> model.Report:
        return await asyncio.to_thread(self._daemon.observer.report)

    async def hottest(self, count: int, tenant: str | None) -> list[dict[str, Any]]:
        named = None if tenant is None else self._daemon.tenants[tenant]
        return await asyncio.to_thread(self._daemon.observer.hottest, count, named)

    async def reuse(self) -> dict[str, dict[str, Any]]:
        return await asyncio.to_thread(self._curves)

    def history(self) -> History:
        return self._history

    async def sample(self, failed: Any) -> None:
        """One more point of the history."""
        try:
            self._history.add(await self.report(), time.monotonic())
        except KvpoolError as error:  # it closes, or has no memory for this
            failed(error)

    def _curves(self) -> dict[str, dict[str, Any]]:
        return {name: _drawn(each) for name, each in self._daemon.observer.reuse().items()}


def _drawn(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Curves as points, of one tenant."""
    sizes = counted["dram_bytes"], counted["ssd_bytes"]
    spaces = {name: _points(each, *sizes) for name, each in counted["spaces"].items()}
    return {"all": _points(counted["all"], *sizes), "spaces": spaces}


def _points(counted: Mapping[str, Any], dram_bytes: int, ssd_bytes: int) -> dict[str, Any]:
    """By the size of DRAM; the SSD stays as it is behind it, and a hit in either is one."""
    found = curve.of_counts(counted)
    ratio = (_POINTS_TO / _POINTS_FROM) ** (1 / (_POINTS - 1))
    sizes = [dram_bytes * _POINTS_FROM * ratio**i for i in range(_POINTS)]
    hits = curve.what_if(found, [size + ssd_bytes for size in sizes])
    doubt = found.doubt(dram_bytes + ssd_bytes)
    return {
        "points": [list(each) for each in zip(sizes, hits, strict=True)],
        "now_bytes": dram_bytes,
        "now_hit": None if found.doubt() else found.hit_ratio(dram_bytes + ssd_bytes),
        "references": int(found.references),
        "error": None if found.doubt() else found.error(),
        "doubt": doubt,
    }
