"""Block payload that tells where it came from, so that wrong bytes cannot pass for right ones.

8-byte word j of the block with key k is `word(j) ^ seed(k)`, both drawn without repeats. So every
word depends on key and position: bytes of another block, bytes from another place of the same
block, a torn mix of two blocks and a single flipped bit all differ from what is expected.

One thread per Payload (it owns a scratch buffer); its words are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Keys = npt.NDArray[np.void]  # dtype V16

KEY_BYTES = 16
WORD_BYTES = 8
_SCRATCH_BYTES = 256 << 10  # stays in the second-level cache beside the block that it is held to
_KEY_SALTS = np.array([0x6B76706F6F6C2D6B, 0x6579732D66726F6D], dtype=np.uint64)


def mix(numbers: Words) -> Words:
    """A fixed bijection of 64-bit numbers that leaves no visible pattern (SplitMix64's)."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def keys_of(block_ids: Sequence[int]) -> Keys:
    """Packed keys for a trace's block ids: dtype V16, shape (n,). Different ids, different keys."""
    ids = np.array(block_ids, dtype=np.uint64)
    return mix(ids[:, None] ^ _KEY_SALTS).view(f"V{KEY_BYTES}").reshape(len(ids))


class Payload:
    """Writes and checks payload of one block size, a multiple of 8 bytes.

    `write` and `wrong` take keys (n,) and words (n, block_bytes / 8); both run at about the speed
    of memory and let other threads run meanwhile.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0 or block_bytes % WORD_BYTES:
            raise ValueError(f"block_bytes {block_bytes} is not a positive multiple of 8")
        self.block_bytes = block_bytes
        self._words = mix(np.arange(block_bytes // WORD_BYTES, dtype=np.uint64))
        rows = max(1, _SCRATCH_BYTES // block_bytes)
        self._scratch = np.empty((rows, len(self._words)), dtype=np.uint64)

    def write(self, keys: Keys, out: Words) -> None:
        """Fills out[i] with the payload of keys[i]."""
        np.bitwise_xor(self._words, _seeds(keys), out=out)

    def wrong(self, keys: Keys, blocks: Words) -> list[int]:
        """Indices i where blocks[i] is not, bit for bit, the payload of keys[i]."""
        seeds = _seeds(keys)
        wrong: list[int] = []
        for start in range(0, len(keys), len(self._scratch)):
            part = blocks[start : start + len(self._scratch)]
            expected = self._scratch[: len(part)]
            np.bitwise_xor(self._words, seeds[start : start + len(part)], out=expected)
            if not np.array_equal(part, expected):
                rows = np.flatnonzero((part != expected).any(axis=1))
                wrong.extend(int(row) + start for row in rows)
        return wrong


def _seeds(keys: Keys) -> Words:
    """The first half of each key, as a column; distinct because keys_of maps ids one to one."""
    return keys.view(np.uint64).reshape(len(keys), 2)[:, :1]
