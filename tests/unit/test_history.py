"""kvpool.observe.history: rates of the right time, and no more memory than was said."""

from __future__ import annotations

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from kvpool.observe import history as module
from kvpool.observe import report
from kvpool.observe.history import FIELDS, RINGS, TENANTS_MAX, History
from tests import reports

BLOCK = 65_536


def at(now_s: float, **traffics: report.Traffic) -> report.Report:
    """One report; of each tenant the traffic."""
    whole = reports.example(tenants=tuple(traffics))
    tenants = [
        msgspec.structs.replace(
            each,
            traffic=traffics[each.name],
            dram=msgspec.structs.replace(each.dram, evictions=traffics[each.name].stored),
        )
        for each in whole.tenants
    ]
    return msgspec.structs.replace(whole, now_s=now_s, tenants=tenants)


def traffic(units: int) -> report.Traffic:
    """10 lookups' worth of blocks a unit, 4 of them hit; 3 blocks loaded and 2 stored."""
    return report.Traffic(
        requested=10 * units,
        hit_dram=3 * units,
        hit_ssd=units,
        asked=4 * units,
        loaded_dram=3 * units,
        loaded_bytes=3 * BLOCK * units,
        stored=2 * units,
        stored_bytes=2 * BLOCK * units,
    )


def test_rates_are_differences_by_time() -> None:
    kept = History()
    kept.add(at(1000.0, a=traffic(50)), 7.0)
    kept.add(at(1002.0, a=traffic(58)), 9.0)
    series = kept.series(1)
    assert series["times"] == [1002.0]
    assert series["hit_ratio"] == [pytest.approx(0.4)]
    assert series["requested_blocks_per_s"] == [40.0]
    assert series["loaded_blocks_per_s"] == [12.0]
    assert series["get_bytes_per_s"] == [12.0 * BLOCK]
    assert series["put_bytes_per_s"] == [8.0 * BLOCK]
    assert series["dram_evictions_per_s"] == [8.0]
    assert series["ssd_evictions_per_s"] == [0.0]
    assert series["dram_used_bytes"] == [1800 << 20]
    assert series["ssd_capacity_bytes"] == [8 << 30]
    assert series["clients"] == [2.0]
    assert kept.latest()["requested_blocks_per_s"] == 40.0


def test_a_first_report_gives_no_rate() -> None:
    kept = History()
    assert kept.latest() == dict.fromkeys(FIELDS)
    kept.add(at(1000.0, a=traffic(50)), 7.0)
    assert kept.series(1)["times"] == []
    assert kept.latest() == dict.fromkeys(FIELDS)


def test_nobody_asked_is_not_a_ratio_of_nothing() -> None:
    kept = History()
    for second in range(3):
        kept.add(at(1000.0 + second, a=traffic(5)), float(second))
    assert kept.series(1)["hit_ratio"] == [None, None]
    assert kept.series(1)["get_bytes_per_s"] == [0.0, 0.0]


def test_the_ratio_is_of_gets_where_nobody_looks_up() -> None:
    kept = History()
    kept.add(at(0.0, a=report.Traffic()), 0.0)
    kept.add(at(1.0, a=report.Traffic(asked=8, loaded_dram=6)), 1.0)
    assert kept.series(1)["hit_ratio"] == [0.75]


def test_each_tenant_and_all_of_them() -> None:
    kept = History()
    kept.add(at(0.0, a=traffic(0), b=traffic(0)), 0.0)
    kept.add(at(1.0, a=traffic(1), b=traffic(4)), 1.0)
    assert kept.series(1, "a")["requested_blocks_per_s"] == [10.0]
    assert kept.series(1, "b")["requested_blocks_per_s"] == [40.0]
    assert kept.series(1)["requested_blocks_per_s"] == [50.0]
    assert kept.series(1)["clients"] == [4.0]


def test_counters_that_fell_count_from_nothing() -> None:
    kept = History()
    kept.add(at(0.0, a=traffic(100), b=traffic(0)), 0.0)
    kept.add(at(1.0, a=traffic(2), b=traffic(1)), 1.0)
    assert kept.series(1, "a")["requested_blocks_per_s"] == [20.0]
    assert kept.series(1)["requested_blocks_per_s"] == [30.0]


def test_a_tenant_that_leaves_or_comes_changes_no_other() -> None:
    kept = History()
    kept.add(at(0.0, a=traffic(10), b=traffic(1000)), 0.0)
    kept.add(at(1.0, a=traffic(11)), 1.0)
    assert kept.series(1)["requested_blocks_per_s"] == [10.0]
    with pytest.raises(KeyError):
        kept.series(1, "b")
    kept.add(at(2.0, a=traffic(12), c=traffic(3)), 2.0)
    assert kept.series(1)["requested_blocks_per_s"] == [10.0, 40.0]


def test_a_clock_that_stands_or_goes_back_adds_nothing() -> None:
    kept = History()
    kept.add(at(0.0, a=traffic(0)), 5.0)
    kept.add(at(1.0, a=traffic(1)), 6.0)
    for clock_s in (6.0, 5.5):
        kept.add(at(9.0, a=traffic(9)), clock_s)
    assert kept.series(1)["requested_blocks_per_s"] == [10.0]


def test_a_wall_clock_that_steps_does_not_tear_the_series() -> None:
    kept = History()
    for second, wall_s in enumerate([1000.0, 1001.0, 500.0]):
        kept.add(at(wall_s, a=traffic(second)), float(second))
    assert kept.series(1)["times"] == [499.0, 500.0]


@pytest.mark.parametrize(("step_s", "points"), RINGS)
def test_rings_are_bounded_and_keep_the_newest(step_s: int, points: int) -> None:
    kept = History()
    seconds = step_s * points + 5 * step_s
    for second in range(0, seconds + 1, step_s):
        kept.add(at(float(second), a=traffic(second)), float(second))
    series = kept.series(step_s)
    assert len(series["times"]) == points
    assert series["times"] == [float(seconds - step_s * n) for n in reversed(range(points))]
    assert set(series["requested_blocks_per_s"]) == {10.0}


def test_a_slower_ring_has_what_happened_between_its_points() -> None:
    kept = History()
    for second in range(61):
        kept.add(at(float(second), a=traffic(600 if second >= 7 else 0)), float(second))
    assert kept.series(60)["requested_blocks_per_s"] == [pytest.approx(100.0)]
    assert kept.series(10)["requested_blocks_per_s"] == [600.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_reports_a_little_early_still_make_a_point_each() -> None:
    kept = History()
    for step in range(11):
        kept.add(at(0.98 * step, a=traffic(step)), 0.98 * step)
    assert len(kept.series(1)["times"]) == 10


def test_memory_is_what_was_said() -> None:
    kept = History()
    names = [f"t{n}" for n in range(TENANTS_MAX + 3)]
    for second in range(2):
        kept.add(at(float(second), **{name: traffic(second) for name in names}), float(second))
    assert kept.series(1)["requested_blocks_per_s"] == [10.0 * len(names)]
    assert kept.series(1, names[0])["requested_blocks_per_s"] == [10.0]
    with pytest.raises(KeyError):
        kept.series(1, names[-1])
    told = (module.POINTS * (4 * len(FIELDS) + 8)) / 1024
    assert told == pytest.approx(115, abs=1)
    for ring in kept._all.rings.values():
        assert ring._values.dtype == np.float32
    held = sum(r._values.nbytes + r._times.nbytes for r in kept._all.rings.values()) / 1024
    assert held == pytest.approx(told)
    assert len(kept._tenants) == TENANTS_MAX


@hypothesis.given(
    st.lists(
        st.tuples(st.floats(0.01, 30), st.integers(0, 50), st.booleans()), min_size=2, max_size=60
    )
)
def test_no_rate_is_negative_and_no_ratio_beyond_one(
    steps: list[tuple[float, int, bool]],
) -> None:
    kept = History()
    clock_s, units = 0.0, 0
    for passed_s, more, begins_anew in steps:
        clock_s, units = clock_s + passed_s, (0 if begins_anew else units) + more
        kept.add(at(clock_s, a=traffic(units)), clock_s)
    for step_s, _ in RINGS:
        series = kept.series(step_s)
        assert series["times"] == sorted(series["times"])
        for name in FIELDS:
            values = [each for each in series[name] if each is not None]
            assert all(each >= 0 for each in values)
        assert all(each is None or each <= 1.0001 for each in series["hit_ratio"])
