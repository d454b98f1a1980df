"""Blocks read in place: a pin is a name in a hazard word, written without asking (client_page.h).

Promise: from an accepted pin to its end the bytes of the slot stay as they were, whatever the node
does: retires the block, moves it, demotes it, promotes and then retires it, gives its pages back.
The reader here takes the record as the complete `find` does, pins, and then reads for ever.
"""

from tests.model.explore import Scenario
from tests.model.machine import Fence, Thread, Value
from tests.model.reads import JUDGED, REFUSED, Without, refusing_node
from tests.model.records import NO_SLOT, Node, Reader, held, record_words, slot_words, wrong_bytes

IN_S = {**record_words(0, 1, "A", "s"), **slot_words({"s": "A", "t": "junk", "u": "junk"})}


def pinning(without: Without, node: Thread, memory: dict[str, Value]) -> Scenario:
    reader = Reader(without)
    reader.find()
    reader.pin()
    reader.view()
    return Scenario([node, reader], {**memory, **held("s", by=None)}, wrong_bytes, JUDGED)


def reuse(node: Node, slot: str) -> None:
    """By the next put, if nobody names it."""
    if node.has("prepare.fence"):
        node.fence(Fence.STREAM)
    node.fill(slot, "D")


def pin_of_retired(without: Without) -> Scenario:
    node = Node(without, scans=True)
    node.retire(0, "s", 1)
    reuse(node, "s")
    return pinning(without, node, IN_S)


def pin_of_punched(without: Without) -> Scenario:
    node = Node(without, scans=True)
    node.retire(0, "s", 1)
    node.punch("s")
    return pinning(without, node, IN_S)


def pin_of_refused(without: Without) -> Scenario:
    """Readable for a moment is long enough to be pinned."""
    node = refusing_node(without, scans=True)
    if node.has("commit.vacates"):
        node.vacate("s", 1)
    reuse(node, "s")
    return pinning(without, node, REFUSED)


def pin_of_moved(without: Without) -> Scenario:
    """Then retired at its new place: both slots are let go, one after the other."""
    node = Node(without, scans=True)
    node.move(0, "t", "A", (1, 2))
    node.vacate("s", 1)
    reuse(node, "s")
    node.when = None
    node.retire(0, "t", 2)
    reuse(node, "t")
    return pinning(without, node, IN_S)


def pin_of_demoted(without: Without) -> Scenario:
    node = Node(without, scans=True)
    node.demote(0, (1, 2))
    node.vacate("s", 1)
    reuse(node, "s")
    return pinning(without, node, IN_S)


ON_SSD = {
    **record_words(0, 1, "A", "s", tier="ssd"),
    **slot_words({"s": "D", "t": "junk", "u": "A"}),
}


def pin_of_promoted(without: Without) -> Scenario:
    """Its bytes are in slot u; then it is retired from there."""
    node = Node(without, scans=True)
    node.promote(0, "u", (1, 2))
    node.retire(0, "u", 2)
    reuse(node, "u")
    return pinning(without, node, ON_SSD)


def unpin(without: Without) -> Scenario:
    """A retired block is held for a pin; the client lets it go, the node looks again."""
    reader = Reader(without)
    reader.load("view", "offset", "offset of the view")
    reader.view()
    reader.unpin()
    node = Node(without, scans=True)
    if node.has("poll.fence"):
        node.fence(Fence.FULL)
    node.scan("s", 1)
    reuse(node, "s")
    name = "s" if node.has("pin.names_the_slot") else 1
    memory = {
        **slot_words({"s": "A", "t": "junk", "u": "junk"}),
        "offset of the view": "s",
        **held("s", by=name),
    }
    return Scenario([node, reader], memory, wrong_bytes, JUDGED)


def word_handed_on(without: Without) -> Scenario:
    """One reader lets its hazard word go, and another of the same client pins with it."""
    before = Thread("before", without)
    before.store("unpin", "hazard.word", NO_SLOT, release=before.has("unpin.release"))
    before.store("unpin", "hazard.in_use", 0, release=before.has("unpin.in_use_release"))
    reader = Reader(without)
    reader.find()
    reader.load("claim", "in use", "hazard.in_use", acquire=reader.has("claim.acquire"))
    reader.check(lambda seen: seen["in use"] == 0, "in use")
    reader.only_when(lambda seen: seen["in use"] == 0, "in use")
    reader.pin()
    reader.view()
    node = Node(without, scans=True)
    node.retire(0, "s", 1)
    reuse(node, "s")
    return Scenario([before, node, reader], {**IN_S, **held("t", by="t")}, wrong_bytes, JUDGED)
