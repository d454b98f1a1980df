"""What a block costs besides its payload: index, record, policy; and what a remembered one costs.

Two independent counts: the pool's own books, and what the process grew by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvpool.bench.fill import filled, open_small_blocks
from kvpool.bench.rows import Row
from kvpool.bench.scale import Scale

BLOCKS = 1_000_000
BYTES_PER_BLOCK_MAX = 128
BYTES_PER_GHOST_MAX = 32


def memory(scale: Scale) -> Iterator[Row]:
    """One row; `bytes_per_block` is without payload and without ghosts."""
    blocks = scale.of(BLOCKS, quick=20_000)
    before = _resident_bytes()
    with open_small_blocks(blocks) as pool:
        filled(pool, blocks)
        stats = pool.stats()
        grown = _resident_bytes() - before - stats["bytes_resident"]
        filled(pool, blocks, first_id=blocks)  # as many again: the first ones become ghosts
        after = pool.stats()
    per_block = round(stats["bytes_index_and_books"] / stats["blocks"], 1)
    # To a tenth: memory comes in pages, which adds a fraction of a thousandth.
    per_ghost = round(after["ghost_bytes"] / after["ghosts"], 1)
    fields: dict[str, str | int | float] = {
        "work": "memory",
        "blocks": blocks,
        "bytes_per_block": per_block,
        "bytes_per_ghost": per_ghost,
        "rss_bytes_per_block": round(grown / blocks, 1),
    }
    holds = per_block <= BYTES_PER_BLOCK_MAX and per_ghost <= BYTES_PER_GHOST_MAX
    yield Row(fields, f"<= {BYTES_PER_BLOCK_MAX} and {BYTES_PER_GHOST_MAX} bytes", holds)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
