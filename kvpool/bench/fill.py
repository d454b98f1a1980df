"""A pool of very many, very small blocks, for what depends on their number only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.rows import expect
from kvpool.bench.served import Served, served
from kvpool.bench.ssd import namespace
from kvpool.replay.payload import Payload, keys_of

BLOCK_BYTES = 64
SLOT_BYTES = 4096  # the smallest slot that there is
_PUT_BLOCKS = 8192
_SLACK_BYTES = 64 << 20


def open_small_blocks(blocks: int) -> kvpool.Pool:
    """A pool with room for so many blocks and no more; it fills to the last."""
    return kvpool.open(
        dram=small_blocks_bytes(blocks), max_blocks=blocks, prefault="off", evict_ahead=0
    )


@contextlib.contextmanager
def served_small_blocks(blocks: int) -> Iterator[Served]:
    """A daemon with such a pool."""
    with served(
        small_blocks_bytes(blocks), max_blocks=blocks, prefault="off", evict_ahead=0
    ) as daemon:
        yield daemon


def small_blocks_bytes(blocks: int) -> int:
    """Memory for so many blocks."""
    return blocks * SLOT_BYTES + _SLACK_BYTES


def filled(pool: kvpool.Pool, blocks: int, *, first_id: int = 0) -> kvpool.Namespace:
    """Puts blocks of ids first_id, first_id + 1, ... with payload that tells them apart."""
    space = namespace(pool, BLOCK_BYTES)
    payload = Payload(BLOCK_BYTES)
    data = np.empty((_PUT_BLOCKS, BLOCK_BYTES // 8), dtype=np.uint64)
    for start in range(first_id, first_id + blocks, _PUT_BLOCKS):
        count = min(_PUT_BLOCKS, first_id + blocks - start)
        keys = keys_of(range(start, start + count))
        payload.write(keys, data[:count])
        expect(space.put(keys, data[:count]).stored == count, "a block was not stored")
    last = np.zeros_like(data[:count])
    expect(space.get_into(keys, last) == count, "a block that was put is not there")
    expect(not payload.wrong(keys, last), "a block came back with other bytes")
    return space
