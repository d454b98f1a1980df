"""How much of one budget of memory each tenant may use. Pure: needs go in, limits come out.

Promises:  1. what is held, or may be held, never comes to more than the budget: memory is given
              only after somebody else has given it back. Where the budget itself became smaller
              than that, nobody grows until it fits;
           2. nobody is asked to have less than its least, or gets more than its most;
           3. nobody loses anything unless somebody else needs it; and what is in use is only taken
              from who has more than its equal share of it;
           4. what nobody holds goes to those who are pressed, the poorest first;
           5. needs that stay the same lead to limits that stay the same: for less than STEP_SHARE
              of the budget nothing is taken from anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNIT_BYTES = 2 << 20  # memory of a node comes in these
STEP_SHARE = 1 / 64  # of the budget: what is worth a change
TAKE_SHARE = 1 / 4  # of what a tenant has: the most that it gives at a time
_SPARE_SHARE = 1 / 8  # of what is in use, left to a tenant beside that


@dataclass(frozen=True, slots=True)
class Need:
    """One tenant at one moment. Bytes; least, most and limit are whole units."""

    least: int
    most: int
    limit: int
    held: int  # committed, or allowed to be: at least the limit
    taken: int  # by blocks
    is_pressed: bool  # blocks go for want of room while others come
    is_idle: bool = False  # nobody has used it for a while: its blocks are cold


def first_limits(budget: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Equal shares within each (least, most), in whole units; the leasts fit into the budget."""
    return _shares(budget, [(least, most) for least, most in ranges])


def next_limits(budget: int, needs: Sequence[Need]) -> list[int]:
    """The limits to be set now; call again when memory came back."""
    limits = [each.limit for each in needs]
    over = sum(each.held for each in needs) - budget
    goals = _shares(budget, [(each.least, max(each.least, _wish(each))) for each in needs])
    if sum(limits) > budget:  # the budget became smaller
        fit = _shares(budget, [(each.least, max(each.least, each.limit)) for each in needs])
        return [min(goal, limit) for goal, limit in zip(fit, limits, strict=True)]
    step = max(UNIT_BYTES, int(budget * STEP_SHARE))
    lacks = [
        max(0, goal - each.limit) if each.is_pressed else 0
        for goal, each in zip(goals, needs, strict=True)
    ]
    free = _whole(max(0, -over))
    on_its_way = sum(each.held - each.limit for each in needs)
    short = sum(lack for lack in lacks if lack >= step) - free - on_its_way
    return _shrunk(_grown(needs, free), needs, goals, short, step)


def _wish(need: Need) -> int:
    """What a tenant would make use of."""
    if need.is_pressed:
        return need.most
    if need.is_idle:
        return need.least
    spare = max(2 * UNIT_BYTES, int(need.taken * _SPARE_SHARE))
    return min(need.most, _whole(need.taken + spare + UNIT_BYTES - 1))


def _shares(budget: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The same for everybody, but within each (least, most); sums to the budget at most."""

    def at(level: int) -> list[int]:
        return [min(most, max(least, level)) for least, most in ranges]

    low, high = 0, budget // UNIT_BYTES
    while low < high:  # the level that all of them are at, as water in basins
        level = (low + high + 1) // 2
        is_within = sum(at(level * UNIT_BYTES)) <= budget
        low, high = (level, high) if is_within else (low, level - 1)
    shares = at(low * UNIT_BYTES)
    left = budget - sum(shares)  # less than a unit for each that is at the level
    for which, (_, most) in enumerate(ranges):
        if shares[which] == low * UNIT_BYTES < most and left >= UNIT_BYTES:
            shares[which] += UNIT_BYTES
            left -= UNIT_BYTES
    return shares


def _grown(needs: Sequence[Need], free: int) -> list[int]:
    """With what is free: all of it for who is pressed, the poorest of them first.

    Not up to the goals alone: those leave room for what others might come to use, and until they do
    it would be of use to nobody.
    """
    ranges = [
        (each.limit, max(each.limit, each.most) if each.is_pressed else each.limit)
        for each in needs
    ]
    return _shares(sum(each.limit for each in needs) + free, ranges)


def _shrunk(
    limits: list[int], needs: Sequence[Need], goals: list[int], short: int, step: int
) -> list[int]:
    """Less for those who have more than their goal, the largest surplus first."""
    surplus = [each.limit - goal for each, goal in zip(needs, goals, strict=True)]
    shrunk = list(limits)
    for at in sorted(range(len(needs)), key=lambda at: -surplus[at]):
        each = needs[at]
        if short <= 0 or surplus[at] < step:
            break
        if each.held > each.limit:  # it is still at the last change
            continue
        less = min(
            surplus[at], _whole(short + UNIT_BYTES - 1), max(step, int(each.limit * TAKE_SHARE))
        )
        shrunk[at] = max(each.least, _whole(each.limit - less))
        short -= each.limit - shrunk[at]
    return shrunk


def _whole(size: int) -> int:
    return size // UNIT_BYTES * UNIT_BYTES
