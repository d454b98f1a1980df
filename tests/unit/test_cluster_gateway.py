"""The gateway beside a server that says what no etcd does, and one that says nothing."""

import base64
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.cluster import answers, http_post
from kvpool.cluster.access import Access
from kvpool.cluster.answers import (
    Closed,
    Compacted,
    Denied,
    EtcdError,
    LeaseGone,
    NotGateway,
    Unanswered,
)
from kvpool.cluster.gateway import Gateway
from kvpool.cluster.http_post import Endpoint

TIMEOUT_S = 0.5
LATE_S = 10.0  # of a call that may take TIMEOUT_S, on a machine that does other things too

Say = Callable[[socket.socket, str, dict[str, Any]], None]  # connection, path, request


class Server:
    """Answers each connection once, as it is told to."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.asked: list[str] = []
        self.headers: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._threads:
            each.join(LATE_S)
            assert not each.is_alive()

    def wait(self) -> None:
        """Silence, until the test is over."""
        self._ended.wait(LATE_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(LATE_S)
            try:
                head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
                self.headers.append(head.decode())
                path = head.split(b" ")[1].decode().removeprefix("/v3/")
                self.asked.append(path)
                self.say(connection, path, json.loads(body))
            except (OSError, ValueError, IndexError):
                pass  # the other side went, which is what the test is about


@contextmanager
def serving(say: Say) -> Iterator[Server]:
    server = Server(say)
    try:
        yield server
    finally:
        server.close()


def http(body: bytes, status: int = 200, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\nContent-Length: {size}"
    return f"{head}\r\n\r\n".encode() + body


def gateway_of(*servers: Server, access: Access | None = None) -> Gateway:
    return Gateway([each.endpoint for each in servers], access or Access(), TIMEOUT_S)


HEADER = {"cluster_id": "7", "revision": "9"}
GOOD = http(json.dumps({"header": HEADER, "kvs": []}).encode())
OVERLONG_LINE = b"HTTP/1.1 200 " + b"x" * 100_000 + b"\r\n\r\n"

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a part of a status line": b"HTTP/1.",
    "no HTTP": b"\x15\x03\x01\x00\x02\x02\x16",
    "an endless status line": OVERLONG_LINE,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    "a body cut short": http(b'{"header": ', length=500),
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}x",
    "a length below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n[]",
    "chunks that are none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "chunks cut short": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "a redirect": http(b"", 302) + b"",
    "no JSON": http(b"<html>"),
    "deep JSON": http(b"[" * 100_000),
    "a list": http(b"[]"),
    "a number": http(b"5"),
    "not UTF-8": http(b"\xff\xfe\xfa"),
    "an empty object": http(b"{}"),
    "no header": http(b'{"kvs": []}'),
    "a header that is a list": http(b'{"header": []}'),
    "a revision that is text": http(b'{"header": {"cluster_id": "7", "revision": "x"}}'),
    "a revision below zero": http(b'{"header": {"cluster_id": "7", "revision": -1}}'),
    "a revision beyond 64 bits": http(b'{"header": {"cluster_id": 7, "revision": 1e400}}'),
    "keys that are no list": http(json.dumps({"header": HEADER, "kvs": {}}).encode()),
    "a key that is no object": http(json.dumps({"header": HEADER, "kvs": [5]}).encode()),
    "a key that is no base64": http(json.dumps({"header": HEADER, "kvs": [{"key": "*"}]}).encode()),
    "a part of the keys": http(json.dumps({"header": HEADER, "more": True}).encode()),
    "an error without words": http(b'{"error": {}}', 500),
    "an error of a strange form": http(b'{"error": [1], "code": "x", "message": 5}', 500),
    "a status without a body": http(b"", 503),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_is_answered_is_an_error_in_time(name: str) -> None:
    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        connection.sendall(HOSTILE[name])

    with serving(say) as server:
        gateway = gateway_of(server)
        calls: list[Callable[[], Any]] = [
            lambda: gateway.read("/kvpool/"),
            lambda: gateway.watch("/kvpool/", 1),
        ]
        if "key" not in name:  # a put asks for none
            calls.append(lambda: gateway.put_if("/kvpool/a", b"", 1, 0))
        for call in calls:
            begin = time.monotonic()
            with pytest.raises(EtcdError) as error:
                call()
            assert time.monotonic() - begin < LATE_S
            assert len(str(error.value)) < 600
        assert gateway._calls == set()


def test_a_body_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_post, "BODY_BYTES_MAX", 1 << 16)

    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(b" " * (1 << 16))

    with serving(say) as server, pytest.raises(EtcdError, match="longer than 65536"):
        gateway_of(server).read("/a/")


@pytest.mark.parametrize("how", ["silent", "byte by byte", "headers for ever"])
def test_slowness_ends_by_the_deadline(how: str) -> None:
    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        while how == "headers for ever":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.01)
        for byte in GOOD if how == "byte by byte" else b"":
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
        server.wait()

    with serving(say) as server:
        begin = time.monotonic()
        with pytest.raises(Unanswered, match=r"in time|timed out"):
            gateway_of(server).read("/a/")
        assert time.monotonic() - begin < LATE_S / 2


def test_another_endpoint_is_tried_and_stayed_at() -> None:
    def silent(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        dead.wait()

    def good(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        connection.sendall(GOOD)

    with serving(silent) as dead, serving(good) as alive:
        gateway = Gateway([dead.endpoint, alive.endpoint], Access(), 4.0)
        assert gateway.read("/a/").revision == 9
        assert (gateway.moves, gateway.endpoint) == (1, alive.endpoint)
        gateway.read("/a/")
        assert len(dead.asked) == 1
    with pytest.raises(Unanswered, match="refused"):
        gateway.read("/a/")


def test_every_call_asks_for_a_leader() -> None:
    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        connection.sendall(GOOD)

    with serving(say) as server:
        gateway_of(server).read("/a/")
        assert "Grpc-Metadata-hasleader: true" in server.headers[0]
        assert "Authorization" not in server.headers[0]


def test_a_login_is_made_anew_when_its_token_is_old() -> None:
    tokens = iter(["first", "second"])

    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        if path == "auth/authenticate":
            assert request == {"name": "pool", "password": "right"}
            connection.sendall(http(json.dumps({"token": next(tokens)}).encode()))
        elif "Authorization: second" in server.headers[-1]:
            connection.sendall(GOOD)
        else:
            told = {"error": "etcdserver: invalid auth token", "code": 16}
            connection.sendall(http(json.dumps(told).encode(), 401))

    with serving(say) as server:
        gateway = gateway_of(server, access=Access(None, "pool", "right"))
        assert gateway.read("/a/").revision == 9
        assert server.asked == ["auth/authenticate", "kv/range"] * 2
        assert "right" not in repr(Access(None, "pool", "right"))


@pytest.mark.parametrize("token", ["", 5, "a\r\nEvil: yes", "\u00e9"])
def test_a_token_that_is_none(token: Any) -> None:
    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        connection.sendall(http(json.dumps({"token": token}).encode()))

    with serving(say) as server, pytest.raises(EtcdError, match="token"):
        gateway_of(server, access=Access(None, "pool", "right")).read("/a/")


@pytest.mark.parametrize(
    ("status", "told", "kind", "says"),
    [
        (404, b"404 page not found", NotGateway, "enable-grpc-gateway: true"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", NotGateway, "https://"),
        (200, b"<title>router</title>", NotGateway, "no etcd answers there: HTTP 200, '<title>"),
        (403, {"code": 7, "error": "permission denied"}, Denied, "read and write the prefix"),
        (400, {"code": 3, "error": "user name is empty"}, Denied, "set user and password_file"),
        (400, {"code": 3, "error": "authentication failed, invalid"}, Denied, "failed"),
        (404, {"code": 5, "error": "requested lease not found"}, LeaseGone, "lease"),
        (503, {"code": 14, "error": "etcdserver: no leader"}, Unanswered, "no leader"),
        (200, {"error": {"grpc_code": 14, "message": "gone"}}, Unanswered, "gone"),
        (400, {"code": 3, "error": "duplicate key\n\x1b[2J given"}, EtcdError, "key \\?"),
    ],
)
def test_an_error_says_what_to_do(status: int, told: Any, kind: type[EtcdError], says: str) -> None:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    with pytest.raises(kind, match=says) as error:
        answers.answer_of("kv/range at x", status, body)
    assert error.type is kind
    assert str(error.value).isprintable()


def chunk(message: Any) -> bytes:
    whole = json.dumps(message).encode() + b"\n"
    return f"{len(whole):x}\r\n".encode() + whole + b"\r\n"


def line(**result: Any) -> bytes:
    return chunk({"result": {"header": HEADER, **result}})


WATCH_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
KEY = base64.b64encode(b"/a/b").decode()


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        (b"0\r\n\r\n", Closed),  # a proper end
        (b"", Closed),  # a hang-up
        (b"ff\r\n{", Unanswered),
        (b"2\r\n{}\r\n", EtcdError),
        (b"5\r\njunk\n\r\n", NotGateway),
        (line(compact_revision="4"), Compacted),
        (line(canceled=True, cancel_reason="because"), Closed),
        (line(events=[{"type": "PUT"}]), EtcdError),
        (line(events=[5]), EtcdError),
        (chunk({"error": {"grpc_code": 14, "message": "no leader"}}), Unanswered),
    ],
)
def test_every_end_of_a_watch_is_an_error(then: bytes, kind: type[EtcdError]) -> None:
    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        put = {"kv": {"key": KEY, "create_revision": "3", "mod_revision": "9"}}
        events = [put, {"type": "DELETE", "kv": {"key": KEY, "mod_revision": "10"}}]
        connection.sendall(WATCH_HEAD + line(created=True) + line(events=events) + then)

    with serving(say) as server:
        watch = gateway_of(server).watch("/a/", 1)
        assert watch.cluster == 7
        batches = iter(watch)
        batch = next(batches)
        assert [(each.key, each.entry is None) for each in batch.events] == [
            ("/a/b", False),
            ("/a/b", True),
        ]
        with pytest.raises(EtcdError) as error:
            next(batches)
        watch.release()
        assert isinstance(error.value, kind)


def test_close_from_another_thread_ends_a_watch_and_a_call() -> None:
    before = len(os.listdir("/proc/self/fd"))

    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        if path == "watch":
            connection.sendall(WATCH_HEAD + line(created=True))
        server.wait()

    with serving(say) as server:
        gateway = Gateway([server.endpoint], Access(), 60.0)
        watch = gateway.watch("/a/", 1)
        ended: list[str] = []

        def follow() -> None:
            try:
                next(iter(watch))
            except EtcdError as error:
                ended.append(type(error).__name__)
            watch.release()

        def call() -> None:
            try:
                gateway.read("/a/")
            except EtcdError as error:
                ended.append(type(error).__name__)

        threads = [threading.Thread(target=each) for each in (follow, call)]
        for each in threads:
            each.start()
        while len(server.asked) < 2:
            time.sleep(0.01)
        gateway.close()
        for each in threads:
            each.join(LATE_S)
            assert not each.is_alive()
        assert ended == ["Closed", "Closed"]
        with pytest.raises(Closed):
            gateway.read("/a/")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_resolves_to_nothing() -> None:
    gateway = Gateway([Endpoint("no.such.host.invalid", 1)], Access(), TIMEOUT_S)
    with pytest.raises(Unanswered, match=r"no such host|not resolved in time"):
        gateway.read("/a/")


def test_a_slow_resolver_does_not_hold_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()
    asked: list[str] = []

    def slow(host: str, *rest: Any, **more: Any) -> list[Any]:
        asked.append(host)
        ready.wait(LATE_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", server.endpoint_address)]

    def say(connection: socket.socket, path: str, request: dict[str, Any]) -> None:
        connection.sendall(GOOD)

    with serving(say) as server:
        server.endpoint_address = ("127.0.0.1", server.endpoint.port)  # type: ignore[attr-defined]
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        gateway = Gateway([Endpoint("etcd.example", 1)], Access(), TIMEOUT_S)
        with pytest.raises(Unanswered, match="not resolved in time"):
            gateway.read("/a/")
        ready.set()
        assert Gateway.read(gateway, "/a/").revision == 9
        assert asked == ["etcd.example"]


def refusals(*steps: Callable[[], Any]) -> list[str]:
    """What each says; a step may do anything but raise another error."""
    said = []
    for step in steps:
        try:
            step()
        except EtcdError as error:
            said.append(str(error))
    return said


@given(st.binary(max_size=200), st.integers(100, 599))
def test_no_body_is_anything_but_an_answer_or_an_error(body: bytes, status: int) -> None:
    said = refusals(
        lambda: answers.found_of("x", answers.answer_of("x", status, body)),
        lambda: answers.put_of("x", answers.answer_of("x", status, body)),
        lambda: answers.batch_of("x", body),
    )
    assert all(len(each) < 600 for each in said)


FIELDS = (  # noqa: SIM905
    "header cluster_id revision kvs kv key value result error events type code grpc_code message"
    " succeeded responses response_range create_revision mod_revision compact_revision canceled"
).split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_no_json_is_anything_but_an_answer_or_an_error(told: Any) -> None:
    body = json.dumps(told).encode()
    said = refusals(
        lambda: answers.found_of("x", answers.answer_of("x", 200, body)),
        lambda: answers.put_of("x", answers.answer_of("x", 200, body)),
        lambda: answers.answer_of("x", 400, body),
        lambda: answers.batch_of("x", body),
    )
    assert all(len(each) < 600 for each in said)
