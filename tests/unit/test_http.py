"""kvpool.observe.http: who sees what, what is refused and how, and that nothing of it can hang.

A real server on a port of this host in every case; only Access is asked by itself as well.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.observe import http, http_serve, http_static, report
from kvpool.observe.http_access import Access, Viewer, is_loopback
from tests.web.moving import WAIT_S, Moving, Running, running

ADMIN, MINE, THEIRS = "admin-" + "a" * 32, "mine-" + "b" * 32, "theirs-" + "c" * 32
DATA = (
    "/metrics",
    "/v1/stats",
    "/v1/namespaces",
    "/v1/blocks/top",
    "/v1/mrc",
    "/v1/history",
)


@pytest.fixture(scope="module")
def open_site() -> Iterator[Running]:
    source = Moving(("default",))
    source.fill(30)
    with running(source) as site:
        yield site


@pytest.fixture(scope="module")
def closed_site() -> Iterator[Running]:
    source = Moving(("mine", "theirs"))
    source.fill(30)
    access = Access(
        is_loopback=True, admin_token=ADMIN, tenant_tokens={"mine": MINE, "theirs": THEIRS}
    )
    with running(source, access) as site:
        yield site


# --- access, by itself ----------------------------------------------------------------------------


def test_loopback_without_tokens_and_tenants_is_open() -> None:
    assert Access(is_loopback=True).viewer(None) == Viewer()


@pytest.mark.parametrize(
    "access",
    [
        Access(is_loopback=False),
        Access(is_loopback=True, has_tenants=True),
        Access(is_loopback=True, tenant_tokens={"a": ""}, has_tenants=True),
    ],
)
def test_without_a_token_that_would_do_it_is_shut(access: Access) -> None:
    assert access.opens_to_nobody
    for authorization in (None, "", "Bearer ", "Bearer x", "Basic eDp5"):
        assert access.viewer(authorization) is None


def test_tokens_tell_who_sees() -> None:
    access = Access(is_loopback=False, admin_token=ADMIN, tenant_tokens={"mine": MINE, "other": ""})
    assert not access.opens_to_nobody
    assert access.viewer(f"Bearer {ADMIN}") == Viewer(None)
    assert access.viewer(f"bearer  {MINE} ") == Viewer("mine")
    for wrong in (None, "", ADMIN, f"Basic {ADMIN}", f"Bearer {ADMIN}x", f"Bearer {ADMIN[:-1]}"):
        assert access.viewer(wrong) is None
    for odd in ("Bearer", "Bearer ", "Bearer \udcff", "Bearer " + "x" * 5000, f"Bearer {MINE}\0"):
        assert access.viewer(odd) is None


def test_tokens_are_not_in_what_gets_printed() -> None:
    access = Access(is_loopback=False, admin_token=ADMIN, tenant_tokens={"mine": MINE})
    assert ADMIN not in repr(access)
    assert MINE not in repr(access)


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("localhost:9465", True),
        ("LOCALHOST:1", True),
        ("127.0.0.1:9465", True),
        ("[::1]:9465", True),
        ("[::1]", True),
        ("attacker.example:9465", False),
        ("localhost.attacker.example", False),
        ("127.0.0.1.attacker.example:9465", False),
        ("localhost:9465@attacker.example", False),
        ("localhost:", False),
        ("", False),
        (None, False),
    ],
)
def test_the_host_header_must_name_this_host(host: str | None, is_known: bool) -> None:
    assert Access(is_loopback=True).knows_host(host) is is_known
    assert Access(is_loopback=False, admin_token=ADMIN).knows_host(host)


def test_which_addresses_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "host", "", "localhost.a")))


# --- what is shown --------------------------------------------------------------------------------


def test_stats_are_the_report(open_site: Running) -> None:
    status, _, body = open_site.ask("/v1/stats")
    assert status == 200
    assert report.from_json(body) == open_site.source.now


def test_metrics_are_of_one_report(open_site: Running) -> None:
    status, headers, body = open_site.ask("/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    found = {
        sample.labels["namespace"]: sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name == "kvpool_requested_blocks_total"
    }
    (tenant,) = open_site.source.now.tenants
    assert sum(found.values()) == tenant.traffic.requested > 0
    assert found["chat"] == tenant.namespaces[0].traffic.requested


def test_namespaces_prefixes_curves_history(open_site: Running) -> None:
    spaces = open_site.json("/v1/namespaces")
    assert [each["name"] for each in spaces] == ["chat", ""]
    assert spaces[0]["hit_ratio"] == pytest.approx(
        open_site.source.now.tenants[0].namespaces[0].traffic.hit_ratio(), abs=0.01
    )
    prefixes = open_site.json("/v1/blocks/top?count=3")
    assert len(prefixes) == 3
    assert bytes.fromhex(prefixes[0]["key"]) == bytes(16)
    curve = open_site.json("/v1/mrc")["default"]["all"]
    assert curve["now_hit"] == pytest.approx(0.368)
    series = open_site.json("/v1/history?step=1")
    assert len(series["times"]) == len(series["hit_ratio"]) >= 29
    assert 0 < series["hit_ratio"][-1] < 1


def test_curves_of_namespaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Moving()
    curves = {str(n): {"points": [], "references": n % 100} for n in range(200)}

    async def reuse() -> dict[str, Any]:
        return {"default": {"all": {"references": 1}, "spaces": curves}}

    monkeypatch.setattr(source, "reuse", reuse)
    with running(source) as site:
        shown = site.json("/v1/mrc")["default"]
    assert shown["all"] == {"references": 1}
    assert {each["references"] for each in shown["spaces"].values()} == set(range(68, 100))
    assert len(shown["spaces"]) == http.CURVES_MAX


def test_health_and_readiness() -> None:
    source = Moving()
    with running(source, Access(is_loopback=True, admin_token=ADMIN)) as site:
        assert site.ask("/healthz")[::2] == (200, b'{"alive":true}')
        assert site.ask("/readyz")[::2] == (200, b'{"ready":true}')
        source.is_ready = False
        source.advance(1)
        deadline = time.monotonic() + WAIT_S  # the report before may be shown FRESH_S long
        while site.ask("/readyz")[0] != 503:
            assert time.monotonic() < deadline
        assert site.ask("/readyz")[2] == b'{"ready":false}'
        source.fails = OSError("no")
        assert site.ask("/healthz")[0] == 200


def test_many_who_ask_cost_one_report() -> None:
    source = Moving()
    with running(source) as site:
        begin = time.monotonic()
        for _ in range(40):
            assert site.ask("/v1/stats")[0] == 200
        passed_s = time.monotonic() - begin
    assert source.asked <= 1 + passed_s / http.FRESH_S


# --- who sees what --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DATA)
def test_without_the_token_nothing_is_said(closed_site: Running, path: str) -> None:
    answers = [closed_site.ask(path), closed_site.ask(path, token="wrong" * 9)]
    answers.append(closed_site.ask(path, Authorization=f"Basic {ADMIN}"))
    for status, headers, body in answers:
        assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="kvpool"')
        assert json.loads(body)["error"] == "token"
        assert body == answers[0][2]
    assert closed_site.site.refused["http_token"] > 0


@pytest.mark.parametrize("path", DATA)
def test_a_tenant_sees_its_own_part(closed_site: Running, path: str) -> None:
    status, _, body = closed_site.ask(path, token=MINE)
    assert status == 200
    assert b"theirs" not in body
    assert closed_site.ask(path, token=ADMIN)[0] == 200


def test_the_admin_sees_all(closed_site: Running) -> None:
    whole = closed_site.json("/v1/stats", ADMIN)
    assert [each["name"] for each in whole["tenants"]] == ["mine", "theirs"]
    assert set(closed_site.json("/v1/mrc", ADMIN)) == {"mine", "theirs"}
    assert whole["refused"] == {"bad_token": 6, "malformed": 1}


def test_a_tenant_learns_nothing_of_the_budget(closed_site: Running) -> None:
    part = closed_site.json("/v1/stats", MINE)
    assert part["budget_bytes"] == part["tenants"][0]["dram"]["limit_bytes"] < 4 << 30
    assert part["refused"] == {}


@pytest.mark.parametrize("path", ["/v1/history", "/v1/blocks/top"])
def test_another_tenant_looks_like_one_that_is_not_there(closed_site: Running, path: str) -> None:
    other = closed_site.ask(f"{path}?tenant=theirs", token=MINE)
    nobody = closed_site.ask(f"{path}?tenant=nobody", token=MINE)
    assert (other[0], other[2]) == (nobody[0], nobody[2])
    assert other[0] == 404
    assert closed_site.ask(f"{path}?tenant=mine", token=MINE)[0] == 200
    assert closed_site.ask(f"{path}?tenant=theirs", token=ADMIN)[0] == 200


def test_history_of_a_tenant_is_its_own(closed_site: Running) -> None:
    own = closed_site.json("/v1/history", MINE)
    assert own["tenant"] == "mine"
    everybody = closed_site.json("/v1/history", ADMIN)
    assert everybody["tenant"] is None
    assert everybody["get_bytes_per_s"][5] > own["get_bytes_per_s"][5]


def test_access_is_replaced_while_it_serves() -> None:
    with running(Moving()) as site:
        assert site.ask("/v1/stats")[0] == 200
        site.site.access = Access(is_loopback=True, admin_token=ADMIN)
        assert site.ask("/v1/stats")[0] == 401
        assert site.ask("/v1/stats", token=ADMIN)[0] == 200


def test_a_page_of_another_site_cannot_read(open_site: Running) -> None:
    for path in (*DATA, "/"):
        status, _, body = open_site.ask(path, Host="attacker.example")
        assert (status, json.loads(body)["error"]) == (421, "host")
    assert open_site.ask("/healthz", Host="attacker.example")[0] == 200
    assert open_site.site.refused["http_host"] > 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/blocks/top?count=0", "1..200"),
        ("/v1/blocks/top?count=201", "1..200"),
        ("/v1/blocks/top?count=-1", "1..200"),
        ("/v1/blocks/top?count=1e2", "1..200"),
        ("/v1/blocks/top?count=%D9%A3", "1..200"),
        ("/v1/blocks/top?count=" + "9" * 200, "1..200"),
        ("/v1/blocks/top?count=1&count=2", "twice"),
        ("/v1/blocks/top?counts=1", "count, tenant"),
        ("/v1/history?step=2", "1, 10, 60"),
        ("/v1/history?tenant=" + "x" * 300, "longer"),
        ("/v1/stats?pretty=1", "there is none"),
        ("/metrics?name=x", "there is none"),
    ],
)
def test_a_wrong_question_is_told_what_is_wrong(open_site: Running, path: str, told: str) -> None:
    status, headers, body = open_site.ask(path)
    assert (status, headers["content-type"]) == (400, "application/json")
    answer = json.loads(body)
    assert answer["error"] == "bad_argument"
    assert told in answer["message"]
    assert len(answer["message"]) < 200


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/stats/",
        "/static/",
        "/static/none.js",
        "/static/index.html",
        "/static/..%2fhttp.py",
        "/static/%2e%2e/http.py",
        "/static/page.js%00",
        "//etc/passwd",
    ],
)
def test_there_is_nothing_else(open_site: Running, path: str) -> None:
    status, headers, body = open_site.ask(path)
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(body)["error"] == "not_found"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "ODD"])
def test_get_and_head_only(open_site: Running, method: str) -> None:
    for path in ("/v1/stats", "/", "/healthz"):
        status, headers, body = open_site.ask(path, method=method)
        assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
        assert json.loads(body)["error"] == "method"


@pytest.mark.parametrize("path", [*DATA, "/", "/static/page.js", "/healthz", "/nothing"])
def test_every_answer_has_the_headers(open_site: Running, path: str) -> None:
    status, headers, body = open_site.ask(path, method="HEAD")
    assert body == b""
    assert status == open_site.ask(path)[0]
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "server" not in headers
    assert headers["cache-control"] == (
        "no-cache" if path in ("/", "/static/page.js") else "no-store"
    )


def test_what_fails_inside_stays_inside() -> None:
    source = Moving()
    source.fails = RuntimeError("secret /etc/kvpool")
    with running(source) as site:
        for path in ("/v1/stats", "/metrics", "/v1/mrc", "/v1/blocks/top"):
            status, _, body = site.ask(path)
            assert (status, json.loads(body)["error"]) == (503, "busy")
            assert b"secret" not in body
        assert site.errors
        assert all(each is source.fails for each in site.errors)


def test_a_bug_of_ours_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Moving()
    monkeypatch.setattr(source, "history", lambda: None)
    with running(source) as site:
        status, _, body = site.ask("/v1/history")
        assert (status, json.loads(body)["error"]) == (500, "internal")
        assert b"Traceback" not in body
        assert site.ask("/healthz")[0] == 200
        assert [type(each) for each in site.errors] == [AttributeError]


class Stuck(Moving):
    async def report(self) -> report.Report:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_report_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SOURCE_S", 0.2)
    with running(Stuck()) as site:
        assert site.ask("/v1/stats")[0] == 503
        assert site.ask("/readyz")[0] == 503
        assert site.errors == []  # it is late, not wrong


# --- files ----------------------------------------------------------------------------------------


def test_the_page_and_its_files(open_site: Running) -> None:
    status, headers, body = open_site.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name in http_static.names():
        status, headers, plain = open_site.ask(f"/static/{name}")
        assert status == 200
        assert f"/static/{name}".encode() in body or name.endswith(".js")
        packed = open_site.ask(f"/static/{name}", Accept_Encoding="gzip")
        assert packed[1]["content-encoding"] == "gzip"
        assert gzip.decompress(packed[2]) == plain
        again = open_site.ask(f"/static/{name}", If_None_Match=headers["etag"])
        assert (again[0], again[2]) == (304, b"")


def test_files_need_no_token_and_have_no_facts(closed_site: Running) -> None:
    assert closed_site.ask("/")[0] == 200
    assert b"theirs" not in closed_site.ask("/static/page.js")[2]


def test_without_the_chart_library_there_is_a_script_that_defines_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_static, "_CHARTS_IN_PACKAGE", ("no_such_package", "x.js"))
    http_static.file.cache_clear()
    try:
        assert not http_static.has_charts()
        assert b"kvpool[page]" in http_static.file(http_static.CHARTS).plain
    finally:
        http_static.file.cache_clear()


# --- the server -----------------------------------------------------------------------------------


def closed_by_peer(sock: socket.socket) -> bytes:
    """What it says until it closes."""
    said = b""
    with sock:
        try:
            while chunk := sock.recv(65536):
                said += chunk
        except ConnectionResetError:
            pass
    return said


def test_it_ends_at_once_whoever_is_connected() -> None:
    with running(Stuck()) as site:
        asking = [site.raw(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(5)]
        idle = [site.raw(b"") for _ in range(5)]
        half = [site.raw(b"GET / HT") for _ in range(5)]
        site.ask("/healthz")  # all of them are accepted, for this one came behind them
        begin = time.monotonic()
        site.tell_to_end()
        site.wait()
        assert time.monotonic() - begin < http_serve.END_S + 2  # a busy machine's leave
        for sock in (*asking, *idle, *half):
            closed_by_peer(sock)
        assert site.errors == []


def test_signals_and_logging_are_left_alone() -> None:
    handlers = [*logging.getLogger().handlers]

    async def main() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        stop = asyncio.Event()
        sock = http_serve.listen("127.0.0.1", 0)
        port = sock.getsockname()[1]
        site = http.Site(Moving(), Access(is_loopback=True), pytest.fail)
        serving = asyncio.create_task(http_serve.serve(site.app(), sock, stop, pytest.fail))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert during == before
        stop.set()
        await serving
        writer.close()
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert after == before

    asyncio.run(main())
    assert logging.getLogger().handlers == handlers


def test_a_server_that_cannot_serve_says_so_and_returns() -> None:
    told: list[BaseException] = []

    async def main() -> None:
        sock = http_serve.listen("127.0.0.1", 0)
        sock.close()
        app = http.Site(Moving(), Access(is_loopback=True), told.append).app()
        async with asyncio.timeout(WAIT_S):
            await http_serve.serve(app, sock, asyncio.Event(), told.append)

    asyncio.run(main())
    assert len(told) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (64 << 10),
        b"GET /" + b"x" * (64 << 10),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"\r\n" * 40_000,
    ],
)
def test_garbage_is_refused_and_disturbs_nobody(
    open_site: Running, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_site.raw(b"") as sock:
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # cut while it was still being said
        answer = closed_by_peer(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert open_site.ask("/healthz")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serve, "HEAD_S", 0.3)
    with running(Moving()) as site:
        for said in (
            b"",
            b"GET / HTTP/1.1\r\nHost: loc",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            begin = time.monotonic()
            closed_by_peer(site.raw(said))
            assert time.monotonic() - begin < WAIT_S


def say_without_end(sock: socket.socket, what: bytes) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        sock.sendall(what)


def test_who_takes_no_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serve, "ANSWER_S", 0.3)
    asked = b"GET /static/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    with running(Moving()) as site:
        # Its sending stops at last, as it takes nothing; and then it is cut.
        with site.raw(b"") as sock, pytest.raises((BrokenPipeError, ConnectionResetError)):
            say_without_end(sock, asked)
        assert site.ask("/healthz")[0] == 200


def test_connections_are_bounded() -> None:
    with running(Moving()) as site:
        taken = [site.raw(b"") for _ in range(http_serve.CONNECTIONS_TAKEN_MAX)]
        one_more = closed_by_peer(site.raw(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert one_more == b"" or one_more.startswith(b"HTTP/1.1 503")
        for sock in taken:
            sock.close()
        deadline = time.monotonic() + WAIT_S
        while site.ask("/healthz")[0] != 200:
            assert time.monotonic() < deadline


def test_kvpool_itself_loads_none_of_it() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kvpool, kvpool.observe.report;"
        "print({'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_report_of_a_viewer_is_a_report(closed_site: Running) -> None:
    part = msgspec.json.decode(closed_site.ask("/v1/stats", token=MINE)[2], type=report.Report)
    assert [each.name for each in part.tenants] == ["mine"]
