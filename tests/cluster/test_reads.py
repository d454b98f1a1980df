"""A client of a node gets what other nodes have, by each way of asking; and who is slow, dead or
restarted costs misses with a reason, for no longer than a call may take."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import Miss, Tier
from tests.cluster.etcd import Etcd
from tests.cluster.town import (
    BLOCK,
    TTL_S,
    Town,
    are_known,
    blocks_at,
    comes,
    directory_of,
    link_to,
    met,
    nodes_of,
    tiers_at,
    town,
)
from tests.served import Blocks, Served

CHANNELS = ("shm", "tcp")
FETCH_S = 1.0  # of a get that names no time of its own
SLACK_S = 2.0  # for a machine that is busy with other things
COUNT = 24
PACE_S = 0.01  # between two gets of a client under load
_numbers = iter(range(0, 1 << 40, 1 << 20))


def fresh(count: int = COUNT) -> range:
    """Numbers of blocks that no other test has used."""
    first = next(_numbers)
    return range(first, first + count)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """Two daemons that every test leaves as they were."""
    with town(tmp_path_factory.mktemp("reads"), None, 2, dram="64MiB") as made:
        yield made


@pytest.fixture(params=CHANNELS)
def ends(request: pytest.FixtureRequest, lasting: Town) -> Iterator[tuple[Blocks, Blocks]]:
    """Clients of the one, which has what the tests put, and of the other."""
    here, there = lasting.daemons
    with blocks_at(here) as ours, blocks_at(there, request.param) as theirs:
        yield ours, theirs


# --- every way of asking -------------------------------------------------------------------------


def test_a_lookup_says_where_they_are_and_a_get_brings_them(ends: tuple[Blocks, Blocks]) -> None:
    ours, theirs = ends
    numbers = fresh()
    ours.put_all(numbers)
    are_known(theirs, numbers)
    assert tiers_at(theirs, numbers) == [Tier.REMOTE] * COUNT
    assert theirs.get(numbers) == COUNT
    again = tiers_at(theirs, numbers)
    assert again == [Tier.DRAM] * COUNT  # there is room for all
    assert theirs.get(numbers) == COUNT


def test_what_nobody_has_is_absent(ends: tuple[Blocks, Blocks]) -> None:
    ours, theirs = ends
    numbers = fresh()
    ours.put_all(numbers[:5])
    are_known(theirs, numbers[:5])
    hit = theirs.space.lookup(theirs.keys(numbers))
    assert (hit.blocks, hit.miss) == (5, Miss.ABSENT)
    misses = bytearray(COUNT)
    out = np.zeros(COUNT * BLOCK, np.uint8)
    assert theirs.space.get_into(theirs.keys(numbers), out, misses=misses) == 5
    assert list(misses) == [Miss.NONE] * 5 + [Miss.ABSENT] + [Miss.BEHIND] * (COUNT - 6)


def test_what_is_here_and_what_is_there_make_one_prefix(ends: tuple[Blocks, Blocks]) -> None:
    ours, theirs = ends
    numbers = fresh()
    ours.put_all(numbers)
    are_known(theirs, numbers)
    assert theirs.get(numbers[:7]) == 7
    assert theirs.get(numbers[12:15]) == 3
    assert theirs.get(numbers) == COUNT


def test_a_view_brings_them_and_pins(ends: tuple[Blocks, Blocks]) -> None:
    ours, theirs = ends
    numbers = fresh()
    ours.put_all(numbers)
    are_known(theirs, numbers)
    with theirs.space.view(theirs.keys(numbers)) as viewed:
        assert len(viewed) == COUNT
        for number, block in zip(numbers, viewed, strict=True):
            assert theirs.is_right(number, block)


def test_many_blocks_come_in_the_background(ends: tuple[Blocks, Blocks]) -> None:
    ours, theirs = ends
    numbers = fresh()
    ours.put_all(numbers)
    are_known(theirs, numbers)
    keys, out = theirs.keys(numbers), np.zeros((COUNT, BLOCK // 8), np.uint64)
    assert asyncio.run(theirs.space.aget_into(keys, out)) == COUNT
    assert (out == theirs.payload(numbers)).all()


def test_many_clients_that_ask_for_the_same_are_one_fetch(lasting: Town) -> None:
    here, there = lasting.daemons
    numbers = fresh(64)
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        ours.put_all(numbers)
        are_known(theirs, numbers)
        before = theirs.pool.stats()["far_blocks"]
        counts: list[int] = []

        def get() -> None:
            with blocks_at(there) as mine:
                counts.append(mine.get(numbers))

        threads = [threading.Thread(target=get) for _ in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert counts == [64] * 6
        assert theirs.pool.stats()["far_blocks"] - before == 64


def test_blocks_of_all_sizes(lasting: Town) -> None:
    here, there = lasting.daemons
    for block_bytes in (8, 4096, 100_000, 4 << 20):
        with here.connect() as one, there.connect("tcp") as other:
            ours = Blocks(one, block_bytes, f"size {block_bytes}")
            theirs = Blocks(other, block_bytes, f"size {block_bytes}")
            numbers = fresh(3)
            ours.put_all(numbers)
            are_known(theirs, numbers)
            assert theirs.get(numbers) == 3, block_bytes


def test_what_was_removed_is_no_hit_for_long(lasting: Town) -> None:
    here, there = lasting.daemons
    with blocks_at(here) as ours, blocks_at(there) as theirs:
        numbers = fresh()
        ours.put_all(numbers)
        are_known(theirs, numbers)
        ours.space.remove(ours.keys(numbers))
        assert theirs.get(numbers) == 0
        comes(lambda: theirs.space.lookup(theirs.keys(numbers)).blocks == 0, "it is withdrawn")


def test_a_dropped_namespace_is_dropped_for_the_others(lasting: Town) -> None:
    here, there = lasting.daemons
    with here.connect() as one, there.connect() as other:
        ours, theirs = Blocks(one, BLOCK, "dropped"), Blocks(other, BLOCK, "dropped")
        numbers = fresh()
        ours.put_all(numbers)
        are_known(theirs, numbers)
        ours.space.drop()
        assert theirs.get(numbers) == 0
        comes(lambda: theirs.space.lookup(theirs.keys(numbers)).blocks == 0, "it is withdrawn")
        ours.put_all(numbers)  # the name lives on
        are_known(theirs, numbers)
        assert theirs.get(numbers) == COUNT


# --- one that is silent --------------------------------------------------------------------------


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_holder_that_is_stopped_costs_one_deadline(tmp_path: Path, channel: str) -> None:
    with town(tmp_path, None, 2, dram="64MiB") as made:
        here, there = made.daemons
        with blocks_at(here) as ours, blocks_at(there, channel) as theirs:
            numbers = fresh(200)
            ours.put_all(numbers)
            are_known(theirs, numbers)
            assert theirs.get(numbers[:40]) == 40
            own = nodes_of(here)["own"]
            here.signal(signal.SIGSTOP)
            try:
                begin = time.monotonic()
                out, misses = np.zeros(BLOCK, np.uint8), bytearray(1)
                keys = theirs.keys(numbers[100:101])
                assert theirs.space.get_into(keys, out, misses=misses) == 0
                took = time.monotonic() - begin
                print(f"{channel}: the first get took {took * 1e3:.0f} ms, {Miss(misses[0]).name}")
                assert took < FETCH_S + SLACK_S
                assert misses[0] in (Miss.TIMED_OUT, Miss.DISCONNECTED)
                costs = [cost_of(theirs, number) for number in numbers[101:180]]
                costs.sort()
                print(
                    f"the next ones {costs[0]:.2f}..{costs[-1]:.2f} ms, median {median(costs):.2f}"
                )
                assert median(costs) < 5
                assert link_to(there, own)["breaker"] != "closed"
                assert theirs.get(numbers[:40]) == 40  # what is here is here
            finally:
                here.signal(signal.SIGCONT)
            comes(lambda: theirs.get(numbers) == 200, "it heals")
            comes(lambda: link_to(there, own)["breaker"] == "closed", "it is trusted again")


def cost_of(at: Blocks, number: int) -> float:
    """Milliseconds of a get of a block that is not had."""
    keys, out = at.keys([number]), np.zeros(BLOCK, np.uint8)
    begin = time.perf_counter()
    assert at.space.get_into(keys, out) == 0
    return (time.perf_counter() - begin) * 1e3


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# --- one that goes and comes ---------------------------------------------------------------------


class Load:
    """Clients that put and get without end, each through a node of its own; every byte is looked
    at. What is wrong is raised by close()."""

    def __init__(self, daemons: list[Served], numbers: range) -> None:
        self.gets = self.hits = self.puts = 0
        self.slowest_s = 0.0
        self._numbers = numbers
        self._ends = threading.Event()
        self._turn = threading.Lock()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(each, seed))
            for seed, each in enumerate(daemons)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, daemon: Served, seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            with blocks_at(daemon) as mine:
                while not self._ends.wait(PACE_S):
                    at = int(random.integers(0, len(self._numbers) - 8))
                    part = self._numbers[at : at + 8]
                    begin = time.monotonic()
                    got = mine.get(part)
                    took = time.monotonic() - begin
                    put = mine.put(part[got:]).stored if got < 8 and random.random() < 0.5 else 0
                    with self._turn:
                        self.gets += 1
                        self.hits += got
                        self.puts += put
                        self.slowest_s = max(self.slowest_s, took)
        except BaseException as error:
            self._errors.append(error)

    def goes_on(self) -> None:
        """Waits until more was got than now."""
        before = self.hits
        comes(lambda: self.hits > before + 50 or self._errors, "the load goes on")

    def close(self) -> None:
        self._ends.set()
        for each in self._threads:
            each.join(60)
            assert not each.is_alive()
        for each in self._errors:
            raise each


def test_a_rolling_restart_under_load(tmp_path: Path, etcd: Etcd) -> None:
    with town(tmp_path, etcd, 3, dram="64MiB") as made:
        load = Load(made.daemons, fresh(400))
        try:
            for each in made.daemons:
                load.goes_on()
                each.stop()
                load.goes_on()
                each.start()
                comes(lambda: met(made.daemons), "it is back")
            load.goes_on()
        finally:
            load.close()
        print(
            f"{load.gets} gets of 8 blocks, {load.hits} hits, {load.puts} puts; "
            f"the slowest get took {load.slowest_s:.2f} s"
        )
        fetched = 0
        for each in made.daemons:
            with each.connect() as pool:
                fetched += pool.stats()["far_blocks"]
        assert fetched > 0


def test_a_kill_under_load(tmp_path: Path, etcd: Etcd) -> None:
    with town(tmp_path, etcd, 3, dram="64MiB") as made:
        load = Load(made.daemons[1:], fresh(400))
        try:
            for _ in range(3):
                load.goes_on()
                made.daemons[0].kill()
                load.goes_on()
                made.daemons[0].start()
                comes(lambda: met(made.daemons), "it is back")
        finally:
            load.close()
        print(f"the slowest get took {load.slowest_s:.2f} s")
        assert load.slowest_s < FETCH_S + SLACK_S + 1


def test_a_node_that_is_back_is_found_with_what_its_ssd_kept(tmp_path: Path, etcd: Etcd) -> None:
    options = {
        "ssd": "{folder}/tier",
        "ssd_capacity": "64MiB",
        "ssd_free_floor": "0",
        "durability": "durable",
    }
    with town(tmp_path, etcd, 2, **options) as made:
        here, there = made.daemons
        numbers = fresh()
        own = nodes_of(here)["own"]
        with blocks_at(here) as ours:
            ours.put_all(numbers)
        here.kill()
        here.start()
        assert nodes_of(here)["own"] == own
        comes(lambda: met(made.daemons), "it is back")
        with blocks_at(there) as theirs:
            are_known(theirs, numbers)
            assert tiers_at(theirs, numbers) == [Tier.REMOTE] * COUNT
            assert theirs.get(numbers) == COUNT


def test_an_empty_node_joins_and_gets(tmp_path: Path, etcd: Etcd) -> None:
    with town(tmp_path, etcd, 2) as made:
        numbers = fresh(200)
        with blocks_at(made.daemons[0]) as ours:
            ours.put_all(numbers)
        made.add().start()
        comes(lambda: met(made.daemons), "it has joined")
        slots = [directory_of(each)["slots"] for each in made.daemons]
        assert sum(slots) == 1 << 16
        assert all(each > 15_000 for each in slots)
        for each in made.daemons[1:]:
            with blocks_at(each) as theirs:
                are_known(theirs, numbers)  # also what the new one keeps the places of
                assert theirs.get(numbers) == 200
        comes(lambda: directory_of(made.daemons[2])["keys"] > 0, "it was told")


def test_without_an_etcd_everything_goes_on(tmp_path: Path, etcd: Etcd) -> None:
    with town(tmp_path, etcd, 2) as made:
        here, there = made.daemons
        etcd.stop()
        comes(lambda: all(nodes_of(each)["is_frozen"] for each in made.daemons), "it is noticed")
        with blocks_at(here) as ours, blocks_at(there) as theirs:
            begin = time.monotonic()
            while time.monotonic() < begin + 2 * TTL_S:  # longer than any lease
                numbers = fresh()
                ours.put_all(numbers)
                are_known(theirs, numbers)
                assert theirs.get(numbers) == COUNT
                for each in (ours, theirs):  # so that there is room for the next ones
                    each.space.remove(each.keys(numbers))
            etcd.start()
            comes(
                lambda: not any(nodes_of(each)["is_frozen"] for each in made.daemons), "it is back"
            )
            assert met(made.daemons)
            numbers = fresh()
            theirs.put_all(numbers)
            are_known(ours, numbers)
            assert ours.get(numbers) == COUNT


def test_who_leaves_says_so_and_takes_its_places_along(tmp_path: Path, etcd: Etcd) -> None:
    with town(tmp_path, etcd, 2) as made:
        here, there = made.daemons
        numbers = fresh()
        with blocks_at(here) as ours, blocks_at(there) as theirs:
            ours.put_all(numbers)
            are_known(theirs, numbers)
            here.stop()
            comes(lambda: len(nodes_of(there)["nodes"]) == 1, "it has left")
            hit = theirs.space.lookup(theirs.keys(numbers))
            assert (hit.blocks, hit.miss) == (0, Miss.ABSENT)
            assert directory_of(there)["slots"] == 1 << 16


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_coming_and_going_leaves_nothing_behind(tmp_path: Path, etcd: Etcd) -> None:
    with town(tmp_path, etcd, 2) as made:
        here, there = made.daemons
        counts: list[Any] = []
        for _ in range(4):
            here.kill()
            here.start()
            comes(lambda: met(made.daemons), "it is back")
            numbers = fresh()
            with blocks_at(here) as ours, blocks_at(there) as theirs:
                ours.put_all(numbers)
                are_known(theirs, numbers)
                assert theirs.get(numbers) == COUNT
            counts.append(open_files(there.pid))
        print("descriptors of the other:", counts)
        assert counts[-1] <= counts[0] + 4
