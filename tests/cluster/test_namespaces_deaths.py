"""Daemons on networks of their own that are killed, stopped and started again, in the middle of a
fetch too. Blocks come from another one that has them, or are a miss by the end of the call."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.lab.cluster import TTL_S, Lab
from kvpool.lab.node import Node
from tests.cluster.in_lab import (
    FETCH_S,
    SLACK_S,
    SSD,
    are_known,
    blocks_at,
    costs,
    fresh,
    holders,
    link,
    make_whole,
    running,
)
from tests.cluster.town import comes
from tests.served import Blocks

LARGE = 1 << 20
ROUNDS = 3


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lab]:
    with running(3, dram="256MiB") as lab:
        yield lab


@pytest.fixture
def lab(lasting: Lab) -> Iterator[Lab]:
    yield lasting
    make_whole(lasting)
    for each in lasting.nodes:
        with blocks_at(each, LARGE) as mine:
            mine.space.drop()
    lasting.meet()


class Fetch:
    """A get under way in a thread of its own."""

    def __init__(self, at: Blocks, numbers: range) -> None:
        self._at, self._numbers = at, numbers
        self.got = 0
        self.took_s = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._before = at.pool.stats()["far_blocks"]
        self._thread.start()

    def is_under_way(self) -> bool:
        """Some have come, or all is over."""
        now = self._at.pool.stats()["far_blocks"]
        return now > self._before or not self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a get does not end"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            self.got = self._at.get(self._numbers)  # looks at every byte
        except BaseException as error:
            self._error = error
        self.took_s = time.monotonic() - begin


def test_the_only_holder_is_killed_during_a_fetch(lab: Lab) -> None:
    holder, asks = lab.nodes[0], lab.nodes[1]
    for _ in range(ROUNDS):
        numbers = fresh(96)
        with blocks_at(asks, LARGE) as theirs:
            with blocks_at(holder, LARGE) as ours:
                ours.put_all(numbers)
                are_known(theirs, numbers)
            fetch = Fetch(theirs, numbers)
            comes(fetch.is_under_way, "the fetch begins")
            holder.kill()
            fetch.end()
            print(f"{fetch.got} of {len(numbers)} blocks came, in {fetch.took_s * 1e3:.0f} ms")
            assert fetch.took_s < FETCH_S + SLACK_S + 2  # beside it every byte was compared
            if fetch.got < len(numbers) - 10:  # it was killed in time
                costs(theirs, numbers[fetch.got :], "after the kill")
        make_whole(lab)


def test_one_of_two_holders_is_killed_during_a_fetch(lab: Lab) -> None:
    """Nothing is missing then."""
    first, second, asks = lab.nodes
    for _ in range(ROUNDS):
        numbers = fresh(64)
        with blocks_at(second, LARGE) as copies, blocks_at(asks, LARGE) as theirs:
            with blocks_at(first, LARGE) as ours:
                ours.put_all(numbers)
                are_known(copies, numbers)
                assert copies.get(numbers) == len(numbers)
                comes(
                    lambda at=theirs, those=numbers: are_at_two(asks, at, those),
                    "the directory knows of both",
                )
            fetch = Fetch(theirs, numbers)
            comes(fetch.is_under_way, "the fetch begins")
            first.kill()
            fetch.end()
            print(f"{fetch.got} of {len(numbers)} blocks came, in {fetch.took_s * 1e3:.0f} ms")
            assert fetch.got == len(numbers)
        make_whole(lab)


def are_at_two(node: Node, at: Blocks, numbers: range) -> bool:
    return all(len(each) >= 2 for each in holders(node, at, numbers))


def test_hot_blocks_outlive_any_one_death() -> None:
    """What is at two members is at one, whichever of the three dies. It is found once the keys that
    the dead one kept are told to others."""
    numbers = fresh(40)
    with running(3, dram="256MiB", cluster_max_replicas=2) as lab:
        with blocks_at(lab.nodes[0], LARGE) as ours:
            ours.put_all(numbers)
            for _ in range(12):
                assert ours.get(numbers) == len(numbers)
            comes(lambda: are_at_two(lab.nodes[0], ours, numbers), "they are copied unasked")
        for number, victim in enumerate(lab.nodes):
            asked = lab.nodes[(number + 1) % 3]
            with blocks_at(asked, LARGE) as rest:
                comes(
                    lambda node=asked, at=rest: are_at_two(node, at, numbers),
                    "there are two of each",
                )
                victim.kill()
                comes(lambda at=rest: at.get(numbers) == len(numbers), "all are found")
                victim.start()
                lab.meet()
                for _ in range(6):  # it came back empty: they are to be copied once more
                    assert rest.get(numbers) == len(numbers)


def test_a_holder_that_stands_still_costs_one_deadline(lab: Lab) -> None:
    """For longer than its lease too: it leaves, and comes back with all that it has."""
    holder, asks = lab.nodes[0], lab.nodes[1]
    numbers = fresh(80)
    with blocks_at(holder, LARGE) as ours, blocks_at(asks, LARGE) as theirs:
        ours.put_all(numbers)
        are_known(theirs, numbers)
        id = holder.told().own
        holder.pause()
        costs(theirs, numbers[:60], "stopped")
        assert link(asks, id).breaker != "closed"
        comes(lambda: len(asks.told().nodes) == 2, "it has left")
        holder.go_on()
        lab.meet()
        comes(lambda: theirs.get(numbers) == len(numbers), "all of it comes again")


def test_a_node_back_within_its_lease_has_what_its_ssd_kept() -> None:
    """Nobody sees it leave, and it is asked for all that it had."""
    with running(3, **SSD, cluster_ttl=60) as lab:
        numbers = fresh(100)
        holder, others = lab.nodes[0], lab.nodes[1:]
        own = holder.told().own
        with blocks_at(holder) as ours:
            ours.put_all(numbers)
        for _ in range(2):
            holder.kill()
            holder.start()
            lab.meet()
            assert holder.told().own == own
            for each in others:
                assert f"member left id={own}" not in each.log()
                with blocks_at(each) as theirs:
                    are_known(theirs, numbers)
        with blocks_at(others[0]) as theirs:
            assert theirs.get(numbers) == len(numbers)


def test_a_clock_that_is_an_hour_off_costs_nothing() -> None:
    """One node's is an hour late, another's an hour early; then each is started with the other's:
    its incarnation must grow all the same."""
    with running(3) as lab:
        late, early, _ = lab.nodes
        for skews in ((-3600, 3600), (3600, -3600), (-3600, 3600)):
            for each, skew_s in zip((late, early), skews, strict=True):
                each.kill()
                each.skew_s = skew_s
                each.start()
            lab.meet()
            for giver in lab.nodes:
                numbers = fresh(20)
                with blocks_at(giver) as ours:
                    ours.put_all(numbers)
                    for taker in lab.nodes:
                        with blocks_at(taker) as theirs:
                            are_known(theirs, numbers)
                            assert theirs.get(numbers) == 20
        lives = [each.told() for each in (late, early)]
        assert all(each.is_entered for each in lives)


def test_a_node_that_comes_back_empty_attracts_no_storm() -> None:
    """Its share of what is hot comes at no more than what it lets others send it."""
    with running(3, dram="512MiB", cluster_max_replicas=2) as lab:
        numbers = fresh(300)
        with blocks_at(lab.nodes[0], LARGE) as ours:
            ours.put_all(numbers)
            for _ in range(10):
                assert ours.get(numbers) == len(numbers)
        lab.nodes[2].kill()
        begin = time.monotonic()
        lab.nodes[2].start()
        lab.meet()
        while time.monotonic() < begin + 3 * TTL_S:
            brought = sum(
                each.bytes_in for node in lab.nodes[2].told().nodes for each in node.links
            )
            assert brought < 2 * (64 << 20) * (time.monotonic() - begin) + (64 << 20)
            time.sleep(0.2)
        with blocks_at(lab.nodes[1], LARGE) as theirs:
            are_known(theirs, numbers)
            assert theirs.get(numbers[:50]) == 50


def test_a_member_with_a_wrong_token_costs_its_share_of_the_directory(tmp_path: Path) -> None:
    """etcd let it in; nobody else does. Nothing of it is got, and nobody waits for it."""
    with running(3) as lab:
        wrong = tmp_path / "members"
        wrong.write_text("w" * 64)
        stranger = lab.add(cluster_token_file=str(wrong)).start()
        here, there = lab.nodes[0], lab.nodes[1]
        comes(lambda: len(here.told().nodes) == 4, "etcd knows it")
        id = stranger.told().own
        comes(
            lambda: any(node.id == id and "token" in node.trouble for node in here.told().nodes),
            "it is refused",
        )
        numbers, its_own = fresh(200), fresh(20)
        with (
            blocks_at(here, 4096) as ours,
            blocks_at(there, 4096) as theirs,
            blocks_at(stranger, 4096) as foreign,
        ):
            ours.put_all(numbers)
            foreign.put_all(its_own)
            assert foreign.get(its_own) == 20

            def found() -> int:
                return sum(theirs.get([number]) for number in numbers)

            comes(lambda: found() > 100, "most are found")
            costs(theirs, its_own, "of the stranger")
            assert foreign.get(numbers[:1]) == 0
        stranger.kill()


def test_a_fetch_is_not_slower_than_the_deadline_says(lab: Lab) -> None:
    """A call that names less time has less."""
    holder, asks = lab.nodes[0], lab.nodes[2]
    numbers = fresh(40)
    with blocks_at(holder, LARGE) as ours, blocks_at(asks, LARGE, timeout=0.3) as theirs:
        ours.put_all(numbers)
        are_known(theirs, numbers)
        lab.pull(holder)
        out = np.zeros(LARGE, np.uint8)
        begin = time.monotonic()
        assert theirs.space.get_into(theirs.keys(numbers[:1]), out) == 0
        assert time.monotonic() - begin < 0.3 + SLACK_S
