"""Hellos, answers and control messages: what is accepted, and that all else is a WireError."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from kvpool import wire, wire_client
from kvpool.wire import RefusedByPeer, WireError

SOON_S = 0.2
PLENTY_S = 10.0
ID = bytes(range(16))


def body_of(fields: Any) -> bytes:
    return bytes(msgpack.packb(fields))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's end, and the one where the test plays the node."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- bytes ---------------------------------------------------------------------------------------


def test_the_bytes_of_a_hello_are_what_the_protocol_says() -> None:
    assert wire.pack_hello({"ok": True}) == b"kvpool\x02\x00\x05\x00\x00\x00\x81\xa2ok\xc3"


def test_the_bytes_of_a_message_are_what_the_protocol_says() -> None:
    assert wire.pack_message({"id": 1}) == b"\x05\x00\x00\x00\x81\xa2id\x01"


def test_a_hello_is_read_back() -> None:
    who = {"name": "engine", "pid": 7, "tenant": "a"}
    proof = {"nonce": bytes(32), "counter": 5, "mac": b"m" * 32}
    said = {"kind": "stream", "client": ID, **who, **proof, "new": [1]}
    packed = wire.pack_hello(said)
    version, length = wire.read_head(packed[: wire.HEAD_BYTES])
    assert length == len(packed) - wire.HEAD_BYTES
    found = wire.read_hello(version, packed[wire.HEAD_BYTES :])
    assert found == wire.Hello("stream", ID, **who, **proof)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (b"GET / HTTP/1", "a hello of kvpool begins with b'kvpool'"),
        (b"KVPOOL\x01\x00\x00\x00\x00\x00", "begins with"),
        (b"kvpool\x01\x00\x01\x00\x01\x00", "65537 bytes; at most 65536"),
        (b"kvpool\x01\x00\xff\xff\xff\xff", "4294967295 bytes"),
    ],
)
def test_a_head_that_cannot_be_meant(head: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        wire.read_head(head)


def test_a_message_beyond_the_bound_is_not_read() -> None:
    assert wire.read_length(b"\x00\x00\x10\x00") == wire.MESSAGE_BYTES_MAX
    with pytest.raises(WireError, match="1048577 bytes; at most 1048576"):
        wire.read_length(b"\x01\x00\x10\x00")


def test_a_message_beyond_the_bound_is_not_written() -> None:
    with pytest.raises(WireError, match="at most 1048576"):
        wire.pack_message({"x": bytes(wire.MESSAGE_BYTES_MAX)})


def nested(depth: int) -> Any:
    inner: Any = {}
    for _ in range(depth - 1):
        inner = {"in": inner}
    return inner


NO_MAPS = {
    "nothing": b"",
    "cut": body_of({"kind": "control"})[:-1],
    "more behind it": body_of({"a": 1}) + b"\x00",
    "a list": body_of([1]),
    "a number": body_of(7),
    "nil": body_of(None),
    "a key of bytes": body_of({b"a": 1}),
    "a key of a number": b"\x81\x01\x01",
    "a key of a list": b"\x81\x90\x01",
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "text that is not UTF-8": b"\x81\xa1a\xa1\xff",
    "an extension": body_of({"a": msgpack.ExtType(4, b"x")}),
    "a time": body_of({"a": msgpack.Timestamp(0)}),
    "a byte that msgpack never writes": b"\x81\xa1a\xc1",
    "a list that says it is huge": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "text that says it is huge": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "a map that says it is huge": b"\xdf\xff\xff\xff\xff",
    "more items than the bound": body_of({"a": [0] * 4097}),
    "too deep": body_of(nested(9)),
    "far too deep": b"\x81\xa1a" * 5000,
}


@pytest.mark.parametrize("name", NO_MAPS)
def test_what_is_no_map_within_bounds(name: str) -> None:
    with pytest.raises(WireError):
        wire.read_map(NO_MAPS[name])


def test_a_map_at_the_bounds_is_read() -> None:
    assert wire.read_map(body_of(nested(8))) == nested(8)
    assert wire.read_map(body_of({"a": [0] * 4096})) == {"a": [0] * 4096}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "kind is None"),
        ({"kind": "admin"}, "kind is 'admin'; it can be control, stream, shm"),
        ({"kind": ["control"]}, "kind is"),
        ({"kind": "control", "client": ID}, "does not bring one"),
        ({"kind": "stream"}, "client is None; it must be 16 bytes"),
        ({"kind": "shm", "client": ID[1:]}, "16 bytes"),
        ({"kind": "shm", "client": "0123456789abcdef"}, "16 bytes"),
        ({"kind": "control", "name": 5}, "name is 5"),
        ({"kind": "control", "name": "n" * 257}, "256 bytes at most"),
        ({"kind": "control", "pid": -1}, "pid is -1"),
        ({"kind": "control", "pid": True}, "pid is True"),
        ({"kind": "control", "pid": 1 << 32}, "pid is 4294967296"),
        ({"kind": "control", "tenant": b"t"}, "tenant is b't'; it must be text"),
        ({"kind": "control", "tenant": "t" * 65}, "64 bytes at most"),
        ({"kind": "control", "nonce": bytes(31)}, "nonce must be 32 bytes"),
        ({"kind": "control", "nonce": "n" * 32}, "nonce must be 32 bytes"),
        ({"kind": "stream", "client": ID, "mac": bytes(16)}, "mac must be 32 bytes"),
        ({"kind": "stream", "client": ID, "counter": 1 << 63}, "counter is"),
        ({"kind": "stream", "client": ID, "counter": -1}, "counter is -1"),
    ],
)
def test_a_hello_with_a_field_that_cannot_be_meant(fields: Any, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        wire.read_hello(wire.VERSION, body_of(fields))


@pytest.mark.parametrize("name", ["nonce", "mac"])
def test_what_proves_is_never_in_the_complaint(name: str) -> None:
    with pytest.raises(WireError) as error:
        wire.read_hello(wire.VERSION, body_of({"kind": "control", name: "secret"}))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("version", "fields", "complaint"),
    [
        (1, {"proof": bytes(32)}, "a proof in protocol 1 behind a hello in 2"),
        (2, {}, "proof is missing"),
        (2, {"proof": bytes(31)}, "proof must be 32 bytes"),
        (2, {"proof": "text"}, "proof must be 32 bytes"),
    ],
)
def test_a_proof_that_cannot_be_meant(version: int, fields: Any, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        wire.read_proof(version, body_of(fields))


@pytest.mark.parametrize(
    ("version", "side"), [(0, "client"), (1, "client"), (3, "node"), (65535, "node")]
)
def test_a_hello_of_another_version_is_not_read_but_told(version: int, side: str) -> None:
    with pytest.raises(RefusedByPeer) as error:
        wire.read_hello(version, b"\xc1 whatever the other version may say")
    assert error.value.code == "version"
    assert f"speaks protocol {version}; this node speaks 2: " in str(error.value)
    assert f"upgrade kvpool on the {side}'s side" in str(error.value)


def test_a_refusal_is_understood_whatever_version_it_comes_in() -> None:
    with pytest.raises(RefusedByPeer, match="no place left") as error:
        wire.read_answer(9, body_of(wire.refusal("full", "no place left")))
    assert error.value.code == "full"


@pytest.mark.parametrize(
    ("version", "fields", "complaint"),
    [
        (3, {"ok": True}, "answers in protocol 3; this client speaks 2"),
        (1, {}, "neither yes nor no"),
        (1, {"ok": 1}, "neither yes nor no"),
        (1, {"ok": False}, "neither yes nor no"),
        (1, {"ok": False, "error": 5, "message": "m"}, "neither yes nor no"),
    ],
)
def test_an_answer_that_cannot_be_meant(version: int, fields: Any, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        wire.read_answer(version, body_of(fields))


# --- a client's side -----------------------------------------------------------------------------


def test_a_node_that_says_nothing_costs_the_deadline(pair: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        wire_client.ask(pair[0], {"kind": "control"}, begin + SOON_S)
    assert SOON_S <= time.monotonic() - begin < PLENTY_S


@pytest.mark.parametrize("count", [1, wire.HEAD_BYTES, wire.HEAD_BYTES + 1])
def test_a_node_that_says_a_part_costs_the_deadline(pair: Any, count: int) -> None:
    pair[1].sendall(wire.pack_hello({"ok": True})[:count])
    with pytest.raises(TimeoutError):
        wire_client.ask(pair[0], {"kind": "control"}, time.monotonic() + SOON_S)


@pytest.mark.parametrize("count", [0, 1, wire.HEAD_BYTES, wire.HEAD_BYTES + 1])
def test_a_node_that_goes_away_is_told_at_once(pair: Any, count: int) -> None:
    pair[1].sendall(wire.pack_hello({"ok": True})[:count])
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match="closed the connection"):
        wire_client.ask(pair[0], {"kind": "control"}, time.monotonic() + PLENTY_S)


def test_a_deadline_that_has_passed_waits_for_nothing(pair: Any) -> None:
    with pytest.raises(TimeoutError):
        wire_client.ask(pair[0], {"kind": "control"}, time.monotonic() - 1)


def test_a_refusal_by_a_node_that_has_closed_already_is_read(pair: Any) -> None:
    pair[1].sendall(wire.pack_hello(wire.refusal("full", "no place left")))
    pair[1].close()
    with pytest.raises(RefusedByPeer, match="no place left"):
        wire_client.ask(pair[0], {"kind": "control"}, time.monotonic() + PLENTY_S)


def test_descriptors_come_with_an_answer_and_are_not_inherited(pair: Any) -> None:
    reader, writer = os.pipe()
    socket.send_fds(pair[1], [wire.pack_hello({"ok": True, "lanes": 1})], [reader, writer])
    asked = wire_client.ask_with_descriptors(pair[0], {}, time.monotonic() + PLENTY_S)
    assert asked[0] == {"ok": True, "lanes": 1}
    os.write(asked[1][1], b"x")
    assert os.read(reader, 1) == b"x"
    assert not any(os.get_inheritable(fd) for fd in asked[1])
    wire_client.close_all([reader, writer, *asked[1]])


@pytest.mark.parametrize(
    "answer",
    [
        wire.pack_hello(wire.refusal("shm", "not today")),
        wire.pack_hello({"ok": True}, version=3),
        wire.pack_hello({"neither": 1}),
        b"HTTP/1.1 400",
        wire.pack_hello({"ok": True})[:-1],
    ],
)
def test_descriptors_of_a_bad_answer_are_closed(pair: Any, answer: bytes) -> None:
    before = open_descriptors()
    with open(os.devnull) as file:
        socket.send_fds(pair[1], [answer], [file.fileno()] * 3)
        pair[1].shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, RefusedByPeer)):
            wire_client.ask_with_descriptors(pair[0], {}, time.monotonic() + PLENTY_S)
    assert open_descriptors() <= before


def test_more_descriptors_than_the_bound_are_closed(pair: Any) -> None:
    before = open_descriptors()
    with open(os.devnull) as file:
        socket.send_fds(pair[1], [wire.pack_hello({"ok": True})], [file.fileno()] * 5)
        with pytest.raises(WireError, match="lost on the way"):
            wire_client.ask_with_descriptors(
                pair[0], {}, time.monotonic() + PLENTY_S, descriptors_max=2
            )
    assert open_descriptors() <= before


def test_descriptors_that_nobody_asked_for_are_not_taken(pair: Any) -> None:
    before = open_descriptors()
    with open(os.devnull) as file:
        socket.send_fds(pair[1], [wire.pack_hello({"ok": True})], [file.fileno()])
        assert wire_client.ask(pair[0], {}, time.monotonic() + PLENTY_S) == {"ok": True}
    assert open_descriptors() <= before


def test_a_wait_for_a_message_that_ends_early_loses_no_byte(pair: Any) -> None:
    messages = wire_client.Messages(pair[0])
    packed = wire.pack_message({"id": 1, "text": "x" * 100})
    for begin in range(len(packed) - 1):
        pair[1].sendall(packed[begin : begin + 1])
        with pytest.raises(TimeoutError):
            messages.next(time.monotonic() + 0.001)
    pair[1].sendall(packed[-1:] + wire.pack_message({"id": 2}))
    deadline = time.monotonic() + PLENTY_S
    assert messages.next(deadline) == {"id": 1, "text": "x" * 100}
    assert messages.next(deadline) == {"id": 2}


def test_a_large_message_that_nobody_reads_costs_the_deadline(pair: Any) -> None:
    packed = wire.pack_message({"x": bytes(wire.MESSAGE_BYTES_MAX - 100)})
    with pytest.raises(TimeoutError):
        wire_client.send_until(pair[0], packed, time.monotonic() + SOON_S)


def test_a_large_message_arrives(pair: Any) -> None:
    fields = {"id": 1, "x": os.urandom(wire.MESSAGE_BYTES_MAX - 100)}
    deadline = time.monotonic() + PLENTY_S
    send = threading.Thread(
        target=wire_client.send_until, args=(pair[1], wire.pack_message(fields), deadline)
    )
    send.start()
    assert wire_client.Messages(pair[0]).next(deadline) == fields
    send.join()
