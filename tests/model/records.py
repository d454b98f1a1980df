"""The steps of node and readers on records and slots, in the order of the source.

Node: IndexWriter (index_writer.cc), Store::retire, vacate, demote, promote, empty_slab, commit.
Reader: IndexReader::find and copy (index_reader.cc), and pins (client_page.h, client_hazards.h).
A slot is two words of payload, which is enough to be torn. A record has the words that readers use.
Every step that can be left out has a name, `function.step`; see test_model.py for what follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.model.machine import Chosen, Fence, Registers, Thread, Value

WORDS = (0, 1)
DRAM, SSD, BOTH = "dram", "ssd", "dram+ssd"
IN_DRAM = (DRAM, BOTH)
ANYWHERE = (DRAM, SSD, BOTH)
SLOTS = ("s", "t", "u")
NO_SLOT = "none"


def record_words(
    number: int, generation: int, key: str, offset: str, *, tier: str = DRAM, length: int = 2
) -> dict[str, Value]:
    words: dict[str, Value] = {
        "generation": generation,
        "key": key,
        "length": length,
        "tier": tier,
        "offset": offset,
    }
    return {f"r{number}.{field}": value for field, value in words.items()}


def slot_words(slots: Mapping[str, str]) -> dict[str, Value]:
    return {f"{slot}.{word}": value for slot, value in slots.items() for word in WORDS}


def held(slot: str, *, by: Value = None) -> dict[str, Value]:
    """One hazard word of one client, and its bit."""
    return {"hazard.in_use": int(by is not None), "hazard.word": by or NO_SLOT}


@dataclass(frozen=True)
class Block:
    record: int
    key: str
    slot: str
    payload: str
    length: int = 2


class Node(Thread):
    """Writes records and slots. `scans`: clients are attached, so hazards are looked at."""

    def __init__(self, without: frozenset[str] = frozenset(), *, scans: bool = False) -> None:
        super().__init__("node", without)
        self.scans = scans
        self.scan_count = 0

    def field(
        self, label: str, record: int, field: str, value: Value, *, release: bool = False
    ) -> None:
        self.store(label, f"r{record}.{field}", value, release=release)

    # --- a block comes ---

    def prepare(self, block: Block) -> None:
        if self.has("prepare.fence"):
            self.fence(Fence.STREAM)
        self.field("prepare", block.record, "key", block.key)
        self.field("prepare", block.record, "length", block.length)
        self.field("prepare", block.record, "offset", block.slot)

    def fill(self, slot: str, payload: str, *, streaming: bool = True) -> None:
        for word in WORDS:
            self.store("fill", f"{slot}.{word}", payload, streaming=streaming)

    def publish(self, block: Block, generation: int, tier: str = DRAM) -> None:
        self.field("publish", block.record, "tier", tier)
        if self.has("publish.fence"):
            self.fence(Fence.STREAM)
        release = self.has("publish.release")
        number = generation if self.has("publish.fresh_generation") else block.record + 1
        self.field("publish", block.record, "generation", number, release=release)

    def put(self, block: Block, generation: int) -> None:
        self.prepare(block)
        if self.has("put.payload_first"):
            self.fill(block.slot, block.payload)
            self.publish(block, generation)
        else:
            self.publish(block, generation)
            self.fill(block.slot, block.payload)

    # --- it goes, or changes its place ---

    def retire(self, record: int, slot: str, generation: int) -> None:
        scan_last = self.has("vacate.scan_last")
        if not scan_last:
            self.scan(slot, generation)
        if self.has("retire.invalidate"):
            self.field("retire", record, "generation", 0)
        self.vacate(slot, generation, scan=scan_last)

    def move(self, record: int, to: str, payload: str, generations: tuple[int, int]) -> None:
        """Its payload is copied while it is readable; so is the record, throughout."""
        if self.has("move.fence_before_copy"):
            self.fence(Fence.STREAM)
        self.fill(to, payload, streaming=False)
        if self.has("move.fence"):
            self.fence(Fence.STREAM)
        self.stay_readable("move", record)
        self.field("move", record, "offset", to)
        new = generations[1] if self.has("move.fresh_generation") else generations[0]
        self.field("move", record, "generation", new, release=self.has("move.release"))

    def demote(self, record: int, generations: tuple[int, int]) -> None:
        if self.has("demote.fence"):
            self.fence(Fence.STREAM)
        self.stay_readable("demote", record)
        self.field("demote", record, "tier", SSD)
        new = generations[1] if self.has("demote.fresh_generation") else generations[0]
        self.field("demote", record, "generation", new, release=self.has("demote.release"))

    def promote(self, record: int, to: str, generations: tuple[int, int]) -> None:
        if self.has("promote.fence"):
            self.fence(Fence.STREAM)
        self.stay_readable("promote", record)
        if self.has("promote.offset_first"):
            self.field("promote", record, "offset", to)
        self.field("promote", record, "tier", BOTH, release=self.has("promote.tier_release"))
        if not self.has("promote.offset_first"):
            self.field("promote", record, "offset", to)
        new = generations[1] if self.has("promote.fresh_generation") else generations[0]
        self.field("promote", record, "generation", new, release=self.has("promote.release"))

    def stay_readable(self, label: str, record: int) -> None:
        """Not: the record of a block that changes its place is withdrawn meanwhile."""
        if not self.has(f"{label}.stays_readable"):
            self.field(label, record, "generation", 0)

    def set_tier(self, record: int, tier: str) -> None:
        self.field("set_tier", record, "tier", tier)

    # --- its slot may be written again ---

    def vacate(self, slot: str, generation: int, *, scan: bool = True) -> None:
        if self.has("vacate.fence"):
            self.fence(Fence.FULL)
        if scan:
            self.scan(slot, generation)

    def scan(self, slot: str, generation: int) -> None:
        """What follows leaves a slot alone that a client names."""
        if not self.scans or not self.has("vacate.scan"):
            return
        self.scan_count += 1
        in_use, word = f"in_use{self.scan_count}", f"word{self.scan_count}"
        self.load("scan", in_use, "hazard.in_use")
        self.load("scan", word, "hazard.word")
        name = slot if self.has("pin.names_the_slot") else generation

        def is_free(seen: Registers) -> bool:
            return not (seen[in_use] and seen[word] == name)

        self.only_when(is_free, in_use, word)

    def punch(self, slot: str) -> None:
        """fallocate(): by the kernel, in any order with what this thread did before."""
        self.fill(slot, "hole", streaming=False)


class Reader(Thread):
    """Looks for key A by a hint to record 0, that may be a stale one."""

    def __init__(self, without: frozenset[str] = frozenset()) -> None:
        super().__init__("reader", without)

    def find(self, tiers: tuple[str, ...] = IN_DRAM) -> None:
        self.load("find", "generation", "r0.generation", acquire=self.has("find.acquire"))
        self.load("find", "key", "r0.key")
        self.load("find", "length", "r0.length")
        tier_first = self.has("find.tier_before_offset")
        if not tier_first:
            self.load("find", "offset", "r0.offset")
        self.load("find", "tier", "r0.tier", acquire=self.has("find.tier_acquire"))
        if tier_first:
            self.load("find", "offset", "r0.offset")
        if self.has("find.fence"):
            self.fence(Fence.ACQUIRE)
        self.check(lambda seen: seen["generation"] != 0, "generation")
        self.check(lambda seen: seen["tier"] in tiers, "tier")
        if self.has("find.key"):
            self.check(lambda seen: seen["key"] == "A", "key")
        if self.has("find.generation_again"):
            self.load("find", "generation again", "r0.generation")
            self.unchanged("generation again")

    def copy(self) -> None:
        self.payload("copy")
        if self.has("copy.fence"):
            self.fence(Fence.ACQUIRE)
        if self.has("copy.generation_last"):
            self.load("copy", "generation last", "r0.generation")
            self.unchanged("generation last")

    def pin(self) -> None:
        in_use_first = self.has("pin.in_use_first")
        if in_use_first:
            self.store("pin", "hazard.in_use", 1)
        names = "offset" if self.has("pin.names_the_slot") else "generation"
        self.store("pin", "hazard.word", source=names)
        if self.has("pin.fence"):
            self.fence(Fence.FULL)
        if not in_use_first:
            self.store("pin", "hazard.in_use", 1)
        if self.has("pin.generation_again"):
            self.load("pin", "generation pinned", "r0.generation")
            self.unchanged("generation pinned")

    def view(self) -> None:
        """Any time after the pin, without a look at anything else."""
        self.payload("view")

    def unpin(self) -> None:
        self.store("unpin", "hazard.word", NO_SLOT, release=self.has("unpin.release"))
        self.store("unpin", "hazard.in_use", 0, release=self.has("unpin.in_use_release"))

    def payload(self, label: str) -> None:
        for word in WORDS:
            places = {slot: f"{slot}.{word}" for slot in SLOTS}
            self.load(label, f"payload{word}", Chosen("offset", places))

    def unchanged(self, again: str) -> None:
        self.check(lambda seen: seen[again] == seen["generation"], "generation", again)


def wrong_bytes(seen: Registers) -> str | None:
    """Of a reader that looked for A, found it and accepted what it read."""
    payload = [seen[f"payload{word}"] for word in WORDS]
    if payload == ["A", "A"]:
        return None
    return f"accepted as A's payload: {' '.join(map(str, payload))}"
