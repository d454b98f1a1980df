"""What a machine may do with a thread's loads and stores, and how a thread is written down.

A thread is a list of loads, stores and fences in the order of its source. Memory is one flat store
that all threads see at once, which is true of x86 and of ARMv8 (multi-copy atomic). An operation
happens when it reads or writes that store; it may happen once everything it is ordered after has
happened. So out-of-order execution is a choice like any other, and a checker can try them all.

  x86   TSO: only a load may overtake, and only stores. Streaming (non-temporal) stores pass and
        are passed by everything but sfence, a full fence and accesses of the same place.
  arm   Anything overtakes anything but: acquire, release and fences as C++ defines them, accesses
        of the same place, and what is computed from a load: addresses, values, and stores that are
        made on a condition.

On both a load may take its value from an earlier store of its own thread that nobody else sees yet.
Weaker than the real ones where that is simpler (a store-release and a later load-acquire are not
kept in order on arm; streaming stores may pass earlier loads on x86): a protocol that is right here
is right there. No compiler is modelled: one that reorders atomics is held off by the same orders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Value = int | str | None
Registers = Mapping[str, Any]  # a Value each; a condition knows of what kind


class Machine(Enum):
    X86 = "x86"
    X86_STREAMING = "x86 streaming"  # payload that is put goes by non-temporal stores
    ARM = "arm"


class Fence(Enum):
    ACQUIRE = "acquire fence"
    RELEASE = "release fence"
    STREAM = "release fence, sfence"  # fence_before_overwrite() and fence_before_publish()
    FULL = "full fence"


@dataclass(frozen=True)
class Chosen:
    """A place that depends on what was loaded before: an address dependency."""

    register: str
    places: Mapping[Any, str]

    def __str__(self) -> str:
        return f"[{self.register}]"


@dataclass(frozen=True)
class Condition:
    """A test of registers: as a guard of stores, and as a check that ends a thread's attempt."""

    registers: tuple[str, ...]
    test: Callable[[Registers], bool]


@dataclass(frozen=True)
class Load:
    label: str
    into: str
    place: str | Chosen
    acquire: bool = False


@dataclass(frozen=True)
class Store:
    label: str
    place: str
    value: Value = None
    source: str | None = None  # the register that is stored, instead of `value`
    release: bool = False
    streaming: bool = False
    when: Condition | None = None


Access = Load | Store


class Thread:
    """A program being written down, with some of its steps left out.

    `has(step)` is asked for every step that can be left out; `asked` remembers them all.
    """

    def __init__(self, name: str, without: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.without = without
        self.asked: set[str] = set()
        self.accesses: list[Access] = []
        self.fences: list[tuple[int, Fence]] = []  # before the access of that number
        self.checks: list[Condition] = []  # one that fails ends the attempt: nothing is accepted
        self.when: Condition | None = None  # of the stores that follow

    def has(self, step: str) -> bool:
        self.asked.add(step)
        return step not in self.without

    def load(self, label: str, into: str, place: str | Chosen, *, acquire: bool = False) -> None:
        self.accesses.append(Load(label, into, place, acquire))

    def store(
        self,
        label: str,
        place: str,
        value: Value = None,
        *,
        source: str | None = None,
        release: bool = False,
        streaming: bool = False,
    ) -> None:
        self.accesses.append(Store(label, place, value, source, release, streaming, self.when))

    def fence(self, kind: Fence) -> None:
        self.fences.append((len(self.accesses), kind))

    def check(self, test: Callable[[Registers], bool], *registers: str) -> None:
        self.checks.append(Condition(registers, test))

    def only_when(self, test: Callable[[Registers], bool], *registers: str) -> None:
        self.when = Condition(registers, test)

    def fences_between(self, first: int, second: int) -> set[Fence]:
        return {kind for at, kind in self.fences if first < at <= second}


def keeps_order(first: Access, second: Access, fences: set[Fence], machine: Machine) -> bool:
    """Does an access happen before one that follows it in its thread, with these fences between?"""
    from_store, to_load = isinstance(first, Store), isinstance(second, Load)
    same_place = isinstance(first.place, str) and first.place == second.place
    if Fence.FULL in fences:
        return True
    if machine is Machine.ARM:
        if Fence.ACQUIRE in fences and not from_store:
            return True
        if fences & {Fence.RELEASE, Fence.STREAM} and not to_load:
            return True
        if isinstance(first, Load) and first.acquire:
            return True
        if isinstance(second, Store) and second.release:
            return True
        return same_place and not (from_store and to_load)
    if Fence.STREAM in fences and from_store and not to_load:
        return True
    streaming = any(isinstance(access, Store) and access.streaming for access in (first, second))
    if streaming and machine is Machine.X86_STREAMING:
        return same_place and not (from_store and to_load)
    return not (from_store and to_load)


def registers_used(access: Access) -> tuple[str, ...]:
    """What must have been loaded before it can happen."""
    if isinstance(access, Load):
        return (access.place.register,) if isinstance(access.place, Chosen) else ()
    guard = access.when.registers if access.when else ()
    return (*guard, *([access.source] if access.source else []))


def places_of(access: Access) -> frozenset[str]:
    """Every place that it may touch."""
    if isinstance(access.place, Chosen):
        return frozenset(access.place.places.values())
    return frozenset([access.place])
