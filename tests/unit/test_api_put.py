"""put: readable on return, whole chains, and one writer per key."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType, Put, Reason
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
    shown,
    wait_until,
)

SOME = keys(range(4))


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened() as pool:
        yield pool.namespace(opaque())


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts the call elsewhere; its answer is in the list once the thread has ended."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def test_a_second_put_is_a_cheap_no_op(space: kvpool.Namespace) -> None:
    assert list(space.put(SOME, payloads(SOME))) == [Put.STORED] * 4
    again = space.put(SOME, payloads(SOME))
    assert list(again) == [Put.PRESENT] * 4
    assert (again.reason, again.no_room) == (Reason.NONE, 0)
    stats = space.pool.stats()
    assert (stats["puts"], stats["put_present"], stats["put_bytes"]) == (4, 4, 4 * BLOCK_BYTES)


def test_the_bytes_of_the_first_put_stay(space: kvpool.Namespace) -> None:
    # Keys are digests of what determines the bytes, so the second writer has the same ones.
    space.put(SOME[:1], payload(SOME[0]))
    assert space.put(SOME[:1], bytes(BLOCK_BYTES))[0] is Put.PRESENT
    assert got(space, SOME[:1]) == 1


def test_a_put_can_fill_holes(space: kvpool.Namespace) -> None:
    space.put(SOME, payloads(SOME))
    space.remove([SOME[0], SOME[2]])
    assert list(space.put(SOME, payloads(SOME))) == [
        Put.STORED,
        Put.PRESENT,
        Put.STORED,
        Put.PRESENT,
    ]
    assert got(space, SOME) == 4


def test_other_threads_read_a_block_when_put_has_returned(space: kvpool.Namespace) -> None:
    stored: list[bytes] = []
    turn = threading.Barrier(2)

    def read() -> None:
        for _ in range(200):
            turn.wait()
            assert got(space, [stored[-1]]) == 1

    thread, answers = in_thread(read)
    for number in range(200):
        assert space.put(keys([number]), payloads(keys([number]))).stored == 1
        stored.append(key(number))
        turn.wait()
    thread.join()
    assert answers == [None]


def test_the_payload_may_be_reused_when_put_has_returned(space: kvpool.Namespace) -> None:
    buffer = bytearray(payloads(SOME))
    space.put(SOME, buffer)
    buffer[:] = bytes(len(buffer))
    assert got(space, SOME) == 4


def test_a_chain_that_does_not_fit_keeps_its_head() -> None:
    with opened("2MiB", dram_max="2MiB") as pool:
        space = pool.namespace(opaque(block_bytes=256 << 10))
        chain = keys(range(10))  # eight of them fit
        result = space.put(chain, payloads(chain, 256 << 10))
        assert list(result) == [Put.STORED] * 8 + [Put.NO_ROOM] * 2
        assert result.reasons[8:] == [Reason.POOL_PINNED, Reason.CHAIN_BROKEN]
        assert got(space, chain) == 8
        assert pool.stats()["put_not_stored"] == 2
        # The next call may evict them again: nothing is left pinned.
        other = keys(range(20, 28))
        assert space.put(other, payloads(other, 256 << 10)).stored == 8
        assert pool.stats()["blocks_pinned"] == 0


def test_no_block_of_the_running_call_is_evicted_for_a_later_one() -> None:
    with opened(max_blocks=4) as pool:
        space = pool.namespace(opaque())
        chain = keys(range(6))
        result = space.put(chain, payloads(chain))
        assert (result.stored, result.reason) == (4, Reason.POOL_PINNED)
        assert got(space, chain) == 4


def test_the_parent_is_kept_while_its_children_are_stored() -> None:
    with opened(max_blocks=4) as pool:
        space = pool.namespace(opaque())
        chain = keys(range(8))
        space.put(chain[:4], payloads(chain[:4]))
        result = space.put(chain[4:], payloads(chain[4:]), parent=chain[3])
        # Its whole prefix has children now, so nothing can be evicted for the new block.
        assert result.no_room == 4
        assert got(space, chain) == 4


def test_children_know_their_parent_and_go_first() -> None:
    clock = kvpool.ManualClock()
    with opened(max_blocks=3, clock=clock) as pool:
        space = pool.namespace(opaque())
        chain = keys(range(2))
        space.put(chain[:1], payloads(chain[:1]))
        clock.set(1)
        for parent in (chain[0], bytearray(chain[0]), np.frombuffer(chain[0], "V16")):
            space.put(chain[1:], payloads(chain[1:]), parent=parent)
        clock.set(2)
        got(space, chain[1:])  # the child is the warmer one now
        other = keys([90, 91])
        space.put(other[:1], payloads(other[:1]))
        clock.set(3)
        space.put(other[1:], payloads(other[1:]))
        assert [is_there(space, each) for each in (*chain, *other)] == [True, True, False, True]
        for number in range(100, 104):
            clock.set(number)
            got(space, chain[1:])
            got(space, keys([number - 1]))
            space.put(keys([number]), payloads(keys([number])))
            # Whatever was evicted, a child is never there without its parent.
            assert is_there(space, chain[0]) >= is_there(space, chain[1])


def test_a_parent_that_is_gone_is_no_error(space: kvpool.Namespace) -> None:
    assert space.put(SOME, payloads(SOME), parent=key(77)).stored == 4


@pytest.mark.parametrize(
    ("parent", "kind"),
    [
        (b"short", BadArgument),
        (b"".join(SOME), BadArgument),
        ("x" * 16, BadType),
        (7, BadType),
        (SOME, BadType),
    ],
    ids=shown,
)
def test_a_parent_is_one_key(space: kvpool.Namespace, parent: Any, kind: type[Exception]) -> None:
    layers = space.layers([np.zeros((4, BLOCK_BYTES), np.uint8)])
    for call in (
        lambda: space.put(SOME, payloads(SOME), parent=parent),
        lambda: space.reserve(SOME[0], parent=parent),
        lambda: space.save(layers, range(4), SOME, parent=parent),
    ):
        with pytest.raises(kind, match="parent is"):
            call()


@pytest.mark.parametrize(
    ("timeout", "kind"),
    [
        (-1, BadArgument),
        (-0.001, BadArgument),
        (float("nan"), BadArgument),
        (float("inf"), BadArgument),
        (86401, BadArgument),
        (10**400, BadType),
        ("5", BadType),
        (None, BadType),
        ([5], BadType),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_timeout_is_a_number_of_seconds(
    space: kvpool.Namespace, timeout: Any, kind: type[Exception]
) -> None:
    layers = space.layers([np.zeros((4, BLOCK_BYTES), np.uint8)])
    for call in (
        lambda: space.put(SOME, payloads(SOME), timeout=timeout),
        lambda: space.reserve(SOME[0], timeout=timeout),
        lambda: space.save(layers, range(4), SOME, timeout=timeout),
    ):
        with pytest.raises(kind, match="timeout is"):
            call()
    assert space.pool.stats()["blocks_reserved"] == 0


def test_a_timeout_may_be_any_number(space: kvpool.Namespace) -> None:
    for number, timeout in enumerate((0, 1, 0.5, np.float32(0.5), np.int8(3), True)):
        assert space.put(keys([number]), payloads(keys([number])), timeout=timeout).stored == 1


def test_keys_that_change_during_a_put_do_not_upset_the_books() -> None:
    # The core reads a key more than once; what a neighbour writes in between must not matter.
    first, second = (
        np.frombuffer(b"".join(keys(at)), np.uint8) for at in (range(64), range(64, 128))
    )
    changing = first.copy()
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for _ in range(100):
                changing[:] = second
                changing[:] = first

    with opened() as pool:
        space = pool.namespace(opaque(block_bytes=64))
        data = bytes(64 * 64)
        thread, _ = in_thread(change)
        try:
            for _ in range(1500):
                space.put(changing, data, timeout=0)
                space.drop()
        finally:
            done.set()
            thread.join()
        assert pool.stats()["blocks_reserved"] == 0


# --- two writers of one key -----------------------------------------------------------------------


def test_a_put_waits_for_an_unfinished_writer(space: kvpool.Namespace) -> None:
    slot = space.reserve(SOME[0])
    thread, answers = in_thread(lambda: space.put(SOME, payloads(SOME), timeout=30))
    time.sleep(0.01)  # likely waiting by now; the answer is the same if it is not
    assert not answers
    assert slot.buffer is not None
    slot.buffer[:] = payload(SOME[0])
    assert slot.commit() is Put.STORED
    thread.join()
    assert list(answers[0]) == [Put.PRESENT] + [Put.STORED] * 3
    assert got(space, SOME) == 4


def test_a_put_takes_over_from_a_writer_that_gave_up(space: kvpool.Namespace) -> None:
    slot = space.reserve(SOME[0])
    thread, answers = in_thread(lambda: space.put(SOME, payloads(SOME), timeout=30))
    time.sleep(0.01)
    slot.abort()
    thread.join()
    assert list(answers[0]) == [Put.STORED] * 4
    assert got(space, SOME) == 4


def test_a_put_takes_over_from_a_writer_that_was_forgotten(space: kvpool.Namespace) -> None:
    space.reserve(SOME[0])  # nobody holds the slot
    assert space.pool.stats()["blocks_reserved"] == 0
    assert space.put(SOME, payloads(SOME), timeout=0).stored == 4


def test_a_put_stops_waiting_at_its_timeout(space: kvpool.Namespace) -> None:
    space.put(SOME[:1], payload(SOME[0]))
    slot = space.reserve(SOME[1])
    before = time.monotonic()
    result = space.put(SOME, payloads(SOME), timeout=0.05)
    waited_s = time.monotonic() - before
    assert result.reasons == [
        Reason.NONE,
        Reason.TIMED_OUT,
        Reason.CHAIN_BROKEN,
        Reason.CHAIN_BROKEN,
    ]
    assert 0.05 <= waited_s < 5
    assert space.put(SOME[1:2], payload(SOME[1]), timeout=0).reason is Reason.TIMED_OUT
    slot.abort()
    assert space.put(SOME, payloads(SOME), timeout=0).stored == 3


def test_a_put_stops_waiting_when_the_namespace_is_dropped(space: kvpool.Namespace) -> None:
    slot = space.reserve(SOME[0])
    thread, answers = in_thread(lambda: space.put(SOME, payloads(SOME), timeout=30))
    time.sleep(0.01)
    space.drop()
    assert slot.commit() is Put.NO_ROOM
    assert slot.reason is Reason.DROPPED
    thread.join()
    # Either it began before the drop and ends with it, or it came after and found an empty place.
    assert set(answers[0].reasons) <= {Reason.DROPPED, Reason.CHAIN_BROKEN, Reason.NONE}
    assert got(space, SOME) == answers[0].stored


def test_a_put_stops_waiting_when_the_pool_is_closed() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        slot = space.reserve(SOME[0])
        thread, answers = in_thread(lambda: space.put(SOME, payloads(SOME), timeout=30))
        time.sleep(0.01)
        before = time.monotonic()
        pool.close()
        thread.join()
        assert time.monotonic() - before < 5
        if answers:  # else it came too late and was told that the pool is closed
            assert answers[0].reasons[0] is Reason.FAILED
        del slot


def test_a_chain_whose_head_was_dropped_while_its_put_waited_is_not_continued(
    space: kvpool.Namespace,
) -> None:
    slot = space.reserve(SOME[1])
    thread, answers = in_thread(lambda: space.put(SOME, payloads(SOME), timeout=30))
    wait_until(lambda: space.lookup(SOME).blocks == 1)
    time.sleep(0.01)  # it has stored the first block and waits for the second
    assert space.drop() == 1
    slot.abort()
    thread.join()
    assert answers[0][0] is Put.STORED
    assert set(answers[0].reasons[2:]) <= {Reason.DROPPED, Reason.CHAIN_BROKEN}
    assert not any(is_there(space, each) for each in (SOME[0], *SOME[2:]))


@pytest.mark.parametrize("how", ["commit", "abort", "put"])
def test_a_put_that_waits_is_woken_and_does_not_look_now_and_then(
    space: kvpool.Namespace, how: str
) -> None:
    node = space.pool._node

    def put(each: bytes) -> tuple[kvpool.PutResult, float]:
        return space.put([each], payload(each), timeout=30), time.monotonic()

    waits_s = []
    for number in range(21):
        each = key(number)
        if how == "put":
            node.fault_pause("put.commit", 30)
            first, _ = in_thread(lambda each=each: put(each))
            wait_until(lambda: node.fault_waiting("put.commit") == 1)
        else:
            slot = space.reserve(each)
            fill_slot(slot, each)
        second, answers = in_thread(lambda each=each: put(each))
        time.sleep(0.003)
        start = time.monotonic()
        if how == "put":
            node.fault_resume("put.commit")
            first.join()
        elif how == "commit":
            slot.commit()
        else:
            slot.abort()
        second.join()
        result, end = answers[0]
        assert result.no_room == 0
        waits_s.append(end - start)
    # The pool's own thread comes round every 50 ms: half of the waits would be longer than this.
    assert sorted(waits_s)[10] < 0.02


def fill_slot(slot: kvpool.Slot, of: bytes) -> None:
    assert slot.buffer is not None
    slot.buffer[:] = payload(of)


def test_many_writers_of_one_chain_store_it_once(space: kvpool.Namespace) -> None:
    chain = keys(range(32))
    data = payloads(chain)
    start = threading.Barrier(8)

    def put() -> kvpool.PutResult:
        start.wait()
        return space.put(chain, data, timeout=30)

    started = [in_thread(put) for _ in range(8)]
    for thread, _ in started:
        thread.join()
    results = [answers[0] for _, answers in started]
    assert sum(result.stored for result in results) == 32
    assert all(result.no_room == 0 for result in results)
    assert got(space, chain) == 32


def test_a_block_is_absent_until_it_is_committed(space: kvpool.Namespace) -> None:
    node = space.pool._node
    node.fault_pause("put.copy", 30)
    thread, answers = in_thread(lambda: space.put(SOME, payloads(SOME)))
    wait_until(lambda: node.fault_waiting("put.copy") == 1)
    assert space.lookup(SOME).blocks == 0
    assert got(space, SOME) == 0
    with space.view(SOME) as blocks:
        assert blocks == []
    assert space.remove(SOME) == 0
    assert space.pool.stats()["blocks_reserved"] == 1
    node.fault_clear()
    thread.join()
    assert answers[0].stored == 4
    assert got(space, SOME) == 4
