"""Each step of a get or a view fails in turn: right bytes or a miss, a counter, nothing pinned."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

import kvpool
from tests.pools import BLOCK_BYTES, got, keys, opaque, opened, payload, payloads

N = 5
CHAIN = keys(range(N))
COPIES_WITHOUT_A_PIN = 3  # a get tries so often before it pins the block


def by_buffer(space: kvpool.Namespace, chain: list[bytes]) -> list[bytes]:
    out = bytearray(b"\xee" * (BLOCK_BYTES * len(chain)))
    count = space.get_into(chain, out)
    return [bytes(out[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(count)]


def by_list(space: kvpool.Namespace, chain: list[bytes]) -> list[bytes]:
    outs = [bytearray(BLOCK_BYTES) for _ in chain]
    return [bytes(out) for out in outs[: space.get_into(chain, outs)]]


def by_load(space: kvpool.Namespace, chain: list[bytes]) -> list[bytes]:
    pages = np.full((len(chain), BLOCK_BYTES), 0xEE, np.uint8)
    count = space.load([pages], range(len(chain)), chain)
    return [page.tobytes() for page in pages[:count]]


def by_aget(space: kvpool.Namespace, chain: list[bytes]) -> list[bytes]:
    outs = [bytearray(BLOCK_BYTES) for _ in chain]
    return [bytes(out) for out in outs[: asyncio.run(space.aget_into(chain, outs))]]


def by_view(space: kvpool.Namespace, chain: list[bytes]) -> list[bytes]:
    with space.view(chain) as blocks:
        return [bytes(block) for block in blocks]


COPIES: dict[str, Callable[[kvpool.Namespace, list[bytes]], list[bytes]]] = {
    "buffer": by_buffer,
    "list": by_list,
    "load": by_load,
    "aget": by_aget,
}


def delivered_up_to(found: list[bytes], at: int) -> None:
    assert len(found) == at
    assert found == [payload(each) for each in CHAIN[:at]]


def unharmed(space: kvpool.Namespace) -> None:
    """A fault on the way out takes nothing away: the same get works the next time."""
    stats = space.pool.stats()
    assert (stats["blocks"], stats["blocks_pinned"]) == (N, 0)
    space.pool.check()
    assert got(space, CHAIN) == N


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("at", range(N))
def test_a_lookup_that_fails_is_a_miss_from_there_on(at: int, way: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        pool._node.fault_fail("get.lookup", times=1, skip=at)
        delivered_up_to(COPIES[way](space, CHAIN), at)
        assert pool._node.fault_hits("get.lookup") == 1
        stats = pool.stats()
        assert (stats["missed_fault"], stats["get_blocks"]) == (1, at)
        assert stats["get_bytes"] == at * BLOCK_BYTES
        unharmed(space)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("times", range(1, COPIES_WITHOUT_A_PIN + 1))
@pytest.mark.parametrize("at", range(N))
def test_a_block_that_goes_away_under_the_copy_is_tried_again(
    at: int, times: int, way: str
) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        pool._node.fault_fail("get.copy", times=times, skip=at)
        delivered_up_to(COPIES[way](space, CHAIN), N)
        assert pool._node.fault_hits("get.copy") == times
        assert pool.stats()["get_blocks"] == N
        unharmed(space)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("last", ["get.acquire", "get.deliver"])
@pytest.mark.parametrize("at", range(N))
def test_a_get_that_fails_to_the_last_step_is_a_miss(at: int, last: str, way: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        pool._node.fault_fail("get.copy", times=COPIES_WITHOUT_A_PIN, skip=at)
        pool._node.fault_fail(last, times=1)
        delivered_up_to(COPIES[way](space, CHAIN), at)
        assert pool._node.fault_hits("get.copy") == COPIES_WITHOUT_A_PIN
        assert pool._node.fault_hits(last) == 1
        stats = pool.stats()
        assert (stats["missed_moved"], stats["get_blocks"]) == (1, at)
        unharmed(space)


@pytest.mark.parametrize("at", range(N))
def test_a_view_that_fails_is_shorter(at: int) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        pool._node.fault_fail("get.acquire", times=1, skip=at)
        delivered_up_to(by_view(space, CHAIN), at)
        assert pool._node.fault_hits("get.acquire") == 1
        unharmed(space)


def test_a_pool_whose_every_step_fails_is_a_pool_of_misses() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        for point in ("get.copy", "get.deliver"):
            pool._node.fault_fail(point, times=1 << 40)
        for way in COPIES.values():
            assert way(space, CHAIN) == []
        pool._node.fault_fail("get.lookup", times=1 << 40)
        for way in COPIES.values():
            assert way(space, CHAIN) == []
        pool._node.fault_fail("get.acquire", times=1 << 40)
        assert by_view(space, CHAIN) == []
        for point in ("get.copy", "get.deliver", "get.lookup", "get.acquire"):
            assert pool._node.fault_hits(point) > 0
        pool._node.fault_clear()
        unharmed(space)


def test_a_miss_is_counted_with_its_reason() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        assert by_buffer(space, CHAIN) == []
        assert pool.stats()["missed_absent"] == 1
        assert (pool.stats()["missed_fault"], pool.stats()["missed_moved"]) == (0, 0)
