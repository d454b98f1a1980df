"""Handshakes with a daemon: who gets in, who is told why not, and that nobody disturbs others.

Who is which tenant, and how that is proved, is in test_tenants_handshake.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import wire, wire_client
from kvpool.address import KEEPALIVE_S, parse_address
from kvpool.daemon import STREAMS_PER_CLIENT_MAX
from kvpool.wire import RefusedByPeer
from tests.daemons import (
    LANES,
    WAIT_S,
    Running,
    answer_to,
    asked,
    connected,
    hello,
    proved,
    request,
    serving,
)
from tests.pools import wait_until

TOKEN = "tök€n"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with serving(tmp_path, listen="localhost:0", token_file=str(token), max_clients="5") as running:
        yield running


def client_of(daemon: Running) -> tuple[socket.socket, bytes]:
    """A control connection and the client's id."""
    sock = connected(daemon)
    return sock, asked(sock, hello())["client"]


def shm_of(daemon: Running, client: bytes) -> tuple[socket.socket, wire.Map, list[int]]:
    sock = connected(daemon)
    said = hello("shm", client=client)
    return sock, *wire_client.ask_with_descriptors(sock, said, time.monotonic() + WAIT_S)


def test_a_client_learns_who_it_is_and_the_limits(daemon: Running) -> None:
    with connected(daemon) as first, connected(daemon) as second:
        answers = [asked(each, hello()) for each in (first, second)]
    for answer in answers:
        assert len(answer["client"]) == wire.CLIENT_ID_BYTES
        assert answer["shm"] is True
        assert answer["version"] == "9.9.9"
        assert answer["block_bytes_max"] == 1 << 31
    assert answers[0]["client"] != answers[1]["client"]
    assert answers[0]["boot"] == answers[1]["boot"]


def test_a_client_is_gone_with_its_control_connection_and_all_else(daemon: Running) -> None:
    control, client = client_of(daemon)
    streams = [connected(daemon) for _ in range(2)]
    for each in streams:
        assert asked(each, hello("stream", client=client)) == {"ok": True}
    shm, _, fds = shm_of(daemon, client)
    wire_client.close_all(fds)
    wait_until(lambda: len(daemon.server.clients[1]) == 3)
    control.close()
    for each in (*streams, shm):
        each.settimeout(WAIT_S)
        assert each.recv(1) == b""
        each.close()
    wait_until(lambda: daemon.server.dropped == [1])


def test_shared_memory_comes_as_descriptors_and_is_started_after_that(daemon: Running) -> None:
    control, client = client_of(daemon)
    sock, facts, fds = shm_of(daemon, client)
    assert facts == {"ok": True, "lanes": LANES, "staging_bytes": 1 << 20}
    assert [os.pread(fd, 1, 0)[0] for fd in fds[:4]] == [0, 1, 2, 3]
    wait_until(lambda: daemon.server.started == [1])
    wire_client.close_all(fds)
    sock.close()
    control.close()


def test_no_descriptor_stays_behind(daemon: Running) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        control, client = client_of(daemon)
        sock, _, fds = shm_of(daemon, client)
        wire_client.close_all(fds)
        with connected(daemon) as stream:
            asked(stream, hello("stream", client=client))
        sock.close()
        control.close()
        assert answer_to(connected(daemon), b"garbage and more")["error"] == "malformed"
    wait_until(lambda: len(daemon.server.dropped) == 20)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_an_offer_that_comes_after_its_handshake_is_closed(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, client = client_of(daemon)
    begun, finish = threading.Event(), threading.Event()
    make_shm = daemon.server.make_shm

    def slow(number: int, fd: int) -> Any:
        begun.set()
        assert finish.wait(WAIT_S)
        return make_shm(number, fd)

    monkeypatch.setattr(daemon.server, "make_shm", slow)
    before = len(os.listdir("/proc/self/fd"))
    with connected(daemon) as sock:
        sock.sendall(wire.pack_hello(hello("shm", client=client)))
        assert begun.wait(WAIT_S)
        daemon.end_handshakes()  # as at the end of their time
        finish.set()
        wait_until(lambda: daemon.server.lanes == {1: LANES})
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # of the socket's ends
    control.close()
    wait_until(lambda: daemon.server.dropped == [1])


def test_a_client_without_shared_memory_is_told_why(daemon: Running) -> None:
    daemon.server.refuses_shm = True
    control, client = client_of(daemon)
    with pytest.raises(RefusedByPeer, match="no memory for a staging ring") as error:
        shm_of(daemon, client)
    assert error.value.code == "shm"
    assert request(control, "ping")["ok"] is True
    control.close()


def test_shared_memory_is_there_once_and_on_unix_sockets_only(daemon: Running) -> None:
    control, client = client_of(daemon)
    sock, _, fds = shm_of(daemon, client)
    wire_client.close_all(fds)
    with pytest.raises(RefusedByPeer, match="already"):
        shm_of(daemon, client)
    with connected(daemon, tcp=True) as tcp, pytest.raises(RefusedByPeer, match="unix socket only"):
        asked(tcp, hello("shm", client=client))
    sock.close()
    control.close()


@pytest.mark.parametrize("kind", ["stream", "shm"])
def test_an_unknown_client_gets_no_more_connections(daemon: Running, kind: str) -> None:
    with connected(daemon) as sock, pytest.raises(RefusedByPeer, match="no such client") as error:
        asked(sock, hello(kind, client=bytes(16)))
    assert error.value.code == "client"


def test_a_client_that_is_gone_gets_no_more_connections(daemon: Running) -> None:
    control, client = client_of(daemon)
    control.close()
    wait_until(lambda: daemon.server.dropped == [1])
    with connected(daemon) as sock, pytest.raises(RefusedByPeer, match="no such client"):
        asked(sock, hello("stream", client=client))


def test_both_ends_of_tcp_notice_that_the_other_host_vanished(daemon: Running) -> None:
    with connected(daemon, tcp=True) as control:
        facts, signer = proved(control, hello(), TOKEN)
        client = facts["client"]
        with parse_address(daemon.tcp_address).open(WAIT_S) as ours:
            asked(ours, hello("stream", client=client, **signer.signed("stream", client)))
            wait_until(lambda: daemon.server.clients[1] != [])
            with socket.socket(fileno=os.dup(daemon.server.clients[1][0])) as theirs:
                for end in (ours, theirs):
                    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    idle_s, between_s, times = (
                        end.getsockopt(socket.IPPROTO_TCP, option)
                        for option in (
                            socket.TCP_KEEPIDLE,
                            socket.TCP_KEEPINTVL,
                            socket.TCP_KEEPCNT,
                        )
                    )
                    assert idle_s + between_s * times == KEEPALIVE_S


def test_one_client_too_many_is_told_the_limit(daemon: Running) -> None:
    inside = [client_of(daemon)[0] for _ in range(5)]
    with connected(daemon) as sock, pytest.raises(RefusedByPeer, match="5 clients") as error:
        asked(sock, hello())
    assert error.value.code == "full"
    inside.pop().close()
    wait_until(lambda: len(daemon.server.dropped) == 1)
    inside.append(client_of(daemon)[0])
    for each in inside:
        each.close()


def test_one_stream_too_many_is_told_the_limit(daemon: Running) -> None:
    control, client = client_of(daemon)
    *streams, one_more = [connected(daemon) for _ in range(STREAMS_PER_CLIENT_MAX + 1)]
    for each in streams:
        asked(each, hello("stream", client=client))
    with pytest.raises(RefusedByPeer, match=f"{STREAMS_PER_CLIENT_MAX} connections"):
        asked(one_more, hello("stream", client=client))
    one_more.close()
    for each in (control, *streams):
        each.close()


def test_all_connections_together_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections="6") as daemon:
        control, client = client_of(daemon)
        sock, _, fds = shm_of(daemon, client)  # 1 + lanes
        wire_client.close_all(fds)
        with connected(daemon) as stream:
            asked(stream, hello("stream", client=client))
        with connected(daemon) as stream, pytest.raises(RefusedByPeer, match="6 connections"):
            asked(stream, hello("stream", client=client))
        control.close()
        sock.close()
        wait_until(lambda: daemon.server.dropped == [1])
        control, client = client_of(daemon)  # they came back with their client
        with connected(daemon) as stream:
            asked(stream, hello("stream", client=client))
        control.close()


MALFORMED = {
    "http": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "zeros": bytes(64),
    "too large": b"kvpool\x02\x00\xff\xff\xff\xff",
    "no map": b"kvpool\x02\x00\x01\x00\x00\x00\x05",
    "no kind": wire.pack_hello({}),
    "behind it": wire.pack_hello({"kind": "nonsense"}) + bytes(100_000),
}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("name", MALFORMED)
def test_garbage_is_answered_with_what_is_wrong(daemon: Running, name: str, tcp: bool) -> None:
    with connected(daemon, tcp=tcp) as sock:
        answer = answer_to(sock, MALFORMED[name])
    assert answer["ok"] is False
    assert answer["error"] == "malformed"
    assert answer["versions"] == [wire.VERSION_MIN, wire.VERSION]
    with connected(daemon) as sock:
        assert asked(sock, hello())["ok"] is True


@pytest.mark.parametrize("version", [0, 1, 3, 999])
def test_another_version_is_told_which_one_is_spoken(daemon: Running, version: int) -> None:
    with connected(daemon) as sock:
        answer = answer_to(sock, wire.pack_hello({"kind": "of the future"}, version=version))
    assert answer["error"] == "version"
    assert f"protocol {version}; this node speaks 2" in answer["message"]
    assert answer["versions"] == [2, 2]


def test_who_closes_in_the_midst_disturbs_nobody(daemon: Running) -> None:
    whole = wire.pack_hello(hello())
    for count in range(len(whole)):
        with connected(daemon) as sock:
            sock.sendall(whole[:count])
    with connected(daemon) as sock:
        assert asked(sock, hello())["ok"] is True


def test_descriptors_that_a_client_sends_are_not_taken(daemon: Running) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with connected(daemon) as sock, open(os.devnull) as file:
        socket.send_fds(sock, [wire.pack_hello(hello())[:5]], [file.fileno()] * 10)
        sock.sendall(wire.pack_hello(hello())[5:])
        deadline = time.monotonic() + WAIT_S
        assert wire_client.ask(sock, {}, deadline)["ok"] is True
        assert len(os.listdir("/proc/self/fd")) <= before + 3
