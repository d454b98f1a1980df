"""A source of reports that move on as a busy daemon's do, and a real server that shows them.

Nothing here is random: step n is the same in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvpool.observe import http_serve, report
from kvpool.observe.history import History
from kvpool.observe.http import Site
from kvpool.observe.http_access import Access
from kvpool.types import Miss, Put, Reason
from tests import reports

WAIT_S = 20.0
_TIERS_BYTES = (2 << 30, 8 << 30)


class Moving:
    """A Source. Each report() is `step_s` seconds after the one before."""

    def __init__(
        self,
        tenants: Sequence[str] = ("default",),
        *,
        spaces: Sequence[str] = ("chat", ""),
        is_busy: bool = True,
        has_ssd: bool = True,
        step_s: float = 1.0,
    ) -> None:
        self.fails: BaseException | None = None
        self.is_ready = True
        self.asked = 0  # how often for a report
        self._kept = History()
        self._step_s = step_s if is_busy else 0.0
        self._shown = reports.example(tenants=tuple(tenants), has_ssd=has_ssd)
        self._spaces = spaces if is_busy else ()
        self._seconds = 0.0
        self._counted = {
            (tenant, number): _nothing(number)
            for tenant in tenants
            for number in range(len(spaces))
        }
        self.now = self._made()

    # --- a Source --------------------------------------------------------------------------------

    async def report(self) -> report.Report:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        self.advance(self._step_s)
        return self.now

    async def hottest(self, count: int, tenant: str | None) -> list[dict[str, Any]]:
        if self.fails is not None:
            raise self.fails
        found = [
            {
                "tenant": each.name,
                "namespace": space.name,
                "number": space.number,
                "key": bytes([rank, space.number]) * 8,
                "depth": 4096 >> (rank // 2),
                "tokens": 16 * 4096 >> (rank // 2),
                "heat": 41.5 / (rank + 1),
                "idle_s": 0.4 * rank * rank,
                "tiers": 1 + rank % 3,
                "children": rank % 4,
            }
            for each in self.now.tenants
            for space in each.namespaces
            for rank in range(12)
        ]
        found = [each for each in found if tenant in (None, each["tenant"])]
        return sorted(found, key=lambda each: -each["heat"])[:count]

    async def reuse(self) -> dict[str, Any]:
        if self.fails is not None:
            raise self.fails
        if not self._spaces:
            return {each.name: {"all": _curve(0), "spaces": {}} for each in self.now.tenants}
        return {
            each.name: {
                "all": _curve(1_000_000 + index),
                "spaces": {str(space.number): _curve(500_000) for space in each.namespaces},
            }
            for index, each in enumerate(self.now.tenants)
        }

    def history(self) -> History:
        return self._kept

    # --- as time goes on -------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """So much traffic more."""
        self._seconds += seconds
        for (tenant, number), counted in self._counted.items():
            weight = 1 + [each.name for each in self._shown.tenants].index(tenant) % 5
            _grow(counted, self._seconds, seconds * weight / (1 + number))
        self.now = self._made()
        self._kept.add(self.now, self._seconds)

    def fill(self, seconds: int, step_s: int = 1) -> None:
        """History of so long."""
        for _ in range(0, seconds, step_s):
            self.advance(step_s)

    def _made(self) -> report.Report:
        return msgspec.structs.replace(
            self._shown,
            now_s=self._shown.now_s + self._seconds,
            is_ready=self.is_ready,
            tenants=[self._tenant(each) for each in self._shown.tenants],
        )

    def _tenant(self, shown: report.Tenant) -> report.Tenant:
        spaces = []
        for number, name in enumerate(self._spaces):
            counted = self._counted[shown.name, number]
            spaces.append(
                msgspec.structs.replace(
                    reports.namespace(number, name), traffic=report.traffic_of(counted, 16)
                )
            )
        traffic = report.total(each.traffic for each in spaces)
        fill = 1 - math.exp(-self._seconds / 600)
        dram, ssd = shown.dram, shown.ssd
        dram = msgspec.structs.replace(
            dram, used_bytes=int(dram.limit_bytes * 0.94 * fill), evictions=traffic.stored // 3
        )
        if ssd is not None:
            ssd = msgspec.structs.replace(ssd, used_bytes=int(ssd.capacity_bytes * fill * 0.6))
        clients = shown.clients if self._spaces else []
        return msgspec.structs.replace(
            shown, namespaces=spaces, traffic=traffic, clients=clients, dram=dram, ssd=ssd
        )


def _nothing(number: int) -> dict[str, Any]:
    counted = reports.counted(number, 0)
    return {**counted, "missed": [0] * (max(Miss) + 1), "put_status": [0] * (max(Reason) + 1)}


def _grow(counted: dict[str, Any], at_s: float, weight: float) -> None:
    """As a report promises: requested = hit + missed, asked = loaded + failed, and so on."""
    asked = int(400 * weight * (1 + 0.4 * math.sin(at_s / 40)))
    hits = int(asked * (0.55 + 0.2 * math.sin(at_s / 90) - 0.05 * math.cos(at_s / 7)))
    disk, failed = hits // 6, hits // 90
    counted["lookups"] += asked // 10
    counted["lookup_blocks"] += asked
    counted["lookup_dram"] += hits - disk
    counted["lookup_ssd"] += disk
    counted["lookup_missed"] += (asked - hits) // 8
    counted["gets"] += asked // 10
    counted["get_blocks"] += hits
    counted["loaded_dram"] += hits - disk - failed
    counted["loaded_ssd"] += disk
    counted["missed"][Miss.MOVED] += failed
    put = asked - hits
    refused, present = put // 50, put // 20
    counted["put_blocks"] += put
    counted["put_status"][Put.STORED] += put - refused - present
    counted["put_status"][Put.PRESENT] += present
    counted["put_status"][Reason.POOL_PINNED] += refused


def _curve(references: int) -> dict[str, Any]:
    points = [
        [bytes_, 0.92 * bytes_ / (bytes_ + (3 << 30))] for bytes_ in range(0, 1 << 35, 1 << 28)
    ]
    if not references:
        return {"points": [], "now_bytes": 2 << 30, "now_hit": None, "references": 0, "error": None}
    now = 0.92 * 2 / 5
    return {
        "points": points,
        "now_bytes": 2 << 30,
        "now_hit": now,
        "references": references,
        "error": 0.013,
    }


class Running:
    """A Site on a port of this host, served by a loop in a thread of its own."""

    def __init__(self, source: Any, access: Access | None = None, port: int = 0) -> None:
        self.source = source
        self.errors: list[BaseException] = []
        self.site: Site
        self._access = access or Access(is_loopback=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self.sock = http_serve.listen("127.0.0.1", port)
        self.port: int = self.sock.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._begun = threading.Event()
        self._thread.start()
        assert self._begun.wait(WAIT_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.site = Site(self.source, self._access, self.errors.append)
        self._begun.set()
        await http_serve.serve(self.site.app(), self.sock, self._stop, self.errors.append)

    def tell_to_end(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server does not end"

    def close(self) -> None:
        if self._thread.is_alive():
            self.tell_to_end()
        self.wait()

    # --- asking ----------------------------------------------------------------------------------

    def ask(
        self, path: str, *, method: str = "GET", token: str = "", **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers by their lower-case names, body."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=sent)
            answer = connection.getresponse()
            got = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, got, answer.read()

    def json(self, path: str, token: str = "") -> Any:
        status, headers, body = self.ask(path, token=token)
        assert status == 200, body
        assert headers["content-type"] == "application/json"
        return json.loads(body)

    def raw(self, data: bytes) -> socket.socket:
        """A connection on which this was said."""
        sock = socket.create_connection(("127.0.0.1", self.port), WAIT_S)
        sock.sendall(data)
        return sock


@contextlib.contextmanager
def running(source: Any, access: Access | None = None) -> Iterator[Running]:
    site = Running(source, access)
    try:
        yield site
    finally:
        site.close()
