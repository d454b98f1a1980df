"""Tries every order in which the accesses of some threads can happen, and judges what came of it.

A state is what has happened (a bit per access), memory and registers. States are visited once,
nearest first, so the counterexample that is shown is a shortest one. Two things keep them few, and
neither loses an outcome:
  - an access that no other thread can notice any more happens at once, without a choice;
  - what nobody will look at again is forgotten, so that states that differ in it are one.
The search ends a branch when a check of the program fails (nothing is accepted then), and when the
judged threads are done. So every state in which another thread is stopped for ever is judged too.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.model.machine import (
    Access,
    Chosen,
    Condition,
    Load,
    Machine,
    Registers,
    Store,
    Thread,
    Value,
    keeps_order,
    places_of,
    registers_used,
)

Judge = Callable[[Registers], str | None]
State = tuple[int, tuple[Value, ...], tuple[Value, ...]]
STATES_MAX = 2_000_000
ALWAYS = -1  # all bits: never forgotten


@dataclass(frozen=True)
class Scenario:
    """Threads over a memory, and what would be wrong about what the judged ones have loaded."""

    threads: Sequence[Thread]
    memory: Mapping[str, Value]
    wrong: Judge
    judged: Sequence[str]  # names of threads
    finally_of: Sequence[str] = ()  # places whose last values are judged too, as "finally <place>"


@dataclass(frozen=True)
class Outcome:
    fault: str | None
    trace: tuple[str, ...]
    states: int
    accepted: bool  # some execution came to its end with nothing wrong

    def __str__(self) -> str:
        steps = [f"  {number:3} {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([f"{self.fault or 'nothing wrong'} ({self.states} states)", *steps])


@dataclass
class Step:
    """One access of one thread, ready to be tried: bits and indices instead of names."""

    thread: str
    access: Access
    bit: int
    needs: int = 0  # bits of what it happens after
    own_stores: list["Step"] = field(default_factory=list)  # a load's, of its place, newest first
    notices: dict[str, int] = field(default_factory=dict)  # by place: others that care
    checks: list[Condition] = field(default_factory=list)  # that can be made once it has happened


def steps_of(scenario: Scenario, machine: Machine) -> list[Step]:
    steps: list[Step] = []
    for thread in scenario.threads:
        first = len(steps)
        for number, access in enumerate(thread.accesses):
            step = Step(thread.name, access, 1 << len(steps))
            for before in range(number):
                earlier = steps[first + before]
                fences = thread.fences_between(before, number)
                is_source = isinstance(earlier.access, Load) and earlier.access.into in (
                    registers_used(access)
                )
                if is_source or keeps_order(earlier.access, access, fences, machine):
                    step.needs |= earlier.bit
                elif isinstance(access, Load) and isinstance(earlier.access, Store):
                    forward_from(step, earlier)
            steps.append(step)
        assert not thread.checks or thread.name in scenario.judged
        for check in thread.checks:
            for step in steps[first:]:
                if isinstance(step.access, Load) and step.access.into in check.registers:
                    step.checks.append(check)
    for step in steps:
        step.notices = {place: noticed_by(step, place, steps) for place in places_of(step.access)}
    return steps


def forward_from(load: Step, store: Step) -> None:
    """A load may see an earlier store of its own thread before it has happened."""
    if store.access.place not in places_of(load.access):
        return
    assert isinstance(store.access, Store)
    # Else its value would not be known whenever the load may happen.
    assert store.access.when is None
    assert store.access.source is None
    load.own_stores.insert(0, store)


def noticed_by(step: Step, place: str, steps: Sequence[Step]) -> int:
    """The accesses of other threads that would be different before and after this one."""
    bits = 0
    for other in steps:
        is_conflict = isinstance(step.access, Store) or isinstance(other.access, Store)
        if other.thread != step.thread and is_conflict and place in places_of(other.access):
            bits |= other.bit
    return bits


class Explorer:
    """One search. `run` may be called once. `reduced` = False: nothing is left out, to compare."""

    def __init__(self, scenario: Scenario, machine: Machine, *, reduced: bool = True) -> None:
        self.scenario = scenario
        self.reduced = reduced
        self.steps = steps_of(scenario, machine)
        self.places = {name: index for index, name in enumerate(scenario.memory)}
        loads = [step.access for step in self.steps if isinstance(step.access, Load)]
        self.registers = {load.into: index for index, load in enumerate(loads)}
        assert len(self.registers) == len(loads), "every load has a register of its own"
        self.all_judged = self.bits(lambda step: step.thread in scenario.judged)
        self.readers_of = [self.readers_bits(name) for name in self.places]
        self.users_of = [self.users_bits(name) for name in self.registers]
        self.came_from: dict[State, tuple[State, Step, Value] | None] = {}

    def bits(self, test: Callable[[Step], bool]) -> int:
        return sum(step.bit for step in self.steps if test(step))

    def readers_bits(self, place: str) -> int:
        is_judged = place in self.scenario.finally_of
        return ALWAYS if is_judged else self.bits(lambda step: is_load_of(step.access, place))

    def users_bits(self, register: str) -> int:
        by = next(s for s in self.steps if getattr(s.access, "into", None) == register)
        is_judged = by.thread in self.scenario.judged
        return ALWAYS if is_judged else self.bits(lambda s: register in registers_used(s.access))

    def run(self) -> Outcome:
        start: State = (0, tuple(self.scenario.memory.values()), (None,) * len(self.registers))
        self.came_from[start] = None
        todo = deque([start])
        accepted = False
        while todo:
            state = todo.popleft()
            if state[0] & self.all_judged == self.all_judged:
                fault = self.scenario.wrong(self.judged_of(state))
                if fault:
                    return Outcome(fault, self.trace(state), len(self.came_from), accepted)
                accepted = True
                continue
            for step, value, after in self.successors(state):
                if after not in self.came_from:
                    self.came_from[after] = (state, step, value)
                    todo.append(after)
            assert len(self.came_from) < STATES_MAX, "this model is too large to be checked"
        return Outcome(None, (), len(self.came_from), accepted)

    def judged_of(self, state: State) -> dict[str, Value]:
        finals = {
            f"finally {name}": state[1][self.places[name]] for name in self.scenario.finally_of
        }
        return {**self.named(state[2]), **finals}

    def named(self, registers: tuple[Value, ...]) -> dict[str, Value]:
        return dict(zip(self.registers, registers, strict=True))

    def successors(self, state: State) -> Iterator[tuple[Step, Value, State]]:
        done, _, registers = state
        named = self.named(registers)
        ready = [s for s in self.steps if not s.bit & done and s.needs & done == s.needs]
        if self.reduced:
            ready = [s for s in ready if self.is_unnoticed(s, done, named)][:1] or ready
        for step in ready:
            value = self.value_of(step, state, named)
            after = self.after(step, value, state)
            if after is not None:
                yield step, value, after

    def is_unnoticed(self, step: Step, done: int, named: Registers) -> bool:
        access = step.access
        if isinstance(access, Store) and access.when and not access.when.test(named):
            return True
        place = self.place(access, named)
        return step.notices[place] & ~done == 0

    @staticmethod
    def place(access: Access, named: Registers) -> str:
        if isinstance(access.place, Chosen):
            return access.place.places[named[access.place.register]]
        return access.place

    def value_of(self, step: Step, state: State, named: Registers) -> Value:
        """What it loads or stores; None for a store whose condition does not hold."""
        access = step.access
        if isinstance(access, Store):
            if access.when and not access.when.test(named):
                return None
            return named[access.source] if access.source else access.value
        place = self.place(access, named)
        for own in step.own_stores:
            if own.access.place == place and not own.bit & state[0]:
                assert isinstance(own.access, Store)
                return own.access.value
        return state[1][self.places[place]]

    def after(self, step: Step, value: Value, state: State) -> State | None:
        """The state when it has happened; None: a check failed."""
        done, memory, registers = state[0] | step.bit, list(state[1]), list(state[2])
        if isinstance(step.access, Load):
            registers[self.registers[step.access.into]] = value
            named = self.named(tuple(registers))
            for check in step.checks:
                known = all(named[register] is not None for register in check.registers)
                if known and not check.test(named):
                    return None
        elif value is not None:
            memory[self.places[step.access.place]] = value
        if self.reduced:
            self.forget(done, memory, registers)
        return done, tuple(memory), tuple(registers)

    def forget(self, done: int, memory: list[Value], registers: list[Value]) -> None:
        """What nothing that is still to happen looks at, nor the judge."""
        for index, users in enumerate(self.users_of):
            if users & ~done == 0:
                registers[index] = None
        for index, readers in enumerate(self.readers_of):
            if readers & ~done == 0:
                memory[index] = None

    def trace(self, state: State) -> tuple[str, ...]:
        lines = []
        while (origin := self.came_from[state]) is not None:
            before, step, value = origin
            late = [
                other.access.label
                for other in self.steps
                if other.thread == step.thread and other.bit < step.bit
                if not other.bit & before[0]
            ]
            note = f"      ahead of {', '.join(dict.fromkeys(late))}" if late else ""
            lines.append(f"{step.thread:7} {described(step.access, value)}{note}")
            state = before
        return tuple(reversed(lines))


def is_load_of(access: Access, place: str) -> bool:
    return isinstance(access, Load) and place in places_of(access)


def described(access: Access, value: Value) -> str:
    if isinstance(access, Load):
        return f"{access.label}: {access.into} = {access.place} -> {value}"
    if access.when and value is None:
        return f"{access.label}: {access.place} left alone"
    return f"{access.label}: {access.place} <- {value}"


def explore(scenario: Scenario, machine: Machine) -> Outcome:
    """The first fault that some execution on that machine leads to, or that there is none."""
    return Explorer(scenario, machine).run()


def after_stop(scenario: Scenario, accesses: int) -> str | None:
    """What is wrong for a judged thread that begins when the other has stopped for ever.

    `accesses`: how many of the first thread's have happened by then, in its own order. The judged
    thread is the second one; one that gives up, where it should have found something, is wrong.
    """
    memory = dict(scenario.memory)
    registers: dict[str, Value] = {}
    node, reader = scenario.threads
    for access in (*node.accesses[:accesses], *reader.accesses):
        place = Explorer.place(access, registers)
        if isinstance(access, Load):
            registers[access.into] = memory[place]
        elif access.when is None or access.when.test(registers):
            memory[place] = registers[access.source] if access.source else access.value
    if not all(check.test(registers) for check in reader.checks):
        return f"missed after {accesses} accesses of the {node.name}"
    return scenario.wrong(registers)
