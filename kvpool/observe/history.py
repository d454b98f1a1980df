"""Rates of the last day, from reports that come every second or so: for charts and `kvpool top`.

Three rings for each tenant and one for all of them: a point a second for 5 minutes, one every 10 s
for an hour, one a minute for a day. A point is the rate since the point before it in its ring, from
the counters of both, so that a slower ring loses nothing of what happened in between.

Promises:  1. memory is bounded: POINTS x FIELDS float32 and their times (115 KiB) a tenant, for
              TENANTS_MAX tenants (7.3 MiB); what is beyond them is in "all" alone;
           2. a counter that fell (a tenant that began anew) counts from 0: no rate is negative;
           3. the clock is an argument; one that stands still or goes back adds nothing.
Thread rule: one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.observe.report import Report, Tenant

RINGS = ((1, 300), (10, 360), (60, 1440))  # seconds from one point to the next, points
TENANTS_MAX = 64
EARLY = 0.5  # of a step: a report this much before its time still makes a point, or many would miss

# Counters; and what is shown of the differences between two of them.
_COUNTERS = ("requested", "hit", "asked", "loaded", "loaded_bytes", "stored_bytes")
_EVICTIONS, _SSD_EVICTIONS = len(_COUNTERS), len(_COUNTERS) + 1
_COUNTED = len(_COUNTERS) + 2
LEVELS = ("dram_used_bytes", "dram_limit_bytes", "ssd_used_bytes", "ssd_capacity_bytes", "clients")
RATES = (
    "requested_blocks_per_s",
    "loaded_blocks_per_s",
    "get_bytes_per_s",
    "put_bytes_per_s",
    "dram_evictions_per_s",
    "ssd_evictions_per_s",
)
FIELDS = ("hit_ratio", *RATES, *LEVELS)
POINTS = sum(points for _, points in RINGS)

_Floats = npt.NDArray[np.float64]


class History:
    """Feed it reports; ask it for series."""

    def __init__(self) -> None:
        self._all = _Scope()
        self._tenants: dict[str, _Scope] = {}
        self._last: dict[str, _Floats] | None = None  # counters of the report before
        self._clock_s = -math.inf
        self._unix_s = 0.0

    def add(self, report: Report, clock_s: float) -> None:
        """clock_s: of a clock that only goes forward, such as time.monotonic()."""
        if clock_s <= self._clock_s:
            return
        self._clock_s, self._unix_s = clock_s, report.now_s
        counters = {each.name: _counters_of(each) for each in report.tenants}
        levels = {each.name: _levels_of(each) for each in report.tenants}
        whole = np.zeros(_COUNTED)
        for name, now in counters.items():
            grown = _grown(now, self._before(name, now))
            whole += grown
            scope = self._scope(name)
            if scope is not None:
                scope.add(clock_s, grown, levels[name])
        self._all.add(clock_s, whole, sum(levels.values(), np.zeros(len(LEVELS))))
        self._tenants = {name: each for name, each in self._tenants.items() if name in counters}
        self._last = counters

    def _before(self, name: str, now: _Floats) -> _Floats:
        """What to count from: in the first report all of it is old, in a later one what is new."""
        if self._last is None:
            return now
        return self._last.get(name, np.zeros(_COUNTED))

    def _scope(self, name: str) -> _Scope | None:
        if name not in self._tenants and len(self._tenants) < TENANTS_MAX:
            self._tenants[name] = _Scope()
        return self._tenants.get(name)

    def series(self, step_s: int, tenant: str | None = None) -> dict[str, Any]:
        """The points of one ring, oldest first: {"step_s", "now_s", "times", and each of FIELDS}.

        times: Unix seconds, put back from the newest report's time by the clock. None in a field:
        not known, such as the hit ratio of a time in which nobody asked. tenant: None for all.
        Raises KeyError for a tenant or a step that there is not.
        """
        scope = self._all if tenant is None else self._tenants[tenant]
        times, values = scope.rings[step_s].ordered()
        shift_s = self._unix_s - self._clock_s
        columns = {
            field: [None if math.isnan(value) else value for value in values[:, index].tolist()]
            for index, field in enumerate(FIELDS)
        }
        return {
            "step_s": step_s,
            "now_s": self._unix_s,
            "times": [round(each + shift_s, 3) for each in times.tolist()],
            **columns,
        }

    def latest(self, tenant: str | None = None) -> Mapping[str, float | None]:
        """The newest point of the fastest ring; all None before there is one. Raises KeyError."""
        series = self.series(RINGS[0][0], tenant)
        return {field: series[field][-1] if series[field] else None for field in FIELDS}


class _Scope:
    """The rings of one tenant, or of all."""

    def __init__(self) -> None:
        self.rings = {step_s: _Ring(step_s, points) for step_s, points in RINGS}

    def add(self, clock_s: float, grown: _Floats, levels: _Floats) -> None:
        for ring in self.rings.values():
            ring.add(clock_s, grown, levels)


class _Ring:
    """Points at least a step apart. What grew since the last one waits in _grown."""

    def __init__(self, step_s: int, points: int) -> None:
        self._step_s = step_s
        self._times = np.zeros(points)
        self._values = np.full((points, len(FIELDS)), np.nan, dtype=np.float32)
        self._count = 0
        self._grown = np.zeros(_COUNTED)
        self._since_s: float | None = None  # of the last point; None: no report yet

    def add(self, clock_s: float, grown: _Floats, levels: _Floats) -> None:
        if self._since_s is None:
            self._since_s = clock_s
            return
        self._grown += grown
        passed_s = clock_s - self._since_s
        if passed_s < self._step_s - min(EARLY, self._step_s * EARLY):
            return
        at = self._count % len(self._times)
        self._times[at] = clock_s
        self._values[at] = _point(self._grown, passed_s, levels)
        self._count += 1
        self._grown[:] = 0
        self._since_s = clock_s

    def ordered(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float32]]:
        size = len(self._times)
        if self._count <= size:
            return self._times[: self._count], self._values[: self._count]
        turn = -(self._count % size)
        return np.roll(self._times, turn), np.roll(self._values, turn, axis=0)


def _counters_of(tenant: Tenant) -> _Floats:
    traffic = [getattr(tenant.traffic, name) for name in _COUNTERS]
    evictions = [tenant.dram.evictions, tenant.ssd.evictions if tenant.ssd else 0]
    return np.array(traffic + evictions, dtype=np.float64)


def _levels_of(tenant: Tenant) -> _Floats:
    ssd = tenant.ssd
    disk = [ssd.used_bytes, ssd.capacity_bytes] if ssd else [0, 0]
    memory = [tenant.dram.used_bytes, tenant.dram.limit_bytes]
    return np.array([*memory, *disk, len(tenant.clients)], dtype=np.float64)


def _grown(now: _Floats, before: _Floats) -> _Floats:
    """A tenant whose counters fell, even one of them, began anew: all of it has grown since."""
    return now if bool((now < before).any()) else now - before


def _point(grown: _Floats, passed_s: float, levels: _Floats) -> list[float]:
    requested, hit, asked, loaded, loaded_bytes, stored_bytes = grown[:_EVICTIONS].tolist()
    of_gets = loaded / asked if asked else math.nan
    ratio = hit / requested if requested else of_gets
    rates = [requested, loaded, loaded_bytes, stored_bytes, *grown[_EVICTIONS:].tolist()]
    return [ratio, *(each / passed_s for each in rates), *levels.tolist()]
