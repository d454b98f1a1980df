"""The checker itself: small programs whose outcomes on real machines are known.

Without these a model that allows too little would call any protocol right.
"""

from collections.abc import Callable

import pytest

from tests.model.explore import Scenario, explore
from tests.model.machine import Chosen, Fence, Machine, Registers, Thread

ARM, X86, STREAMING = Machine.ARM, Machine.X86, Machine.X86_STREAMING
BOTH_X86 = {X86, STREAMING}
EVERYWHERE = {ARM, *BOTH_X86}
Program = Callable[[Thread, Thread], None]


def is_one(register: str) -> Callable[[Registers], bool]:
    return lambda seen: seen[register] == 1


def store_buffering(one: Thread, two: Thread) -> None:
    for thread, mine, other in ((one, "x", "y"), (two, "y", "x")):
        thread.store("store", mine, 1)
        thread.load("load", f"r{other}", other)


def store_buffering_with_one_fence(one: Thread, two: Thread) -> None:
    one.store("store", "x", 1)
    one.fence(Fence.FULL)
    one.load("load", "ry", "y")
    two.store("store", "y", 1)
    two.load("load", "rx", "x")


def store_buffering_with_fences(one: Thread, two: Thread) -> None:
    for thread, mine, other in ((one, "x", "y"), (two, "y", "x")):
        thread.store("store", mine, 1)
        thread.fence(Fence.FULL)
        thread.load("load", f"r{other}", other)


def store_buffering_seen_by_itself(one: Thread, two: Thread) -> None:
    """Each sees its own store at once and the other's not yet."""
    for thread, mine, other in ((one, "x", "y"), (two, "y", "x")):
        thread.store("store", mine, 1)
        thread.load("own", f"own {mine}", mine)
        thread.check(is_one(f"own {mine}"), f"own {mine}")
        thread.load("load", f"r{other}", other)


def message(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1)
    one.store("flag", "y", 1)
    two.load("flag", "flag", "y")
    two.load("data", "rx", "x")


def message_released_only(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1)
    one.store("flag", "y", 1, release=True)
    two.load("flag", "flag", "y")
    two.load("data", "rx", "x")


def message_by_release(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1)
    one.store("flag", "y", 1, release=True)
    two.load("flag", "flag", "y", acquire=True)
    two.load("data", "rx", "x")


def message_by_fences(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1)
    one.fence(Fence.RELEASE)
    one.store("flag", "y", 1)
    two.load("flag", "flag", "y")
    two.fence(Fence.ACQUIRE)
    two.load("data", "rx", "x")


def message_by_address(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1)
    one.store("flag", "y", 1, release=True)
    two.load("flag", "flag", "y")
    two.load("data", "rx", Chosen("flag", {0: "other", 1: "x"}))


def streamed_message(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1, streaming=True)
    one.store("flag", "y", 1, release=True)
    two.load("flag", "flag", "y", acquire=True)
    two.load("data", "rx", "x")


def streamed_message_with_sfence(one: Thread, two: Thread) -> None:
    one.store("data", "x", 1, streaming=True)
    one.fence(Fence.STREAM)
    one.store("flag", "y", 1)
    two.load("flag", "flag", "y", acquire=True)
    two.load("data", "rx", "x")


def overwritten_early(one: Thread, two: Thread) -> None:
    """Data of the next round may be seen before the flag that withdraws the last one."""
    one.store("flag", "y", 0)
    one.store("data", "x", 2, streaming=True)
    two.load("data", "data", "x", acquire=True)
    two.load("flag", "flag", "y")


def load_buffering(one: Thread, two: Thread) -> None:
    for thread, mine, other in ((one, "x", "y"), (two, "y", "x")):
        thread.load("load", f"r{mine}", mine)
        thread.store("store", other, 1)


def load_buffering_on_condition(one: Thread, two: Thread) -> None:
    for thread, mine, other in ((one, "x", "y"), (two, "y", "x")):
        thread.load("load", f"r{mine}", mine)
        thread.only_when(is_one(f"r{mine}"), f"r{mine}")
        thread.store("store", other, 1)


def same_place_twice(one: Thread, two: Thread) -> None:
    one.store("store", "x", 1)
    two.load("first", "first", "x")
    two.load("second", "second", "x")


BOTH_ZERO = {"rx": 0, "ry": 0}
STALE = {"flag": 1, "rx": 0}
BOTH_ONE = {"rx": 1, "ry": 1}
KNOWN: list[tuple[Program, dict[str, int], set[Machine]]] = [
    (store_buffering, BOTH_ZERO, EVERYWHERE),
    (store_buffering_with_one_fence, BOTH_ZERO, EVERYWHERE),
    (store_buffering_with_fences, BOTH_ZERO, set()),
    (store_buffering_seen_by_itself, BOTH_ZERO, EVERYWHERE),
    (message, STALE, {ARM}),
    (message_released_only, STALE, {ARM}),
    (message_by_release, STALE, set()),
    (message_by_fences, STALE, set()),
    (message_by_address, STALE, set()),
    (streamed_message, STALE, {STREAMING}),
    (streamed_message_with_sfence, STALE, set()),
    (overwritten_early, {"data": 2, "flag": 1}, {ARM, STREAMING}),
    (load_buffering, BOTH_ONE, {ARM}),
    (load_buffering_on_condition, BOTH_ONE, set()),
    (same_place_twice, {"first": 1, "second": 0}, set()),
]


def is_possible(program: Program, outcome: dict[str, int], machine: Machine) -> bool:
    one, two = Thread("one"), Thread("two")
    program(one, two)
    flag = 1 if program is overwritten_early else 0
    scenario = Scenario(
        [one, two],
        {"x": 0, "y": flag, "other": 0},
        lambda seen: "seen" if outcome.items() <= seen.items() else None,
        ["one", "two"],
    )
    return explore(scenario, machine).fault is not None


@pytest.mark.parametrize("machine", Machine, ids=lambda machine: machine.value)
@pytest.mark.parametrize(
    ("program", "outcome", "machines"), KNOWN, ids=[program.__name__ for program, _, _ in KNOWN]
)
def test_outcome_is_possible_where_it_is_known_to_be(
    program: Program, outcome: dict[str, int], machines: set[Machine], machine: Machine
) -> None:
    assert is_possible(program, outcome, machine) == (machine in machines)
