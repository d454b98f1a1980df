"""Requests and payload between a client and its node (net/lane.h, futex.h).

Promises: who sleeps while there is something to do is woken; what a counter announces is there; a
place of the ring is not written again before it has been read, also by the request after.
"""

from tests.model.explore import Scenario
from tests.model.machine import Fence, Registers, Thread, Value
from tests.model.reads import Without

FOR_EVER = "asleep for ever"
TOO_EARLY = "the counter came before what it counts"


def bell(without: Without) -> Scenario:
    """A client asks while the node, which rings for the last request woke, is about to sleep."""
    client, node = Thread("client", without), Thread("node", without)
    client.store("ask", "fields", 1)
    client.store("ask", "asked", 1, release=client.has("ask.release"))
    if client.has("ask.fence"):
        client.fence(Fence.FULL)
    client.load("ask", "polls", "node_polls")
    client.only_when(lambda seen: seen["polls"] == 0, "polls")
    client.store("ring", "bell", 1)
    drain_first = node.has("serve.drains_bell_first")
    if drain_first:
        node.store("drain", "bell", 0)
    node.load("poll", "at first", "asked")
    node.store("serve", "node_polls", 0)
    if node.has("serve.fence"):
        node.fence(Fence.FULL)
    look_again = node.has("serve.look_again")
    if look_again:
        node.load("serve", "again", "asked", acquire=node.has("serve.acquire"))
        node.load("serve", "fields", "fields")
    if not drain_first:
        node.store("drain", "bell", 0)

    def wrong(seen: Registers) -> str | None:
        news = seen["again"] if look_again else seen["at first"]
        if not news and not seen["finally bell"]:
            return FOR_EVER
        return TOO_EARLY if look_again and news and not seen["fields"] else None

    memory = {"fields": 0, "asked": 0, "node_polls": 1, "bell": 1}
    return Scenario([client, node], memory, wrong, ["client", "node"], finally_of=["bell"])


def sleep(sleeper: Thread, news: str) -> None:
    """One round of wait_for(): it sleeps if `wake` is, for the kernel, what it was before."""
    seen_first = sleeper.has("sleep.wake_seen_first")
    sleeper.store("sleep", "waits", 1)
    if seen_first:
        sleeper.load("sleep", "wake seen", "wake")
    if sleeper.has("sleep.fence"):
        sleeper.fence(Fence.FULL)
    if sleeper.has("sleep.look_again"):
        sleeper.load("sleep", "news", news, acquire=sleeper.has("sleep.acquire"))
    if not seen_first:
        sleeper.load("sleep", "wake seen", "wake")
    sleeper.load("futex", "wake compared", "wake")


def is_asleep_for_ever(seen: Registers) -> bool:
    sleeps = not seen.get("news") and seen["wake compared"] == seen["wake seen"]
    return sleeps and seen["finally wake"] == seen["wake seen"]


def futex(without: Without) -> Scenario:
    """One side advances its counter while the other is about to sleep until it does."""
    teller, sleeper = Thread("teller", without), Thread("sleeper", without)
    teller.store("tell", "payload", 1)
    teller.store("tell", "counter", 1, release=teller.has("tell.release"))
    if teller.has("rouse.fence"):
        teller.fence(Fence.FULL)
    teller.load("rouse", "waits seen", "waits")
    teller.only_when(lambda seen: seen["waits seen"] == 1, "waits seen")
    teller.store("rouse", "wake", 1, release=teller.has("rouse.release"))
    sleep(sleeper, "counter")
    sleeper.load("work", "payload", "payload")

    def wrong(seen: Registers) -> str | None:
        if is_asleep_for_ever(seen):
            return FOR_EVER
        return TOO_EARLY if seen.get("news") and not seen["payload"] else None

    memory = {"payload": 0, "counter": 0, "waits": 0, "wake": 0}
    return Scenario([teller, sleeper], memory, wrong, ["teller", "sleeper"], finally_of=["wake"])


def interrupt(without: Without) -> Scenario:
    """A server that ends wakes whoever waits, without looking whether anybody does."""
    closer, sleeper = Thread("closer", without), Thread("sleeper", without)
    closer.store("end", "ended", 1)
    if closer.has("interrupt.wakes"):
        closer.store("wake up", "wake", 1, release=closer.has("rouse.release"))
    sleep(sleeper, "ended")

    def wrong(seen: Registers) -> str | None:
        return FOR_EVER if is_asleep_for_ever(seen) else None

    memory = {"ended": 0, "waits": 0, "wake": 0}
    return Scenario([closer, sleeper], memory, wrong, ["closer", "sleeper"], finally_of=["wake"])


def stage(client: Thread, number: int) -> None:
    client.store("stage", "place", f"piece {number}")
    client.store("stage", "staged", number, release=client.has("stage.release"))


def take(node: Thread, number: int) -> None:
    staged = f"staged{number}"
    node.load("take", staged, "staged", acquire=node.has("take.acquire"))
    node.check(lambda seen: seen[staged] >= number, staged)
    node.load("take", f"piece{number}", "place")
    node.store("take", "taken", number, release=node.has("take.release"))


def ring(without: Without) -> Scenario:
    """A request after another, in a ring with room for one piece, that takes two of them."""
    client, node = Thread("client", without), Thread("node", without)
    if node.has("answer.resets_taken"):
        node.store("answer", "taken", 0)
    node.store("answer", "answered", 1, release=node.has("answer.release"))
    node.load("serve", "asked", "asked", acquire=node.has("serve.acquire"))
    node.check(lambda seen: seen["asked"] == 2, "asked")
    take(node, 1)
    take(node, 2)

    client.load("ask", "answered", "answered", acquire=client.has("ask.acquire"))
    client.check(lambda seen: seen["answered"] == 1, "answered")
    client.only_when(lambda seen: seen["answered"] == 1, "answered")
    if client.has("ask.resets_staged"):
        client.store("ask", "staged", 0)
    client.store("ask", "asked", 2, release=client.has("ask.release"))
    stage(client, 1)
    if client.has("stage.waits_for_room"):
        client.load("stage", "taken", "taken", acquire=client.has("stage.acquire"))
        client.check(lambda seen: seen["taken"] == 1, "taken")
        client.only_when(lambda seen: seen["taken"] == 1, "taken")
    stage(client, 2)

    def wrong(seen: Registers) -> str | None:
        pieces = (seen["piece1"], seen["piece2"])
        return None if pieces == ("piece 1", "piece 2") else f"took {pieces}"

    memory: dict[str, Value] = {
        "place": "last request's",
        "staged": 1,
        "taken": 1,
        "answered": 0,
        "asked": 1,
    }
    return Scenario([client, node], memory, wrong, ["client", "node"])
