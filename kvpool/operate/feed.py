"""Reports one after the other, from a daemon that may go away and come back.

Promises:  1. next() never raises for a daemon's sake: it gives a sample, or why there is none;
           2. rates are of the daemon's own clock, and there are none across its restart.
Thread rule: one next() at a time; close() from any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from kvpool.errors import KvpoolError
from kvpool.observe.report import Report, Tenant, Traffic
from kvpool.operate.client import Hot, Operator, Reach

POLL_S = 3.0  # that one sample may take
HOTTEST_MAX = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """One report, the hottest prefixes with it, and the report before it."""

    report: Report
    where: str
    hottest: list[Hot] = field(default_factory=list)
    before: Report | None = None

    @property
    def seconds(self) -> float:
        """Since the report before; 0 without one of the same process."""
        before, now = self.before, self.report
        if before is None or (before.pid, before.started_s) != (now.pid, now.started_s):
            return 0.0
        return max(0.0, now.now_s - before.now_s)


@dataclass(frozen=True, slots=True)
class Lost:
    """Why there is no sample."""

    reason: str


class Feed:
    """Keeps one connection and makes it anew when it broke. A context manager."""

    def __init__(
        self,
        reach: Reach,
        *,
        with_hottest: bool = False,
        open_link: Callable[[Reach, float], Any] = Operator.connect,
    ) -> None:
        """Connects at the first next()."""
        self._reach = reach
        self._with_hottest = with_hottest
        self._open = open_link
        self._operator: Any = None
        self._before: Report | None = None
        self._is_closed = False

    def next(self) -> Sample | Lost:
        """Blocks for POLL_S and a second try at most."""
        was_connected = self._operator is not None
        found = self._once()
        if isinstance(found, Lost) and was_connected:  # it may be another daemon by now
            found = self._once()
        return found

    def _once(self) -> Sample | Lost:
        if self._is_closed:
            return Lost("closed")
        try:
            operator = self._operator  # close() may come from another thread
            if operator is None:
                operator = self._operator = self._open(self._reach, POLL_S)
            report = operator.report()
            hottest = operator.hottest(HOTTEST_MAX) if self._with_hottest else []
        except KvpoolError as error:
            self._disconnect()
            return Lost(str(error))
        sample = Sample(report, operator.where, hottest, self._before)
        self._before = report
        return sample

    def close(self) -> None:
        """Ends a next() that waits in another thread, too. Idempotent."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        operator, self._operator = self._operator, None
        if operator is not None:
            with contextlib.suppress(OSError):
                operator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Flow:
    """What happened between two reports. Per second, but for the ratio; 0 for not known."""

    lookups: float = 0.0
    loaded_bytes: float = 0.0
    stored_bytes: float = 0.0
    evictions: float = 0.0
    ssd_read_bytes: float = 0.0
    ssd_written_bytes: float = 0.0
    hit_ratio: float | None = None


def flow(now: list[Tenant], before: list[Tenant], seconds: float) -> Flow:
    """Of these tenants together; those that only one side has are left out."""
    if seconds <= 0:
        return Flow()
    known = {tenant.name: tenant for tenant in before}
    pairs = [(tenant, known[tenant.name]) for tenant in now if tenant.name in known]

    def per_s(pick: Callable[[Tenant], float]) -> float:
        return max(0.0, sum(pick(new) - pick(old) for new, old in pairs) / seconds)

    return Flow(
        lookups=per_s(lambda each: each.traffic.lookups),
        loaded_bytes=per_s(lambda each: each.traffic.loaded_bytes),
        stored_bytes=per_s(lambda each: each.traffic.stored_bytes),
        evictions=per_s(lambda each: each.dram.evictions),
        ssd_read_bytes=per_s(lambda each: each.ssd.read_bytes if each.ssd else 0),
        ssd_written_bytes=per_s(lambda each: each.ssd.written_bytes if each.ssd else 0),
        hit_ratio=_ratio_between([(new.traffic, old.traffic) for new, old in pairs]),
    )


def _ratio_between(pairs: list[tuple[Traffic, Traffic]]) -> float | None:
    """As Traffic.hit_ratio(), of what came in between."""
    requested = sum(new.requested - old.requested for new, old in pairs)
    if requested > 0:
        return sum(new.hit - old.hit for new, old in pairs) / requested
    asked = sum(new.asked - old.asked for new, old in pairs)
    return sum(new.loaded - old.loaded for new, old in pairs) / asked if asked > 0 else None
