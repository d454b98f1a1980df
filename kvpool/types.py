"""Values that calls return. All frozen; none holds memory of the pool."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.void]  # dtype V16: one 16-byte key per element, packed


class Tier(enum.IntEnum):
    """Where a block lies; 0 is nowhere."""

    ABSENT = 0
    DRAM = 1  # whether or not it is on SSD as well
    SSD = 2  # there only
    REMOTE = 8  # not on this node: another one of its cluster says that it has it


class Put(enum.IntEnum):
    """What became of one block of a put."""

    STORED = 0
    PRESENT = 1
    NO_ROOM = 2


class Reason(enum.IntEnum):
    """Why a block was not stored as asked; NONE for one that was, or was there already.

    All but NOT_DURABLE mean that the pool does not have the block. A NOT_DURABLE one is in DRAM
    and readable; only the SSD did not take it, so that a crash or an eviction loses it.
    """

    NONE = 0
    POOL_PINNED = 2  # nothing more can go: it is being read or written
    INDEX_FULL = 3  # the index has no place for this key
    CHAIN_BROKEN = 4  # a block before it in the same call was not stored
    TIMED_OUT = 5  # another writer of this key, or making room in several steps, took too long
    DROPPED = 6  # the namespace was dropped meanwhile
    NO_MEMORY = 7  # the machine has no pages for it
    FAILED = 8  # the writer gave up, the pool was closed meanwhile, or a test injected a fault
    TOO_LARGE = 9  # the block is larger than the pool is now
    NOT_DURABLE = 10  # put, but not committed: full, read-only, a fault, too slow; readable
    DISCONNECTED = 11  # no node to put it into, or it went away before it answered
    LIMITED = 13  # clients of this node put more bytes per second than they may


class Miss(enum.IntEnum):
    """Why a block was not found or delivered; NONE for one that was."""

    NONE = 0
    ABSENT = 1  # no node has it: never put, evicted, removed or dropped
    BEHIND = 2  # a block before it in the same call is missing; nobody looked at this one
    MOVED = 3  # it left, or changed its place, at every attempt
    SSD_LATE = 4  # the SSD did not deliver it in time
    SSD_DAMAGED = 5  # its copy on the SSD is not whole
    NO_ROOM = 6  # on the SSD, and no room in DRAM to show it in place
    PIN_LIMIT = 7  # this client may not pin more than it does
    TIMED_OUT = 8  # the node, or the one that has it, did not answer in time
    DISCONNECTED = 9  # no node to ask, or the one that has it is not reached
    DAMAGED = 10  # what came over the network is not what was sent
    FAULT = 11  # a fault injected by a test
    LIMITED = 12  # clients of this node get more bytes per second than they may


class Hit(NamedTuple):
    """Answer of a lookup: how many leading blocks are present, and the tier of each key asked."""

    blocks: int
    tiers: bytes  # one Tier per key; 0 from the first miss on
    miss: Miss = Miss.NONE  # why the next block is missing; NONE when none is

    @property
    def misses(self) -> list[Miss]:
        """One Miss per key."""
        missing = len(self.tiers) - self.blocks
        behind = [self.miss, *[Miss.BEHIND] * (missing - 1)] if missing else []
        return [Miss.NONE] * self.blocks + behind

    def __bool__(self) -> bool:
        return self.blocks > 0


class PutResult(Sequence[Put]):
    """One Put per key, in order; `reasons` tells why a block was not stored."""

    __slots__ = ("_codes",)

    def __init__(self, codes: bytes) -> None:
        self._codes = codes

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Put: ...
    @overload
    def __getitem__(self, index: slice) -> PutResult: ...
    def __getitem__(self, index: int | slice) -> Put | PutResult:
        if isinstance(index, slice):
            return PutResult(self._codes[index])
        return Put(min(self._codes[index], Put.NO_ROOM))

    def __iter__(self) -> Iterator[Put]:
        return (Put(min(code, Put.NO_ROOM)) for code in self._codes)

    @property
    def stored(self) -> int:
        """Blocks that this call stored."""
        return self._codes.count(Put.STORED)

    @property
    def present(self) -> int:
        """Blocks that were there already; nothing was copied for them."""
        return self._codes.count(Put.PRESENT)

    @property
    def no_room(self) -> int:
        """Blocks that are not stored as asked; the pool works on without them.

        Those of Reason.NOT_DURABLE count here as well, so that stored + present + no_room is
        len(self); but they are in DRAM and readable: see not_durable.
        """
        return len(self._codes) - self.stored - self.present

    @property
    def not_durable(self) -> int:
        """Blocks among no_room that are readable; only the SSD did not take them."""
        return self._codes.count(Reason.NOT_DURABLE)

    @property
    def reasons(self) -> list[Reason]:
        """One Reason per key."""
        return [Reason(code) if code > Put.PRESENT else Reason.NONE for code in self._codes]

    @property
    def reason(self) -> Reason:
        """Why the first block that was not stored as asked was not; NONE when all were."""
        return next((reason for reason in self.reasons if reason is not Reason.NONE), Reason.NONE)

    def __repr__(self) -> str:
        counts = f"stored={self.stored}, present={self.present}, no_room={self.no_room}"
        if self.not_durable:
            counts += f", not_durable={self.not_durable}"
        why = f", reason={self.reason.name}" if self.no_room else ""
        return f"PutResult({counts}{why})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PutResult) and self._codes == other._codes

    def __hash__(self) -> int:
        return hash(self._codes)
