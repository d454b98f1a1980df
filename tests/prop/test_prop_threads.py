"""Eight threads do everything at once, each verifying every byte that it is given.

Bounded by counts, not by time. Which calls meet is up to the machine; what must hold is not.
"""

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

import kvpool
from kvpool import Put, Reason
from tests.pools import key, opaque, payload

SIZES = (4096, 40_000)
CHAIN = 6
CHAINS = 12
ROUNDS = 400
THREADS = 8


class Worker:
    """One thread: its own random numbers, and everything it saw go wrong."""

    def __init__(self, number: int, pool: kvpool.Pool, start: threading.Barrier) -> None:
        seed = [int(os.environ["KVPOOL_SEED"]), number]
        self.rng = np.random.default_rng(seed)
        self.pool = pool
        self.start = start
        self.spaces = [pool.namespace(opaque(block_bytes=size)) for size in SIZES]
        self.delivered = 0
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        steps: list[Callable[[kvpool.Namespace, list[bytes]], None]] = [
            self.put,
            self.put,
            self.reserve,
            self.get,
            self.get,
            self.view,
            self.remove,
            self.drop_or_resize,
        ]
        self.start.wait()
        try:
            for _ in range(ROUNDS):
                space = self.spaces[self.rng.integers(len(self.spaces))]
                first = int(self.rng.integers(CHAINS)) * CHAIN
                chain = [key(number) for number in range(first, first + CHAIN)]
                steps[self.rng.integers(len(steps))](space, chain)
        except BaseException as error:
            self.errors.append(error)

    def put(self, space: kvpool.Namespace, chain: list[bytes]) -> None:
        size = space.block_bytes
        result = space.put(chain, [payload(each, size) for each in chain], timeout=20)
        assert Reason.TIMED_OUT not in result.reasons

    def reserve(self, space: kvpool.Namespace, chain: list[bytes]) -> None:
        with space.reserve(chain[0], timeout=20) as slot:
            if slot.buffer is not None:
                slot.buffer[:] = payload(chain[0], space.block_bytes)
        assert slot.status in Put

    def get(self, space: kvpool.Namespace, chain: list[bytes]) -> None:
        size = space.block_bytes
        out = np.full(size * CHAIN, 0xEE, np.uint8)
        count = space.get_into(chain, out)
        for number, each in enumerate(chain[:count]):
            assert out[number * size : (number + 1) * size].tobytes() == payload(each, size)
        self.delivered += count

    def view(self, space: kvpool.Namespace, chain: list[bytes]) -> None:
        size = space.block_bytes
        with space.view(chain) as blocks:
            for _ in range(3):  # and they stay what they are while others evict, drop and resize
                assert all(
                    block == payload(each, size) for block, each in zip(blocks, chain, strict=False)
                )
            self.delivered += len(blocks)

    def remove(self, space: kvpool.Namespace, chain: list[bytes]) -> None:
        assert 0 <= space.remove(chain) <= CHAIN

    def drop_or_resize(self, space: kvpool.Namespace, _: list[bytes]) -> None:
        if self.rng.random() < 0.3:
            space.drop()
        else:
            size = self.rng.choice(["2MiB", "4MiB", "8MiB"])
            self.pool.resize(str(size), max_blocks=int(self.rng.choice([0, 30])), timeout=5)


@pytest.mark.parametrize("policy", ["temperature", "s3fifo"])
@pytest.mark.parametrize("evict_ahead", [0.0, 0.2])
def test_right_bytes_or_a_miss_whoever_else_is_at_work(policy: str, evict_ahead: float) -> None:
    with kvpool.open("4MiB", dram_max="8MiB", policy=policy, evict_ahead=evict_ahead) as pool:
        start = threading.Barrier(THREADS)
        workers = [Worker(number, pool, start) for number in range(THREADS)]
        for worker in workers:
            worker.thread.start()
        for worker in workers:
            worker.thread.join(60)
        assert not any(worker.thread.is_alive() for worker in workers)
        for worker in workers:
            if worker.errors:
                raise worker.errors[0]
        assert sum(worker.delivered for worker in workers) > 0
        assert pool._node.settle(10)
        pool.check()
        stats = pool.stats()
        assert (stats["blocks_pinned"], stats["blocks_reserved"]) == (0, 0)
        assert stats["blocks_removed_while_pinned"] == 0
        for space in workers[0].spaces:
            space.drop()
        assert pool._node.settle(10)
        assert pool.stats()["bytes_taken"] == 0
