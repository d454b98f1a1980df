"""Copying reads beside a node that withdraws, reuses, moves, demotes and promotes.

Promise: a copy that is accepted holds the bytes that were committed under that key. At no moment
that the node may be stopped at is a block missed while its place changes.
"""

from collections.abc import Callable

from tests.model.explore import Scenario
from tests.model.machine import Registers
from tests.model.records import (
    ANYWHERE,
    SSD,
    Block,
    Node,
    Reader,
    record_words,
    slot_words,
    wrong_bytes,
)

Without = frozenset[str]
Build = Callable[[Without], Scenario]
JUDGED = ("reader",)


def recycling_node(without: Without) -> Node:
    """A and B go, their records and slots change partners, go again, and A comes back.

    It comes back to the same record and slot, with other bytes of its own: the case in which every
    word but the generation looks as it did.
    """
    node = Node(without)
    node.retire(0, "s", 1)
    node.retire(1, "t", 2)
    node.put(Block(1, "D", "s", "D"), 11)
    node.put(Block(0, "C", "t", "C", length=1), 12)
    node.retire(1, "s", 11)
    node.retire(0, "t", 12)
    node.put(Block(0, "A", "s", "a"), 13)
    return node


RECYCLED = {
    **record_words(0, 1, "A", "s"),
    **record_words(1, 2, "B", "t"),
    **slot_words({"s": "A", "t": "B", "u": "junk"}),
}


def copy_of_recycled(without: Without) -> Scenario:
    reader = Reader(without)
    reader.find()
    reader.copy()

    def wrong(seen: Registers) -> str | None:
        payload = (seen["payload0"], seen["payload1"])
        committed = {1: ("A", "A"), 13: ("a", "a")}.get(seen["generation"])
        return None if payload == committed else f"accepted as A's payload: {' '.join(payload)}"

    return Scenario([recycling_node(without), reader], RECYCLED, wrong, JUDGED)


def find_of_recycled(without: Without) -> Scenario:
    """What a reader is about to use: a length and an offset that never belonged together."""
    reader = Reader(without)
    reader.find()

    def wrong(seen: Registers) -> str | None:
        found = (seen["length"], seen["offset"])
        return None if found == (2, "s") else f"would use A's length and offset {found}"

    return Scenario([recycling_node(without), reader], RECYCLED, wrong, JUDGED)


def refusing_node(without: Without, *, scans: bool = False) -> Node:
    """Store::commit() that finds no place for the hint: readable for a moment, then withdrawn."""
    node = Node(without, scans=scans)
    node.publish(Block(0, "A", "s", "A"), 1)
    node.field("commit refused", 0, "generation", 0)
    return node


REFUSED = {**record_words(0, 0, "A", "s"), **slot_words({"s": "A", "t": "junk", "u": "junk"})}


def copy_of_refused(without: Without) -> Scenario:
    node = refusing_node(without)
    node.put(Block(0, "D", "s", "D"), 2)
    reader = Reader(without)
    reader.find()
    reader.copy()
    return Scenario([node, reader], REFUSED, wrong_bytes, JUDGED)


def moving_node(without: Without) -> Node:
    """A moves to the slot of B, which went; D takes the slot that A had. Then once more."""
    node = Node(without)
    node.retire(1, "t", 2)
    node.move(0, "t", "A", (1, 3))
    node.vacate("s", 1)
    node.put(Block(1, "D", "s", "D"), 4)
    node.move(0, "u", "A", (3, 5))
    node.vacate("t", 3)
    node.put(Block(2, "E", "t", "E"), 6)
    return node


MOVED = {
    **record_words(0, 1, "A", "s"),
    **record_words(1, 2, "B", "t"),
    **record_words(2, 0, "none", "t"),
    **slot_words({"s": "A", "t": "B", "u": "junk"}),
}


def copy_of_moved(without: Without) -> Scenario:
    reader = Reader(without)
    reader.find()
    reader.copy()
    return Scenario([moving_node(without), reader], MOVED, wrong_bytes, JUDGED)


def tiering_node(without: Without) -> Node:
    """A is written to the SSD, leaves DRAM, comes back to another slot and loses its SSD copy."""
    node = Node(without)
    node.set_tier(0, "dram+ssd")
    node.demote(0, (1, 2))
    node.vacate("s", 1)
    node.put(Block(1, "D", "s", "D"), 3)
    node.fill("u", "A", streaming=False)
    node.promote(0, "u", (2, 4))
    node.set_tier(0, "dram")
    node.retire(0, "u", 4)
    node.put(Block(2, "E", "u", "E"), 5)
    return node


TIERED = {
    **record_words(0, 1, "A", "s"),
    **record_words(1, 0, "none", "s"),
    **record_words(2, 0, "none", "u"),
    **slot_words({"s": "A", "t": "junk", "u": "junk"}),
}


def copy_of_tiered(without: Without) -> Scenario:
    reader = Reader(without)
    reader.find()
    reader.copy()
    return Scenario([tiering_node(without), reader], TIERED, wrong_bytes, JUDGED)


def find_of_tiered(without: Without) -> Scenario:
    """By a reader that must find A, in DRAM or on the SSD: it is never retired here."""
    node = Node(without)
    node.demote(0, (1, 2))
    node.vacate("s", 1)
    node.put(Block(1, "D", "s", "D"), 3)
    node.fill("u", "A", streaming=False)
    node.promote(0, "u", (2, 4))
    reader = Reader(without)
    reader.find(ANYWHERE)
    reader.copy()

    def wrong(seen: Registers) -> str | None:
        return None if seen["tier"] == SSD else wrong_bytes(seen)

    return Scenario([node, reader], TIERED, wrong, JUDGED)
