"""A pool that outlives its memory and its process: DRAM over an SSD.

    python examples/05_ssd_tier.py

One conversation is larger than the pool's DRAM. Its blocks sink to files in a directory, are read
from there, and are found again by a second pool on the same directory: the warm restart of an
engine. Every byte that comes back is compared. The directory is a temporary one, and goes at the
end.
"""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvpool

MANIFEST = kvpool.Manifest(
    model="toy-1b",
    dtype="float16",
    layers=8,
    kv_heads=4,
    head_dim=64,
    block_tokens=16,
)
BLOCKS, STEP = 256, 32
Blocks = npt.NDArray[np.float16]


def prefill(blocks: int) -> Blocks:
    """What a GPU would do: the KV of the conversation, 128 KiB a block."""
    items = 8 * 2 * 16 * 4 * 64
    return np.random.default_rng(3).random((blocks, items), np.float32).astype(np.float16)


def open_pool(directory: Path) -> kvpool.Pool:
    return kvpool.open(
        dram="16MiB",
        ssd=directory,
        ssd_capacity="64MiB",  # all files together; taken at once
        ssd_free_floor="64MiB",  # left free on the filesystem
        durability="durable",  # put returns when the block would survive a power cut
    )


def where(space: kvpool.Namespace, keys: kvpool.Keys) -> str:
    hit = space.lookup(keys)
    tiers = Counter(hit.tiers)
    in_dram, on_ssd = tiers[kvpool.Tier.DRAM], tiers[kvpool.Tier.SSD]
    return f"{hit.blocks} of {len(keys)} blocks, {in_dram} in DRAM, {on_ssd} on the SSD alone"


def main() -> None:
    tokens = np.random.default_rng(7).integers(0, 32_000, BLOCKS * MANIFEST.block_tokens)
    computed = prefill(BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "tier"

        with open_pool(directory) as pool:
            space = pool.namespace(MANIFEST)
            keys = space.keys(tokens)
            for first in range(0, BLOCKS, STEP):  # as an engine does, prefill by prefill
                these = slice(first, first + STEP)
                parent = keys[first - 1] if first else None
                result = space.put(keys[these], computed[these], parent=parent)
                assert result.stored == STEP, result
            print(f"there now: {where(space, keys)}")

        with open_pool(directory) as pool:  # as another process would, days later
            space = pool.namespace(MANIFEST)
            print(f"after a restart: {where(space, keys)}")
            back = np.empty_like(computed)
            count = space.get_into(keys, back)
            assert np.array_equal(back[:count], computed[:count])
            print(f"got {count} blocks, byte for byte what was put")
            stats = pool.stats()
            print(f"from the SSD: {stats['ssd_hits']}, back in DRAM: {stats['promotions']}")
            mib = stats["ssd_bytes_taken"] / 2**20
            print(f"on the SSD: {stats['ssd_blocks']} blocks, {mib:.0f} MiB")


if __name__ == "__main__":
    main()
