"""Rows of vLLM's CPU tier <-> blocks of a namespace.

Promises:  1. nothing raises: what cannot be moved is told as the chunks that were, and a reason;
           2. bytes go straight between the rows and the pool, one copy;
           3. after close() no reference to the rows is left.
Thread rule: any thread; rows that are being moved are pinned by vLLM meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvpool import _core
from kvpool.connectors.attach import Attachment
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace
from kvpool.types import Keys, Miss

# Reasons of a miss after which the next block would take as long and miss as well.
_FUTILE = frozenset({Miss.TIMED_OUT, Miss.DISCONNECTED, Miss.LIMITED})


class Moved(NamedTuple):
    """What became of some chunks: places of those that arrived, and why others did not."""

    done: list[int]
    reasons: dict[str, int]


class Rows:
    """The memory of the CPU tier, with the pool's side of it."""

    def __init__(self, view: memoryview, attachment: Attachment, manifest: Manifest) -> None:
        """view: (chunks, row_bytes), contiguous."""
        rows = np.asarray(view)
        self.row_bytes = int(rows.strides[0])
        self._attachment = attachment
        self._manifest = manifest
        self._region: _core.Region | None = _core.Region(rows.reshape(-1).view(np.uint8))

    @property
    def are_near(self) -> bool:
        """Whether present() takes no request: the pool shares its memory, or there is none."""
        return self._attachment.pool is None or self._attachment.shares_memory

    @property
    def _space(self) -> Namespace | None:
        return self._attachment.space(self._manifest)

    def present(self, keys: Sequence[bytes]) -> int:
        """How many leading chunks the pool has. 0 for whatever goes wrong."""
        space = self._space
        if space is None:
            return 0
        try:
            return int(space.count_present(space.fold(keys))[0])
        except Exception:  # a closed or forked pool has nothing
            return 0

    def load(self, keys: Sequence[bytes], chunks: Sequence[int]) -> Moved:
        """Fill the rows of these chunks. A missing one does not end it; a pool that is away does.

        Blocks: the pool's timeout, once for every run of chunks between missing ones.
        """
        space, region = self._space, self._region
        if space is None or region is None:
            return Moved([], {"no_pool": len(keys)})
        done: list[int] = []
        reasons: dict[str, int] = {}
        try:
            folded, offsets = space.fold(keys), self._offsets(chunks)
            begin = 0
            while begin < len(keys):
                misses = np.zeros(len(keys) - begin, np.uint8)
                count = space.get_into(
                    folded[begin:], region, offsets=offsets[begin:], misses=misses
                )
                done += range(begin, begin + count)
                begin += count
                if begin < len(keys):
                    miss = Miss(int(misses[count]))
                    left = len(keys) - begin if miss in _FUTILE else 1
                    reasons[miss.name] = reasons.get(miss.name, 0) + left
                    begin += left
        except Exception as error:
            reasons[type(error).__name__] = len(keys) - len(done) - sum(reasons.values())
        return Moved(done, reasons)

    def store(
        self, keys: Sequence[bytes], chunks: Sequence[int], parent: bytes | None, timeout_s: float
    ) -> Moved:
        """Put chunks of one chain, in its order, the first after `parent`."""
        space, region = self._space, self._region
        if space is None or region is None:
            return Moved([], {"no_pool": len(keys)})
        try:
            before: Keys | None = None if parent is None else space.fold([parent])
            result = space.put(
                space.fold(keys),
                region,
                offsets=self._offsets(chunks),
                parent=None if before is None else before[0],
                timeout=timeout_s,
            )
        except Exception as error:
            return Moved([], {type(error).__name__: len(keys)})
        reasons: dict[str, int] = {}
        done = []
        for place, reason in enumerate(result.reasons):
            if reason == reason.NONE or reason == reason.NOT_DURABLE:
                done.append(place)
            else:
                reasons[reason.name] = reasons.get(reason.name, 0) + 1
        return Moved(done, reasons)

    def _offsets(self, chunks: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.asarray(chunks, np.int64) * self.row_bytes

    def close(self) -> None:
        """Let go of the memory, which vLLM unmaps next. No transfer may be under way."""
        self._region = None
