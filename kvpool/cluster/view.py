"""Who is in the cluster, from what etcd says. Touches nothing: it is fed reads, changes and times.

Promises:  1. losing etcd freezes the view and never empties it: nobody leaves because etcd is away;
           2. after any gap whoever is missing is kept for the ttl and GRACE_S: time to enter again;
           3. two views with the same fingerprint share the directory out alike. A revision alone
              proves nothing: an etcd that lost its data begins at 1 again;
           4. an entry that is no member costs itself alone, and is counted.
Thread rule: none; whoever runs it has a lock.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.cluster.answers import Batch, Entry, Found
from kvpool.cluster.member import BadEntry, Member, member_of
from kvpool.cluster.names import Names

GRACE_S = 2.0
MEMBERS_MAX = 4096
BAD_MAX = 64  # that are remembered by name
POOL_BYTES_MAX = 64


class Kind(enum.Enum):
    """What happened to a member."""

    JOIN = "join"
    LEAVE = "leave"
    RESTART = "restart"  # the same id, but another process: its memory is new
    BACK = "back"  # it lost its lease and kept its memory
    CHANGE = "change"  # its weight, addresses or state


@dataclass(frozen=True, slots=True)
class Change:
    kind: Kind
    member: Member


class View:
    """The members, this node included once it has entered."""

    def __init__(self, names: Names, own_id: str, ttl_s: float) -> None:
        self.members: dict[str, Member] = {}
        self.generation = 0  # of the data in etcd
        self.revision = 0
        self.pool: str | None = None
        self.bad: dict[str, str] = {}  # what is skipped, and why
        self.bad_seen = 0  # entries skipped so far
        self.is_following = False
        self._names = names
        self._own_id = own_id
        self._ttl_s = ttl_s
        self._bad_before: dict[str, str] = {}
        self._cluster: int | None = None
        self._leaving: dict[str, float] = {}  # when it goes, unless it comes back
        self._thaw_at = -math.inf
        self._heard_at = -math.inf

    @property
    def cluster(self) -> int | None:
        """The id of the etcd that was read last; None: none ever was."""
        return self._cluster

    def fingerprint(self) -> int:
        return fingerprint_of(self.members.values())

    def is_frozen(self, now: float) -> bool:
        """Nobody leaves, and nobody is known to be there still."""
        return not self.is_following or now > self._heard_at + self._ttl_s

    def heard(self, now: float) -> None:
        """etcd answered something."""
        self._heard_at = max(self._heard_at, now)

    def lost(self) -> None:
        """Changes are not followed any more."""
        self.is_following = False

    def snapshot(self, found: Found, now: float) -> list[Change]:
        """A read of everything under the cluster's root."""
        is_first = self._cluster is None
        pool = self._pool_in(found)
        is_other = found.cluster != self._cluster or found.revision < self.revision
        is_other = is_other or (self.pool is not None and pool not in (None, self.pool))
        if not is_first and (is_other or not self.is_following):
            self._thaw_at = now + self._ttl_s + GRACE_S
        if is_other and not is_first:
            self.generation += 1
        self.pool = pool or (None if is_other else self.pool)
        self._cluster, self.revision, self.is_following = found.cluster, found.revision, True
        self.heard(now)
        self._bad_before, self.bad = self.bad, {}
        changes = []
        there = set()
        for key, entry in found.entries.items():
            if (name := self._names.member_of(key)) is not None:
                there.add(name)
                changes += self._put(name, entry)
        for name in self.members.keys() - there:
            self._drop(name, now)
        return changes + self.tick(now)

    def change(self, batch: Batch, now: float) -> list[Change]:
        """What a watch says. What a read knew already is left out."""
        self.heard(now)
        if batch.revision <= self.revision:
            return []
        self.revision = batch.revision
        changes = []
        for event in batch.events:
            if event.key == self._names.pool:
                self.pool = None if event.entry is None else _pool_of(event.entry)
            if (name := self._names.member_of(event.key)) is None:
                continue
            if event.entry is None:
                self.bad.pop(name, None)
                self._drop(name, now)
            else:
                changes += self._put(name, event.entry)
        return changes + self.tick(now)

    def tick(self, now: float) -> list[Change]:
        """Time went on."""
        if self.is_frozen(now):
            return []
        gone = [name for name, at in self._leaving.items() if at <= now]
        for name in gone:
            del self._leaving[name]
        return [Change(Kind.LEAVE, self.members.pop(name)) for name in gone]

    def _put(self, name: str, entry: Entry) -> list[Change]:
        old = self.members.get(name)
        try:
            if old is None and len(self.members) >= MEMBERS_MAX:
                raise BadEntry(f"there are {MEMBERS_MAX} members already")
            new = member_of(name, entry.value, entry.created)
        except BadEntry as error:
            reason = str(error)
            self.bad_seen += reason not in (self.bad.get(name), self._bad_before.get(name))
            if len(self.bad) < BAD_MAX:
                self.bad[name] = reason
            return []  # who was there before it was spoiled is kept
        self.bad.pop(name, None)
        self._leaving.pop(name, None)
        self.members[name] = new
        if old is None:
            return [Change(Kind.JOIN, new)]
        if old.incarnation != new.incarnation:
            return [Change(Kind.RESTART, new)]
        if old.registered != new.registered:
            return [Change(Kind.BACK, new)]
        return [] if old == new else [Change(Kind.CHANGE, new)]

    def _drop(self, name: str, now: float) -> None:
        if name not in self.members or name in self._leaving:
            return
        # This process knows that it lives: others drop it, and it enters again.
        at = now + self._ttl_s + GRACE_S if name == self._own_id else now
        self._leaving[name] = max(at, self._thaw_at)

    def _pool_in(self, found: Found) -> str | None:
        entry = found.entries.get(self._names.pool)
        return None if entry is None else _pool_of(entry)


def fingerprint_of(members: Iterable[Member]) -> int:
    """64 bits of who is there, in which life, with which weight."""
    votes = sorted(each.vote for each in members)
    text = "".join(f"{node} {incarnation} {weight}\n" for node, incarnation, weight in votes)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _pool_of(entry: Entry) -> str | None:
    text = entry.value[:POOL_BYTES_MAX].decode("utf-8", "replace")
    return text if text.isprintable() and text else None
