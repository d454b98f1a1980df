"""What a daemon has of its cluster: who is a member, the core's part of it, and the dialer between.

Promises:  1. the core is told whole views, one after the other, each with this node in it: until it
              stands among the members itself it serves alone, and goes on with the last view while
              it does not for a moment;
           2. leave() and close() end by the time that they are given, whoever does not answer;
           3. nothing that etcd, a member or a network does ends a thread of this.
Thread rule: from any thread; start(), leave() and close() one after the other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from kvpool.cluster.core import Core, Vote
from kvpool.cluster.dialer import Dialer, Target
from kvpool.cluster.lane_watch import LaneWatch
from kvpool.cluster.member import DRAINING, Member
from kvpool.cluster.peer_link import Own
from kvpool.cluster.roster import Roster
from kvpool.cluster.static_members import LIST_INCARNATION
from kvpool.errors import KvpoolError
from kvpool.serve_log import EventLog

_LOOK_S = 0.5  # of the thread that follows the members, until it looks whether to end


class Members(Protocol):
    """Who keeps this node among the members, and knows the others."""

    @property
    def roster(self) -> Roster: ...
    def newer(self, version: int, timeout_s: float) -> Roster | None: ...
    def start(self) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def close(self) -> None:
        """Leaves; in its own time."""
        ...


class Place(Protocol):
    """This node's place among the members, and what it keeps on disk for it."""

    @property
    def members(self) -> Members: ...
    def close(self) -> None: ...


class Joined:
    """A daemon's part of its cluster. cores: by the names of tenants. All of it is closed with it.

    From a list nobody knows in which life a member is: that is taken from the member itself, when
    one meets the other (met()).
    """

    def __init__(
        self,
        own: Own,
        cores: Mapping[str, Core],
        place: Place,
        log: EventLog,
        *,
        lanes: Mapping[str, bytes] | None = None,
    ) -> None:
        """lanes: what members are told of the memory of each tenant that they may read."""
        self.own = own
        self.cores = cores
        self.lanes = lanes or {}
        self.members = place.members
        self.dialer = Dialer(own, cores, log, met=self.met, readers=self.lanes)
        self._watch = LaneWatch(log)
        self._place = place
        self._log = log
        self._is_ended = False
        self._turn = threading.Lock()  # guards what follows, and the order in which views are told
        self._roster: Roster | None = None  # that was taken over
        self._applied: list[Vote] = []
        self._lives = {own.node: own.incarnation}  # of members of a list that were met
        self._follower = threading.Thread(target=self._follow, name="kvpool-roster", daemon=True)
        self._leaver = threading.Thread(target=self._leave, name="kvpool-leave", daemon=True)

    def start(self) -> None:
        """Others may connect from now on: this node listens already."""
        self.dialer.start()
        self._follower.start()
        self.members.start()

    def leave(self, timeout_s: float) -> bool:
        """Says goodbye, while everything still works: first to those who look for members, then to
        those who look for blocks. False: not all of them have heard it."""
        deadline = time.monotonic() + timeout_s
        self._is_ended = True
        self._leaver.start()
        self._leaver.join(timeout_s / 2)
        is_told = True
        for each in self.cores.values():
            try:
                is_told &= each.leave(max(0.0, deadline - time.monotonic()))
            except KvpoolError as error:
                self._log.warning("leave not told", reason=error)
                is_told = False
        self._leaver.join(max(0.0, deadline - time.monotonic()))
        return is_told and not self._leaver.is_alive()

    def close(self, timeout_s: float) -> None:
        """Idempotent. Whatever is still under way after that time harms nobody."""
        deadline = time.monotonic() + timeout_s
        self._is_ended = True
        self.dialer.stop()
        for each in self.cores.values():
            with contextlib.suppress(KvpoolError):
                each.close(max(0.0, deadline - time.monotonic()))
        if self._leaver.ident is None:
            self._leaver.start()
        for thread in (self._leaver, self._follower):
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        self.dialer.close(max(0.0, deadline - time.monotonic()))

    def met(self, node: bytes, incarnation: int) -> None:
        """A member has said, and proved, in which life it is. Raises KvpoolError."""
        with self._turn:
            roster = self._roster
            if roster is None or self._lives.get(node, 0) >= incarnation:
                return
            member = roster.member(node.hex())
            if member is not None and member.incarnation == LIST_INCARNATION:
                self._lives[node] = incarnation
                self._apply(roster)

    @property
    def roster(self) -> Roster:
        """The newest."""
        return self.members.roster

    def life_of(self, member: Member) -> int:
        """As far as is known."""
        with self._turn:
            return self._life(bytes.fromhex(member.id), member)

    def _leave(self) -> None:
        try:
            self._place.close()
        except Exception as error:  # the process ends, and what is kept for it with it
            self._log.error("members not left", reason=repr(error))

    def _follow(self) -> None:
        version = -1
        while not self._is_ended:
            roster = self.members.newer(version, _LOOK_S)
            if self.lanes:
                self._look_at_lanes()
            if roster is None:
                continue
            version = roster.version
            try:
                self.apply(roster)
            except KvpoolError as error:  # no memory for it, or the core closes
                self._log.error("members not taken over", reason=error)

    def _look_at_lanes(self) -> None:
        with contextlib.suppress(KvpoolError):  # it closes
            self._watch.look({name: self.cores[name] for name in self.lanes})

    def apply(self, roster: Roster) -> None:
        """Tells the core and the dialer, if this node is one of the members. Raises KvpoolError."""
        if roster.member(self.own.node.hex()) is None:
            return
        with self._turn:
            self._roster = roster
            self._lives = {
                id: life for id, life in self._lives.items() if roster.member(id.hex()) is not None
            }
            self._apply(roster)

    def _apply(self, roster: Roster) -> None:
        members = {bytes.fromhex(each.id): each for each in roster.members}
        lives = {id: self._life(id, each) for id, each in members.items()}
        # The dialer first: the core wishes for connections as soon as it knows whom to ask.
        self.dialer.set_targets(
            {
                id: Target(lives[id], each.addresses, each.incarnation == LIST_INCARNATION)
                for id, each in members.items()
                if id != self.own.node
            }
        )
        votes = [
            (id, lives[id], each.weight, each.state == DRAINING) for id, each in members.items()
        ]
        if votes == self._applied:
            return
        for core in self.cores.values():
            core.set_members(votes)
        self._applied = votes
        self._log.info("members", count=len(votes), fingerprint=f"{roster.fingerprint:016x}")

    def _life(self, id: bytes, member: Member) -> int:
        if member.incarnation == LIST_INCARNATION:
            return self._lives.get(id, LIST_INCARNATION)
        return member.incarnation
