"""Handshakes that prove: who gets in over TCP, what is refused, counted, and told to nobody."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import wire, wire_client
from kvpool.serve_control import Operation
from kvpool.serve_handshakes import PLACES
from kvpool.tenants.tenant import Client
from kvpool.wire import HANDSHAKE_S, RefusedByPeer
from kvpool.wire_proof import Exchange, Signer
from tests.daemons import WAIT_S, Running, asked, connected, hello, proved, request
from tests.pools import opaque, wait_until
from tests.tenants import TOKENS, answer_of, challenged, configuration, planned

NONCE = b"n" * wire.NONCE_BYTES


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    """Of root, who is no tenant; a may have two clients."""
    path = configuration(tmp_path, {"a": "max_clients = 2", "b": 'dram_min = "8MiB"'})
    running = Running(planned(path))
    try:
        yield running
    finally:
        running.stop()


def client_of(
    daemon: Running, token: str, tenant: str = "", *, tcp: bool = True
) -> tuple[socket.socket, wire.Map, Signer]:
    sock = connected(daemon, tcp=tcp)
    return sock, *proved(sock, hello(tenant=tenant), token)


def refusal(daemon: Running, said: wire.Map, *, tcp: bool = True) -> RefusedByPeer:
    with connected(daemon, tcp=tcp) as sock, pytest.raises(RefusedByPeer) as error:
        asked(sock, said)
    return error.value


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
@pytest.mark.parametrize(
    ("token", "named", "tenant"),
    [("a", "", "a"), ("b", "b", "b"), ("admin", "", None), ("admin", "a", "a")],
)
def test_who_proves_a_token_is_who_has_it(
    daemon: Running, tcp: bool, token: str, named: str, tenant: str | None
) -> None:
    sock, facts, _ = client_of(daemon, TOKENS[token], named, tcp=tcp)
    with sock:
        assert facts["tenant"] == tenant
        assert facts["admin"] is (token == "admin" or not tcp)  # the test runs as the daemon does
        assert facts["shm"] is not tcp
        assert request(sock, "ping")["ok"] is True
    assert daemon.daemon.refused.total() == 0


@pytest.mark.parametrize(
    ("token", "named"), [("wrong", ""), ("wrong", "a"), (TOKENS["a"], "b"), (TOKENS["a"], "nobody")]
)
def test_a_wrong_token_and_an_unknown_tenant_sound_the_same(
    daemon: Running, token: str, named: str
) -> None:
    with pytest.raises(RefusedByPeer, match="knows no such tenant with this token") as error:
        client_of(daemon, token, named)
    assert error.value.code == "token"
    assert daemon.daemon.refused == {"bad_token": 1}


def test_no_token_is_told_so_and_counted(daemon: Running) -> None:
    assert "needs a token" in str(refusal(daemon, hello()))
    assert refusal(daemon, hello(tenant="a")).code == "token"
    assert daemon.daemon.refused == {"no_token": 2}


def test_a_token_of_old_is_not_looked_at(daemon: Running) -> None:
    assert refusal(daemon, hello(token=TOKENS["a"])).code == "token"
    assert daemon.daemon.refused == {"no_token": 1}


def test_a_proof_that_was_heard_is_of_no_use(daemon: Running) -> None:
    first, challenge = challenged(daemon, tenant="a")
    proof = Exchange(NONCE, challenge, "a").client_proof(TOKENS["a"])
    with first:
        first.sendall(wire.pack_hello({"proof": proof}))
        assert answer_of(first)["tenant"] == "a"
    second, other = challenged(daemon, tenant="a")  # with the same nonce
    assert other != challenge
    with second:
        second.sendall(wire.pack_hello({"proof": proof}))
        assert answer_of(second)["error"] == "token"
    assert daemon.daemon.refused == {"bad_token": 1}


def test_a_challenge_ends_with_its_time(daemon: Running) -> None:
    sock, _ = challenged(daemon)
    with sock:
        daemon.end_handshakes()  # as at the end of their time
        assert answer_of(sock)["error"] == "late"
    assert daemon.daemon.refused == {"late": 1}


def test_a_challenge_is_of_its_connection(daemon: Running) -> None:
    """Its proof is asked for there alone; elsewhere it is no hello."""
    first, challenge = challenged(daemon, tenant="a")
    proof = Exchange(NONCE, challenge, "a").client_proof(TOKENS["a"])
    with first, connected(daemon, tcp=True) as second:
        second.sendall(wire.pack_hello({"proof": proof}))
        assert answer_of(second)["error"] == "malformed"
    assert daemon.daemon.refused["malformed"] >= 1


@pytest.mark.parametrize("proof", [None, b"", bytes(31), "text", 5])
def test_a_proof_that_is_none_is_malformed(daemon: Running, proof: object) -> None:
    sock, _ = challenged(daemon)
    with sock:
        sock.sendall(wire.pack_hello({"proof": proof}))
        assert answer_of(sock)["error"] == "malformed"
    assert daemon.daemon.refused == {"malformed": 1}


def test_those_who_owe_a_proof_keep_nobody_waiting_for_long(daemon: Running) -> None:
    """As many as there are places; without the limit for silent ones it would take 5 s."""
    begin = time.monotonic()
    silent = [challenged(daemon)[0] for _ in range(PLACES)]
    sock, facts, _ = client_of(daemon, TOKENS["a"])
    assert facts["tenant"] == "a"
    assert time.monotonic() - begin < HANDSHAKE_S
    for each in (*silent, sock):
        each.close()
    assert daemon.daemon.refused["late"] >= 1


def test_a_node_without_the_token_is_left(daemon: Running) -> None:
    """Somebody who says yes to every proof."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.pack_hello({"ok": True, "challenge": bytes(wire.NONCE_BYTES)}))
        theirs.sendall(wire.pack_hello({"ok": True, "client": bytes(16), "proof": bytes(32)}))
        with pytest.raises(RefusedByPeer, match="does not have the token") as error:
            proved(ours, hello(), "token")
    assert error.value.code == "impostor"


def test_a_node_that_asks_for_no_proof_is_left(daemon: Running) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.pack_hello({"ok": True, "client": bytes(16), "streams_max": 1}))
        with pytest.raises(wire.WireError, match="lacks the challenge"):
            proved(ours, hello(), "token")


def stream_of(signer: Signer, client: bytes) -> wire.Map:
    return hello("stream", client=client, **signer.signed("stream", client))


def test_streams_of_a_client_that_proved_are_signed_once(daemon: Running) -> None:
    control, facts, signer = client_of(daemon, TOKENS["a"])
    client = facts["client"]
    said = stream_of(signer, client)
    with control:
        with connected(daemon, tcp=True) as sock:
            assert asked(sock, said) == {"ok": True}
        assert refusal(daemon, said).code == "replayed"
        assert refusal(daemon, hello("stream", client=client)).code == "token"
        forged = stream_of(Signer(bytes(32)), client)
        assert refusal(daemon, forged).code == "token"
        other_kind = {**stream_of(signer, client), "kind": "shm"}
        assert refusal(daemon, other_kind).code == "shm"
        with connected(daemon, tcp=True) as sock:
            assert asked(sock, stream_of(signer, client)) == {"ok": True}
    counts = daemon.daemon.refused
    assert counts == {"replayed": 1, "no_token": 1, "bad_token": 1, "shm": 1}


def test_a_client_s_streams_come_from_where_it_came(daemon: Running) -> None:
    control, facts, signer = client_of(daemon, TOKENS["a"])
    with control:
        said = stream_of(signer, facts["client"])
        assert refusal(daemon, said, tcp=False).code == "client"
        with connected(daemon, tcp=True) as sock:  # and that used up no counter
            assert asked(sock, said) == {"ok": True}
    assert daemon.daemon.refused == {"client": 1}


def test_an_administrator_who_is_no_tenant_has_no_blocks(daemon: Running) -> None:
    control, facts, signer = client_of(daemon, TOKENS["admin"])
    with control:
        error = refusal(daemon, stream_of(signer, facts["client"]))
        assert (error.code, error.reason) == ("tenant", "tenant")
        answer = request(control, "open_namespace", manifest=opaque().pack())
        assert answer["error"] == "bad_argument"
        assert "name the one that is meant" in answer["message"]
        everything = request(control, "stats")["tenants"]
        assert set(everything) == {"a", "b"}
        opened = request(control, "open_namespace", manifest=opaque().pack(), tenant="b")
        assert opened["ok"] is True
        assert request(control, "stats", tenant="b")["node"]["namespaces"] == 1
        assert request(control, "stats", tenant="a")["node"]["namespaces"] == 0
        assert request(control, "stats", tenant="c")["error"] == "bad_argument"


def test_a_tenant_asks_about_itself_alone(daemon: Running) -> None:
    control, _, _ = client_of(daemon, TOKENS["a"])
    with control:
        found = request(control, "stats")
        assert found["tenant"]["name"] == "a"
        assert "tenants" not in found
        assert request(control, "stats", tenant="a")["ok"] is True
        answers = [request(control, "stats", tenant=name) for name in ("b", "nobody", 5)]
        assert [answer["error"] for answer in answers] == ["not_allowed"] * 3
        assert len({answer["message"] for answer in answers}) == 1
        for op in ("resize", "trim", "settle", "reload"):
            assert request(control, op, timeout=0)["error"] == "not_allowed"
        refused = request(control, "stats")["tenant"]["refused"]
    assert refused == {"not_admin": 7}
    assert daemon.tenants["b"].refused.total() == 0


def test_a_tenant_has_its_own_limit_of_clients(daemon: Running) -> None:
    inside = [client_of(daemon, TOKENS["a"])[0] for _ in range(2)]
    with pytest.raises(RefusedByPeer, match="2 clients of this tenant, its limit") as error:
        client_of(daemon, TOKENS["a"])
    assert error.value.code == "full"
    assert daemon.tenants["a"].refused == {"tenant_full": 1}
    assert len(daemon.tenants["a"].clients) == 2
    other, _, _ = client_of(daemon, TOKENS["b"])  # is in nobody's way
    inside.pop().close()
    wait_until(lambda: len(daemon.tenants["a"].clients) == 1)
    inside.append(client_of(daemon, TOKENS["a"])[0])
    for each in (*inside, other):
        each.close()


def test_numbers_and_names_of_tenants_are_their_own(daemon: Running) -> None:
    here, _, _ = client_of(daemon, TOKENS["a"])
    there, _, _ = client_of(daemon, TOKENS["b"])
    with here, there:
        packed = [opaque(name="n", salt=salt).pack() for salt in ("x", "y")]
        answers = [
            request(sock, "open_namespace", manifest=each)
            for sock, each in zip((here, there), packed, strict=True)
        ]
        assert [answer["number"] for answer in answers] == [0, 0]
        assert request(here, "open_namespace", manifest=packed[1])["error"] == "manifest_mismatch"
    found = {name: each.named[0].salt for name, each in daemon.tenants.items()}
    assert found == {"a": "x", "b": "y"}


def test_the_default_tenant_s_ids_are_those_of_manifests_and_others_are_not(
    daemon: Running,
) -> None:
    manifest = opaque()
    ids = {each.space_id(manifest) for each in daemon.tenants.values()}
    assert len(ids) == 2
    assert manifest.namespace_id not in ids


def test_operations_can_be_added_with_rights_of_their_own(daemon: Running) -> None:
    daemon.daemon.add_operations(
        {
            "whoami": (lambda request, caller: {"name": caller.tenant.name}, False),
            "secret": (lambda request, caller: {"told": True}, True),
        }
    )
    with client_of(daemon, TOKENS["a"])[0] as sock:
        assert request(sock, "whoami")["name"] == "a"
        assert request(sock, "secret")["error"] == "not_allowed"
    with client_of(daemon, TOKENS["admin"])[0] as sock:
        assert request(sock, "secret")["told"] is True


def test_what_is_much_work_takes_one_thread_of_a_tenant(daemon: Running) -> None:
    """However many of its clients ask: there is a thread left for the others."""
    finish = threading.Event()

    def report(request: wire.Map, caller: Client) -> wire.Map:
        assert finish.wait(WAIT_S)
        return {}

    daemon.daemon.add_operations({"report": Operation(report, takes_turns=True)})
    with (
        client_of(daemon, TOKENS["a"])[0] as one,
        client_of(daemon, TOKENS["a"])[0] as two,
        client_of(daemon, TOKENS["b"])[0] as other,
    ):
        for each in (one, two):
            each.sendall(wire.pack_message({"id": 1, "op": "report"}))
        assert request(other, "ping")["ok"] is True
        finish.set()
        for each in (one, two):
            assert wire_client.Messages(each).next(time.monotonic() + WAIT_S)["ok"] is True


def test_no_descriptor_stays_behind_a_refusal(daemon: Running) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(RefusedByPeer):
            client_of(daemon, "wrong")
        client_of(daemon, TOKENS["a"])[0].close()
        wait_until(lambda: not daemon.tenants["a"].clients)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_client_waits_for_its_proof_until_its_deadline_only() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        wire_client.ask_with_proof(ours, hello(), "token", 0.0)
