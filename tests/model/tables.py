"""Looking for a key while its table is outgrown and wiped (IndexWriter::step, finish_growing).

Promise: a key that is there throughout, or whose put was answered before, is found.
The key lies in the second bucket of the old table, past a full first one, and in the first bucket
of the new one. A table's memory is wiped by stores or punched, once there is a new one.
"""

from tests.model.explore import Scenario
from tests.model.machine import Chosen, Fence, Registers, Thread, Value
from tests.model.reads import JUDGED, Without

HINT, NO_HINT = "hint", "empty"
OLD_PASSED = {"old": "old.passed", "new": "new.passed"}
FIRST_HINT = {"old": "old.hint0", "new": "new.hint0"}
SECOND_HINT = {"old": "old.hint1", "new": "new.hint1"}


def grow(node: Thread) -> None:
    """The last piece of growing: this key is carried over, then the old table goes."""
    if not node.has("grow.copy_first"):
        node.store("grow", "root", "new", release=True)
    node.store("grow", "new.hint0", HINT, release=node.has("put.hint_release"))
    if node.has("grow.copy_first"):
        node.store("grow", "root", "new", release=node.has("grow.root_release"))
    if node.has("grow.fence"):
        node.fence(Fence.RELEASE)


def wipe(node: Thread) -> None:
    node.store("wipe", "old.passed", 0)
    node.store("wipe", "old.hint1", NO_HINT)


def attempt(reader: Thread, root: str) -> None:
    """One probe of the table that was loaded as `root`, and the look whether it is the newest."""
    passed_acquire, hint_acquire = (
        reader.has("find.passed_acquire"),
        reader.has("find.hint_acquire"),
    )
    reader.load("find", root, "root", acquire=reader.has("find.root_acquire"))
    passed = Chosen(root, OLD_PASSED)
    reader.load("find", f"{root} passed", passed, acquire=passed_acquire)
    reader.load("find", f"{root} hint0", Chosen(root, FIRST_HINT), acquire=hint_acquire)
    reader.load("find", f"{root} hint1", Chosen(root, SECOND_HINT), acquire=hint_acquire)


def is_found(seen: Registers, root: str) -> bool:
    is_passed = seen[f"{root} passed"] != 0
    return bool(seen[f"{root} hint0"] == HINT or (is_passed and seen[f"{root} hint1"] == HINT))


def lookup(reader: Thread) -> None:
    attempt(reader, "root")
    if reader.has("find.root_again"):
        reader.load("find", "root again", "root", acquire=True)
        attempt(reader, "next root")


def wrong(seen: Registers) -> str | None:
    if is_found(seen, "root"):
        return None
    if "root again" not in seen or seen["root again"] == seen["root"]:
        return f"a key that is there is missed in the {seen['root']} table"
    if is_found(seen, "next root"):
        return None
    return f"missed in the {seen['root']} table, then in the {seen['next root']} one"


EMPTY: dict[str, Value] = {
    "root": "old",
    "old.passed": 1,
    "old.hint0": "other",
    "old.hint1": NO_HINT,
    "new.passed": 0,
    "new.hint0": NO_HINT,
    "new.hint1": NO_HINT,
}


def lookup_in_outgrown(without: Without) -> Scenario:
    node, reader = Thread("node", without), Thread("reader", without)
    grow(node)
    wipe(node)
    lookup(reader)
    return Scenario([node, reader], {**EMPTY, "old.hint1": HINT}, wrong, JUDGED)


def lookup_of_put(without: Without) -> Scenario:
    """Put while the table grows, and answered: it is in both tables, or would go with the old."""
    node, reader = Thread("node", without), Thread("reader", without)
    passed_first = node.has("put.passed_first")
    if passed_first:
        node.store("put", "old.passed", 2)
    node.store("put", "old.hint1", HINT, release=node.has("put.hint_release"))
    if not passed_first:
        node.store("put", "old.passed", 2)
    if node.has("put.into_both"):
        node.store("put", "new.hint0", HINT, release=node.has("put.hint_release"))
    node.store("put", "answered", 1, release=node.has("put.answer_release"))
    node.store("grow", "root", "new", release=node.has("grow.root_release"))
    if node.has("grow.fence"):
        node.fence(Fence.RELEASE)
    wipe(node)
    reader.load("wait", "answered", "answered", acquire=reader.has("wait.acquire"))
    reader.check(lambda seen: seen["answered"] == 1, "answered")
    lookup(reader)
    return Scenario([node, reader], {**EMPTY, "old.passed": 0, "answered": 0}, wrong, JUDGED)
