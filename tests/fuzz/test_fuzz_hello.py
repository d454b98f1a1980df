"""Bytes that claim to be a hello, an answer or a message: a WireError, a refusal, or what was said.

The pure functions get most of the examples; a daemon gets some of each kind, and must go on.
"""

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvpool import wire, wire_client
from kvpool.address import TcpAddress, parse_host_and_port
from kvpool.cluster.peer_link import Own, dial
from kvpool.wire import RefusedByPeer, WireError
from tests.daemons import WAIT_S, Running, asked, connected, hello, request, serving
from tests.pools import opaque

ID = bytes(range(16))
HELLOS = [
    wire.pack_hello(
        {"kind": "control", "name": "engine", "pid": 7, "tenant": "a", "nonce": bytes(32)}
    ),
    wire.pack_hello({"kind": "stream", "client": ID, "name": "模型", "pid": 0}),
    wire.pack_hello({"kind": "stream", "client": ID, "counter": 1, "mac": bytes(32)}),
    wire.pack_hello({"kind": "shm", "client": ID}),
    wire.pack_hello({"kind": "peer", "cluster": "prod", "node": ID, "incarnation": 1, "to": ID}),
    wire.pack_hello(
        {"kind": "peer", "cluster": "c", "node": ID, "incarnation": 1 << 60, "nonce": bytes(32)}
    ),
]
ANSWERS = [
    wire.pack_hello({"ok": True, "client": ID, "lanes": 4}),
    wire.pack_hello(wire.refusal("full", "no place")),
]
REQUESTS = [
    wire.pack_message({"id": 1, "op": "open_namespace", "manifest": opaque().pack()}),
    wire.pack_message({"id": 2, "op": "resize", "dram": 4 << 20, "timeout": 0.5}),
    wire.pack_message({"id": 3, "op": "temperature", "number": 0, "key": ID}),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
edits = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4)


def damaged(packed: bytes, changes: list[tuple[int, int]], cut: int, tail: bytes) -> bytes:
    changed = bytearray(packed)
    for at, value in changes:
        changed[at % len(changed)] = value
    return bytes(changed[: cut % (len(changed) + 1)] if cut else changed) + tail


def read_as_hello(packed: bytes) -> wire.Hello | None:
    try:
        version, length = wire.read_head(packed[: wire.HEAD_BYTES].ljust(wire.HEAD_BYTES, b"\0"))
        return wire.read_hello(version, packed[wire.HEAD_BYTES : wire.HEAD_BYTES + length])
    except (WireError, RefusedByPeer):
        return None


def read_as_answer(packed: bytes) -> wire.Map | None:
    try:
        version, length = wire.read_head(packed[: wire.HEAD_BYTES].ljust(wire.HEAD_BYTES, b"\0"))
        return wire.read_answer(version, packed[wire.HEAD_BYTES : wire.HEAD_BYTES + length])
    except (WireError, RefusedByPeer):
        return None


@settings(max_examples=300)
@given(packed=st.binary(max_size=300))
@example(packed=b"kvpool\x01\x00\xff\xff\x00\x00" + b"\x91" * 65535)
@example(packed=b"kvpool\x01\x00\x05\x00\x00\x00\xdf\xff\xff\xff\xff")
def test_random_bytes(packed: bytes) -> None:
    read_as_hello(packed)
    read_as_answer(packed)


@settings(max_examples=300)
@given(body=st.binary(max_size=200))
def test_random_maps(body: bytes) -> None:
    try:
        found = wire.read_map(body)
    except WireError:
        return
    assert wire.read_map(msgpack.packb(found)) == found or "nan" in repr(found)


@settings(max_examples=300)
@given(
    packed=st.sampled_from(HELLOS + ANSWERS),
    changes=edits,
    cut=st.integers(0, 400),
    tail=st.binary(max_size=4),
)
def test_damaged_ones(packed: bytes, changes: Any, cut: int, tail: bytes) -> None:
    found = read_as_hello(damaged(packed, changes, cut, tail))
    if found is not None:
        assert found.kind in wire.KINDS
        assert (found.client is None) == (found.kind in ("control", "peer"))
        assert (found.node is not None) == (found.kind == "peer")
        assert len(found.name.encode()) <= wire.NAME_BYTES_MAX
    read_as_answer(damaged(packed, changes, cut, tail))


@settings(max_examples=300)
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(wire.KINDS) | values,
            "client": st.just(ID) | values,
            "name": values,
            "pid": values,
            "tenant": values,
            "nonce": values,
            "counter": values,
            "mac": values,
            "cluster": values,
            "node": st.just(ID) | values,
            "incarnation": values,
            "to": values,
            "proof": values,
            "ok": st.booleans() | values,
            "error": values,
            "message": values,
        },
    )
)
def test_well_formed_maps_with_other_contents(fields: dict[str, Any]) -> None:
    packed = wire.pack_hello(fields)
    read_as_hello(packed)
    read_as_answer(packed)


def test_the_valid_ones_are_read() -> None:
    for packed in HELLOS:  # else the tests above could pass by refusing everything
        assert read_as_hello(packed) is not None
    assert read_as_answer(ANSWERS[0]) is not None


# --- a daemon ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(folder, listen="127.0.0.1:0", log_level="error") as running:
        yield running


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A daemon that is in a cluster."""
    folder = tmp_path_factory.mktemp("member")
    own = Own("prod", ID, 1000, "token of the cluster")
    with serving(folder, own, listen="127.0.0.1:0", log_level="error") as running:
        yield running


def end_of(sock: socket.socket) -> bytes:
    """All that comes until the daemon closes."""
    sock.settimeout(WAIT_S)
    everything = b""
    try:
        while part := sock.recv(1 << 16):
            everything += part
    except ConnectionResetError:
        pass
    return everything


def still_serves(daemon: Running) -> None:
    with connected(daemon) as sock:
        asked(sock, hello())
        assert request(sock, "ping")["ok"] is True


DAEMON = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@DAEMON
@given(
    packed=st.binary(max_size=100) | st.sampled_from(HELLOS),
    changes=edits,
    cut=st.integers(0, 400),
    tail=st.binary(max_size=64),
    tcp=st.booleans(),
)
def test_a_daemon_closes_what_is_no_hello_and_serves_on(
    daemon: Running, packed: bytes, changes: Any, cut: int, tail: bytes, tcp: bool
) -> None:
    said = damaged(packed, changes, cut, tail) if packed else tail
    with connected(daemon, tcp=tcp) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)  # so that what is not whole is no wait
        answered = end_of(sock)
    if answered:
        version, length = wire.read_head(answered[: wire.HEAD_BYTES])
        body = answered[wire.HEAD_BYTES : wire.HEAD_BYTES + length]
        fields = wire.read_map(body)
        assert (version, "ok" in fields) == (wire.VERSION, True)
    still_serves(daemon)


@DAEMON
@given(
    packed=st.sampled_from(REQUESTS) | st.binary(min_size=1, max_size=64),
    changes=edits,
    cut=st.integers(0, 400),
    tail=st.binary(max_size=64),
)
def test_a_daemon_answers_or_closes_on_garbage_requests_and_serves_on(
    daemon: Running, packed: bytes, changes: Any, cut: int, tail: bytes
) -> None:
    with connected(daemon) as sock:
        asked(sock, hello())
        sock.sendall(damaged(packed, changes, cut, tail))
        sock.shutdown(socket.SHUT_WR)
        end_of(sock)
    still_serves(daemon)


@DAEMON
@given(
    fields=st.fixed_dictionaries(
        {"op": st.sampled_from(["open_namespace", "drop", "temperature", "flush", "nothing"])},
        optional={
            "id": values,
            "manifest": st.just(opaque().pack()) | values,
            "number": st.integers(0, 3) | values,
            "key": st.just(ID) | values,
            "timeout": st.floats(0, 0.01) | values,
        },
    )
)
def test_a_daemon_answers_every_well_formed_request(
    daemon: Running, fields: dict[str, Any]
) -> None:
    with connected(daemon) as sock:
        asked(sock, hello())
        deadline = time.monotonic() + WAIT_S
        wire_client.send_until(sock, wire.pack_message(fields), deadline)
        answer = wire_client.Messages(sock).next(deadline)
    assert answer["ok"] is True or answer["error"] in ("bad_argument", "manifest_mismatch")


@DAEMON
@given(
    fields=st.fixed_dictionaries(
        {"kind": st.just("peer"), "cluster": st.just("prod") | values},
        optional={
            "node": st.just(ID[::-1]) | values,
            "incarnation": st.integers(1, 1 << 63) | values,
            "nonce": st.just(bytes(32)) | values,
            "tenant": st.just("default") | values,
            "to": st.just(ID) | values,
            "client": values,
            "name": values,
        },
    ),
    proof=st.just({"proof": bytes(32)}) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    tail=st.binary(max_size=64),
)
def test_no_stranger_becomes_a_peer(
    member: Running, fields: dict[str, Any], proof: dict[str, Any], tail: bytes
) -> None:
    with connected(member, tcp=True) as sock:
        sock.sendall(wire.pack_hello(fields) + wire.pack_hello(proof) + tail)
        sock.shutdown(socket.SHUT_WR)
        answered = end_of(sock)
    while answered:
        _, length = wire.read_head(answered[: wire.HEAD_BYTES])
        told = wire.read_map(answered[wire.HEAD_BYTES : wire.HEAD_BYTES + length])
        assert told["ok"] is False or set(told) == {"ok", "challenge"}
        answered = answered[wire.HEAD_BYTES + length :]
    assert member.server.peers == []
    still_serves(member)


def test_a_member_lets_the_right_one_in_after_all_that(member: Running) -> None:
    host, port = parse_host_and_port("listen", member.tcp_address.removeprefix("tcp://"))
    own = Own("prod", ID[::-1], 1, "token of the cluster")
    sock, facts = dial(TcpAddress(host, port), own, "", time.monotonic() + WAIT_S, to=ID)
    sock.close()
    assert facts.incarnation == 1000


def test_no_descriptor_was_left_behind(daemon: Running) -> None:
    still_serves(daemon)  # the last of the module's tests: what came before is closed by now
    assert len(os.listdir("/proc/self/fd")) < 60
    assert len(daemon.server.clients) <= 1
