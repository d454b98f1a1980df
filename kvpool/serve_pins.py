"""Prefixes that an operator keeps in DRAM, by name: a system prompt that must not be evicted.

Promises:  1. a pinned block is neither evicted nor moved to the SSD alone until unpin(), a drop of
              its namespace, or the end of the daemon; pins are not kept over a restart;
           2. all of them together take at most `share` of the tenant's DRAM as it is when they are
              made, and there are at most PINS_MAX names: what is pinned is kept from everybody.
Thread rule: every method from any thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from kvpool import _core
from kvpool.errors import BadArgument, NoResource

PINS_MAX = 1024
NAME_BYTES_MAX = 256


@dataclass(frozen=True, slots=True)
class Pin:
    """A name, and the blocks that are kept for it."""

    name: str
    namespace: str  # as the operator called it
    number: int  # of the namespace in the node
    asked: int  # blocks; those that were not there are not held
    bytes: int
    views: list[Any]  # memoryviews: each holds a lease of the core


class Pins:
    """The pinned prefixes of one tenant."""

    def __init__(self, node: _core.Node, share: float) -> None:
        self._node = node
        self._share = share
        self._lock = threading.Lock()
        self._pins: dict[str, Pin] = {}

    def pin(self, name: str, namespace: str, opened: _core.OpenedSpace, keys: bytes) -> int:
        """Pins the leading blocks that are there, reads them from the SSD if need be; how many.

        A pin of that name is replaced. Raises BadArgument, NoResource. Waits for the SSD.
        """
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise BadArgument(f"the name of a pin is text of 1..{NAME_BYTES_MAX} bytes")
        space = _core.Space(opened)
        wanted = len(keys) // 16 * space.block_bytes
        with self._lock:
            self._require_room(name, wanted)
            views = space.view_blocks(keys)
            old = self._pins.pop(name, None)
            if views:
                held = len(views) * space.block_bytes
                self._pins[name] = Pin(name, namespace, space.number, len(keys) // 16, held, views)
        if old is not None:
            _core.release_blocks(old.views)
        return len(views)

    def unpin(self, name: str) -> int:
        """How many blocks it held; 0 for a name that pins nothing."""
        with self._lock:
            pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        blocks = len(pin.views)
        _core.release_blocks(pin.views)
        return blocks

    def forget(self, number: int) -> None:
        """After a drop of that namespace: what was pinned in it is not there any more."""
        with self._lock:
            gone = [pin for pin in self._pins.values() if pin.number == number]
            for pin in gone:
                del self._pins[pin.name]
        for pin in gone:
            _core.release_blocks(pin.views)

    def has(self, name: str) -> bool:
        """Whether something is pinned under that name."""
        return name in self._pins

    def all(self) -> list[Pin]:
        """By name."""
        with self._lock:
            return [self._pins[name] for name in sorted(self._pins)]

    def __len__(self) -> int:
        return len(self._pins)

    def clear(self) -> None:
        """Lets all of them go."""
        with self._lock:
            pins, self._pins = list(self._pins.values()), {}
        for pin in pins:
            _core.release_blocks(pin.views)

    def _require_room(self, name: str, wanted_bytes: int) -> None:
        if len(self._pins) >= PINS_MAX and name not in self._pins:
            raise NoResource(f"{PINS_MAX} prefixes are pinned, the limit; unpin one first")
        limit = int(self._node.stats()["bytes_limit"] * self._share)
        held = sum(pin.bytes for pin in self._pins.values() if pin.name != name)
        if held + wanted_bytes > limit:
            raise NoResource(
                f"pins may take {limit:,} bytes, {self._share:.0%} of this DRAM: {held:,} are taken"
                f" and these blocks need {wanted_bytes:,}"
            )
