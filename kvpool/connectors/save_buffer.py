"""Memory in which blocks wait until they are put: the only place where saves can pile up.

Promises:  1. bounded: take() gives what there is or nothing, and never waits;
           2. a slot has one user from take() to give().
Thread-safe. The memory is touched when it is first used, not when it is made.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvpool.errors import BadArgument

_ALIGNED = 4096


class SaveBuffer:
    """`capacity` bytes in slots of one block each, the largest of those that are kept."""

    def __init__(self, capacity: int, block_bytes: int, memory: Any = None) -> None:
        """memory: a writable buffer of at least `capacity` bytes, such as pinned memory; else ours.

        Raises BadArgument where not even one block fits.
        """
        stride = -(-block_bytes // _ALIGNED) * _ALIGNED
        self.slots = capacity // stride
        if self.slots < 1:
            raise BadArgument(
                f"save_buffer is {capacity} bytes; one block of this model takes {stride}"
            )
        whole = np.empty(self.slots * stride, np.uint8) if memory is None else memory
        self._blocks = [whole[at * stride : (at + 1) * stride] for at in range(self.slots)]
        self._free = list(range(self.slots - 1, -1, -1))  # the warm ones are taken first
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Slots that nobody uses now."""
        with self._lock:
            return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` slots, or as many as there are."""
        with self._lock:
            count = min(count, len(self._free))
            return [self._free.pop() for _ in range(count)]

    def give(self, slots: list[int]) -> None:
        """Back; the bytes in them mean nothing any more."""
        with self._lock:
            self._free.extend(slots)

    def block(self, slot: int, block_bytes: int) -> np.ndarray[Any, Any]:
        """The memory of a slot."""
        return self._blocks[slot][:block_bytes]
