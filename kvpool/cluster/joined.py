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
from typing import Protocol

from kvpool.cluster.core import Core, Vote
from kvpool.cluster.dialer import Dialer, Target
from kvpool.cluster.member import DRAINING, Member
from kvpool.cluster.peer_link import Own
from kvpool.cluster.roster import Board, Roster
from kvpool.errors import KvpoolError
from kvpool.serve_log import EventLog

_LOOK_S = 0.5  # of the thread that follows the members, until it looks whether to end


class Membership(Protocol):
    """Who keeps this node among the members, and knows the others."""

    @property
    def board(self) -> Board: ...
    def start(self) -> None: ...
    def leave(self, timeout_s: float) -> bool:
        """Takes this node's entry away. False: nobody confirmed it in time; it runs out."""
        ...

    def close(self, timeout_s: float) -> bool: ...


class Joined:
    """A daemon's part of its cluster. cores: by the names of tenants; they are closed with it."""

    def __init__(
        self, own: Own, cores: Mapping[str, Core], membership: Membership, log: EventLog
    ) -> None:
        self.own = own
        self.cores = cores
        self.membership = membership
        self.dialer = Dialer(own, cores, log)
        self._log = log
        self._is_ended = False
        self._applied: tuple[Vote, ...] = ()
        self._follower = threading.Thread(target=self._follow, name="kvpool-members", daemon=True)

    @property
    def roster(self) -> Roster:
        """The newest."""
        return self.membership.board.roster

    def start(self) -> None:
        """Others may connect from now on: this node listens already."""
        self.dialer.start()
        self._follower.start()
        self.membership.start()

    def leave(self, timeout_s: float) -> bool:
        """Says goodbye, while everything still works: first to those who look for members, then to
        those who look for blocks. False: not all of them heard it."""
        deadline = time.monotonic() + timeout_s
        is_told = self.membership.leave(timeout_s)
        for each in self.cores.values():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            try:
                each.leave(left_s)
            except KvpoolError as error:
                self._log.warning("leave not told", reason=error)
                is_told = False
        return is_told

    def close(self, timeout_s: float) -> None:
        """Idempotent. Whatever is still under way after that time harms nobody."""
        deadline = time.monotonic() + timeout_s
        self._is_ended = True
        self.membership.board.close()
        self.dialer.stop()
        for each in self.cores.values():
            with contextlib.suppress(KvpoolError):
                each.close(max(0.0, deadline - time.monotonic()))
        self.membership.close(max(0.0, deadline - time.monotonic()))
        self.dialer.close(max(0.0, deadline - time.monotonic()))
        if self._follower.ident is not None:
            self._follower.join(max(0.0, deadline - time.monotonic()))

    def _follow(self) -> None:
        board = self.membership.board
        version = -1
        while not self._is_ended:
            roster = board.newer(version, _LOOK_S)
            if roster is None:
                continue
            version = roster.version
            try:
                self.apply(roster)
            except KvpoolError as error:  # no memory for it, or the core closes
                self._log.error("members not taken over", reason=error)

    def apply(self, roster: Roster) -> None:
        """Tells the core and the dialer, if this node is one of the members. Raises KvpoolError."""
        if roster.member(self.own.node.hex()) is None:
            return
        votes = tuple(_vote(each) for each in roster.members)
        others = [each for each in roster.members if each.id != self.own.node.hex()]
        # The dialer first: the core wishes for connections as soon as it knows whom to ask.
        self.dialer.set_targets({bytes.fromhex(each.id): _target(each) for each in others})
        if votes == self._applied:
            return
        for core in self.cores.values():
            core.set_members(votes)
        self._applied = votes
        self._log.info("members", count=len(votes), fingerprint=f"{roster.fingerprint:016x}")


def _vote(member: Member) -> Vote:
    is_draining = member.state == DRAINING
    return bytes.fromhex(member.id), member.incarnation, member.weight, is_draining


def _target(member: Member) -> Target:
    return Target(member.incarnation, member.addresses)
