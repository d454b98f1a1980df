"""One node greets another: real listener, real dialler; who gets in, and who is told why not."""

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool import wire
from kvpool.address import KEEPALIVE_S, TcpAddress, parse_address
from kvpool.cluster.peer_link import Own, PeerFacts, dial
from kvpool.serve_handshakes import PLACES
from kvpool.serve_peers import STREAMS_PER_PEER_MAX
from kvpool.wire import RefusedByPeer, WireError
from kvpool.wire_proof import PeerExchange
from tests.daemons import WAIT_S, Running, answer_to, asked, connected, serving
from tests.pools import wait_until
from tests.tenants import answer_of, configuration
from tests.tenants import planned as planned_with_tenants

TOKEN = "tök€n of the cluster"
HERE, THERE = bytes(range(16)), bytes(range(16, 32))
US = Own("prod", HERE, 1000, TOKEN, weight=3, version="9.9.9")  # who listens
THEM = Own("prod", THERE, 2000, TOKEN)  # who dials
NONCE = b"n" * wire.NONCE_BYTES
ANY_PORT = "127.0.0.1:0"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path, US, listen=ANY_PORT) as running:
        yield running


@pytest.fixture
def open_daemon(tmp_path: Path) -> Iterator[Running]:
    """Of a cluster without a token."""
    with serving(tmp_path, replace(US, token=None), listen=ANY_PORT) as running:
        yield running


def address_of(daemon: Running) -> TcpAddress:
    address = parse_address(daemon.tcp_address)
    assert isinstance(address, TcpAddress)
    return address


def dialled(
    daemon: Running, own: Own = THEM, tenant: str = "", to: bytes | None = None
) -> tuple[socket.socket, PeerFacts]:
    return dial(address_of(daemon), own, tenant, time.monotonic() + WAIT_S, to=to)


def refusal(daemon: Running, own: Own = THEM, tenant: str = "", to: bytes | None = None) -> Any:
    with pytest.raises(RefusedByPeer) as error:
        dialled(daemon, own, tenant, to)
    return error.value


def peers_of(daemon: Running) -> list[int]:
    peers: list[int] = daemon.server.peers
    return peers


def has_peers(server: Any, count: int) -> bool:
    return len(server.peers) == count


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(WAIT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


# --- what is said --------------------------------------------------------------------------------


def test_both_learn_who_the_other_is_and_the_socket_is_a_peers(daemon: Running) -> None:
    sock, facts = dialled(daemon, to=HERE)
    with sock:
        assert facts == PeerFacts(HERE, 1000, 3, is_draining=False, version="9.9.9")
        wait_until(lambda: peers_of(daemon) == [1])
        assert sock.gettimeout() is None
        with socket.socket(fileno=os.dup(daemon.server.clients[1][0])) as theirs:
            theirs.setblocking(True)
            theirs.sendall(b"first byte of a frame")
        assert sock.recv(100) == b"first byte of a frame"  # nothing of the handshake was left


def test_a_node_that_is_not_known_yet_says_who_it_is(daemon: Running) -> None:
    sock, facts = dialled(daemon, to=None)
    sock.close()
    assert facts.node == HERE


def test_a_node_that_drains_says_so(daemon: Running) -> None:
    assert daemon.daemon.peers is not None
    daemon.daemon.peers.is_draining = True
    sock, facts = dialled(daemon)
    sock.close()
    assert facts.is_draining


def test_connections_of_one_node_have_one_number(daemon: Running) -> None:
    socks = [dialled(daemon)[0] for _ in range(3)]
    other, _ = dialled(daemon, replace(THEM, node=bytes(16)))
    wait_until(lambda: len(peers_of(daemon)) == 4)
    assert peers_of(daemon) == [1, 1, 1, 2]
    for each in (*socks, other):
        each.close()


def test_the_proofs_are_what_the_page_says() -> None:
    hello = wire.Hello("peer", None, "", 0, "a", NONCE, cluster="prod", node=THERE, incarnation=7)
    exchange = PeerExchange(hello, b"c" * 32)
    said = NONCE + b"c" * 32 + THERE + struct.pack("<Q", 7) + bytes(16) + b"\x04\x00prod" + b"a"
    key = TOKEN.encode()
    ours = hmac.new(key, b"kvpool peer 2" + said, hashlib.sha256).digest()
    theirs = b"kvpool peer node 2" + said + HERE + struct.pack("<Q", 9)
    assert exchange.peer_proof(TOKEN) == ours
    assert exchange.node_proof(TOKEN, HERE, 9) == hmac.new(key, theirs, hashlib.sha256).digest()
    theirs = b"kvpool peer node ucx 2" + said + HERE + struct.pack("<Q", 9)
    theirs += hashlib.sha256(b"address").digest()
    of_ucx = hmac.new(key, theirs, hashlib.sha256).digest()
    assert exchange.node_proof(TOKEN, HERE, 9, b"address") == of_ucx


def test_every_part_of_what_was_said_changes_every_proof() -> None:
    base = wire.Hello("peer", None, "", 0, "a", NONCE, cluster="prod", node=THERE, incarnation=7)
    changes: list[dict[str, Any]] = [
        {},
        {"tenant": "b"},
        {"tenant": ""},
        {"nonce": b"m" * 32},
        {"cluster": "proda", "tenant": ""},
        {"cluster": "pro", "tenant": "da"},
        {"node": HERE},
        {"incarnation": 8},
        {"to": HERE},
    ]
    exchanges = [PeerExchange(replace(base, **each), b"c" * 32) for each in changes]
    exchanges.append(PeerExchange(base, b"d" * 32))
    proofs = [each.peer_proof(token) for each in exchanges for token in ("t", "u")]
    for node, incarnation in ((HERE, 1), (HERE, 2), (THERE, 1)):
        for ucx in (b"", b"one", b"two"):
            proofs += [each.node_proof("t", node, incarnation, ucx) for each in exchanges]
    assert len(set(proofs)) == len(proofs)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cluster": None}, "cluster is missing"),
        ({"cluster": "c" * 65}, "64 bytes at most"),
        ({"cluster": b"prod"}, "must be text"),
        ({"node": None}, "node is missing"),
        ({"node": bytes(15)}, "node must be 16 bytes"),
        ({"node": "n" * 16}, "node must be 16 bytes"),
        ({"incarnation": 0}, "incarnation is missing"),
        ({"incarnation": -1}, "incarnation is -1"),
        ({"incarnation": 1 << 63}, "incarnation is"),
        ({"incarnation": 1.5}, "incarnation is 1.5"),
        ({"to": bytes(17)}, "to must be 16 bytes"),
        ({"nonce": bytes(31)}, "nonce must be 32 bytes"),
        ({"client": bytes(16)}, "brings no client id"),
    ],
)
def test_a_hello_with_a_field_that_cannot_be_meant(
    daemon: Running, change: dict[str, Any], complaint: str
) -> None:
    said = {"kind": "peer", "cluster": "prod", "node": THERE, "incarnation": 1, "nonce": NONCE}
    with connected(daemon, tcp=True) as sock:
        answer = answer_to(sock, wire.pack_hello({**said, **change}))
    assert answer["error"] == "malformed"
    assert complaint in answer["message"]
    assert daemon.daemon.refused == {"malformed": 1}


# --- who is refused ------------------------------------------------------------------------------


def test_a_node_in_no_cluster_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, listen=ANY_PORT) as daemon:
        error = refusal(daemon)
        assert error.code == "cluster"
        assert "no [cluster]" in str(error)


def test_another_cluster_is_not_told_the_name_of_this_one(daemon: Running) -> None:
    error = refusal(daemon, replace(THEM, cluster="test"))
    assert error.code == "cluster"
    assert "prod" not in str(error)
    assert daemon.daemon.refused == {"cluster": 1}


def test_a_wrong_token_is_told_so(daemon: Running) -> None:
    error = refusal(daemon, replace(THEM, token="wrong"))
    assert error.code == "token"
    assert "every member needs the same one" in str(error)
    assert daemon.daemon.refused == {"bad_token": 1}


def test_no_token_is_told_how_to_get_in(daemon: Running) -> None:
    error = refusal(daemon, replace(THEM, token=None))
    assert error.code == "token"
    assert "[cluster] token_file" in str(error)
    assert daemon.daemon.refused == {"no_token": 1}


def test_who_means_another_node_is_told_who_is_here(daemon: Running) -> None:
    error = refusal(daemon, to=b"x" * 16)
    assert error.code == "node"
    assert HERE.hex() in str(error)


def test_who_says_wrong_things_and_has_no_token_learns_nothing(daemon: Running) -> None:
    for to, tenant in ((b"x" * 16, ""), (HERE, "nobody")):
        error = refusal(daemon, replace(THEM, token="wrong"), tenant, to)
        assert error.code == "token"
        assert HERE.hex() not in str(error)


def test_a_node_with_our_own_id_is_no_peer(daemon: Running) -> None:
    error = refusal(daemon, replace(THEM, node=HERE))
    assert error.code == "node"
    assert "state directory was copied" in str(error)


def test_an_unknown_tenant_is_told_which_there_are(daemon: Running) -> None:
    error = refusal(daemon, tenant="chat")
    assert error.code == "tenant"
    assert "there are: default" in str(error)
    assert daemon.daemon.refused == {"unknown_tenant": 1}


def test_each_tenant_has_peers_of_its_own(tmp_path: Path) -> None:
    path = configuration(tmp_path, {"a": "", "b": ""})
    daemon = Running(planned_with_tenants(path), US)
    try:
        socks = [dialled(daemon, tenant=name)[0] for name in ("a", "b", "b")]
        servers: list[Any] = [daemon.tenants[name].server for name in ("a", "b")]
        wait_until(lambda: [len(each.peers) for each in servers] == [1, 2])
        for each in socks:
            each.close()
        assert refusal(daemon).code == "tenant"  # a node without tenants has nothing to share here
    finally:
        daemon.stop()


def test_a_proof_that_was_heard_is_of_no_use(daemon: Running) -> None:
    said = {"kind": "peer", "cluster": "prod", "node": THERE, "incarnation": 5, "nonce": NONCE}
    answers = []
    proof = b""
    for _ in range(2):
        with connected(daemon, tcp=True) as sock:
            sock.sendall(wire.pack_hello(said))
            challenge = answer_of(sock)["challenge"]
            if not proof:
                hello = wire.Hello(
                    "peer", None, "", 0, "", NONCE, cluster="prod", node=THERE, incarnation=5
                )
                proof = PeerExchange(hello, challenge).peer_proof(TOKEN)
            sock.sendall(wire.pack_hello({"proof": proof}))
            answers.append(answer_of(sock))
    assert answers[0]["ok"] is True
    assert answers[1]["error"] == "token"


def test_a_clients_token_makes_no_peer(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of clients")
    with serving(tmp_path, US, listen=ANY_PORT, token_file=str(token)) as daemon:
        assert refusal(daemon, replace(THEM, token="of clients")).code == "token"


# --- memory that peers read ----------------------------------------------------------------------


def test_what_a_node_says_of_its_memory_is_told_to_those_who_ask(daemon: Running) -> None:
    assert daemon.daemon.peers is not None
    daemon.daemon.peers._lanes = {"default": b"address of a worker"}
    wait = time.monotonic() + WAIT_S
    for wants, told in ((True, b"address of a worker"), (False, b"")):
        sock, facts = dial(address_of(daemon), THEM, "", wait, to=HERE, wants_ucx=wants)
        sock.close()
        assert facts.ucx == told


# --- clusters without a token --------------------------------------------------------------------


def test_without_a_token_the_nodes_of_one_host_find_together(open_daemon: Running) -> None:
    sock, facts = dialled(open_daemon, replace(THEM, token=None), to=HERE)
    with sock:
        assert facts.node == HERE
        wait_until(lambda: peers_of(open_daemon) == [1])


def test_a_token_that_only_one_side_has_is_told_so(open_daemon: Running) -> None:
    error = refusal(open_daemon)
    assert error.code == "token"
    assert "has no token" in str(error)


def test_a_node_that_asks_clients_for_a_token_lets_no_peer_in_without(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of clients")
    own = replace(US, token=None)
    with serving(tmp_path, own, listen=ANY_PORT, token_file=str(token)) as daemon:
        error = refusal(daemon, replace(THEM, token=None))
        assert error.code == "token"
        assert "lets nobody in" in str(error)


# --- lives and limits ----------------------------------------------------------------------------


def test_a_later_life_takes_the_place_of_the_former(daemon: Running) -> None:
    old, _ = dialled(daemon)
    new, _ = dialled(daemon, replace(THEM, incarnation=2001))
    with old, new:
        assert is_closed(old)
        wait_until(lambda: daemon.server.dropped == [1])
        wait_until(lambda: peers_of(daemon) == [1, 2])


def test_a_former_life_does_not_come_back(daemon: Running) -> None:
    sock, _ = dialled(daemon)
    with sock:
        error = refusal(daemon, replace(THEM, incarnation=1999))
        assert error.code == "node"
        assert "later life" in str(error)


def test_connections_of_a_peer_are_bounded(daemon: Running) -> None:
    socks = [dialled(daemon)[0] for _ in range(STREAMS_PER_PEER_MAX)]
    error = refusal(daemon)
    assert error.code == "full"
    assert f"{STREAMS_PER_PEER_MAX} connections" in str(error)
    for each in socks:
        each.close()


def test_peers_and_clients_share_the_connections_that_there_are(tmp_path: Path) -> None:
    with serving(tmp_path, US, listen=ANY_PORT, max_connections="3") as daemon:
        with connected(daemon) as control:
            client = asked(control, {"kind": "control"})["client"]
            with connected(daemon) as stream:
                asked(stream, {"kind": "stream", "client": client})
                socks = [dialled(daemon)[0] for _ in range(2)]
                error = refusal(daemon)
                assert error.code == "full"
                assert "3 connections" in str(error)
        for each in socks:
            each.close()


def test_peers_that_have_gone_take_no_place_for_ever(daemon: Running) -> None:
    peers = daemon.daemon.peers
    assert peers is not None
    server: Any = daemon.server
    for number in range(1, 151):
        dialled(daemon, replace(THEM, node=number.to_bytes(16, "big")))[0].close()
        wait_until(partial(has_peers, server, number))
        # The core's server closes a connection that ended; the one that keeps books is told to.
        os.close(server.clients[number].pop())
    assert len(peers) <= 64 + 1


def test_silent_peers_keep_nobody_out(daemon: Running) -> None:
    said = wire.pack_hello(
        {"kind": "peer", "cluster": "prod", "node": THERE, "incarnation": 5, "nonce": NONCE}
    )
    silent = [connected(daemon, tcp=True) for _ in range(PLACES)]
    for each in silent:
        each.sendall(said)  # and never a proof
    begin = time.monotonic()
    dialled(daemon)[0].close()
    assert time.monotonic() - begin < 2 * wire.HANDSHAKE_S
    for each in silent:
        each.close()


def test_clients_are_served_beside_hostile_peers(daemon: Running) -> None:
    for _ in range(20):
        with connected(daemon, tcp=True) as sock:
            sock.sendall(wire.pack_hello({"kind": "peer", "cluster": "prod"}) + os.urandom(100))
    with connected(daemon) as control:
        assert asked(control, {"kind": "control"})["ok"] is True


# --- the dialler ---------------------------------------------------------------------------------


def answering(answer: Callable[[socket.socket], None]) -> tuple[TcpAddress, threading.Thread]:
    """A listener of one connection that is no node: for what a node never says."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(WAIT_S)
                answer(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return TcpAddress("127.0.0.1", listener.getsockname()[1]), thread


def fails(answer: Callable[[socket.socket], None], own: Own, wait_s: float = WAIT_S) -> Exception:
    address, thread = answering(answer)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((RefusedByPeer, WireError, OSError)) as error:
        dial(address, own, "", time.monotonic() + wait_s, to=HERE)
    thread.join(WAIT_S)
    assert len(os.listdir("/proc/self/fd")) <= before
    return error.value


FACTS = {"ok": True, "node": HERE, "incarnation": 1, "weight": 1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"node": None}, "no member of a cluster"),
        ({"node": b"short"}, "no member of a cluster"),
        ({"node": THERE}, "another node answers there"),
        ({"incarnation": 0}, "no incarnation"),
        ({"incarnation": True}, "no incarnation"),
        ({"weight": 257}, "no weight of 1..256"),
        ({"ok": False}, "neither yes nor no"),
    ],
)
def test_an_answer_that_cannot_be_meant(change: dict[str, Any], complaint: str) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(wire.pack_hello({**FACTS, **change}))

    assert complaint in str(fails(answer, replace(THEM, token=None)))


def test_who_cannot_prove_the_token_is_an_impostor() -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(wire.pack_hello({"ok": True, "challenge": b"c" * 32}))
        sock.recv(1 << 16)
        sock.sendall(wire.pack_hello({**FACTS, "proof": bytes(32)}))

    error = fails(answer, THEM)
    assert isinstance(error, RefusedByPeer)
    assert error.code == "impostor"


def test_who_skips_the_challenge_gets_no_further() -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(wire.pack_hello(FACTS))

    assert "lacks the challenge" in str(fails(answer, THEM))


def test_a_node_that_is_older_than_peers_says_what_it_knows() -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        text = "kind is 'peer'; it can be control, stream, shm"
        sock.sendall(wire.pack_hello(wire.refusal("malformed", text)))

    error = fails(answer, THEM)
    assert isinstance(error, RefusedByPeer)
    assert error.code == "malformed"


def test_a_node_that_says_nothing_is_left_at_the_deadline() -> None:
    def answer(sock: socket.socket) -> None:
        while sock.recv(1 << 16):
            pass

    begin = time.monotonic()
    assert isinstance(fails(answer, THEM, 0.2), TimeoutError)
    assert time.monotonic() - begin < 2


def test_nobody_there_is_an_oserror_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial(TcpAddress("127.0.0.1", port), THEM, "", time.monotonic() + WAIT_S)


def test_both_ends_notice_that_the_other_host_vanished(daemon: Running) -> None:
    ours, _ = dialled(daemon)
    wait_until(lambda: peers_of(daemon) == [1])
    with ours, socket.socket(fileno=os.dup(daemon.server.clients[1][0])) as theirs:
        for end in (ours, theirs):
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle_s, between_s, times = (
                end.getsockopt(socket.IPPROTO_TCP, each) for each in options
            )
            assert idle_s + between_s * times == KEEPALIVE_S
