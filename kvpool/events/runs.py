"""From a node's changes to events: as few as say the same.

Promises:  1. the events of one key come in the order of its changes;
           2. a BlockStored names blocks that follow each other in one chain, and no others;
           3. a list holds at most KEYS_PER_BATCH keys.
Relies on: the rows of _core.ChangeFeed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.events.encoding import (
    MEDIUM_DRAM,
    MEDIUM_SSD,
    BlockRemoved,
    BlockStored,
    Event,
)

KEYS_PER_BATCH = 1024  # 20 KB where chains are long, 150 KB where each block stands alone
DRAM, SSD = 1, 2
_MEDIA = ((DRAM, MEDIUM_DRAM), (SSD, MEDIUM_SSD))
# Namespace, key, the one before it, number of the namespace, tiers before and after.
_ROW = struct.Struct("<16s16s16sIBB2x")
ROW_BYTES = _ROW.size
_NONE = bytes(16)

Row = tuple[bytes, bytes, int, int]  # key, the one before it, tiers before and after


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace, as a row names it."""

    id: bytes
    number: int


def by_space(rows: bytes) -> dict[Space, list[Row]]:
    """In the order in which they came, those of each namespace by themselves."""
    found: dict[Space, list[Row]] = {}
    of_id: dict[bytes, list[Row]] = {}
    for space, key, parent, number, before, after in _ROW.iter_unpack(rows):
        of_space = of_id.get(space)
        if of_space is None:
            of_space = of_id[space] = found[Space(space, number)] = []
        of_space.append((key, parent, before, after))
    return found


@dataclass(slots=True)
class _Run:
    """One BlockStored to be."""

    parent: bytes | None
    keys: list[bytes]


@dataclass(slots=True)
class _Pending:
    """Changes of different keys, in no order."""

    keys: set[bytes] = field(default_factory=set)
    named: int = 0  # keys in lists: one that changes its tier may be in two
    removed: dict[str, list[bytes]] = field(default_factory=dict)
    runs: list[tuple[str, _Run]] = field(default_factory=list)
    tails: dict[tuple[str, bytes], _Run] = field(default_factory=dict)  # by their last key

    def add(self, row: Row) -> None:
        key, parent, before, after = row
        self.keys.add(key)
        # Gone, and gone already: said to whoever thinks otherwise.
        left = before & ~after if before or after else DRAM | SSD
        for tier, medium in _MEDIA:
            if left & tier:
                self.removed.setdefault(medium, []).append(key)
                self.named += 1
            elif after & ~before & tier:
                self._store(medium, key, None if parent == _NONE else parent)
                self.named += 1

    def _store(self, medium: str, key: bytes, parent: bytes | None) -> None:
        run = None if parent is None else self.tails.pop((medium, parent), None)
        if run is None:
            run = _Run(parent, [])
            self.runs.append((medium, run))
        run.keys.append(key)
        self.tails[medium, key] = run

    def events(self, block_tokens: int) -> list[Event]:
        events: list[Event] = [
            BlockRemoved(block_hashes=keys, medium=medium) for medium, keys in self.removed.items()
        ]
        events += [
            BlockStored(
                block_hashes=run.keys,
                parent_block_hash=run.parent,
                block_size=block_tokens,
                medium=medium,
            )
            for medium, run in self.runs
        ]
        return events


def events_of(rows: list[Row], block_tokens: int) -> Iterator[list[Event]]:
    """Of one namespace: the events of a batch each."""
    events: list[Event] = []
    named = 0
    pending = _Pending()
    for row in rows:
        is_full = named + pending.named >= KEYS_PER_BATCH - 1
        if row[0] in pending.keys or is_full:
            events += pending.events(block_tokens)
            named += pending.named
            pending = _Pending()
        if is_full:
            yield events
            events, named = [], 0
        pending.add(row)
    events += pending.events(block_tokens)
    if events:
        yield events
