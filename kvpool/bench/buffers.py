"""Two large buffers of blocks, payload in one of them, and memcpy between the two in steps.

The memory is numpy's as it comes: 16 bytes off a cache line, on huge pages where the system gives
them. It is touched once, at the start, for first touch is far slower than a copy. One thread.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpool.bench.timing import Work
from kvpool.replay.payload import Keys, Payload, Words, keys_of

Layer = npt.NDArray[np.uint16]

TOKENS, HEADS, HEAD_DIM = 16, 8, 128
LAYER_BYTES = 2 * TOKENS * HEADS * HEAD_DIM * 2  # K and V of a block's tokens, in bfloat16


class Memory:
    """The bytes of a source and of a target, allocated once for blocks of any size."""

    def __init__(self, working_set_bytes: int) -> None:
        self.source: Words = np.ones(working_set_bytes // 8, dtype=np.uint64)
        self.target: Words = np.ones(working_set_bytes // 8, dtype=np.uint64)


class Buffers:
    """`memory` as rows of one block each; `source` holds the payload of `keys`, row by row.

    `source_layers` and `target_layers` are the same bytes seen as paged KV: per layer an array
    [page][kv][token][head][element], with as many pages as there are rows. Blocks are a multiple of
    LAYER_BYTES then.
    """

    def __init__(self, memory: Memory, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.count = memory.source.nbytes // block_bytes
        words = self.count * block_bytes // 8
        self.source: Words = memory.source[:words].reshape(self.count, -1)
        self.target: Words = memory.target[:words].reshape(self.count, -1)
        self.keys = keys_of(range(self.count))
        self._payload = Payload(block_bytes)
        self._payload.write(self.keys, self.source)

    @functools.cached_property
    def source_layers(self) -> list[Layer]:
        return _layers(self.source)

    @functools.cached_property
    def target_layers(self) -> list[Layer]:
        return _layers(self.target)

    def wrong(self, keys: Keys, blocks: Words) -> list[int]:
        """Indices of blocks that are not the payload of their keys."""
        return self._payload.wrong(keys, blocks)

    def memcpy(self, batch: int, seed: int) -> Work:
        """Per step one memmove of `batch` rows, between other places each time."""
        step_bytes = batch * self.block_bytes
        source, target = self.source.ctypes.data, self.target.ctypes.data
        start, end = groups(self.count, batch, seed), groups(self.count, batch, seed + 1)

        def step() -> None:
            ctypes.memmove(
                target + next(end) * step_bytes, source + next(start) * step_bytes, step_bytes
            )

        return step

    def memcpy_from(self, addresses: list[int], batch: int, seed: int) -> Work:
        """The same out of other memory: one memmove per block, as they need not lie in line."""
        target, block_bytes = self.target.ctypes.data, self.block_bytes
        start, end = groups(self.count, batch, seed), groups(self.count, batch, seed + 1)

        def step() -> None:
            at = target + next(end) * batch * block_bytes
            first = next(start) * batch
            for address in addresses[first : first + batch]:
                ctypes.memmove(at, address, block_bytes)
                at += block_bytes

        return step


def groups(count: int, batch: int, seed: int) -> Iterator[int]:
    """Endless: numbers of the groups of `batch` among `count` rows, in a random order, repeated."""
    order = np.random.default_rng([seed, batch]).permutation(count // batch)
    return itertools.cycle(order.tolist())


def _layers(blocks: Words) -> list[Layer]:
    count, layer_count = len(blocks), blocks.nbytes // len(blocks) // LAYER_BYTES
    shape = (layer_count, count, 2, TOKENS, HEADS, HEAD_DIM)
    return list(blocks.reshape(-1).view(np.uint16).reshape(shape))
