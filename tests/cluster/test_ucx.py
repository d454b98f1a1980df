"""Daemons that read blocks out of each other's memory. Here is no RDMA: UCX's tcp (the holder's own
thread sends) and cma (the reader copies by itself, as a network card would) stand in for it."""

import ctypes.util
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import Miss, Tier
from kvpool.cluster.lanes import has_rdma
from tests.cluster.etcd import Etcd
from tests.cluster.town import (
    BLOCK,
    Town,
    are_known,
    blocks_at,
    comes,
    link_to,
    met,
    nodes_of,
    tiers_at,
    town,
)
from tests.served import Blocks, Served

FETCH_S = 1.0  # of a get that names no time of its own
SLACK_S = 4.0  # for a machine that is busy with other things
COUNT = 64
LANES = {
    "tcp": {"UCX_TLS": "tcp"},
    "cma": {"UCX_TLS": "cma", "UCX_CMA_MEMORY_INVALIDATE": "y"},
}
UCX = {"cluster_ucx": "on", "arena": "sealed", "dram": "64MiB"}
_numbers = iter(range(0, 1 << 40, 1 << 20))


@pytest.fixture(scope="module", autouse=True)
def _ucx_is_there() -> None:
    if ctypes.util.find_library("ucp") is None:
        pytest.skip("UCX is not installed")


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Daemons that are begun after it have it."""
    name = str(request.param)
    set_lane(monkeypatch, name)
    return name


def set_lane(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_CMA_MEMORY_INVALIDATE", "KVPOOL_UCX_LIB"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in LANES[name].items():
        monkeypatch.setenv(variable, value)


def fresh(count: int = COUNT) -> range:
    """Numbers of blocks that no other test has used."""
    first = next(_numbers)
    return range(first, first + count)


def id_of(daemon: Served) -> str:
    return str(nodes_of(daemon)["own"])


def link(daemon: Served, other: Served) -> Any:
    return link_to(daemon, id_of(other))


@pytest.fixture
def two(tmp_path: Path, lane: str) -> Iterator[Town]:
    with town(tmp_path, None, 2, **UCX) as made:
        yield made


def is_read(theirs: Blocks, ours: Blocks, here: Served, there: Served) -> bool:
    """Whether blocks that are put now come out of the holder's memory."""
    before = link(there, here)["ucx_blocks"]
    numbers = fresh()
    ours.put_all(numbers)
    are_known(theirs, numbers)
    return theirs.get(numbers) == COUNT and link(there, here)["ucx_blocks"] > before


def test_what_one_has_the_other_reads_out_of_its_memory(two: Town) -> None:
    here, there = two.daemons
    numbers = fresh()
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        ours.put_all(numbers)
        are_known(theirs, numbers)
        assert link(there, here)["ucx"] == "unused"
        assert tiers_at(theirs, numbers) == [Tier.REMOTE] * COUNT
        assert theirs.get(numbers) == COUNT  # looks at every byte
        assert tiers_at(theirs, numbers) == [Tier.DRAM] * COUNT
        comes(lambda: is_read(theirs, ours, here, there), "they are read")
        told = link(there, here)
        print(f"{told['ucx_blocks']} of {told['fetched_blocks']}, {told['ucx_failed']} failures")
        assert told["ucx"] == "open"
        assert told["fetched_blocks"] >= 2 * COUNT
        assert link(here, there)["bytes_out"] >= 2 * COUNT * BLOCK  # the holder knows of it too
    for each in two.daemons:
        assert "ucx opened unchecked" in each.log()


def test_many_at_once_and_both_ways(two: Town) -> None:
    here, there = two.daemons
    mine, other = fresh(128), fresh(128)
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        comes(lambda: is_read(theirs, ours, here, there), "one reads")
        comes(lambda: is_read(ours, theirs, there, here), "and the other")
        ours.put_all(mine)
        theirs.put_all(other)
        are_known(theirs, mine)
        are_known(ours, other)
        counts: list[tuple[str, int]] = []

        def get(daemon: Served, numbers: range, what: str) -> None:
            with blocks_at(daemon) as at:
                for first in range(0, len(numbers), 32):
                    counts.append((what, at.get(numbers[first : first + 32])))

        threads = [
            threading.Thread(target=get, args=each)
            for each in ((there, mine, "a"), (there, mine, "b"), (here, other, "c"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [count for _, count in counts] == [32] * 12


def test_a_holder_that_is_killed_costs_misses_or_another_is_asked(
    tmp_path: Path, lane: str, etcd: Etcd
) -> None:
    with town(tmp_path, etcd, 3, **UCX) as made:
        here, spare, there = made.daemons
        numbers = fresh(200)
        with (
            blocks_at(here) as ours,
            blocks_at(spare) as copies,
            blocks_at(there) as theirs,
        ):
            comes(lambda: is_read(theirs, ours, here, there), "one reads")
            ours.put_all(numbers)
            copies.put_all(numbers[:100])
        with blocks_at(there) as theirs:
            are_known(theirs, numbers)
            slowest_s, rounds, is_over = 0.0, 0, threading.Event()
            errors: list[BaseException] = []

            def load() -> None:
                nonlocal slowest_s, rounds
                try:
                    with blocks_at(there) as mine:
                        while not is_over.is_set():
                            begin = time.monotonic()
                            mine.get(numbers)  # looks at what comes
                            slowest_s = max(slowest_s, time.monotonic() - begin)
                            mine.space.remove(mine.keys(numbers))
                            rounds += 1
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=load)
            thread.start()
            comes(lambda: rounds >= 3 or errors, "gets go on")
            here.kill()
            before = rounds
            comes(lambda: rounds >= before + 3 or errors, "gets go on after it")
            is_over.set()
            thread.join()
            assert not errors, errors
            print(f"{lane}: {rounds} gets, the slowest {slowest_s:.2f} s")
            assert slowest_s < FETCH_S + SLACK_S
            # Once the dead one is off the list, and its part of the directory another's.
            comes(lambda: theirs.get(numbers[:100]) == 100, "the other one is asked")


def test_one_that_is_stopped_costs_its_time_and_heals(two: Town) -> None:
    here, there = two.daemons
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        comes(lambda: is_read(theirs, ours, here, there), "they are read")
        numbers = fresh()
        ours.put_all(numbers)
        are_known(theirs, numbers)
        here.signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            got = theirs.get(numbers)
            took = time.monotonic() - begin
        finally:
            here.signal(signal.SIGCONT)
        assert got == 0
        assert took < FETCH_S + SLACK_S
        comes(lambda: theirs.get(numbers) == COUNT, "it heals")
        comes(lambda: is_read(theirs, ours, here, there), "it is read from again")


def test_one_that_begins_again_is_read_from_again(two: Town) -> None:
    here, there = two.daemons
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        comes(lambda: is_read(theirs, ours, here, there), "they are read")
    here.kill()
    here.start()
    comes(lambda: met(two.daemons), "it is back")
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        comes(lambda: is_read(theirs, ours, here, there), "its new memory is read")


def test_where_one_has_no_lane_blocks_come_over_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_lane(monkeypatch, "tcp")
    made = Town(tmp_path, None, 2, **UCX)
    try:
        made.daemons[1].options["cluster_ucx"] = "off"
        made.start()
        here, there = made.daemons
        with blocks_at(here) as ours, blocks_at(there) as theirs:
            mine, other = fresh(), fresh()
            ours.put_all(mine)
            theirs.put_all(other)
            are_known(theirs, mine)
            are_known(ours, other)
            assert theirs.get(mine) == COUNT
            assert ours.get(other) == COUNT
            for one, two in ((here, there), (there, here)):
                assert (link(one, two)["ucx"], link(one, two)["ucx_blocks"]) == ("none", 0)
        made.stop()
    finally:
        made.close()


def test_lanes_that_do_not_meet_leave_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has tcp, the other shared memory: each has a lane, and there is no way between them."""
    made = Town(tmp_path, None, 2, **UCX)
    try:
        set_lane(monkeypatch, "tcp")
        made.daemons[0].start()
        set_lane(monkeypatch, "cma")
        made.daemons[1].start()
        here, there = made.daemons
        comes(lambda: met(made.daemons), "all are members")
        with blocks_at(here) as ours, blocks_at(there) as theirs:
            numbers = fresh()
            ours.put_all(numbers)
            are_known(theirs, numbers)
            assert theirs.get(numbers) == COUNT
        assert link(there, here)["ucx_failed"] > 0
        assert link(there, here)["ucx_blocks"] == 0
        comes(lambda: "ucx failed" in there.log(), "it is in the log")
        made.stop()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("options", "environment", "why"),
    [
        ({"cluster_ucx": "maybe"}, {}, "'maybe'; it can be auto, off, on"),
        ({"cluster_ucx": "on", "arena": "elastic"}, {"UCX_TLS": "tcp"}, "arena is elastic"),
        ({"cluster_ucx": "on"}, {"UCX_TLS": "cma"}, "UCX_CMA_MEMORY_INVALIDATE=y"),
        (
            {"cluster_ucx": "on"},
            {"UCX_TLS": "tcp", "KVPOOL_UCX_LIB": "/nowhere/libucp.so.0"},
            "no UCX library: /nowhere/libucp.so.0",
        ),
        ({"cluster_ucx": "on"}, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "no_such0"}, "UCX"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    environment: dict[str, str],
    why: str,
) -> None:
    for variable in LANES["cma"]:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    made = Town(tmp_path, None, 1, **{**UCX, **options})
    try:
        _, line = made.daemons[0].refused()
        assert why in line
    finally:
        made.close()


@pytest.mark.skipif(has_rdma(), reason="there is an RDMA device here")
def test_without_rdma_nothing_is_opened_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in LANES["cma"]:
        monkeypatch.delenv(variable, raising=False)
    made = Town(tmp_path, None, 1, **UCX)
    try:
        assert "no RDMA device" in made.daemons[0].refused()[1]
        made.daemons[0].options["cluster_ucx"] = "auto"
        made.daemons[0].start()
        assert "ucx opened" not in made.daemons[0].log()
        with blocks_at(made.daemons[0]) as at:
            assert at.get(fresh()) == 0
            misses = at.space.lookup(at.keys(fresh()))
            assert misses.miss == Miss.ABSENT
        made.daemons[0].stop()
    finally:
        made.close()
