"""Two keys that the index cannot tell apart by its hash are still two keys.

The index hashes with a salt that each pool draws, so nobody can choose such keys from outside. Here
the salt is known, and the formula of csrc/node/index_layout.h is turned round.
"""

import numpy as np

from kvpool import _core
from kvpool.local import LocalBackend
from kvpool.pool import Pool
from tests.pools import opaque

SALT = 0x1234_5678_9ABC_DEF0
MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    for _ in range(2):
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & MASK
    return x ^ (x >> 32)


def colliding_keys(count: int) -> list[bytes]:
    """Different keys for which low ^ mix64(high ^ salt), all that the index hashes, is the same."""
    made = []
    for high in range(count):
        low = 0x0F0F_0F0F_0F0F_0F0F ^ mix64(high ^ SALT)
        made.append(low.to_bytes(8, "little") + high.to_bytes(8, "little"))
    return made


def test_colliding_keys_are_kept_apart() -> None:
    node = _core.Node.open(
        dram=4 << 20,
        dram_max=4 << 20,
        max_blocks=0,
        policy="lru",
        tau_s=0.0,
        prefault="off",
        evict_ahead=0.0,
        huge_pages=False,
        salt=SALT,
        clock=None,
    )
    with Pool(LocalBackend(node)) as pool:
        space = pool.namespace(opaque(block_bytes=16))
        keys = colliding_keys(30)
        stored, absent = keys[::2], keys[1::2]
        assert space.put(stored, b"".join(stored)).stored == len(stored)
        out = np.zeros(16, np.uint8)
        for each in stored:
            assert space.get_into([each], out) == 1
            assert out.tobytes() == each
        for each in absent:
            assert space.get_into([each], out) == 0
            assert not space.lookup([each])
            assert space.remove([each]) == 0
        assert space.remove(stored[:5]) == 5
        assert [space.lookup([each]).blocks for each in stored] == [0] * 5 + [1] * 10
        pool.check()
