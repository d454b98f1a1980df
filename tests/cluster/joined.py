"""Members for tests: real ones, with threads and connections, that remember what happened."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvpool.cluster.access import Access
from kvpool.cluster.gateway import Gateway, timeout_for
from kvpool.cluster.member import Member
from kvpool.cluster.membership import Membership
from kvpool.cluster.names import Names
from kvpool.cluster.told import Told
from kvpool.cluster.view import Change, Kind
from kvpool.serve_log import EventLog
from tests.cluster.etcd import Etcd

TTL_S = 3
LATE_S = 60.0  # a wait that takes so long has failed
NAMES = Names("/kvpool", "one")


class Remembering(Told):
    """A log that nobody reads, and every change in a list."""

    def __init__(self) -> None:
        logger = logging.Logger("members of a test")
        self.lines: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = self.lines.append  # type: ignore[method-assign]
        logger.addHandler(handler)
        super().__init__(EventLog(logger))
        self.changes: list[Change] = []

    def changed(self, changes: list[Change]) -> None:
        self.changes += changes
        super().changed(changes)

    def of(self, kind: Kind) -> list[str]:
        return [each.member.id for each in self.changes if each.kind is kind]

    def events(self) -> list[str]:
        return [each.getMessage() for each in self.lines]


class Joined:
    """A member, begun."""

    def __init__(self, etcd: Etcd, **told: Any) -> None:
        ttl_s = told.get("ttl_s", TTL_S)
        self.told = Remembering()
        self.me = Member(
            id=told.get("id") or secrets.token_hex(16),
            incarnation=told.get("incarnation") or time.time_ns(),
            addresses=("127.0.0.1:7070",),
            weight=told.get("weight", 1),
        )
        endpoints = told.get("endpoints", [etcd.endpoint])
        self.gateway = Gateway(endpoints, told.get("access", Access()), timeout_for(ttl_s))
        self.members = Membership(
            self.gateway,
            told.get("names", NAMES),
            self.me,
            self.told,
            ttl_s=ttl_s,
            check_s=told.get("check_s", 30.0),
        )
        self.members.start()

    @property
    def id(self) -> str:
        return self.me.id

    @property
    def roster(self) -> Any:
        return self.members.roster

    def ids(self) -> set[str]:
        return {each.id for each in self.roster.members}

    def fall_silent(self) -> None:
        """As a process that was killed: no goodbye, and its lease runs out."""
        self.gateway.close()
        self.members._stopping.set()

    def close(self) -> None:
        self.members.close()


@contextmanager
def joined(etcd: Etcd, count: int, **told: Any) -> Iterator[list[Joined]]:
    """So many members that know one another."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(Joined(etcd, **told))
            stack.callback(found[-1].close)
        until(lambda: agree(found, count), "all to know all")
        yield found


def agree(members: list[Joined], count: int) -> bool:
    """All follow, all have entered, and all see the same."""
    rosters = [each.roster for each in members]
    return (
        all(len(each.members) == count for each in rosters)
        and len({each.fingerprint for each in rosters}) == 1
        and all(each.is_entered and not each.is_frozen for each in rosters)
    )


def until(condition: Callable[[], bool], what: str, late_s: float = LATE_S) -> float:
    """-> how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < late_s, f"waited {late_s} s for {what}"
        time.sleep(0.01)
    return time.monotonic() - begin


def threads() -> int:
    return sum(each.name.startswith("kvpool") for each in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
