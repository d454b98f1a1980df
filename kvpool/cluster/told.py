"""What a membership writes to the daemon's log.

Promises:  1. etcd being away is told once, and again each REPEAT_S, however many calls failed;
           2. nothing that other members, or who writes to etcd, can cause is told without a bound.
Thread rule: any thread; nothing here is called with a lock held that others wait for.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from kvpool.cluster.answers import Denied, EtcdError, NotGateway
from kvpool.cluster.member import Member
from kvpool.cluster.view import Change, Kind
from kvpool.serve_log import EventLog

REPEAT_S = 60.0


class Told:
    """Speaks for one membership."""

    def __init__(self, log: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._turn = threading.Lock()  # often() itself is for one thread at a time
        self._trouble: dict[str, float] = {}  # what is in trouble: when that was told
        self.last_error: str | None = None

    def changed(self, changes: list[Change]) -> None:
        for each in changes:
            fields = _fields(each.member)
            with self._turn:
                if each.kind is Kind.JOIN:
                    self._log.often(logging.INFO, "member joined", **fields)
                elif each.kind is Kind.LEAVE:
                    self._log.often(logging.WARNING, "member left", **fields)
                elif each.kind is Kind.RESTART:
                    self._log.often(logging.INFO, "member restarted", **fields)
                elif each.kind is Kind.BACK:
                    self._log.often(logging.INFO, "member is back", **fields)
                else:
                    self._log.often(logging.INFO, "member changed", **fields)

    def entered(self, me: Member, where: str) -> None:
        with self._turn:
            self._log.often(logging.INFO, "entered the cluster", etcd=where, **_fields(me))

    def lease_lost(self) -> None:
        with self._turn:
            self._log.often(logging.WARNING, "lease lost")

    def replaced(self, me: Member) -> None:
        with self._turn:
            self._log.often(
                logging.ERROR,
                "replaced by another process with the same id",
                id=me.id,
                hint="was the state_dir copied? this node serves on, but others do not find it",
            )

    def frozen(self, is_frozen: bool) -> None:
        with self._turn:
            if is_frozen:
                self._log.often(logging.WARNING, "members frozen")
            else:
                self._log.often(logging.INFO, "members followed")

    def bad(self, name: str, reason: str) -> None:
        with self._turn:
            self._log.often(logging.WARNING, "bad entry of a member", id=name[:64], reason=reason)

    def trouble(self, part: str, error: EtcdError) -> None:
        """part: which of several things that go on at the same time."""
        now = self._clock()
        with self._turn:
            self.last_error = str(error)
            if now - self._trouble.get(part, now - REPEAT_S) < REPEAT_S:
                return
            is_first = not self._trouble
            self._trouble[part] = now
            if isinstance(error, Denied | NotGateway):
                self._log.often(logging.ERROR, "etcd refuses", reason=error)
            elif is_first or len(self._trouble) == 1:
                self._log.often(logging.WARNING, "etcd does not answer", reason=error)

    def went_well(self, part: str) -> None:
        with self._turn:
            had_trouble = self._trouble.pop(part, None) is not None
            if had_trouble and not self._trouble:
                self._log.often(logging.INFO, "etcd answers again")

    def bug(self, part: str) -> None:
        """In an except clause."""
        with self._turn:
            self._log.error("membership failed by a bug", part=part, exc=traceback.format_exc())


def _fields(member: Member) -> dict[str, Any]:
    return {
        "id": member.id,
        "addresses": ",".join(member.addresses),
        "weight": member.weight,
        "state": member.state,
        "host": member.host,
    }
