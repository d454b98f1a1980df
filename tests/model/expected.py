"""Which step is needed where: for each scenario, what is caught when steps are left out.

A step that a scenario has and its table does not name is free there: without it nothing goes wrong
on any machine. That is asserted too, so a table that says too little fails as well. `SPARE` says of
the steps that no scenario needs what makes them so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.model import lanes, pins, reads, tables
from tests.model.explore import Scenario
from tests.model.machine import Machine

Where = frozenset[Machine]
NOWHERE: Where = frozenset()
ARM: Where = frozenset([Machine.ARM])
SFENCE: Where = frozenset([Machine.X86_STREAMING])  # on arm something else keeps that order
WEAK: Where = ARM | SFENCE
ALL: Where = frozenset(Machine)


@dataclass(frozen=True)
class Case:
    build: Callable[[frozenset[str]], Scenario]
    caught: dict[str, Where]  # several steps left out at once: joined by " + "


COPY = {"find.acquire": ARM, "copy.fence": ARM, "copy.generation_last": ALL}
PIN = {
    "pin.fence": ALL,
    "pin.generation_again": ALL,
    "pin.in_use_first": ALL,
    "vacate.fence": ALL,
    "vacate.scan": ALL,
}
PIN_OF_RETIRED = PIN | {"vacate.scan_last": ALL, "retire.invalidate": ALL}
MOVED = {
    "find.acquire": ARM,
    "move.fence": ARM,
    "move.release": ARM,
    "move.fresh_generation": ALL,
}
DEMOTED = {"find.acquire": ARM, "demote.release": ARM, "demote.fresh_generation": ALL}
PROMOTED = {
    "promote.offset_first": ALL,
    "promote.tier_release": ARM,
    "find.tier_before_offset": ALL,
    "find.tier_acquire": ARM,
}
LOOKUP = {
    "find.root_again": ALL,
    "find.hint_acquire": ARM,
    "find.passed_acquire": ARM,
    "grow.fence": ARM,
}
SLEEP = {"sleep.fence": ALL, "sleep.look_again": ALL, "sleep.wake_seen_first": ALL}

CASES = {
    "copy of recycled": Case(
        reads.copy_of_recycled,
        COPY
        | {
            "find.key": ALL,
            "retire.invalidate": ALL,
            "put.payload_first": ALL,
            "publish.fence": SFENCE,
            "publish.fresh_generation": ALL,
            # Each of these two keeps the order that the other keeps as well.
            "publish.fence + publish.release": WEAK,
            "vacate.fence + prepare.fence": WEAK,
        },
    ),
    "find of recycled": Case(
        reads.find_of_recycled,
        {
            "find.acquire": ARM,
            "find.key": ALL,
            "find.fence": ARM,
            "find.generation_again": ALL,
            "retire.invalidate": ALL,
            "publish.fresh_generation": ALL,
        },
    ),
    "copy of refused": Case(
        reads.copy_of_refused,
        COPY | {"find.key": ALL, "prepare.fence": WEAK, "publish.fresh_generation": ALL},
    ),
    "copy of moved": Case(
        reads.copy_of_moved, COPY | MOVED | {"vacate.fence + prepare.fence": WEAK}
    ),
    "copy of tiered": Case(
        reads.copy_of_tiered,
        COPY
        | DEMOTED
        | PROMOTED
        | {
            "retire.invalidate": ALL,
            "vacate.fence + prepare.fence": WEAK,
        },
    ),
    "pin of retired": Case(pins.pin_of_retired, PIN_OF_RETIRED),
    "pin of punched": Case(pins.pin_of_punched, PIN_OF_RETIRED),
    "pin of refused": Case(pins.pin_of_refused, PIN | {"commit.vacates": ALL}),
    "pin of moved": Case(pins.pin_of_moved, PIN_OF_RETIRED | MOVED | {"pin.names_the_slot": ALL}),
    "pin of demoted": Case(pins.pin_of_demoted, PIN | DEMOTED),
    "pin of promoted": Case(
        pins.pin_of_promoted, PIN_OF_RETIRED | PROMOTED | {"pin.names_the_slot": ALL}
    ),
    "unpin": Case(
        pins.unpin, {"vacate.scan": ALL, "unpin.release": ARM, "unpin.in_use_release": ARM}
    ),
    "word handed on": Case(pins.word_handed_on, PIN_OF_RETIRED | {"unpin.in_use_release": ARM}),
    "lookup in outgrown": Case(
        tables.lookup_in_outgrown,
        LOOKUP | {"grow.copy_first": ALL, "grow.root_release": ARM},
    ),
    "lookup of put": Case(
        tables.lookup_of_put,
        LOOKUP | {"put.into_both": ALL, "put.answer_release": ARM, "wait.acquire": ARM},
    ),
    "bell": Case(
        lanes.bell,
        {
            "ask.release": ARM,
            "ask.fence": ALL,
            "serve.drains_bell_first": ALL,
            "serve.fence": ALL,
            "serve.look_again": ALL,
            "serve.acquire": ARM,
        },
    ),
    "futex": Case(
        lanes.futex, SLEEP | {"tell.release": ARM, "rouse.fence": ALL, "sleep.acquire": ARM}
    ),
    "interrupt": Case(
        lanes.interrupt,
        SLEEP | {"sleep.fence": ARM, "interrupt.wakes": ALL, "rouse.release": ARM},
    ),
    "ring": Case(
        lanes.ring,
        {
            "answer.resets_taken": ALL,
            "answer.release": ARM,
            "ask.acquire": ARM,
            "ask.resets_staged": ALL,
            "ask.release": ARM,
            "serve.acquire": ARM,
            "stage.waits_for_room": ALL,
            "stage.release": ARM,
            "take.acquire": ARM,
            "take.release": ARM,
        },
    ),
}

SPARE = {
    "publish.release": "publish.fence keeps the same order",
    "move.fence_before_copy": "vacate.fence came before the slot was free",
    "demote.fence": "the record was as good under the generation before",
    "promote.fence": "promote.tier_release keeps the payload and the offset before the tier",
    "promote.release": "a reader that takes the old tier looks on the SSD, where the block is too",
    "promote.fresh_generation": "the tier decides; the next change gives a fresh one",
    "poll.fence": "a store that depends on what was scanned does not overtake it",
    "claim.acquire": "a store that depends on the free word does not overtake the look for it",
    "find.root_acquire": "the table's address depends on it",
    "put.hint_release": "who sees a hint too early finds an unreadable record, as before the put",
    "put.passed_first": "the answer comes after both",
    "stage.acquire": "a store that depends on room does not overtake the look for it",
}
# What would be wrong is not a wrong byte but a miss: test_model.py stops the node at every step.
SEEN_WHEN_STOPPED = {"move.stays_readable", "demote.stays_readable", "promote.stays_readable"}
