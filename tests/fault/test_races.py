"""A writer or a reader is held in the middle of a step while something else happens to it."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import PoolClosed, Put, Reason
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

N = 3
CHAIN = keys(range(N))
HELD_AT_MOST_S = 30


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.answer: Any = None
        self.thread = threading.Thread(target=self._run, args=(call,))
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.answer = call()
        except Exception as error:
            self.answer = error

    def result(self) -> Any:
        self.thread.join(HELD_AT_MOST_S)
        assert not self.thread.is_alive()
        return self.answer


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with opened() as pool:
        yield pool


def held(pool: kvpool.Pool, points: list[str], call: Callable[[], Any]) -> Call:
    """Starts the call and returns when it stands at the last of these points, reached in order.

    A point is let go only when the next one is closed, so no two in a row are the same.
    """
    node, before = pool._node, ""
    started: Call | None = None
    for point in points:
        node.fault_pause(point, HELD_AT_MOST_S)
        if started is None:
            started = Call(call)
        else:
            node.fault_resume(before)
        wait_until(lambda point=point: node.fault_waiting(point) == 1)  # type: ignore[misc]
        before = point
    assert started is not None
    return started


def put(space: kvpool.Namespace, timeout: float = 30) -> Callable[[], kvpool.PutResult]:
    return lambda: space.put(CHAIN, payloads(CHAIN), timeout=timeout)


WRITER_POINTS = ("put.pages", "put.copy", "put.commit")


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_reader_finds_nothing_until_the_writer_has_committed(
    pool: kvpool.Pool, point: str
) -> None:
    space = pool.namespace(opaque())
    writer = held(pool, [point], put(space))
    assert space.lookup(CHAIN).blocks == 0
    assert got(space, CHAIN) == 0
    with space.view(CHAIN) as blocks:
        assert blocks == []
    assert space.temperature(CHAIN[0]) is None
    pool.check()
    assert pool.stats()["blocks_reserved"] == 1
    pool._node.fault_clear()
    assert writer.result().stored == N
    assert got(space, CHAIN) == N
    assert pool._node.fault_hits(point) == 1


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_second_put_waits_and_finds_the_block(pool: kvpool.Pool, point: str) -> None:
    space = pool.namespace(opaque())
    first = held(pool, [point], put(space))
    second = Call(put(space))
    second.thread.join(0.02)
    assert second.thread.is_alive()
    pool._node.fault_clear()
    results = [first.result(), second.result()]
    assert sum(result.stored for result in results) == N
    assert sum(result.present for result in results) == N
    assert got(space, CHAIN) == N


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_second_put_times_out_and_the_first_goes_on(pool: kvpool.Pool, point: str) -> None:
    space = pool.namespace(opaque())
    first = held(pool, [point], put(space))
    start = time.monotonic()
    second = space.put(CHAIN, payloads(CHAIN), timeout=0.05)
    assert 0.05 <= time.monotonic() - start < 10
    assert second.reasons == [Reason.TIMED_OUT, Reason.CHAIN_BROKEN, Reason.CHAIN_BROKEN]
    with space.reserve(CHAIN[0], timeout=0) as slot:
        assert slot.reason is Reason.TIMED_OUT
    pool._node.fault_clear()
    assert first.result().stored == N
    assert pool.stats()["put_not_stored"] == N + 1  # and the slot that could not be had


def test_other_keys_and_namespaces_go_on_while_writers_stand_still(pool: kvpool.Pool) -> None:
    space, other = pool.namespace(opaque()), pool.namespace(opaque(salt="s"))
    slot = space.reserve(key(50))
    waiting = Call(lambda: space.put([key(50)], payload(key(50)), timeout=30))
    waiting.thread.join(0.02)
    assert other.put(CHAIN, payloads(CHAIN)).stored == N
    assert other.put([key(50)], payload(key(50))).stored == 1
    assert space.put(CHAIN, payloads(CHAIN)).stored == N
    assert got(space, CHAIN) == N
    assert other.drop() == N + 1
    pool.resize("4MiB")
    assert waiting.thread.is_alive()
    slot.abort()
    assert waiting.result().stored == 1


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_namespace_dropped_under_a_writer_stays_empty(pool: kvpool.Pool, point: str) -> None:
    space = pool.namespace(opaque())
    space.put(keys([40]), payloads(keys([40])))
    writer = held(pool, [point], put(space))
    assert space.drop() == 1
    pool._node.fault_clear()
    result = writer.result()
    assert (result.stored, result.reason) == (0, Reason.DROPPED)
    assert space.lookup(CHAIN).blocks == 0
    assert pool._node.settle(10)
    stats = pool.stats()
    assert (stats["blocks"], stats["bytes_taken"], stats["blocks_reserved"]) == (0, 0, 0)
    pool.check()
    assert put(space)().stored == N


def test_a_namespace_dropped_in_the_middle_of_a_chain(pool: kvpool.Pool) -> None:
    space = pool.namespace(opaque())
    writer = held(pool, ["put.copy", "put.commit", "put.copy"], put(space))
    assert space.lookup(CHAIN).blocks == 1
    assert space.drop() == 1
    pool._node.fault_clear()
    result = writer.result()
    assert result[0] is Put.STORED  # it was, until it was dropped
    assert result.reasons[1] is Reason.DROPPED
    assert not any(is_there(space, each) for each in CHAIN)
    assert pool._node.settle(10)
    assert pool.stats()["bytes_taken"] == 0


@pytest.mark.parametrize("at", range(N))
@pytest.mark.parametrize("then", ["abort", "commit"])
def test_a_chain_whose_head_was_dropped_ends_while_it_waits(
    pool: kvpool.Pool, at: int, then: str
) -> None:
    """Its next key is another writer's. What it would put there could never be reached."""
    space = pool.namespace(opaque())
    other = space.reserve(CHAIN[at])
    assert other.buffer is not None
    waiting = Call(put(space))
    wait_until(lambda: space.lookup(CHAIN).blocks == at)
    waiting.thread.join(0.02)
    assert waiting.thread.is_alive()
    assert space.drop() == at
    result = waiting.result()  # though the other one still stands there
    assert [result[i] for i in range(at)] == [Put.STORED] * at  # they were, until then
    assert result.reasons[at] is Reason.DROPPED
    assert set(result.reasons[at + 1 :]) <= {Reason.CHAIN_BROKEN}
    assert not any(is_there(space, each) for each in CHAIN)
    if then == "commit":
        other.buffer[:] = payload(CHAIN[at])
        assert other.commit() is Put.NO_ROOM
        assert other.reason is Reason.DROPPED
    else:
        other.abort()
    assert not any(is_there(space, each) for each in CHAIN)
    assert put(space)().stored == N
    assert pool._node.settle(10)
    assert pool.stats()["bytes_taken"] == N * BLOCK_BYTES
    pool.check()


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_writer_of_a_dropped_namespace_does_not_hinder_the_next_one(
    pool: kvpool.Pool, point: str
) -> None:
    space = pool.namespace(opaque())
    writer = held(pool, [point], put(space))
    space.drop()
    pool._node.fault_resume(point)
    assert put(space, timeout=10)().no_room == 0
    writer.result()
    assert got(space, CHAIN) == N


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_close_does_not_wait_for_a_writer_that_stands_still(point: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        writer = held(pool, [point], put(space))
        waiting = Call(put(space))
        start = time.monotonic()
        pool.close()
        assert time.monotonic() - start < 10
        answer = waiting.result()
        assert isinstance(answer, PoolClosed) or answer.reason is Reason.FAILED
        with pytest.raises(PoolClosed):
            space.lookup(CHAIN)
        pool._node.fault_clear()
        result = writer.result()  # it ends with an answer, not with a fault
        assert isinstance(result, kvpool.PutResult)
        assert result.stored <= 1
        assert result.reasons[1] is Reason.FAILED or result.reasons[1] is Reason.CHAIN_BROKEN


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_writer_outlives_everybody_who_knew_the_pool(point: str) -> None:
    pool = kvpool.open("4MiB", prefault="off")
    space = pool.namespace(opaque())
    node = pool._node
    writer = held(pool, [point], put(space))
    pool.close()
    del pool, space
    gc.collect()
    node.fault_clear()
    assert isinstance(writer.result(), kvpool.PutResult)


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_a_shrink_goes_on_around_a_writer(point: str) -> None:
    size = 1 << 20
    with opened("16MiB") as pool:
        space = pool.namespace(opaque(block_bytes=size))
        before = keys(range(100, 112))
        space.put(before, b"".join(bytes([1]) * size for _ in before))
        contents = payloads(CHAIN, size)
        writer = held(pool, [point], lambda: space.put(CHAIN, contents))
        pool.resize("4MiB", timeout=5)
        pool.check()
        pool._node.fault_clear()
        result = writer.result()
        assert pool._node.settle(10)
        assert pool.stats()["bytes_committed"] <= 4 << 20
        assert got(space, CHAIN[: result.stored]) <= result.stored


# --- readers --------------------------------------------------------------------------------------


def overwrite(space: kvpool.Namespace) -> None:
    """Takes the chain away and writes other bytes to where it was."""
    space.remove(CHAIN)
    for each in keys(range(1000, 1600)):
        space.put([each], b"\xee" * BLOCK_BYTES)


def drop_and_store_other_bytes(space: kvpool.Namespace) -> None:
    space.drop()
    space.put(CHAIN, b"\xdd" * (BLOCK_BYTES * N))


# What may happen to a block while somebody copies it out.
CHANGES: dict[str, Callable[[kvpool.Namespace], Any]] = {
    "nothing": lambda space: None,
    "overwrite": overwrite,
    "remove": lambda space: space.remove(CHAIN),
    "drop": lambda space: space.drop(),
    "drop and store again": drop_and_store_other_bytes,
    "shrink": lambda space: space.pool.resize("2MiB", max_blocks=1, timeout=5),
    "trim": lambda space: space.pool.trim(),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("point", ["get.lookup", "get.copy"])
@pytest.mark.parametrize("at", range(N))
def test_a_reader_gets_right_bytes_or_a_miss_whatever_happens_under_it(
    point: str, what: str, at: int
) -> None:
    with opened("4MiB", policy="lru") as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        out = np.full(N * BLOCK_BYTES, 0xA5, np.uint8)
        points = ["get.lookup", "get.copy"] * at + ["get.lookup"]
        points += ["get.copy"] if point == "get.copy" else []
        reader = held(pool, points, lambda: space.get_into(CHAIN, out))
        CHANGES[what](space)
        pool._node.fault_clear()
        count = reader.result()
        if what in ("nothing", "trim"):
            assert count == N
        assert count >= at  # what was delivered before stays delivered
        for number, each in enumerate(CHAIN[:count]):
            found = out[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES].tobytes()
            again = what == "drop and store again" and number >= at
            assert found == payload(each) or (again and found == b"\xdd" * BLOCK_BYTES)


@pytest.mark.parametrize("what", ["overwrite", "remove", "drop", "shrink"])
def test_a_reader_that_has_pinned_gets_its_block_whatever_happens(what: str) -> None:
    """After three copies in vain the block is pinned; then nothing can take it away any more."""
    with opened("4MiB", policy="lru") as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        pool._node.fault_fail("get.copy", times=3)
        out = np.zeros(BLOCK_BYTES, np.uint8)
        reader = held(pool, ["get.deliver"], lambda: space.get_into(CHAIN[:1], out))
        assert pool.stats()["blocks_pinned"] == 1
        CHANGES[what](space)
        pool._node.fault_clear()
        # The copy that follows still checks the generation: right bytes, or a miss if the key went.
        if reader.result() == 1:
            assert out.tobytes() == payload(CHAIN[0])
        assert pool.stats()["blocks_pinned"] == 0
        assert pool._node.settle(10)
        pool.check()
        assert pool.stats()["blocks_removed_while_pinned"] == 0


def test_a_reader_of_a_closed_pool_ends() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(CHAIN, payloads(CHAIN))
        out = np.zeros(N * BLOCK_BYTES, np.uint8)
        reader = held(pool, ["get.copy"], lambda: space.get_into(CHAIN, out))
        pool.close()
        pool._node.fault_clear()
        count = reader.result()
        assert out[: count * BLOCK_BYTES].tobytes() == payloads(CHAIN[:count])
