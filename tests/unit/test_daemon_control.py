"""What clients ask on control connections: every operation, mistake and end."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import serve_control, wire, wire_client
from kvpool.tenants import tenant
from tests.daemons import WAIT_S, Running, asked, connected, hello, request, serving
from tests.pools import key, opaque, wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def control(daemon: Running) -> Iterator[socket.socket]:
    with connected(daemon) as sock:
        asked(sock, hello())
        yield sock


def opened(sock: socket.socket, **fields: Any) -> wire.Map:
    return request(sock, "open_namespace", manifest=opaque(**fields).pack())


def test_a_namespace_has_one_number_for_all_clients(
    daemon: Running, control: socket.socket
) -> None:
    with connected(daemon) as other:
        asked(other, hello())
        first, again = opened(control, salt="a"), opened(other, salt="a")
        second = opened(other, salt="b")
    assert first == {"id": 1, "ok": True, "number": first["number"], "block_bytes": 4096}
    assert again["number"] == first["number"] != second["number"]


def test_a_name_that_stands_for_another_manifest_is_told_by_field(control: socket.socket) -> None:
    assert opened(control, name="n", tp=(0, 2))["ok"] is True
    answer = opened(control, name="n", tp=(1, 2), salt="s")
    assert answer["error"] == "manifest_mismatch"
    assert answer["name"] == "n"
    assert answer["differing"] == {"tp": [[0, 2], [1, 2]], "salt": ["", "s"]}
    assert opened(control, name="n", tp=(0, 2))["ok"] is True


def test_names_are_kept_within_a_bound(
    control: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant, "NAMED_BYTES_MAX", 300)
    answers = [opened(control, name=f"n{number}") for number in range(4)]
    assert [answer["ok"] for answer in answers] == [True, True, False, False]
    assert answers[-1]["error"] == "no_resource"
    assert opened(control, name="n0")["ok"] is True
    assert opened(control, salt="without a name")["ok"] is True


def test_drop_and_temperature_go_by_number(control: socket.socket) -> None:
    number = opened(control)["number"]
    assert request(control, "drop", number=number) == {"id": 1, "ok": True, "blocks": 0}
    answer = request(control, "temperature", number=number, key=key(1))
    assert answer == {"id": 1, "ok": True, "temperature": None}


def test_stats_are_the_node_s_and_the_server_s(control: socket.socket) -> None:
    opened(control)
    answer = request(control, "stats")
    assert answer["node"]["namespaces"] == 1
    assert answer["server"] == {"clients": 1}
    assert answer["tenant"]["name"] == "default"
    assert answer["tenant"]["clients"] == 1


def test_resize_trim_flush_settle_and_ping_are_answered(
    daemon: Running, control: socket.socket
) -> None:
    answer = request(control, "resize", dram=4 << 20, max_blocks=None, timeout=1.0)
    assert answer["ok"] is True
    assert daemon.node.stats()["bytes_limit"] == 4 << 20
    assert request(control, "trim") == {"id": 1, "ok": True}
    assert request(control, "flush", timeout=5) == {"id": 1, "ok": True, "done": True}
    assert request(control, "settle", timeout=5)["ok"] is True
    assert request(control, "ping", id=77) == {"id": 77, "ok": True}


@pytest.mark.parametrize(
    ("op", "fields", "complaint"),
    [
        ("fly", {}, "there is no operation 'fly'; open_namespace, drop"),
        ("", {}, "there is no operation ''"),
        ("open_namespace", {}, "manifest must be bytes"),
        ("open_namespace", {"manifest": "text"}, "manifest must be bytes"),
        ("open_namespace", {"manifest": b"\x90"}, "not a manifest"),
        ("drop", {}, "number is NoneType"),
        ("drop", {"number": -1}, "number is -1"),
        ("drop", {"number": 1 << 32}, "number is 4294967296"),
        ("drop", {"number": True}, "number is bool"),
        ("drop", {"number": 4_000_000_000}, "no namespace of number 4000000000"),
        ("temperature", {"number": 0}, "key must be 16 bytes"),
        ("temperature", {"number": 0, "key": b"short"}, "key must be 16 bytes"),
        ("temperature", {"number": 9, "key": bytes(16)}, "no namespace of number 9"),
        ("resize", {"dram": 1 << 40, "timeout": 1}, "this pool was opened for"),
        ("resize", {"dram": -1, "timeout": 1}, "dram is -1"),
        ("resize", {"dram": 1 << 63, "timeout": 1}, "dram is"),
        ("resize", {"ssd_capacity": 5, "timeout": 1}, "no SSD tier to resize"),
        ("resize", {"dram": 4 << 20}, "timeout is NoneType"),
        ("flush", {}, "timeout is NoneType"),
        ("flush", {"timeout": float("nan")}, "timeout is nan"),
        ("flush", {"timeout": -1}, "timeout is -1"),
    ],
)
def test_a_mistake_is_answered_and_the_connection_goes_on(
    control: socket.socket, op: str, fields: dict[str, Any], complaint: str
) -> None:
    answer = request(control, op, **fields)
    assert answer["ok"] is False
    assert answer["error"] == "bad_argument"
    assert complaint in answer["message"]
    assert request(control, "ping")["ok"] is True


@pytest.mark.parametrize(
    ("fields", "number"), [({}, 0), ({"id": "x", "op": 5}, 0), ({"id": 3, "op": ["ping"]}, 3)]
)
def test_a_request_without_id_or_operation_is_answered(
    control: socket.socket, fields: dict[str, Any], number: int
) -> None:
    deadline = time.monotonic() + WAIT_S
    wire_client.send_until(control, wire.pack_message(fields), deadline)
    answer = wire_client.Messages(control).next(deadline)
    assert (answer["id"], answer["error"]) == (number, "bad_argument")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (kvpool.NoResource("no disk"), "no_resource"),
        (kvpool.TierRefused("no tier"), "no_resource"),
        (kvpool.PoolClosed("closed"), "closing"),
        (kvpool.KvpoolError("other"), "failed"),
        (ZeroDivisionError("our bug"), "internal"),
        (MemoryError(), "internal"),
    ],
)
def test_what_the_node_raises_is_answered(
    daemon: Running, control: socket.socket, error: Exception, code: str
) -> None:
    def fail() -> None:
        raise error

    daemon.node.instead["trim"] = fail
    answer = request(control, "trim")
    assert (answer["ok"], answer["error"]) == (False, code)
    assert ("our bug" in answer["message"]) is False
    assert request(control, "ping")["ok"] is True


def test_requests_that_are_sent_ahead_are_answered_in_order(control: socket.socket) -> None:
    numbers = range(1, 40)
    control.sendall(b"".join(wire.pack_message({"id": number, "op": "ping"}) for number in numbers))
    messages, deadline = wire_client.Messages(control), time.monotonic() + WAIT_S
    assert [messages.next(deadline)["id"] for _ in numbers] == list(numbers)


def test_a_wait_is_cut_so_that_the_client_asks_again(
    daemon: Running, control: socket.socket
) -> None:
    waits: list[float] = []

    def flush(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    daemon.node.instead["flush"] = flush
    assert request(control, "flush", timeout=60)["done"] is False
    assert waits == [serve_control.WAIT_S_MAX]


def test_a_slow_request_keeps_no_other_client_waiting(daemon: Running) -> None:
    begun, finish = threading.Event(), threading.Event()

    def flush(timeout_s: float) -> bool:
        begun.set()
        return finish.wait(WAIT_S)

    daemon.node.instead["flush"] = flush
    slow = [connected(daemon) for _ in range(8)]  # more than there are threads for it
    for each in slow:
        asked(each, hello())
        each.sendall(wire.pack_message({"id": 1, "op": "flush", "timeout": 1}))
    assert begun.wait(WAIT_S)
    with connected(daemon) as sock:
        asked(sock, hello())
        assert request(sock, "stats")["ok"] is True
    finish.set()
    for each in slow:
        assert wire_client.Messages(each).next(time.monotonic() + WAIT_S)["done"] is True
        each.close()


def test_a_client_that_dies_in_a_request_is_gone_before_it_ends(daemon: Running) -> None:
    begun, finish = threading.Event(), threading.Event()

    def flush(timeout_s: float) -> bool:
        begun.set()
        return finish.wait(WAIT_S)

    daemon.node.instead["flush"] = flush
    with connected(daemon) as sock:
        asked(sock, hello())
        sock.sendall(wire.pack_message({"id": 1, "op": "flush", "timeout": 1}))
        assert begun.wait(WAIT_S)
    wait_until(lambda: daemon.server.dropped == [1])
    finish.set()


def test_a_client_that_dies_with_requests_in_a_queue_is_gone_at_once(daemon: Running) -> None:
    begun, finish = threading.Event(), threading.Event()

    def flush(timeout_s: float) -> bool:
        begun.set()
        return finish.wait()

    daemon.node.instead["flush"] = flush
    try:
        with connected(daemon) as sock:
            asked(sock, hello())
            for number in range(1, 9):  # more than are read before their turn
                sock.sendall(wire.pack_message({"id": number, "op": "flush", "timeout": 1}))
            assert begun.wait(WAIT_S)
        wait_until(lambda: daemon.server.dropped == [1], WAIT_S)
    finally:
        finish.set()


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x01\x00\x00\x00\x90",
        b"\x00\x00\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_ends_that_client_and_no_other(
    daemon: Running, control: socket.socket, bytes_sent: bytes
) -> None:
    with connected(daemon) as sock:
        asked(sock, hello())
        sock.sendall(bytes_sent)
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):  # it was not read to its end
            assert sock.recv(1) == b""
    wait_until(lambda: daemon.server.dropped == [2])
    assert request(control, "ping")["ok"] is True


def test_a_client_that_never_reads_is_no_harm(daemon: Running, control: socket.socket) -> None:
    with connected(daemon) as deaf:
        asked(deaf, hello())
        deaf.settimeout(0.5)
        request_bytes = wire.pack_message({"id": 1, "op": "stats"})
        with pytest.raises(TimeoutError):  # the daemon stops to read before its memory grows
            deaf.sendall(request_bytes * 100_000)
        assert request(control, "ping")["ok"] is True
    wait_until(lambda: daemon.server.dropped == [2])
