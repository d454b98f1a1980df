"""The protocol of shared memory, with every step and with each step left out, on every machine.

Complete, it leads to nothing wrong. Without a step it goes wrong exactly where expected.py says, so
each case can fail and so can the model: `python -m tests.model` prints the table, and the shortest
way to a fault. States are printed with each test (pytest -rP).
"""

import pytest

from tests.model import reads
from tests.model.expected import CASES, NOWHERE, SEEN_WHEN_STOPPED, SPARE, Where
from tests.model.explore import Explorer, Scenario, after_stop, explore
from tests.model.machine import Machine

COMPLETE: frozenset[str] = frozenset()
SMALL = [name for name in CASES if not name.startswith("copy of") and name != "pin of moved"]


def steps_left_out(removal: str) -> frozenset[str]:
    return frozenset(removal.split(" + ")) if removal else COMPLETE


def steps_of(scenario: Scenario) -> set[str]:
    return set().union(*(thread.asked for thread in scenario.threads))


def removals_of(name: str) -> list[str]:
    """None, each step alone, and the pairs that the table names."""
    pairs = [removal for removal in CASES[name].caught if " + " in removal]
    return ["", *sorted(steps_of(CASES[name].build(COMPLETE))), *pairs]


ROWS = [(name, removal) for name in CASES for removal in removals_of(name)]


@pytest.mark.parametrize(
    ("name", "removal"), ROWS, ids=[f"{name}-{removal or 'complete'}" for name, removal in ROWS]
)
def test_goes_wrong_where_a_step_is_needed_and_nowhere_else(name: str, removal: str) -> None:
    case = CASES[name]
    without = steps_left_out(removal)
    expected: Where = case.caught.get(removal, NOWHERE)
    found = set()
    for machine in Machine:
        outcome = explore(case.build(without), machine)
        # One that accepts nothing at all would be right about everything.
        assert outcome.fault or outcome.accepted, f"nothing is accepted on {machine.value}"
        print(f"{name}, without {removal or 'nothing'}, {machine.value}: {outcome}")
        if outcome.fault:
            found.add(machine)
    assert found == expected


def test_every_step_is_needed_somewhere_or_known_to_be_spare() -> None:
    asked = set().union(*(steps_of(case.build(COMPLETE)) for case in CASES.values()))
    needed = set().union(*(case.caught for case in CASES.values()))
    alone = {removal for removal in needed if " + " not in removal}
    assert alone | set(SPARE) | SEEN_WHEN_STOPPED == asked
    assert not alone & set(SPARE)


@pytest.mark.parametrize("scenario", [reads.copy_of_moved, reads.find_of_tiered])
def test_block_is_found_wherever_the_node_is_stopped(scenario: reads.Build) -> None:
    complete = scenario(COMPLETE)
    for accesses in range(len(complete.threads[0].accesses) + 1):
        assert after_stop(complete, accesses) is None


@pytest.mark.parametrize(
    ("scenario", "step"),
    [
        (reads.copy_of_moved, "move.stays_readable"),
        (reads.find_of_tiered, "demote.stays_readable"),
        (reads.find_of_tiered, "promote.stays_readable"),
    ],
)
def test_a_record_withdrawn_while_it_changes_is_missed(scenario: reads.Build, step: str) -> None:
    cut = scenario(frozenset([step]))
    count = len(cut.threads[0].accesses)
    assert any(after_stop(cut, accesses) for accesses in range(count))


@pytest.mark.parametrize("machine", Machine, ids=lambda machine: machine.value)
@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_lost_by_what_the_search_leaves_out(name: str, machine: Machine) -> None:
    for removal in removals_of(name):
        scenario = CASES[name].build(steps_left_out(removal))
        quick = Explorer(scenario, machine).run()
        whole = Explorer(scenario, machine, reduced=False).run()
        assert (quick.fault is None) == (whole.fault is None), removal
        assert quick.states <= whole.states
