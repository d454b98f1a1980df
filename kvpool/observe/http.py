"""What a daemon shows by HTTP: metrics, its report as JSON, and the status page.

Promises:  1. GET and HEAD only, and no request changes anything;
           2. every answer that has facts in it is for one Viewer: a tenant's has its own part;
           3. whatever is asked, the answer is bounded, comes within SOURCE_S or is an error, and an
              error is JSON that says what was wrong and nothing of the inside;
           4. however many ask, the daemon makes a report at most every FRESH_S for them.
Relies on: starlette, loaded with this module and by nothing else of kvpool.
Thread rule: the event loop's; the text of metrics is put together in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.observe import cluster, http_static, metrics
from kvpool.observe import report as model
from kvpool.observe.history import RINGS, History
from kvpool.observe.http_access import Access, Viewer

SOURCE_S = 5.0
FRESH_S = 0.25
HOTTEST_MAX = 200
HOTTEST = 20  # without ?count
CURVES_MAX = 64  # of namespaces, for each tenant
_QUERY_MAX = 256  # characters of one value

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}


class Source(Protocol):
    """Where the facts come from. A call may wait, and may raise: that is a 503 then."""

    async def report(self) -> model.Report:
        """Of all tenants."""
        ...

    async def hottest(self, count: int, tenant: str | None) -> list[dict[str, Any]]:
        """Prefixes, hottest first, of one tenant or of all: {tenant, namespace (name), number,
        key (bytes or hexadecimal), depth, tokens, heat, idle_s, tiers, children}."""
        ...

    async def reuse(self) -> Mapping[str, Mapping[str, Any]]:
        """Tenant -> {"all": curve, "spaces": {number: curve}}, a curve being {points: [[bytes, hit
        ratio], ...] by growing bytes, now_bytes, now_hit, references, error}; None: not known."""
        ...

    def history(self) -> History: ...


class Site:
    """The app of one daemon. `access` may be replaced at any time; `refused` counts by reason."""

    def __init__(
        self, source: Source, access: Access, failed: Callable[[BaseException], None]
    ) -> None:
        """failed: told what the source raised, which whoever asked is not."""
        self.access = access
        self._failed = failed
        self.refused: Counter[str] = Counter({"http_token": 0, "http_host": 0})
        self._source = source
        self._report = _Shared(source.report)
        self._reuse = _Shared(source.reuse)
        self._metrics = metrics.Exposition()
        self._metrics_lock = asyncio.Lock()

    def app(self) -> Any:
        """For an ASGI server."""
        routes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._seen(self._show_metrics)),
            Route("/v1/stats", self._seen(self._show_stats)),
            Route("/v1/namespaces", self._seen(self._show_namespaces)),
            Route("/v1/blocks/top", self._seen(self._show_hottest)),
            Route("/v1/cluster", self._seen(self._show_cluster)),
            Route("/v1/mrc", self._seen(self._show_curves)),
            Route("/v1/history", self._seen(self._show_history)),
            Route("/", self._static),
            Route("/static/{name}", self._static),
        ]
        handlers: Any = {HTTPException: self._tell, Exception: _tell_bug}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return _with_headers(app)

    # --- who may ---------------------------------------------------------------------------------

    def _seen(
        self, show: Callable[[Request, Viewer], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self._require_host(request)
            viewer = self.access.viewer(request.headers.get("authorization"))
            if viewer is None:
                self.refused["http_token"] += 1
                raise HTTPException(
                    401,
                    "this needs a token: say Authorization: Bearer TOKEN",
                    {"www-authenticate": 'Bearer realm="kvpool"'},
                )
            return await show(request, viewer)

        return handle

    def _require_host(self, request: Request) -> None:
        if not self.access.knows_host(request.headers.get("host")):
            self.refused["http_host"] += 1
            raise HTTPException(421, "ask for localhost, 127.0.0.1 or [::1]: this listens there")

    # --- what is shown ---------------------------------------------------------------------------

    async def _healthz(self, request: Request) -> Response:
        return _json({"alive": True})

    async def _readyz(self, request: Request) -> Response:
        try:
            is_ready = (await self._report.get()).is_ready
        except HTTPException:
            is_ready = False
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def _show_metrics(self, request: Request, viewer: Viewer) -> Response:
        _query(request)
        report = await self._report.get()
        async with self._metrics_lock:
            body, content_type = await asyncio.to_thread(
                self._metrics.text, report, request.headers.get("accept", ""), viewer.tenant
            )
        return _answer(body, content_type)

    async def _show_stats(self, request: Request, viewer: Viewer) -> Response:
        _query(request)
        return _answer(model.as_json(_part(await self._report.get(), viewer)))

    async def _show_namespaces(self, request: Request, viewer: Viewer) -> Response:
        _query(request)
        report = _part(await self._report.get(), viewer)
        return _json(
            [
                {
                    "tenant": tenant.name,
                    "hit_ratio": space.traffic.hit_ratio(),
                    **msgspec.structs.asdict(space),
                }
                for tenant in report.tenants
                for space in tenant.namespaces
            ]
        )

    async def _show_cluster(self, request: Request, viewer: Viewer) -> Response:
        _query(request)
        report = _part(await self._report.get(), viewer)
        if report.cluster is None:
            raise HTTPException(404, "this node is in no cluster")
        return _json(report.cluster)

    async def _show_hottest(self, request: Request, viewer: Viewer) -> Response:
        query = _query(request, "count", "tenant")
        count = _number(query, "count", HOTTEST, range(1, HOTTEST_MAX + 1))
        tenant = await self._tenant(query, viewer)
        found = await _in_time(self._source.hottest(count, tenant))
        return _json([_readable(each) for each in found[:count]])

    async def _show_curves(self, request: Request, viewer: Viewer) -> Response:
        _query(request)
        curves = await self._reuse.get()
        return _json({name: _busiest(of) for name, of in curves.items() if viewer.may_see(name)})

    async def _show_history(self, request: Request, viewer: Viewer) -> Response:
        query = _query(request, "step", "tenant")
        step_s = _number(query, "step", RINGS[0][0], [step for step, _ in RINGS])
        tenant = await self._tenant(query, viewer)
        try:
            return _json({"tenant": tenant, **self._source.history().series(step_s, tenant)})
        except KeyError:
            raise HTTPException(404, "this tenant has no history of its own yet") from None

    async def _tenant(self, query: Mapping[str, str], viewer: Viewer) -> str | None:
        """The one to show; None: all. One that another may see looks like one that is not there."""
        asked = query.get("tenant", viewer.tenant)
        if asked is not None:
            report = _part(await self._report.get(), viewer)
            if asked not in {each.name for each in report.tenants}:
                raise HTTPException(404, "there is no such tenant")
        return asked

    async def _static(self, request: Request) -> Response:
        self._require_host(request)
        name = request.path_params.get("name", "index.html")
        if "name" in request.path_params and name not in http_static.names():
            raise HTTPException(404)
        file = http_static.file(name)
        headers = {"cache-control": "no-cache", "etag": file.tag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            packed = {**headers, "content-encoding": "gzip"}
            return Response(file.packed, headers=packed, media_type=file.content_type)
        return Response(file.plain, headers=headers, media_type=file.content_type)

    async def _tell(self, request: Request, error: HTTPException) -> Response:
        if error.__cause__ is not None and not isinstance(error.__cause__, TimeoutError):
            self._failed(error.__cause__)
        code, text = _ERRORS.get(error.status_code, ("failed", ""))
        answer = _json({"error": code, "message": text or error.detail}, error.status_code)
        answer.headers.update(error.headers or {})
        return answer


class _Shared:
    """One answer for all who ask at about the same time."""

    def __init__(self, make: Callable[[], Awaitable[Any]]) -> None:
        self._make = make
        self._making: asyncio.Task[Any] | None = None
        self._made_s = 0.0

    async def get(self) -> Any:
        now_s = asyncio.get_running_loop().time()
        if self._making is None or (self._making.done() and now_s - self._made_s > FRESH_S):
            self._making = asyncio.create_task(self._timed())
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await _in_time(asyncio.shield(self._making))

    async def _timed(self) -> Any:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SOURCE_S):
                return await self._make()
        finally:
            self._made_s = loop.time()


async def _in_time(answer: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(SOURCE_S):
            return await answer
    except Exception as error:
        raise HTTPException(503, "the daemon does not answer now; ask again") from error


def _part(report: model.Report, viewer: Viewer) -> model.Report:
    """What the viewer may see: of the budget too, which would tell what the others have."""
    if viewer.tenant is None:
        return report
    own = [each for each in report.tenants if each.name == viewer.tenant]
    budget_bytes = sum(each.dram.limit_bytes for each in own)
    seen = None if report.cluster is None else cluster.part_of(report.cluster, viewer.tenant)
    return msgspec.structs.replace(
        report, tenants=own, refused={}, budget_bytes=budget_bytes, cluster=seen, events=None
    )


# --- queries -------------------------------------------------------------------------------------


def _query(request: Request, *known: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            told = f"known: {', '.join(known)}" if known else "there is none here"
            raise HTTPException(400, f"unknown parameter {name[:32]!r}; {told}")
        if name in values:
            raise HTTPException(400, f"{name} is given twice")
        if len(value) > _QUERY_MAX:
            raise HTTPException(400, f"{name} is longer than {_QUERY_MAX} characters")
        values[name] = value
    return values


def _number(query: Mapping[str, str], name: str, default: int, allowed: Any) -> int:
    text = query.get(name)
    if text is None:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else -1
    if number not in allowed:
        told = (
            f"{allowed[0]}..{allowed[-1]}"
            if isinstance(allowed, range)
            else ", ".join(map(str, allowed))
        )
        raise HTTPException(400, f"{name} is {text[:32]!r}; it must be one of {told}")
    return number


# --- answers -------------------------------------------------------------------------------------


def _answer(body: bytes, content_type: str = "application/json", status: int = 200) -> Response:
    return Response(body, status, {"cache-control": "no-store", "content-type": content_type})


def _json(value: Any, status: int = 200) -> Response:
    return _answer(msgspec.json.encode(value), status=status)


def _busiest(curves: Mapping[str, Any]) -> dict[str, Any]:
    """Of one tenant: the namespaces with the most references, CURVES_MAX of them."""
    by_references = sorted(curves["spaces"].items(), key=lambda each: -each[1]["references"])
    return {**curves, "spaces": dict(by_references[:CURVES_MAX])}


def _readable(prefix: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in hexadecimal, not as msgspec would have bytes."""
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in prefix.items()
    }


# By status: the code, and the text where the router raises it with one of its own.
_ERRORS = {
    400: ("bad_argument", ""),
    401: ("token", ""),
    404: ("not_found", ""),
    405: ("method", "GET and HEAD only"),
    421: ("host", ""),
    503: ("busy", ""),
}


async def _tell_bug(request: Request, error: Exception) -> Response:
    return _json({"error": "internal", "message": "the daemon failed at this; see its log"}, 500)


def _with_headers(app: Any) -> Any:
    """Of every answer, errors too."""
    added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await app(scope, receive, sent)

    return call
