"""Connecting to members that are wanted: real listeners, and the core on both sides."""

import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool import _core
from kvpool.cluster.core import STREAMS_PER_PEER
from kvpool.cluster.dialer import DIALS_MAX, PAUSE_MIN_S, Target
from kvpool.cluster.peer_link import Own
from tests.daemons import WAIT_S, Running, serving
from tests.members import US, Dialling, node, target
from tests.pools import wait_until

ANY_PORT = "127.0.0.1:0"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def member(stack: ExitStack, folder: Path, number: int, incarnation: int = 5) -> Running:
    folder = folder / str(number)
    folder.mkdir(exist_ok=True)
    own = replace(US, node=node(number), incarnation=incarnation)
    told = {"listen": ANY_PORT, "log_level": "error"}
    return stack.enter_context(serving(folder, own, is_whole=True, **told))


def dialling(stack: ExitStack, **options: Any) -> Dialling:
    made = Dialling(**options)
    stack.callback(made.close)
    return made


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return f"127.0.0.1:{gone.getsockname()[1]}"


def test_who_is_wanted_is_connected(stack: ExitStack, tmp_path: Path) -> None:
    daemons = [member(stack, tmp_path, number) for number in (1, 2)]
    made = dialling(stack)
    made.show({node(n): target(each) for n, each in enumerate(daemons, 1)})
    wait_until(lambda: all(made.core.count(node(n)) >= 1 for n in (1, 2)))
    for each in daemons:
        wait_until(lambda each=each: each.server.sources >= 1)
    assert made.dialer.trouble(node(1)) == ""
    assert made.core.failed == []


def test_who_is_asked_for_blocks_gets_as_many_connections_as_there_may_be(
    stack: ExitStack, tmp_path: Path
) -> None:
    daemon = member(stack, tmp_path, 1)
    space = _core.Space(daemon.node.watched.open_space(b"s" * 16, 4096))
    keys = [bytes([n]) * 16 for n in range(64)]
    space.put_codes(b"".join(keys), bytes(64 * 4096), None, None, None, 1.0)
    made = dialling(stack)
    made.show({node(1): target(daemon)})
    ours = _core.Space(made.core.node.open_space(b"s" * 16, 4096))
    out = bytearray(4096)
    # This node keeps half of the directory, and nobody has told it: the rest is there.
    wait_until(lambda: any(ours.get_into(key, out) for key in keys))
    wait_until(lambda: made.core.count(node(1)) == STREAMS_PER_PEER)
    assert made.core.failed == []


def test_a_wish_that_cannot_be_met_is_no_busy_loop(stack: ExitStack) -> None:
    made = dialling(stack)
    made.show({node(1): Target(5, (closed_port(),))})
    wait_until(lambda: len(made.core.failed) >= 3)  # after two pauses
    assert made.core.waits < 100


def test_who_is_no_member_is_not_dialled(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    made = dialling(stack)
    made.show({node(1): target(daemon)}, unknown=(node(9),))
    wait_until(lambda: made.core.count(node(1)) == 1)
    assert made.core.count(node(9)) == 0
    assert made.core.failed == []


def test_one_who_is_not_there_is_told_and_tried_again(stack: ExitStack, tmp_path: Path) -> None:
    made = dialling(stack)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
    made.show({node(1): Target(5, (address,))})
    wait_until(lambda: made.core.failed != [])
    assert made.core.failed[0] == (node(1), 5)
    assert "refused" in made.dialer.trouble(node(1)).lower()
    folder = tmp_path / "late"
    folder.mkdir()
    own = replace(US, node=node(1), incarnation=5)
    stack.enter_context(serving(folder, own, is_whole=True, listen=address, log_level="error"))
    wait_until(lambda: made.core.count(node(1)) >= 1)
    wait_until(lambda: made.dialer.trouble(node(1)) == "")


def test_pauses_grow(stack: ExitStack) -> None:
    made = dialling(stack)
    begin = time.monotonic()
    made.show({node(1): Target(5, (closed_port(),))})
    wait_until(lambda: len(made.core.failed) == 4)
    assert time.monotonic() - begin >= 0.75 * PAUSE_MIN_S * (1 + 2 + 4)


def test_a_new_life_is_tried_at_once(stack: ExitStack, tmp_path: Path) -> None:
    made = dialling(stack)
    made.show({node(1): Target(5, (closed_port(),))})
    wait_until(lambda: len(made.core.failed) == 4)  # the next pause is two seconds
    daemon = member(stack, tmp_path, 1, incarnation=6)
    begin = time.monotonic()
    made.show({node(1): target(daemon, 6)})
    wait_until(lambda: made.core.count(node(1)) == 1)
    assert time.monotonic() - begin < 1


def refused(stack: ExitStack, meant: Target, own: Own = US) -> str:
    """Why the node of number 1 is not reached."""
    made = dialling(stack, own=own)
    made.show({node(1): meant})
    wait_until(lambda: made.core.failed != [])
    assert made.core.count(node(1)) == 0
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
    made = dialling(stack)
    made.show({node(1): Target(5, ("nonsense", closed_port(), *target(daemon).addresses))})
    wait_until(lambda: made.core.count(node(1)) == 1)
    assert made.core.failed == []


def silent(stack: ExitStack) -> str:
    """A host that takes connections and says nothing."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_silent_members_keep_no_other_waiting_for_long(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    made = dialling(stack, dial_s=0.3)
    targets = {node(100 + n): Target(5, (silent(stack),)) for n in range(2 * DIALS_MAX)}
    begin = time.monotonic()
    made.show({**targets, node(1): target(daemon)})
    wait_until(lambda: made.core.count(node(1)) == 1)
    assert time.monotonic() - begin < 5
    wait_until(lambda: {each for each, _ in made.core.failed} == set(targets))
    assert made.dialer.trouble(node(100)).endswith(("no answer in time", "timed out"))


def test_close_waits_for_nobody_longer_than_it_is_told(stack: ExitStack) -> None:
    made = Dialling(dial_s=1.0)
    made.show({node(1): Target(5, (silent(stack),))})
    wait_until(lambda: made.dialer._table.tries != {})
    begin = time.monotonic()
    made.dialer.stop()
    made.core.end()
    made.dialer.close(0.1)
    assert time.monotonic() - begin < 0.9
    assert made.dialer.close(WAIT_S)  # what was under way has ended by itself


def test_no_descriptor_stays_behind(stack: ExitStack, tmp_path: Path) -> None:
    daemon = member(stack, tmp_path, 1)
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    for incarnation in (5, 4):
        made = Dialling()
        made.show({node(1): target(daemon, incarnation)})
        wait_until(lambda made=made: made.core.count(node(1)) == 1 or made.core.failed)
        made.close()
        del made
    gc.collect()  # memory of a node goes with its last reference
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
