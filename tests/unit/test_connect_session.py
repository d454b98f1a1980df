"""The keeper: reconnecting, mending, and what it must not keep alive.

The daemon is a real one in a thread; the channel only keeps the descriptors that it was handed, so
that a test decides what breaks and when.
"""

import asyncio
import contextlib
import gc
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import NoResource, PoolClosed, Refused, Unreachable, remote
from kvpool.address import parse_address
from kvpool.pool import Pool
from kvpool.remote import RemoteBackend, find
from kvpool.remote_link import Caller, Control, Link, dial
from kvpool.remote_session import BACKOFF_S_MAX, BACKOFF_S_MIN, WAIT_GRACE_S, Session
from tests.daemons import WAIT_S, Running, planned, serving
from tests.pools import opaque, wait_until

CALLER = Caller("test", None, 2)
NOBODY = (1 << 32) - 1


class HeldChannel:
    """Holds what it is handed; breaks when a stream ends, as the core's does."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.rest: list[int] = []
        self.attached: list[dict[bytes, int]] = []
        self.fails: list[Exception] = []
        self.wanted = self.added = 0
        self.waits = 0
        self.closed = threading.Event()
        self._lock = threading.Lock()

    def attach(self, streams: list[int], shm: Any, spaces: dict[bytes, int]) -> None:
        with self._lock:
            self._drop()
            self.streams = list(streams)
            self.wanted = len(streams)
            self.rest = [] if shm is None else [shm[0], *shm[1]]
            self.attached.append(dict(spaces))
            if self.fails:
                self._drop()
                raise self.fails.pop()

    @property
    def is_broken(self) -> bool:
        with self._lock:
            return not self.streams

    @property
    def wait_connections(self) -> int:
        return self.waits

    def wait_broken(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and not self.closed.is_set():
            with self._lock:
                ended = select.select(self.streams, [], [], 0)[0]
                for fd in ended:
                    self.streams.remove(fd)
                    os.close(fd)
                if len(self.streams) < self.wanted or not self.streams:
                    return True
            time.sleep(0.001)
        return self.closed.is_set()

    def add_stream(self, descriptor: int) -> None:
        with self._lock:
            self.streams.append(descriptor)
            self.added += 1

    def add_wait_connection(self, descriptor: int) -> None:
        with self._lock:
            self.rest.append(descriptor)
            self.waits += 1

    def add_space(self, id: bytes, block_bytes: int, number: int) -> Any:
        return (id, block_bytes, number)

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        for fd in (*self.streams, *self.rest):
            os.close(fd)
        self.streams, self.rest = [], []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path) as running:
        yield running


@contextlib.contextmanager
def session_to(daemon: Running, **options: Any) -> Iterator[tuple[Session, HeldChannel]]:
    address = parse_address(daemon.address)
    channel = HeldChannel()
    session = Session(channel, address, CALLER, WAIT_S, **options)
    session.begin(dial(address, CALLER, time.monotonic() + WAIT_S))
    try:
        yield session, channel
    finally:
        session.close()
        session._keeper.join(WAIT_S)
        assert not session._keeper.is_alive()


def end_streams(daemon: Running) -> None:
    """As a node that loses its clients does."""
    for client in list(daemon.server.clients):
        daemon.server.drop_client(client)
        daemon.server.clients[client] = []


def test_a_link_has_all_that_was_asked_for(daemon: Running) -> None:
    before = len(os.listdir("/proc/self/fd"))
    link = dial(parse_address(daemon.address), CALLER, time.monotonic() + WAIT_S)
    assert len(link.streams) == 2
    assert link.shm is not None
    assert len(link.shm[1]) == 4 + link.shm[2]["lanes"]
    assert link.version == "9.9.9"
    assert len(link.boot) == 16
    link.close()
    link.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_handshake_that_fails_in_the_midst_leaves_nothing_open(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections="1") as daemon:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kvpool.Refused, match="1 connections, its limit") as error:
            dial(parse_address(daemon.address), CALLER, time.monotonic() + WAIT_S)
        assert error.value.code == "full"
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        wait_until(lambda: daemon.server.dropped == [1])


def test_without_shared_memory_there_are_streams_and_a_reason(daemon: Running) -> None:
    daemon.server.refuses_shm = True
    with session_to(daemon) as (session, channel):
        assert session.facts()["trouble"] == "no memory for a staging ring"
        assert len(channel.streams) == 2


def test_a_manifest_is_asked_for_once(daemon: Running) -> None:
    with session_to(daemon) as (session, _):
        first = session.open_space(opaque(salt="a"))
        daemon.node.instead["open_space"] = pytest.fail
        assert session.open_space(opaque(salt="a")) is first


def test_a_lost_node_is_found_again_with_every_namespace(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, session_to(daemon) as (session, channel):
        spaces = [session.open_space(opaque(salt=salt)) for salt in "ab"]
        daemon.stop()
        wait_until(lambda: channel.is_broken)
        wait_until(lambda: session.trouble != "")
        with pytest.raises(Unreachable, match=r"not connected|Broken pipe|closed"):
            session.ask("ping")
        assert session.facts()["connected"] is False
        other = Running(planned(tmp_path))
        try:
            # Its namespaces have other numbers: these are opened in front of ours.
            other.node.open_space(bytes(range(16)), 4096)
            wait_until(lambda: session.reconnects == 1)
            assert session.ask("ping")["ok"] is True
            numbers = channel.attached[-1]
            assert set(numbers) == {id for id, _, _ in spaces}
            assert session.trouble == ""
        finally:
            other.stop()


def test_a_namespace_that_the_node_refuses_now_is_lost_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, session_to(daemon) as (session, channel):
        lost, fine = (session.open_space(opaque(name=name)) for name in "nm")
        daemon.stop()

        begun = threading.Event()

        def refuse_one(id: bytes, block_bytes: int) -> Any:
            assert begun.wait(WAIT_S)
            if id == lost[0]:
                raise NoResource("no place for it")
            return other.node.watched.open_space(id, block_bytes)

        other = Running(planned(tmp_path), open_space=refuse_one)
        begun.set()
        try:
            wait_until(lambda: session.reconnects == 1)
            assert session.trouble == "namespace n: no place for it"
        finally:
            other.stop()
        assert channel.attached[-1][lost[0]] == NOBODY
        assert channel.attached[-1][fine[0]] != NOBODY


def test_one_lost_connection_is_mended_and_the_others_stay(daemon: Running) -> None:
    with session_to(daemon) as (session, channel):
        kept = channel.streams[1]
        server_side = daemon.server.clients[1]
        os.close(server_side.pop(0))
        wait_until(lambda: len(channel.streams) == 2 and channel.streams[0] == kept)
        assert session.reconnects == 0
        assert len(channel.attached) == 1


def test_one_that_cannot_be_mended_takes_no_other_with_it(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Refused("the node has 2 connections, its limit", "full")
    may_mend = threading.Event()
    another_stream = Link.another_stream

    def refused(link: Link, *args: Any) -> int:
        if not may_mend.is_set():
            raise full
        return another_stream(link, *args)

    monkeypatch.setattr(Link, "another_stream", refused)
    with session_to(daemon) as (session, channel):
        kept = channel.streams[1]
        os.close(daemon.server.clients[1].pop(0))
        wait_until(lambda: session.trouble == str(full))
        assert channel.streams == [kept]
        assert session.ask("ping")["ok"] is True
        may_mend.set()
        wait_until(lambda: len(channel.streams) == 2)
        wait_until(lambda: session.trouble == "")
        assert (channel.streams[0], session.reconnects, len(channel.attached)) == (kept, 0, 1)


def test_a_node_that_has_forgotten_the_client_is_connected_to_anew(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(link: Link, *args: Any) -> int:
        raise Refused("there is no such client", "client")

    monkeypatch.setattr(Link, "another_stream", refused)
    with session_to(daemon) as (session, channel):
        os.close(daemon.server.clients[1].pop(0))
        wait_until(lambda: session.reconnects == 1)
        assert len(channel.streams) == 2


def test_what_was_mended_often_is_noted_no_longer_than_it_lives(daemon: Running) -> None:
    with session_to(daemon) as (session, channel):
        before = len(session._handed_on)
        for count in range(1, 6):
            with socket.socket(fileno=os.dup(channel.streams[0])) as stream:
                stream.shutdown(socket.SHUT_RDWR)
            wait_until(lambda count=count: channel.added == count)  # type: ignore[misc]
            assert len(session._handed_on) <= before


def test_a_number_is_asked_about_on_the_connection_that_it_belongs_to(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at one and at the other, the node may have begun a new life."""
    with session_to(daemon) as (session, _):
        other = dial(parse_address(daemon.address), CALLER, time.monotonic() + WAIT_S)
        asked: list[tuple[str, dict[str, Any]]] = []
        old = session._link
        assert old is not None

        def ask(name: str, op: str, deadline: float, **fields: Any) -> dict[str, Any]:
            asked.append((name, fields))
            return {}

        for name, link in (("old", old), ("new", other)):
            monkeypatch.setattr(link.control, "ask", partial(ask, name))

        class Reconnecting:
            @property
            def number(self) -> int:
                session._link = other
                return 7

        session.ask_about(Reconnecting(), "drop")
        session._link = old
        other.close()
        assert asked == [("old", {"number": 7})]


def test_a_flush_takes_no_longer_than_it_was_told(daemon: Running) -> None:
    finish = threading.Event()
    daemon.node.instead["flush"] = lambda timeout_s: finish.wait(WAIT_S)
    with session_to(daemon) as (session, _):
        begin = time.monotonic()
        assert RemoteBackend(session).flush(0.05) is False
        assert time.monotonic() - begin < WAIT_S / 2
        finish.set()


def test_a_namespace_that_is_slow_to_open_blocks_no_event_loop() -> None:
    begun, finish = threading.Event(), threading.Event()

    class Slow:
        is_forked = is_closed = False

        def require_usable(self) -> None: ...

        def close(self, flush_timeout_s: float) -> None: ...

        def open_space(self, manifest: kvpool.Manifest) -> Any:
            begun.set()
            finish.wait(WAIT_S)
            raise Unreachable("no answer in time")

    def open_one() -> None:
        with pytest.raises(Unreachable):
            pool.namespace(opaque(name="slow"))

    async def answer() -> int:
        return await pool._in_thread(lambda: 7)

    pool = Pool(Slow())  # type: ignore[arg-type]
    opening = threading.Thread(target=open_one)
    opening.start()
    assert begun.wait(WAIT_S)
    begin = time.monotonic()
    assert asyncio.run(answer()) == 7
    assert time.monotonic() - begin < WAIT_S / 2
    finish.set()
    opening.join(WAIT_S)
    pool.close()


def test_what_cannot_be_mended_is_made_anew(daemon: Running) -> None:
    with session_to(daemon) as (session, channel):
        end_streams(daemon)
        wait_until(lambda: session.reconnects == 1)
        assert len(channel.streams) == 2
        assert len(channel.attached) == 2


def test_an_attachment_that_fails_is_tried_again(daemon: Running) -> None:
    with session_to(daemon) as (session, channel):
        channel.fails = [NoResource("no room to map it"), RuntimeError("a bug")]
        end_streams(daemon)
        wait_until(lambda: session.reconnects == 1)
        assert len(channel.attached) == 4
        assert session.trouble == ""


def test_a_channel_with_shared_memory_waits_until_there_is_some_again(daemon: Running) -> None:
    with session_to(daemon) as (session, _):
        daemon.server.refuses_shm = True
        end_streams(daemon)
        wait_until(lambda: "no shared memory any more" in session.trouble)
        daemon.server.refuses_shm = False
        wait_until(lambda: session.reconnects == 1)


def test_a_channel_without_shared_memory_gives_back_what_comes(daemon: Running) -> None:
    daemon.server.refuses_shm = True
    with session_to(daemon) as (session, channel):
        daemon.server.refuses_shm = False
        end_streams(daemon)
        wait_until(lambda: session.reconnects == 1)
        assert channel.rest == []


def test_pauses_between_attempts_grow_to_their_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Pausing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            return len(pauses) > 8

    with serving(tmp_path) as daemon:
        address = parse_address(daemon.address)
    dice = iter([0.0, 1.0] * 5)
    session = Session(HeldChannel(), address, CALLER, WAIT_S, dice=lambda: next(dice))
    session.closed = Pausing()
    session._connect_again()
    wanted = [min(BACKOFF_S_MIN * 2**n, BACKOFF_S_MAX) for n in range(9)]
    assert pauses == [each * (0.5 if n % 2 == 0 else 1.0) for n, each in enumerate(wanted)]


def test_closing_ends_a_request_that_waits(daemon: Running) -> None:
    begun, finish = threading.Event(), threading.Event()

    def flush(timeout_s: float) -> bool:
        begun.set()
        return finish.wait(WAIT_S)

    daemon.node.instead["flush"] = flush
    with session_to(daemon) as (session, _):
        errors: list[Exception] = []

        def ask() -> None:
            try:
                session.ask("flush", timeout=1)
            except Unreachable as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(WAIT_S)
        session.close()
        asking.join(WAIT_S)
        assert len(errors) == 1
    finish.set()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(daemon: Running) -> None:
    finish = threading.Event()
    daemon.node.instead["flush"] = lambda timeout_s: finish.wait(WAIT_S)
    with session_to(daemon) as (session, _):
        with pytest.raises(Unreachable, match="no answer to flush in time"):
            session.ask("flush", 0.05, timeout=1)
        finish.set()
        assert "node" in session.ask("stats")
        assert session.reconnects == 0


def test_a_pool_that_nobody_holds_ends_its_keeper(daemon: Running) -> None:
    address = parse_address(daemon.address)
    session = Session(HeldChannel(), address, CALLER, WAIT_S)
    session.begin(dial(address, CALLER, time.monotonic() + WAIT_S))
    backend = RemoteBackend(session)
    gone = weakref.ref(backend)
    del backend
    gc.collect()
    assert gone() is None
    wait_until(lambda: not session._keeper.is_alive())
    wait_until(lambda: daemon.server.dropped == [1])


def test_a_closed_pool_says_so(daemon: Running) -> None:
    with session_to(daemon) as (session, _):
        backend = RemoteBackend(session)
        backend.close()
        backend.close()
        assert backend.is_closed
        for call in (backend.trim, backend.stats, lambda: backend.open_space(opaque())):
            with pytest.raises(PoolClosed, match="the pool is closed"):
                call()


def test_each_wait_has_a_connection_of_its_own(daemon: Running) -> None:
    with session_to(daemon) as (session, channel), contextlib.ExitStack() as waits:
        for count in range(1, 4):
            waits.enter_context(session.waiting(WAIT_S))
            assert channel.waits == count
        waits.close()
        with session.waiting(WAIT_S) as left_s:
            assert left_s == WAIT_S
            assert channel.waits == 3  # one of the others does


def test_a_wait_that_just_looks_makes_no_connection(daemon: Running) -> None:
    with session_to(daemon) as (session, channel), session.waiting(0) as left_s:
        assert (left_s, channel.waits) == (0, 0)


def test_waits_at_a_silent_node_end_in_their_own_time_side_by_side(daemon: Running) -> None:
    silent = socket.socket(socket.AF_UNIX)
    path = f"{daemon.plan.socket_path}.silent"
    silent.bind(path)
    silent.listen()
    with silent, session_to(daemon) as (session, channel):
        session.address = parse_address(f"unix:{path}")
        left: list[float | None] = []

        def wait() -> None:
            with session.waiting(0.01) as left_s:
                left.append(left_s)

        begin = time.monotonic()
        waiting = [threading.Thread(target=wait) for _ in range(8)]
        for each in waiting:
            each.start()
        while session._dialling < 8:
            assert time.monotonic() - begin < WAIT_S
        session.open_space(opaque())  # waits for none of them
        assert left == []
        for each in waiting:
            each.join(WAIT_S)
        assert time.monotonic() - begin < 5 * WAIT_GRACE_S  # one after the other: eight times it
        assert left == [None] * 8
        assert (channel.waits, session._dialling, session._waits) == (0, 0, 0)


def test_looking_for_a_node_lists_where(tmp_path: Path) -> None:
    paths = [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    begin = time.monotonic()
    with pytest.raises(Unreachable) as error:
        find([parse_address(each) for each in paths], CALLER, begin + 0.2)
    assert time.monotonic() - begin < WAIT_S
    for each in paths:
        assert f"{each}: No such file or directory" in str(error.value)


def test_a_node_that_comes_within_the_time_is_found(tmp_path: Path) -> None:
    found: list[Any] = []
    address = parse_address(f"unix:{tmp_path}/node.sock")

    def look() -> None:
        found.append(find([address], CALLER, time.monotonic() + WAIT_S))

    looking = threading.Thread(target=look)
    looking.start()
    with serving(tmp_path):
        looking.join(WAIT_S)
        assert found[0][0] == address
        found[0][1].close()


def test_a_refusal_that_passes_is_asked_again(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = ["client", "descriptors", "late", "full", "failed"]

    def refusing(*args: Any) -> Link:
        if codes:
            raise Refused("not now", codes.pop())
        return dial(*args)

    monkeypatch.setattr(remote, "dial", refusing)
    address = parse_address(daemon.address)
    find([address], CALLER, time.monotonic() + WAIT_S)[1].close()
    assert codes == []


def test_a_refusal_that_stays_is_told_at_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections="1") as daemon:
        begin = time.monotonic()
        with pytest.raises(Refused, match="its limit") as error:
            find([parse_address(daemon.address)], CALLER, begin + 0.3)
        assert error.value.code == "full"


def test_a_control_connection_is_busy_until_its_deadline(daemon: Running) -> None:
    link = dial(parse_address(daemon.address), CALLER, time.monotonic() + WAIT_S)
    assert isinstance(link.control, Control)
    with link.control._lock, pytest.raises(Unreachable, match="busy with another request"):
        link.control.ask("ping", time.monotonic() + 0.01)
    link.close()
