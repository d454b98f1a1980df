"""Connecting to members that are wanted: real listeners, and a core that only keeps books."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster.core import Core, Vote
from kvpool.cluster.dialer import DIALS_MAX, PAUSE_MIN_S, Dialer, Target
from kvpool.cluster.peer_link import Own
from kvpool.serve_log import open_log
from tests.daemons import WAIT_S, Running, serving
from tests.pools import wait_until

HERE = b"h" * 16
US = Own("prod", HERE, 1, "token of the cluster")
ANY_PORT = "127.0.0.1:0"


class BookCore:
    """Wishes what a test tells it to, and owns the sockets that it was given."""

    def __init__(self, *, repeats: bool = False) -> None:
        """repeats: says what it wishes until it has it, not once."""
        self.streams: dict[bytes, list[int]] = {}
        self.failed: list[tuple[bytes, int]] = []
        self.members: list[Vote] = []
        self.waits = 0
        self.has_left = self.is_closed = False
        self._repeats = repeats
        self._wishes: dict[bytes, int] = {}
        self._changed = threading.Condition()

    def wish(self, id: bytes, streams: int = 1) -> None:
        with self._changed:
            self._wishes[id] = streams
            self._changed.notify_all()

    def serve(self, server: Any) -> None:
        pass

    def set_members(self, members: list[Vote]) -> None:
        self.members = list(members)

    def add_stream(self, id: bytes, incarnation: int, descriptor: int) -> None:
        with self._changed:
            self.streams.setdefault(id, []).append(descriptor)
            if self._repeats and len(self.streams[id]) >= self._wishes.get(id, 0):
                self._wishes.pop(id, None)

    def wait_wanted(self, timeout_s: float) -> list[tuple[bytes, int]]:
        with self._changed:
            self.waits += 1
            self._changed.wait_for(lambda: self._wishes or self.is_closed, timeout_s)
            wished = list(self._wishes.items())
            if not self._repeats:
                self._wishes.clear()
            return [] if self.is_closed else wished

    def note_failed(self, id: bytes, incarnation: int) -> None:
        self.failed.append((id, incarnation))

    def locate(self, space_id: bytes, keys: bytes, timeout_s: float) -> list[list[bytes]]:
        return [[] for _ in range(len(keys) // 16)]

    def stats(self) -> dict[str, Any]:
        return {}

    def peers(self) -> list[dict[str, Any]]:
        return []

    def leave(self, timeout_s: float) -> bool:
        self.has_left = True
        return True

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        for descriptors in self.streams.values():
            for each in descriptors:
                os.close(each)
        self.streams.clear()
        return True

    def count(self, id: bytes) -> int:
        return len(self.streams.get(id, ()))


class Dialling:
    """A dialer over one such core."""

    def __init__(self, core: BookCore, own: Own = US, **options: Any) -> None:
        self.core = core
        typed: Core = core
        log = open_log("text", "error")
        self.dialer = Dialer(own, {"default": typed}, log, **options)
        self.dialer.start()

    def close(self) -> None:
        self.dialer.stop()
        self.core.close(0)
        assert self.dialer.close(WAIT_S)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


def member(stack: ExitStack, folder: Path, number: int, incarnation: int = 5) -> Running:
    folder = folder / str(number)
    folder.mkdir(exist_ok=True)
    own = replace(US, node=node(number), incarnation=incarnation)
    return stack.enter_context(serving(folder, own, listen=ANY_PORT, log_level="error"))


def dialling(stack: ExitStack, core: BookCore, **options: Any) -> Dialling:
    made = Dialling(core, **options)
    stack.callback(made.close)
    return made


def target(daemon: Running, incarnation: int = 5) -> Target:
    return Target(incarnation, (daemon.listeners.tcp_addresses[0],))


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return f"127.0.0.1:{gone.getsockname()[1]}"


@pytest.mark.parametrize("repeats", [False, True])
def test_who_is_wanted_is_connected(stack: ExitStack, tmp_path: Path, repeats: bool) -> None:
    daemons = [member(stack, tmp_path, number) for number in (1, 2)]
    core = BookCore(repeats=repeats)
    made = dialling(stack, core)
    made.dialer.set_targets({node(n): target(each) for n, each in enumerate(daemons, 1)})
    core.wish(node(1), 4)
    core.wish(node(2), 1)
    wait_until(lambda: (core.count(node(1)), core.count(node(2))) == (4, 1))
    for each, count in zip(daemons, (4, 1), strict=True):
        wait_until(lambda each=each, count=count: len(each.server.peers) == count)
    assert made.dialer.trouble(node(1)) == ""
    assert core.failed == []


def test_a_wish_that_stays_is_no_busy_loop(stack: ExitStack) -> None:
    core = BookCore(repeats=True)
    made = dialling(stack, core)
    made.dialer.set_targets({node(1): Target(5, (closed_port(),))})
    core.wish(node(1))
    wait_until(lambda: len(core.failed) >= 3)  # after two pauses
    assert core.waits < 100


def test_who_is_no_member_is_not_dialled(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    core = BookCore()
    made = dialling(stack, core)
    core.wish(node(9))
    made.dialer.set_targets({node(1): target(daemon)})
    core.wish(node(1))
    wait_until(lambda: core.count(node(1)) == 1)
    assert core.count(node(9)) == 0
    assert core.failed == []


def test_one_who_is_not_there_is_told_and_tried_again(stack: ExitStack, tmp_path: Path) -> None:
    core = BookCore()
    made = dialling(stack, core)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
    made.dialer.set_targets({node(1): Target(5, (address,))})
    core.wish(node(1))
    wait_until(lambda: core.failed != [])
    assert core.failed[0] == (node(1), 5)
    assert "refused" in made.dialer.trouble(node(1)).lower()
    folder = tmp_path / "late"
    folder.mkdir()
    own = replace(US, node=node(1), incarnation=5)
    stack.enter_context(serving(folder, own, listen=address, log_level="error"))
    wait_until(lambda: core.count(node(1)) == 1)  # without another wish
    wait_until(lambda: made.dialer.trouble(node(1)) == "")


def test_pauses_grow(stack: ExitStack) -> None:
    core = BookCore()
    made = dialling(stack, core)
    made.dialer.set_targets({node(1): Target(5, (closed_port(),))})
    begin = time.monotonic()
    core.wish(node(1))
    wait_until(lambda: len(core.failed) == 4)
    assert time.monotonic() - begin >= 0.75 * PAUSE_MIN_S * (1 + 2 + 4)


def test_a_new_life_is_tried_at_once(stack: ExitStack, tmp_path: Path) -> None:
    core = BookCore()
    made = dialling(stack, core)
    made.dialer.set_targets({node(1): Target(5, (closed_port(),))})
    core.wish(node(1))
    wait_until(lambda: len(core.failed) == 4)  # the next pause is two seconds
    daemon = member(stack, tmp_path, 1, incarnation=6)
    begin = time.monotonic()
    made.dialer.set_targets({node(1): target(daemon, 6)})
    core.wish(node(1))
    wait_until(lambda: core.count(node(1)) == 1)
    assert time.monotonic() - begin < 1


def refused(stack: ExitStack, meant: Target, own: Own = US) -> str:
    """Why the node of number 1 is not reached."""
    core = BookCore()
    made = dialling(stack, core, own=own)
    made.dialer.set_targets({node(1): meant})
    core.wish(node(1))
    wait_until(lambda: core.failed != [])
    assert core.count(node(1)) == 0
    return made.dialer.trouble(node(1))


def test_another_life_is_not_taken_for_the_one_that_is_meant(
    stack: ExitStack, tmp_path: Path
) -> None:
    daemon = member(stack, tmp_path, 1)
    assert "it lives its incarnation 5, and 4 was meant" in refused(stack, target(daemon, 4))


def test_another_node_at_the_address_is_told(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 2)
    assert node(2).hex() in refused(stack, target(daemon))


def test_a_wrong_token_is_told(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    assert "token" in refused(stack, target(daemon), replace(US, token="wrong"))


def test_every_address_is_tried(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    core = BookCore()
    made = dialling(stack, core)
    addresses = ("nonsense", closed_port(), *target(daemon).addresses)
    made.dialer.set_targets({node(1): Target(5, addresses)})
    core.wish(node(1))
    wait_until(lambda: core.count(node(1)) == 1)
    assert core.failed == []


def silent(stack: ExitStack) -> str:
    """A host that takes connections and says nothing."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_silent_members_keep_no_other_waiting_for_long(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    core = BookCore()
    made = dialling(stack, core, dial_s=0.3)
    targets = {node(100 + n): Target(5, (silent(stack),)) for n in range(2 * DIALS_MAX)}
    made.dialer.set_targets({**targets, node(1): target(daemon)})
    for each in targets:
        core.wish(each)
    core.wish(node(1))
    begin = time.monotonic()
    wait_until(lambda: core.count(node(1)) == 1)
    assert time.monotonic() - begin < 5
    wait_until(lambda: {each for each, _ in core.failed} == set(targets))
    assert made.dialer.trouble(node(100)).endswith("no answer in time") or made.dialer.trouble(
        node(100)
    ).endswith("timed out")


def test_close_waits_for_nobody_longer_than_it_is_told(stack: ExitStack) -> None:
    core = BookCore()
    made = Dialling(core, dial_s=1.0)
    made.dialer.set_targets({node(1): Target(5, (silent(stack),))})
    core.wish(node(1))
    wait_until(lambda: made.dialer._table.tries != {})
    begin = time.monotonic()
    made.dialer.stop()
    core.close(0)
    made.dialer.close(0.1)
    assert time.monotonic() - begin < 0.9
    assert made.dialer.close(WAIT_S)  # what was under way has ended by itself


def test_no_descriptor_stays_behind(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    before = len(os.listdir("/proc/self/fd"))
    for incarnation in (5, 4):
        core = BookCore()
        made = Dialling(core)
        made.dialer.set_targets({node(1): target(daemon, incarnation)})
        core.wish(node(1), 3)
        wait_until(lambda core=core: core.count(node(1)) == 3 or core.failed)
        made.close()
    for client in list(daemon.server.clients):
        daemon.server.drop_client(client)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
