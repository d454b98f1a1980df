"""What the machine can do: one memcpy of as many bytes, measured between the pool's own copies.

A Floor owns a ring of memory, as large as its thread's share of what the pool works on (all rings
together up to a limit well beyond the last-level cache), and walks through it, so that its bytes
are as cold as a pool's. Buffers are numpy's as they come. One thread per Floor.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import numpy.typing as npt

RING_BYTES_MAX = 128 << 20  # of all rings of a replay


class Floor:
    """Sums up memcpy's bytes and seconds: out of the ring after a get, into it after a put."""

    def __init__(self, working_set_bytes: int, *, floors: int = 1) -> None:
        share_bytes = max(1, min(working_set_bytes, RING_BYTES_MAX) // floors)
        # Written once here: first touch is far slower than a copy and is not what is compared.
        self._ring = np.ones(share_bytes, dtype=np.uint8)
        self._at = 0
        self.copied_bytes = 0
        self.seconds = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.copied_bytes / self.seconds if self.seconds else 0.0

    def copy_out(self, buffer: npt.NDArray[np.uint64]) -> None:
        """ring -> buffer; overwrites the buffer."""
        self._copy(buffer, into_ring=False)

    def copy_in(self, buffer: npt.NDArray[np.uint64]) -> None:
        """buffer -> ring."""
        self._copy(buffer, into_ring=True)

    def _copy(self, buffer: npt.NDArray[np.uint64], *, into_ring: bool) -> None:
        copy_bytes = min(buffer.nbytes, self._ring.nbytes)
        if self._at + copy_bytes > self._ring.nbytes:
            self._at = 0
        ring, memory = self._ring.ctypes.data + self._at, buffer.ctypes.data
        target, source = (ring, memory) if into_ring else (memory, ring)
        started = time.perf_counter()
        ctypes.memmove(target, source, copy_bytes)
        self.seconds += time.perf_counter() - started
        self.copied_bytes += copy_bytes
        self._at += copy_bytes
