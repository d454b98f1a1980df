"""Prints what the model says: `python -m tests.model`, or the way to one fault.

python -m tests.model                                  the table: every scenario, every step
python -m tests.model "pin of moved" pin.fence [arm]   one scenario without that step
python -m tests.model "pin of moved" "" [arm]          complete
"""

import sys
import time

from tests.model.expected import CASES
from tests.model.explore import explore
from tests.model.machine import Machine
from tests.model.test_model import removals_of, steps_left_out


def print_table() -> None:
    started, total = time.monotonic(), 0
    for name, case in CASES.items():
        print(f"\n{name:42}" + "".join(f"{machine.value:>22}" for machine in Machine))
        for removal in removals_of(name):
            cells = []
            for machine in Machine:
                outcome = explore(case.build(steps_left_out(removal)), machine)
                total += outcome.states
                cells.append(f"{'caught' if outcome.fault else 'none'} ({outcome.states:,})")
            print(f"  {removal or '(complete)':40}" + "".join(f"{cell:>22}" for cell in cells))
    print(f"\n{total:,} states in {time.monotonic() - started:.1f} s")


def print_one(name: str, removal: str, machines: list[str]) -> None:
    for machine in Machine:
        if machines and machine.value not in machines:
            continue
        print(f"{machine.value}: {explore(CASES[name].build(steps_left_out(removal)), machine)}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print_one(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        print_table()
