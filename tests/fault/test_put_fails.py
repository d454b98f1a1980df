"""Each step of a put fails in turn, at each place of a batch: whole block or none, nothing lost.

The steps are put.reserve, put.pages, put.copy and put.commit. A point that did not fire fails the
test, so a step that was renamed or moved off the path cannot pass unnoticed.
"""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

import kvpool
from kvpool import Put, Reason
from tests.pools import (
    BLOCK_BYTES,
    got,
    is_there,
    key,
    keys,
    opaque,
    opened,
    payload,
    payloads,
    wait_until,
)

REASONS = {
    "put.reserve": Reason.FAILED,
    "put.pages": Reason.NO_MEMORY,
    "put.copy": Reason.FAILED,
    "put.commit": Reason.FAILED,
}
ABORTED = {"put.reserve": 0, "put.pages": 1, "put.copy": 1, "put.commit": 1}
N = 5
CHAIN = keys(range(N))


def by_put(space: kvpool.Namespace, chain: list[bytes]) -> kvpool.PutResult:
    return space.put(chain, payloads(chain))


def by_list(space: kvpool.Namespace, chain: list[bytes]) -> kvpool.PutResult:
    return space.put(chain, [payload(each) for each in chain])


def by_region(space: kvpool.Namespace, chain: list[bytes]) -> kvpool.PutResult:
    region = space.pool.register(payloads(chain))
    return space.put(chain, region, offsets=np.arange(len(chain)) * BLOCK_BYTES)


def by_save(space: kvpool.Namespace, chain: list[bytes]) -> kvpool.PutResult:
    pages = np.frombuffer(payloads(chain), np.uint8).reshape(len(chain), BLOCK_BYTES)
    return space.save([pages], range(len(chain)), chain)


def by_aput(space: kvpool.Namespace, chain: list[bytes]) -> kvpool.PutResult:
    return asyncio.run(space.aput(chain, payloads(chain)))


WAYS: dict[str, Callable[[kvpool.Namespace, list[bytes]], kvpool.PutResult]] = {
    "put": by_put,
    "list": by_list,
    "region": by_region,
    "save": by_save,
    "aput": by_aput,
}


def conserved(pool: kvpool.Pool, blocks: int) -> None:
    """Every slot is a block or free, nobody holds anything, and the pool agrees with itself."""
    pool.check()
    stats = pool.stats()
    assert stats["blocks"] == blocks
    assert stats["bytes_taken"] == blocks * BLOCK_BYTES
    assert (stats["blocks_reserved"], stats["blocks_pinned"]) == (0, 0)
    assert stats["blocks_removed_while_pinned"] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", range(N))
@pytest.mark.parametrize("point", REASONS)
def test_a_step_that_fails_leaves_whole_blocks_or_none(point: str, at: int, way: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        pool._node.fault_fail(point, times=1, skip=at)
        result = WAYS[way](space, CHAIN)
        assert pool._node.fault_hits(point) == 1
        assert list(result) == [Put.STORED] * at + [Put.NO_ROOM] * (N - at)
        assert result.reasons[at] is REASONS[point]
        assert set(result.reasons[at + 1 :]) <= {Reason.CHAIN_BROKEN}
        assert got(space, CHAIN) == at
        assert not any(is_there(space, each) for each in CHAIN[at:])
        conserved(pool, at)
        stats = pool.stats()
        assert stats["puts"] == at
        assert stats["put_not_stored"] == N - at
        assert stats["put_aborted"] == ABORTED[point]
        assert stats["put_bytes"] == at * BLOCK_BYTES
        # The next try, as an engine makes it, has what is missing and stores no more than that.
        again = WAYS[way](space, CHAIN)
        assert (again.stored, again.present) == (N - at, at)
        assert got(space, CHAIN) == N
        conserved(pool, N)


@pytest.mark.parametrize("point", REASONS)
def test_a_failure_under_blocks_that_are_there_already(point: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN[:2], payloads(CHAIN[:2]))
        # Present blocks pass put.reserve as well, and no other point.
        pool._node.fault_fail(point, times=1, skip=2 if point == "put.reserve" else 0)
        result = by_put(space, CHAIN)
        assert pool._node.fault_hits(point) == 1
        assert list(result) == [Put.PRESENT] * 2 + [Put.NO_ROOM] * 3
        assert got(space, CHAIN) == 2
        conserved(pool, 2)


@pytest.mark.parametrize("point", REASONS)
def test_a_step_that_fails_every_time_stores_nothing_and_leaks_nothing(point: str) -> None:
    with opened("2MiB", dram_max="2MiB") as pool:
        space = pool.namespace(opaque())
        pool._node.fault_fail(point, times=2000)
        for number in range(2000):  # four times what the pool could hold, if it kept any
            assert space.put([key(number)], payload(key(number))).reason is REASONS[point]
        assert pool._node.fault_hits(point) == 2000
        conserved(pool, 0)
        assert by_put(space, CHAIN).stored == N


@pytest.mark.parametrize("point", REASONS)
def test_a_failed_put_on_a_full_pool_has_evicted_at_most_for_itself(point: str) -> None:
    with opened(max_blocks=8) as pool:
        space = pool.namespace(opaque())
        for number in range(8):
            space.put([key(100 + number)], payload(key(100 + number)))
        pool._node.fault_fail(point, times=1)
        assert space.put([key(1)], payload(key(1))).reason is REASONS[point]
        assert pool._node.fault_hits(point) == 1
        left = pool.stats()["blocks"]
        assert left in (7, 8)
        conserved(pool, left)
        assert sum(got(space, [key(100 + number)]) for number in range(8)) == left


@pytest.mark.parametrize("point", ["put.reserve", "put.pages"])
def test_a_reservation_that_fails_is_told_and_holds_nothing(point: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN[:1], payload(CHAIN[0]))
        pool._node.fault_fail(point, times=1)
        with space.reserve(CHAIN[1], parent=CHAIN[0]) as slot:
            assert slot.buffer is None
            assert (slot.status, slot.reason) == (Put.NO_ROOM, REASONS[point])
        assert pool._node.fault_hits(point) == 1
        conserved(pool, 1)
        with space.reserve(CHAIN[1], parent=CHAIN[0]) as slot:
            assert slot.buffer is not None
            slot.buffer[:] = payload(CHAIN[1])
        assert got(space, CHAIN[:2]) == 2


@pytest.mark.parametrize("point", ["put.pages", "put.copy", "put.commit"])
def test_the_one_that_waited_takes_over_from_the_one_that_failed(point: str) -> None:
    with opened() as pool:
        node = pool._node
        space = pool.namespace(opaque())
        results: list[kvpool.PutResult] = []
        node.fault_pause("put.pages", 30)
        writers = [
            threading.Thread(
                target=lambda: results.append(space.put(CHAIN, payloads(CHAIN), timeout=30))
            )
            for _ in range(2)
        ]
        for writer in writers:
            writer.start()
        wait_until(lambda: node.fault_waiting("put.pages") == 1)
        node.fault_fail(point, times=1)
        node.fault_resume("put.pages")
        for writer in writers:
            writer.join()
        assert sorted(result.stored for result in results) == [0, N]
        assert got(space, CHAIN) == N
        conserved(pool, N)
