"""Who is a member, from random histories of an etcd, beside a plain model of it."""

import dataclasses
import secrets
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.cluster.answers import Batch, Entry, Event, Found
from kvpool.cluster.member import DRAINING, ENTRY_BYTES_MAX, BadEntry, Member, member_of
from kvpool.cluster.names import Names
from kvpool.cluster.view import GRACE_S, MEMBERS_MAX, Change, Kind, View, fingerprint_of

NAMES = Names("/kvpool", "one")
TTL_S = 10.0
IDS = [f"{number:032x}" for number in range(4)]
OWN = IDS[0]


def member(node_id: str, incarnation: int = 1, **fields: Any) -> Member:
    return Member(node_id, incarnation, ("10.0.0.1:7070",), **fields)


def entry(one: Member, created: int) -> Entry:
    return Entry(one.entry(), created, created)


def found(revision: int, *members: Member, cluster: int = 1, created: int = 1) -> Found:
    entries = {NAMES.member(each.id): entry(each, created) for each in members}
    return Found(cluster, revision, entries)


def batch(revision: int, node_id: str, one: Member | None, created: int = 1) -> Batch:
    there = None if one is None else entry(one, created)
    return Batch(1, revision, False, [Event(NAMES.member(node_id), there)])


def kinds(changes: list[Change]) -> list[tuple[str, str]]:
    return [(each.kind.value, each.member.id) for each in changes]


class Histories(RuleBasedStateMachine):
    """An etcd that members enter and leave, and a view that follows it, loses it, reads it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.view = View(NAMES, OWN, TTL_S)
        self.now = 100.0
        self.revision, self.cluster = 5, 1
        self.there: dict[str, tuple[Member, int]] = {}  # etcd: the entry, and what made it
        self.follows = False
        self.was_read = False
        self.thaw = 0.0
        self.shown: dict[str, Member] = {}  # what the changes, one after another, come to
        self.expected: dict[str, float | None] = {}  # when it goes; None: it is there

    # --- what etcd does; the view hears of it if it follows --------------------------------------

    @rule(node=st.sampled_from(IDS), incarnation=st.integers(1, 3), weight=st.integers(1, 3))
    def enter(self, node: str, incarnation: int, weight: int) -> None:
        self.revision += 1
        _, created = self.there.get(node, (None, self.revision))
        one = member(node, incarnation, weight=weight)
        self.there[node] = one, created
        if self.follows:
            self.expected[node] = None
            self.hear(batch(self.revision, node, one, created))

    @rule(node=st.sampled_from(IDS))
    def leave(self, node: str) -> None:
        if self.there.pop(node, None) is None:
            return
        self.revision += 1
        if self.follows:
            self.miss(node)
            self.hear(batch(self.revision, node, None))

    @rule()
    def lose_all_data(self) -> None:
        self.lose()
        self.there, self.revision = {}, 1

    # --- what the view does ----------------------------------------------------------------------

    @rule()
    def lose(self) -> None:
        self.view.lost()
        self.follows = False

    @rule()
    def read(self) -> None:
        is_gap = self.was_read and (not self.follows or self.revision < self.view.revision)
        if is_gap:
            self.thaw = self.now + TTL_S + GRACE_S
        self.follows = self.was_read = True
        for node in self.there:
            self.expected[node] = None
        for node in set(self.expected) - set(self.there):
            self.miss(node)
        entries = {NAMES.member(n): entry(one, made) for n, (one, made) in self.there.items()}
        self.apply(self.view.snapshot(Found(self.cluster, self.revision, entries), self.now))

    @rule(seconds=st.floats(0.0, 15.0))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        if self.follows:
            self.view.heard(self.now)
        self.apply(self.view.tick(self.now))

    @precondition(lambda self: self.follows)
    @rule()
    def hear_something_old(self) -> None:
        gone = batch(self.view.revision, IDS[1], None)
        self.apply(self.view.change(gone, self.now))

    def hear(self, what: Batch) -> None:
        self.apply(self.view.change(what, self.now))

    def miss(self, node: str) -> None:
        if node in self.expected and self.expected[node] is None:
            own_s = TTL_S + GRACE_S if node == OWN else 0.0
            self.expected[node] = max(self.now + own_s, self.thaw)

    def apply(self, changes: list[Change]) -> None:
        for each in changes:
            node = each.member.id
            assert (each.kind is Kind.JOIN) == (node not in self.shown)
            if each.kind is Kind.LEAVE:
                del self.shown[node]
            else:
                self.shown[node] = each.member
        if self.follows:
            over = [n for n, at in self.expected.items() if at is not None and at <= self.now]
            for node in over:
                del self.expected[node]

    @invariant()
    def the_view_is_what_is_expected(self) -> None:
        assert self.view.members.keys() == self.expected.keys()
        assert self.view.members == self.shown
        for node, at in self.expected.items():
            if at is None and self.follows:
                assert self.view.members[node].vote == self.there[node][0].vote
        assert self.view.fingerprint() == fingerprint_of(self.shown.values())


TestHistories = Histories.TestCase


def test_each_kind_of_change() -> None:
    view = View(NAMES, OWN, TTL_S)
    a, b = member(IDS[1]), member(IDS[2])
    assert view.is_frozen(0)
    assert kinds(view.snapshot(found(10, a, b), 0.0)) == [("join", a.id), ("join", b.id)]
    assert not view.is_frozen(TTL_S)
    assert view.is_frozen(TTL_S + 0.1)
    assert kinds(view.change(batch(11, a.id, None), 1.0)) == [("leave", a.id)]
    assert kinds(view.change(batch(12, a.id, a, 12), 1.1)) == [("join", a.id)]
    assert view.change(batch(12, a.id, None), 1.2) == []  # seen already
    again = dataclasses.replace(a, incarnation=2)
    assert kinds(view.change(batch(13, a.id, again, 12), 1.3)) == [("restart", a.id)]
    drained = dataclasses.replace(again, state=DRAINING)
    assert kinds(view.change(batch(14, a.id, drained, 12), 1.4)) == [("change", a.id)]
    assert kinds(view.change(batch(15, a.id, drained, 15), 1.5)) == [("back", a.id)]


def test_nobody_leaves_until_the_grace_is_over() -> None:
    view = View(NAMES, OWN, TTL_S)
    a, b = member(IDS[1]), member(IDS[2])
    view.snapshot(found(10, a, b), 0.0)
    view.lost()
    assert view.tick(1e6) == []
    assert view.snapshot(found(20, a), 100.0) == []
    view.heard(111.0)
    assert view.tick(111.9) == []
    assert kinds(view.tick(112.0)) == [("leave", b.id)]


@pytest.mark.parametrize("sign", ["revision", "cluster", "pool"])
def test_an_etcd_without_its_data_is_noticed_and_costs_nothing(sign: str) -> None:
    view = View(NAMES, OWN, TTL_S)
    a, b = member(IDS[1]), member(IDS[2])
    pool = {NAMES.pool: Entry(b"first", 1, 1)}
    first = found(10, a, b)
    view.snapshot(dataclasses.replace(first, entries=first.entries | pool), 0.0)
    before = view.fingerprint()
    other = {"revision": found(2), "cluster": found(30, cluster=2), "pool": found(30)}[sign]
    entries = {NAMES.pool: Entry(b"second", 1, 1)} if sign == "pool" else {}
    assert view.snapshot(dataclasses.replace(other, entries=entries), 1.0) == []
    assert view.generation == 1
    assert (view.fingerprint(), len(view.members)) == (before, 2)
    now = other.revision + 1
    assert kinds(view.change(batch(now, a.id, a, now), 2.0)) == [("back", a.id)]
    view.heard(20.0)
    assert kinds(view.tick(20.0)) == [("leave", b.id)]


def test_the_fingerprint_is_of_ids_lives_and_weights_alone() -> None:
    a, b = member(IDS[1]), member(IDS[2])
    same = [dataclasses.replace(b, state=DRAINING, registered=9, host="x"), a]
    assert fingerprint_of([a, b]) == fingerprint_of(same)
    for other in (dataclasses.replace(b, weight=2), dataclasses.replace(b, incarnation=2)):
        assert fingerprint_of([a, b]) != fingerprint_of([a, other])


def test_there_is_a_most_of_members_and_of_bad_ones() -> None:
    view = View(NAMES, OWN, TTL_S)
    many = [member(f"{number:032x}") for number in range(MEMBERS_MAX + 100)]
    view.snapshot(found(10, *many), 0.0)
    assert len(view.members) == MEMBERS_MAX
    assert (len(view.bad), view.bad_seen) == (64, 100)


def test_who_is_spoiled_stays_as_it_was() -> None:
    view = View(NAMES, OWN, TTL_S)
    a = member(IDS[1])
    view.snapshot(found(10, a), 0.0)
    spoiled = Batch(1, 11, False, [Event(NAMES.member(a.id), Entry(b"junk", 1, 11))])
    assert view.change(spoiled, 1.0) == []
    assert view.members == {a.id: dataclasses.replace(a, registered=1)}
    assert view.bad == {a.id: "it is not JSON"}
    assert view.change(batch(12, a.id, None), 2.0)
    assert view.bad == {}


def test_an_entry_comes_back_as_it_was() -> None:
    one = member(secrets.token_hex(16), 7, weight=256, state=DRAINING, host="node 1")
    assert member_of(one.id, one.entry(), 3) == dataclasses.replace(one, registered=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("form", 2),
        ("form", None),
        ("incarnation", 0),
        ("incarnation", 2**63),
        ("incarnation", True),
        ("incarnation", "7"),
        ("weight", 257),
        ("weight", 1.5),
        ("addresses", []),
        ("addresses", ["a:1"] * 9),
        ("addresses", "10.0.0.1:7070"),
        ("addresses", ["10.0.0.1"]),
        ("addresses", ["10.0.0.1:0"]),
        ("addresses", ["10.0.0.1:70\n"]),
        ("addresses", ["a b:70"]),
        ("state", "gone"),
        ("host", 5),
    ],
)
def test_a_bad_entry_says_what_is_bad(field: str, value: Any) -> None:
    import json

    told = json.loads(member(IDS[1]).entry()) | {field: value}
    with pytest.raises(BadEntry, match="address" if field == "addresses" else field):
        member_of(IDS[1], json.dumps(told).encode(), 1)


@pytest.mark.parametrize(
    "value", [b"", b"[]", b"\xff", b"[" * 8000, b"{" + b" " * ENTRY_BYTES_MAX + b"}"]
)
def test_what_is_no_entry_at_all(value: bytes) -> None:
    with pytest.raises(BadEntry):
        member_of(IDS[1], value, 1)


@pytest.mark.parametrize("node_id", ["", "../x", "A" * 32, "0" * 31, "0" * 33])
def test_a_key_that_is_no_id(node_id: str) -> None:
    with pytest.raises(BadEntry, match="no id"):
        member_of(node_id, member(IDS[1]).entry(), 1)


def test_a_key_of_another_cluster_is_no_member() -> None:
    one, other = Names("/kvpool", "one"), Names("/kvpool", "one-more")
    assert one.member_of(other.member(IDS[1])) is None
    assert one.member_of(one.pool) is None
    assert not other.root.startswith(one.root)
