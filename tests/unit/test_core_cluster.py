"""A node's part in a cluster, as the daemon calls it: arguments, ends, and who waits."""

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool import _core
from kvpool.errors import BadArgument, BadType, ForkedProcess, KvpoolError, PoolClosed

BLOCK_BYTES = 4096
SPACE = b"s" * 16
STREAMS = 2  # enough for a short request beside a long one


def made_id(number: int) -> bytes:
    return bytes([number]) * 16


def open_node() -> _core.Node:
    return _core.Node.open(
        dram=16 << 20,
        dram_max=16 << 20,
        max_blocks=0,
        policy="temperature",
        tau_s=0.0,
        prefault="off",
        evict_ahead=0.0,
        huge_pages=False,
        salt=5,
        clock=None,
    )


class Host:
    """A node, its server and its part in a cluster."""

    def __init__(self, number: int) -> None:
        self.id = made_id(number)
        self.node = open_node()
        self.server = _core.Server.create(self.node)
        self.peers = self.server.add_client()
        self.cluster = _core.Cluster.open(self.node, self.id, 1, streams_per_peer=STREAMS)
        self.cluster.serve(self.server)
        self.space = _core.Space(self.node.open_space(SPACE, BLOCK_BYTES))

    @property
    def member(self) -> tuple[bytes, int, int, bool]:
        return (self.id, 1, 1, False)

    def close(self) -> None:
        assert self.cluster.close(10.0)
        self.server.close()
        self.node.check()
        self.node.close()


def connect(near: Host, far: Host) -> None:
    ours, theirs = socket.socketpair()
    far.server.add_stream(far.peers, theirs.detach(), is_peer=True, node=near.id, incarnation=1)
    near.cluster.add_stream(far.id, 1, ours.detach())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def settle(*hosts: Host) -> None:
    """All that they have is known to whoever keeps it."""
    for host in hosts:
        before = host.cluster.stats()["turns"]

        def is_told(host: Host = host, before: int = before) -> bool:
            stats = host.cluster.stats()
            return bool(stats["turns"] >= before + 2 and stats["is_told"])

        wait_until(is_told)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(1)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[tuple[Host, Host]]:
    """Members of one cluster, with connections both ways."""
    one, other = Host(1), Host(2)
    for each in (one, other):
        each.cluster.set_members([one.member, other.member])
    for _ in range(STREAMS):
        connect(one, other)
        connect(other, one)
    yield one, other
    one.close()
    other.close()


# --- what it does --------------------------------------------------------------------------------


def test_what_one_has_the_other_gets(two: tuple[Host, Host]) -> None:
    one, other = two
    keys = random.Random(7).randbytes(16 * 40)
    data = random.Random(8).randbytes(BLOCK_BYTES * 40)
    one.space.put_codes(keys, data, None, None, None, 1.0)
    settle(one, other)
    holders = other.cluster.locate(SPACE, keys, 1.0)
    assert holders == [[one.id]] * 40
    out = bytearray(len(data))
    assert other.space.get_into(keys, out) == 40
    assert out == data
    (peer,) = other.cluster.peers()
    assert peer["id"] == one.id
    assert peer["breaker"] == "closed"
    assert peer["fetched_blocks"] == 40
    assert peer["bytes_in"] == len(data)


def test_who_leaves_is_forgotten(two: tuple[Host, Host]) -> None:
    one, other = two
    keys = random.Random(9).randbytes(16 * 4)
    one.space.put_codes(keys, bytes(BLOCK_BYTES * 4), None, None, None, 1.0)
    settle(one, other)
    assert one.cluster.leave(10.0)
    assert other.cluster.locate(SPACE, keys, 1.0) == [[]] * 4
    assert one.cluster.locate(SPACE, keys, 1.0) == [[one.id]] * 4
    assert one.cluster.stats()["has_left"]


def test_a_client_is_not_served_as_a_peer(host: Host) -> None:
    other = Host(2)
    try:
        host.cluster.set_members([host.member, other.member])
        ours, theirs = socket.socketpair()
        other.server.add_stream(other.peers, theirs.detach())
        host.cluster.add_stream(other.id, 1, ours.detach())
        wait_until(lambda: host.cluster.stats()["wire_refused"] > 0)
        assert other.cluster.stats()["heard_batches"] == 0
    finally:
        other.close()


def test_each_member_is_wanted_once(host: Host) -> None:
    assert host.cluster.wait_wanted(0.0) == []
    host.cluster.set_members([host.member, (made_id(2), 3, 1, False), (made_id(3), 9, 2, True)])
    wanted = dict(host.cluster.wait_wanted(10.0))
    assert set(wanted) <= {made_id(2), made_id(3)}
    assert all(1 <= count <= STREAMS for count in wanted.values())
    assert host.cluster.stats()["members"] == 3
    assert host.cluster.stats()["voters"] == 2  # who leaves keeps nothing


def test_one_that_was_not_reached_is_left_alone(host: Host) -> None:
    host.cluster.set_members([host.member, (made_id(2), 3, 1, False)])
    host.cluster.note_failed(made_id(2), 2)  # of another life
    host.cluster.note_failed(made_id(7), 1)  # no member
    host.cluster.note_failed(made_id(2), 3)
    (peer,) = host.cluster.peers()
    assert peer["breaker"] in {"open", "half_open"}
    assert peer["failed"] >= 1
    assert peer["incarnation"] == 3


def test_facts_are_numbers(two: tuple[Host, Host]) -> None:
    stats = two[0].cluster.stats()
    assert all(isinstance(value, int | float) for value in stats.values())
    assert stats["slots_owned"] + two[1].cluster.stats()["slots_owned"] == 1 << 16
    assert stats["owners"] == two[1].cluster.stats()["owners"]


# --- arguments -----------------------------------------------------------------------------------

GOOD = (made_id(1), 1, 1, False)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"node_id": b"short"}, "node_id has 5 bytes; it must have 16"),
        ({"incarnation": 0}, "incarnation is 0; it must be 1..18446744073709551615"),
        ({"incarnation": -1}, "incarnation is -1; "),
        ({"incarnation": 1 << 64}, "incarnation is 18446744073709551616; "),
        ({"directory_bytes": 1}, "directory_bytes is 1; it must be 65536..1099511627776"),
        ({"directory_bytes": 1 << 41}, "directory_bytes is 2199023255552; "),
        ({"streams_per_peer": 1}, "streams_per_peer is 1; it must be 2..64"),
        ({"streams_per_peer": 65}, "streams_per_peer is 65; it must be 2..64"),
        ({"fetch_timeout_s": 0}, "fetch_timeout_s is 0.000000 s; it must be 0.001..86400"),
        ({"fetch_timeout_s": float("nan")}, "fetch_timeout_s is nan s; "),
        ({"locate_timeout_s": 1e9}, "locate_timeout_s is 1000000000.000000 s; "),
    ],
)
def test_options_out_of_range_are_refused(given: dict[str, Any], complaint: str) -> None:
    node = open_node()
    right = {"node_id": made_id(1), "incarnation": 1}
    with pytest.raises(BadArgument) as raised:
        _core.Cluster.open(node, **{**right, **given})
    assert str(raised.value).startswith(complaint)
    node.close()


@pytest.mark.parametrize(
    "given",
    [
        {"node_id": "a" * 16},
        {"node_id": bytearray(16)},
        {"incarnation": 1.5},
        {"incarnation": "1"},
        {"directory_bytes": 1e7},
        {"streams_per_peer": "4"},
        {"fetch_timeout_s": "1"},
        {"locate_timeout_s": b"1"},
    ],
)
def test_options_of_another_type_are_refused(given: dict[str, Any]) -> None:
    node = open_node()
    right = {"node_id": made_id(1), "incarnation": 1}
    with pytest.raises(BadType):
        _core.Cluster.open(node, **{**right, **given})
    node.close()


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ([GOOD, GOOD], "two members have one id"),
        ([GOOD, (b"x", 1, 1, False)], "the id of members[1] has 1 bytes; it must have 16"),
        ([(made_id(2), 0, 1, False)], "the incarnation of members[0] is 0; it must be 1.."),
        ([(made_id(2), 1, 0, False)], "the weight of members[0] is 0; it must be 1..256"),
        ([(made_id(2), 1, 257, False)], "the weight of members[0] is 257; it must be 1..256"),
        ([(made_id(2), 1)], "members[0] has 2 items; it must have 4"),
        ([(n.to_bytes(16, "big"), 1, 1, False) for n in range(4096)], "a cluster has at most"),
    ],
)
def test_views_that_cannot_be_are_refused(host: Host, members: Any, complaint: str) -> None:
    host.cluster.set_members([host.member])
    with pytest.raises(BadArgument) as raised:
        host.cluster.set_members(members)
    assert str(raised.value).startswith(complaint)
    assert host.cluster.stats()["members"] == 1


@pytest.mark.parametrize(
    "members",
    [
        [None],
        [[made_id(2), 1, 1, False]],
        [("a" * 16, 1, 1, False)],
        [(made_id(2), 1.0, 1, False)],
        [(made_id(2), 1, "1", False)],
        [(made_id(2), 1, 1, 0)],
        [(made_id(2), 1, 1, None)],
    ],
)
def test_members_of_another_type_are_refused(host: Host, members: Any) -> None:
    with pytest.raises(BadType):
        host.cluster.set_members(members)
    assert host.cluster.stats()["views"] == 0


def test_calls_with_wrong_arguments_are_refused(host: Host) -> None:
    cluster: Any = host.cluster
    for call in (
        lambda: cluster.note_failed(b"x", 1),
        lambda: cluster.note_failed(made_id(2), 0),
        lambda: cluster.wait_wanted(-1),
        lambda: cluster.locate(b"x", made_id(1), 1.0),
        lambda: cluster.locate(SPACE, b"x", 1.0),
        lambda: cluster.locate(SPACE, bytes(16 * ((1 << 20) + 1)), 1.0),
        lambda: cluster.locate(SPACE, made_id(1), 1e9),
        lambda: cluster.leave(float("nan")),
        lambda: cluster.close(-0.5),
    ):
        with pytest.raises(BadArgument):
            call()
    for call in (
        lambda: cluster.note_failed(made_id(2), None),
        lambda: cluster.wait_wanted("1"),
        lambda: cluster.set_members(None),
        lambda: cluster.set_members(iter([])),
        lambda: cluster.serve(None),
        lambda: cluster.serve(host.node),
        lambda: cluster.locate(None, made_id(1), 1.0),
        lambda: cluster.close(None),
        lambda: _core.Cluster.open(None, made_id(1), 1),  # type: ignore[arg-type]
    ):
        with pytest.raises((BadType, TypeError)):
            call()
    assert cluster.locate(SPACE, b"", 1.0) == []


def test_a_socket_that_is_refused_is_closed(host: Host) -> None:
    cluster: Any = host.cluster
    cluster.set_members([host.member, (made_id(2), 3, 1, False)])
    refused = [(made_id(2), 2), (made_id(5), 3), (host.id, 1), (b"short", 3), (made_id(2), 0)]
    for id, incarnation in refused:
        ours, theirs = socket.socketpair()
        with theirs:
            with pytest.raises(KvpoolError):
                cluster.add_stream(id, incarnation, ours.detach())
            theirs.settimeout(10)
            assert theirs.recv(1) == b""
    reader, writer = os.pipe()
    with contextlib.closing(os.fdopen(writer, "wb")):
        with pytest.raises(KvpoolError):
            cluster.add_stream(made_id(2), 3, reader)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(reader)
    with pytest.raises(BadArgument):
        cluster.add_stream(made_id(2), 3, -1)


# --- ends ----------------------------------------------------------------------------------------


def test_a_closed_one_says_so() -> None:
    host = Host(1)
    host.cluster.set_members([host.member])
    host.close()
    cluster = host.cluster
    assert cluster.is_closed
    for call in (
        lambda: cluster.set_members([host.member]),
        lambda: cluster.locate(SPACE, made_id(1), 1.0),
        lambda: cluster.serve(host.server),
        lambda: cluster.leave(1.0),
        lambda: cluster.note_failed(made_id(2), 1),
    ):
        with pytest.raises(PoolClosed):
            call()
    assert cluster.wait_wanted(60.0) == []
    assert cluster.stats()["is_closed"]
    assert cluster.peers() == []
    assert cluster.close(0.0)
    ours, theirs = socket.socketpair()
    with theirs:
        with pytest.raises(PoolClosed):
            cluster.add_stream(made_id(2), 1, ours.detach())
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
    with pytest.raises(PoolClosed):
        _core.Cluster.open(host.node, host.id, 1)


def test_opened_and_closed_often_nothing_is_left() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    node = open_node()
    server = _core.Server.create(node)
    gc.collect()  # what the tests before have left
    threads, before = threading.active_count(), descriptors()
    for turn in range(50):
        cluster = _core.Cluster.open(node, made_id(1), turn + 1)
        cluster.serve(server)
        members = [(made_id(n), 1, 1, False) for n in range(1, 2 + turn % 5)]
        cluster.set_members(members)
        if turn % 3:  # else it ends with its last reference
            assert cluster.close(10.0)
        del cluster
    gc.collect()
    assert descriptors() == before
    assert threading.active_count() == threads
    tasks = len(os.listdir("/proc/self/task"))
    cluster = _core.Cluster.open(node, made_id(1), 99)
    assert len(os.listdir("/proc/self/task")) == tasks
    assert cluster.close(1.0)
    server.close()
    node.close()


def test_one_node_is_in_one_cluster(host: Host) -> None:
    host.cluster.set_members([host.member])
    with pytest.raises(KvpoolError, match="another cluster"):
        _core.Cluster.open(host.node, made_id(2), 1)


def test_the_node_may_go_first() -> None:
    node = open_node()
    cluster = _core.Cluster.open(node, made_id(1), 1)
    cluster.set_members([(made_id(1), 1, 1, False), (made_id(2), 1, 1, False)])
    node.close()
    del node
    gc.collect()
    assert cluster.stats()["members"] == 2
    assert cluster.close(10.0)


def test_who_waits_holds_nobody_up(host: Host) -> None:
    is_waiting = threading.Event()
    told: list[Any] = []

    def wait() -> None:
        is_waiting.set()
        told.append(host.cluster.wait_wanted(60.0))
        told.append(host.cluster.wait_wanted(60.0))

    waiter = threading.Thread(target=wait)
    waiter.start()
    is_waiting.wait(10)
    began = time.monotonic()
    for _ in range(1000):
        host.cluster.stats()
    assert time.monotonic() - began < 30
    host.cluster.set_members([host.member, (made_id(2), 1, 1, False)])
    wait_until(lambda: bool(told))
    assert [id for id, _ in told[0]] == [made_id(2)]
    host.cluster.close(10.0)
    waiter.join(30)
    assert not waiter.is_alive()
    assert len(told) == 2


def test_in_a_child_it_is_left_alone(host: Host) -> None:
    host.cluster.set_members([host.member, (made_id(2), 1, 1, False)])
    child = os.fork()
    if child == 0:
        status = 70
        try:
            for call in (host.cluster.stats, host.cluster.peers, lambda: host.cluster.leave(1.0)):
                with pytest.raises(ForkedProcess):
                    call()
            assert host.cluster.wait_wanted(60.0) == []
            assert host.cluster.close(60.0)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert host.cluster.stats()["members"] == 2
