"""Sharing a budget of memory out: tenants that want, fill, hold on to and leave alone anything."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.tenants.budget import STEP_SHARE, UNIT_BYTES, Need, first_limits, next_limits

UNIT = UNIT_BYTES
units = st.integers(1, 64).map(lambda count: count * UNIT)


@dataclass
class Simulated:
    """A tenant whose blocks come up to `wants`, or to the limit; slow to give memory back."""

    least: int
    most: int
    limit: int
    wants: int
    is_idle: bool = False
    held: int = 0

    def need(self) -> Need:
        taken = min(self.wants, self.limit)
        self.held = max(self.limit, self.held)
        return Need(
            least=self.least,
            most=self.most,
            limit=self.limit,
            held=self.held,
            taken=taken,
            is_pressed=self.wants > self.limit and not self.is_idle,
            is_idle=self.is_idle,
        )


@st.composite
def crowds(draw: st.DrawFn) -> tuple[int, list[Simulated]]:
    """A budget, and tenants that begin with their first limits."""
    ranges = []
    for _ in range(draw(st.integers(1, 6))):
        least = draw(units)
        ranges.append((least, least + draw(st.integers(0, 200)) * UNIT))
    budget = sum(least for least, _ in ranges) + draw(st.integers(0, 400)) * UNIT
    limits = first_limits(budget, ranges)
    crowd = [
        Simulated(least, most, limit, wants=draw(st.integers(0, 300)) * UNIT)
        for (least, most), limit in zip(ranges, limits, strict=True)
    ]
    return budget, crowd


def step(budget: int, crowd: list[Simulated], give_back: float = 1.0) -> list[int]:
    """One look; then what is above a limit comes back, or a part of it."""
    needs = [each.need() for each in crowd]
    held = sum(each.held for each in needs)
    limits = next_limits(budget, needs)
    for each, need, limit in zip(crowd, needs, limits, strict=True):
        assert limit % UNIT == 0
        assert min(each.least, need.limit) <= limit <= max(each.most, need.limit)
        each.limit = limit
    may_be_held = sum(max(limit, need.held) for limit, need in zip(limits, needs, strict=True))
    assert may_be_held <= max(budget, held)
    for each in crowd:
        over = max(0, each.held - each.limit)
        each.held = each.limit + int(over * (1 - give_back)) // UNIT * UNIT
    return limits


def one_that_lacks_what_another_may_come_to_use() -> tuple[int, list[Simulated]]:
    """The first could use ten units; they are free, and seven of them the third's to spare."""
    crowd = [
        Simulated(least * UNIT, most * UNIT, limit * UNIT, wants * UNIT)
        for least, most, limit, wants in [
            (21, 104, 94, 104),
            (1, 46, 46, 41),
            (13, 94, 84, 80),
            (1, 1, 1, 0),
            (1, 79, 49, 43),
        ]
    ]
    return 284 * UNIT, crowd


@given(crowd=crowds())
def test_the_first_limits_are_within_the_budget_and_fair(
    crowd: tuple[int, list[Simulated]],
) -> None:
    budget, tenants = crowd
    limits = [each.limit for each in tenants]
    assert sum(limits) <= budget
    for each in tenants:
        assert each.least <= each.limit <= each.most
    free = budget - sum(limits)
    for each in tenants:  # who could have more has as much as anybody who has more than its least
        if each.limit < each.most and free >= UNIT * len(tenants):
            raise AssertionError("memory was left over")
        for other in tenants:
            if each.limit < each.most:
                assert other.limit <= max(each.limit + UNIT, other.least)


@settings(max_examples=200)
@given(crowd=crowds(), data=st.data())
def test_whatever_they_want_the_limits_stay_within_the_budget(
    crowd: tuple[int, list[Simulated]], data: st.DataObject
) -> None:
    budget, tenants = crowd
    for _ in range(data.draw(st.integers(1, 25))):
        each = data.draw(st.sampled_from(tenants))
        each.wants = data.draw(st.integers(0, 300)) * UNIT
        each.is_idle = data.draw(st.booleans())
        step(budget, tenants, data.draw(st.sampled_from([0.0, 0.3, 1.0])))
        assert sum(tenant.limit for tenant in tenants) <= budget


@settings(max_examples=200)
@given(crowd=crowds())
def test_needs_that_stay_the_same_come_to_rest(crowd: tuple[int, list[Simulated]]) -> None:
    budget, tenants = crowd
    for _ in range(200):
        step(budget, tenants)
    at_rest = [each.limit for each in tenants]
    for _ in range(10):
        assert step(budget, tenants) == at_rest


@settings(max_examples=200)
@given(crowd=crowds())
@example(crowd=one_that_lacks_what_another_may_come_to_use())
def test_at_rest_nobody_lacks_what_another_does_not_use(
    crowd: tuple[int, list[Simulated]],
) -> None:
    budget, tenants = crowd
    for _ in range(200):
        step(budget, tenants)
    slack = max(UNIT, int(budget * STEP_SHARE)) + UNIT * len(tenants)
    pressed = [each for each in tenants if min(each.wants, each.most) > each.limit + slack]
    if pressed:
        poorest = min(each.limit for each in pressed)
        assert budget - sum(each.limit for each in tenants) < slack
        for each in tenants:
            used = min(each.wants, each.limit)
            spare = max(2 * UNIT, used // 8)
            most = max(each.least, min(used + spare, max(poorest, used)) + slack, poorest + slack)
            assert each.limit <= most, (each, poorest)


@given(crowd=crowds(), less=st.integers(0, 400))
def test_a_smaller_budget_is_kept_at_once_and_leaves_everybody_the_least(
    crowd: tuple[int, list[Simulated]], less: int
) -> None:
    budget, tenants = crowd
    smaller = max(sum(each.least for each in tenants), budget - less * UNIT)
    limits = next_limits(smaller, [each.need() for each in tenants])
    assert sum(limits) <= smaller
    assert all(limit >= each.least for limit, each in zip(limits, tenants, strict=True))


def pair(**second: int | bool) -> list[Need]:
    """Of 64 MiB: one with half of it in use, and one with the other half that is pressed."""
    half = 32 << 20
    first = Need(UNIT, 64 << 20, limit=half, held=half, taken=half, is_pressed=False)
    pressed = Need(UNIT, 64 << 20, limit=half, held=half, taken=half, is_pressed=True)
    return [replace(first, **second), pressed]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "loses"),
    [
        ({}, False),  # in use
        ({"taken": 4 << 20}, True),
        ({"is_idle": True}, True),
        ({"is_pressed": True}, False),  # as much as the other, and both want more
        ({"taken": 4 << 20, "least": 32 << 20}, False),
        ({"taken": 4 << 20, "held": 40 << 20}, False),  # it is giving back already
    ],
)
def test_who_gives_to_one_that_is_pressed(first: dict[str, int], loses: bool) -> None:
    needs = pair(**first)
    limits = next_limits(64 << 20, needs)
    assert (limits[0] < needs[0].limit) is loses
    assert limits[1] == needs[1].limit  # it has to come back first
    if loses:
        given = needs[0].limit - limits[0]
        came_back = [replace(needs[0], limit=limits[0], held=limits[0]), needs[1]]
        assert next_limits(64 << 20, came_back)[1] == needs[1].limit + given
