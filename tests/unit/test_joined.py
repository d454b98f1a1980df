"""What a daemon does about its cluster: whom it tells what, and that it ends in time."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool import wire
from kvpool.address import TcpAddress
from kvpool.cluster.joined import Joined
from kvpool.cluster.member import DRAINING, Member
from kvpool.cluster.peer_link import Own, dial
from kvpool.cluster.roster import Roster
from kvpool.cluster.static_members import LIST_INCARNATION
from kvpool.serve_log import open_log
from tests.daemons import WAIT_S, NoOthers, connected, serving
from tests.members import Watched, node, target
from tests.pools import wait_until

OWN = Own("prod", node(1), 100, "token of the cluster")
US = Member(node(1).hex(), 100, ("127.0.0.1:1",), weight=2)
THEM = Member(node(2).hex(), 200, ("127.0.0.1:1",))


def roster(version: int, *members: Member) -> Roster:
    return Roster(version, US.id, members, fingerprint=len(members))


class Part:
    """A daemon's part of a cluster, of members that a test shows it."""

    def __init__(self, membership: NoOthers | None = None) -> None:
        self.core = Watched(OWN)
        self.membership = membership or NoOthers(OWN)
        self.membership.board.put(roster(1))
        log = open_log("text", "critical")
        self.joined = Joined(OWN, {"default": self.core}, self.membership, log)

    def show(self, version: int, *members: Member) -> None:
        self.membership.board.put(roster(version, *members))

    def close(self, timeout_s: float = WAIT_S) -> None:
        self.joined.close(timeout_s)
        assert self.core.is_closed
        self.core.end()


def test_the_core_is_told_every_view_with_this_node_in_it() -> None:
    part = Part()
    part.joined.start()
    part.show(2, THEM)  # not entered yet
    part.show(3, US, THEM)
    ours, theirs = (node(1), 100, 2, False), (node(2), 200, 1, False)
    wait_until(lambda: part.core.members == [ours, theirs])
    part.show(4, THEM)  # lost for a moment
    part.show(5, US, replace(THEM, state=DRAINING))
    wait_until(lambda: part.core.members == [ours, (*theirs[:3], True)])
    part.close()


def test_a_view_that_changes_nothing_is_not_told_again() -> None:
    part = Part()
    part.joined.apply(roster(2, US, THEM))
    part.joined.apply(roster(3, US, THEM))
    assert len(part.core.views) == 1
    part.close()


def test_members_that_are_wanted_are_dialled_where_the_view_says(tmp_path: Path) -> None:
    own = replace(OWN, node=node(2), incarnation=200)
    part = Part()
    told = {"listen": "127.0.0.1:0", "log_level": "error"}
    with serving(tmp_path, own, is_whole=True, **told) as daemon:
        part.joined.start()
        part.show(2, US, replace(THEM, addresses=target(daemon).addresses))
        wait_until(lambda: part.core.count(node(2)) >= 1)
        part.close()


def test_leaving_tells_those_who_look_for_members_first() -> None:
    part = Part()
    part.joined.start()
    assert part.joined.leave(1.0)
    assert part.membership.calls == ["start", "close"]
    assert part.core.stats()["has_left"]
    part.close()
    assert part.membership.calls == ["start", "close"]


def test_who_could_not_tell_all_says_so() -> None:
    part = Part()
    part.core.end()  # as in a node that closes
    assert part.joined.leave(1.0) is False
    part.close()


class Slow(NoOthers):
    """As with an etcd that does not answer."""

    def __init__(self, own: Own) -> None:
        super().__init__(own)
        self.goes_on = threading.Event()

    def close(self) -> None:
        assert self.goes_on.wait(WAIT_S)
        super().close()


def test_an_etcd_that_does_not_answer_holds_up_nothing() -> None:
    place = Slow(OWN)
    part = Part(place)
    part.joined.start()
    begin = time.monotonic()
    assert part.joined.leave(0.2) is False
    assert part.core.stats()["has_left"]  # the other half of the time was for this
    part.joined.close(0.1)
    assert time.monotonic() - begin < 2
    place.goes_on.set()
    part.close()


def test_a_member_of_a_list_says_itself_in_which_life_it_is() -> None:
    part = Part()
    listed = [replace(each, incarnation=LIST_INCARNATION) for each in (US, THEM)]
    part.joined.met(node(2), 7)  # before there is any view
    part.joined.apply(roster(2, *listed))
    assert [each[1] for each in part.core.members] == [100, LIST_INCARNATION]
    part.joined.met(node(2), 200)
    assert [each[1] for each in part.core.members] == [100, 200]
    for node_id, life in ((node(2), 199), (node(3), 5)):  # an earlier life; no member
        part.joined.met(node_id, life)
    assert [each[1] for each in part.core.members] == [100, 200]
    part.close()


def test_members_of_a_list_are_met_by_dialling(tmp_path: Path) -> None:
    own = replace(OWN, node=node(2), incarnation=200)
    part = Part()
    told = {"listen": "127.0.0.1:0", "log_level": "error"}
    with serving(tmp_path, own, is_whole=True, **told) as daemon:
        listed = [replace(each, incarnation=LIST_INCARNATION) for each in (US, THEM)]
        listed[1] = replace(listed[1], addresses=target(daemon).addresses)
        part.joined.start()
        part.show(2, *listed)
        wait_until(lambda: part.core.count(node(2)) >= 1)
        assert [each[1] for each in part.core.members] == [100, 200]
        assert part.core.failed == []
        part.close()


def test_closing_one_that_never_began_takes_no_time() -> None:
    part = Part()
    begin = time.monotonic()
    part.close()
    assert time.monotonic() - begin < 1


def test_a_daemon_enters_when_it_listens_and_leaves_before_it_ends(tmp_path: Path) -> None:
    with serving(tmp_path, OWN, listen="127.0.0.1:0", log_level="error") as daemon:
        assert daemon.daemon.joined is not None
        membership = daemon.daemon.joined.members
        assert isinstance(membership, NoOthers)
        wait_until(lambda: membership.calls == ["start"])
    assert membership.calls == ["start", "close"]


def test_a_daemon_that_is_leaving_still_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who have not heard of it find it as it was, and are told that it goes."""
    told = []

    def leave(self: Joined, timeout_s: float) -> bool:
        own = Own("prod", node(3), 1, OWN.token)
        address = target(daemon).addresses[0].rpartition(":")
        where = TcpAddress(address[0], int(address[2]))
        sock, facts = dial(where, own, "", time.monotonic() + WAIT_S)
        sock.close()
        told.append(facts.is_draining)
        with connected(daemon) as client:
            client.sendall(wire.pack_hello({"kind": "control"}))
            told.append(bool(client.recv(1)))
        return True

    monkeypatch.setattr(Joined, "leave", leave)
    with serving(tmp_path, OWN, listen="127.0.0.1:0", log_level="error") as daemon:
        pass
    assert told == [True, True]
