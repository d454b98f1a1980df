"""The batches that were sent last, for whoever missed some."""

from __future__ import annotations

from collections import deque

BYTES_MAX = 64 << 20


class History:
    """Batches by their sequence, which has no holes: at most so many, and BYTES_MAX of them."""

    def __init__(self, batches_max: int, bytes_max: int = BYTES_MAX) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._kept: deque[bytes] = deque()
        self.bytes = 0
        self.first = 0  # sequence of the oldest that is kept
        self.next = 0  # of the next that will be sent

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, payload: bytes) -> int:
        """Its sequence."""
        sequence = self.next
        self.next += 1
        self._kept.append(payload)
        self.bytes += len(payload)
        while len(self._kept) > self._batches_max or self.bytes > self._bytes_max:
            self.bytes -= len(self._kept.popleft())
            self.first += 1
        return sequence

    def has(self, sequence: int) -> bool:
        """Kept; or the next one, behind all that is kept."""
        return self.first <= sequence <= self.next

    def get(self, sequence: int) -> bytes | None:
        if self.first <= sequence < self.next:
            return self._kept[sequence - self.first]
        return None
