"""reserve: a slot of the pool filled in place, committed or given back, never half."""

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType, PoolClosed, Put, Reason
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
)

KEY = key(1)


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened() as pool:
        yield pool.namespace(opaque())


def reserved(space: kvpool.Namespace) -> int:
    return int(space.pool.stats()["blocks_reserved"])


def fill(slot: kvpool.Slot, of: bytes = KEY) -> None:
    assert slot.buffer is not None
    slot.buffer[:] = payload(of)


def test_leaving_the_with_commits(space: kvpool.Namespace) -> None:
    with space.reserve(KEY) as slot:
        assert slot.buffer is not None
        assert (slot.buffer.nbytes, slot.buffer.readonly) == (BLOCK_BYTES, False)
        assert (slot.status, slot.reason) == (Put.STORED, Reason.NONE)
        assert not is_there(space, KEY)
        assert reserved(space) == 1
        fill(slot)
    assert (slot.status, slot.buffer) == (Put.STORED, None)
    assert got(space, [KEY]) == 1
    assert reserved(space) == 0


def test_an_exception_aborts(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    fill(slot)
    with pytest.raises(RuntimeError, match="inside"), slot:
        raise RuntimeError("inside")
    assert not is_there(space, KEY)
    assert (slot.status, slot.reason) == (Put.NO_ROOM, Reason.FAILED)
    stats = space.pool.stats()
    assert (stats["blocks_reserved"], stats["put_aborted"], stats["bytes_taken"]) == (0, 1, 0)


def test_what_was_written_before_an_abort_is_never_read(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    assert slot.buffer is not None
    slot.buffer[:] = b"\xee" * BLOCK_BYTES
    slot.abort()
    assert got(space, [KEY]) == 0
    space.put([KEY], payload(KEY))
    assert got(space, [KEY]) == 1


def test_a_present_key_needs_nothing(space: kvpool.Namespace) -> None:
    space.put([KEY], payload(KEY))
    with space.reserve(KEY) as slot:
        assert (slot.status, slot.reason, slot.buffer) == (Put.PRESENT, Reason.NONE, None)
    assert slot.commit() is Put.PRESENT
    slot.abort()
    assert got(space, [KEY]) == 1


def test_a_key_that_somebody_else_writes_times_out(space: kvpool.Namespace) -> None:
    with space.reserve(KEY) as slot:
        other = space.reserve(KEY, timeout=0)
        assert (other.status, other.reason, other.buffer) == (Put.NO_ROOM, Reason.TIMED_OUT, None)
        fill(slot)
    assert other.commit() is Put.NO_ROOM
    assert got(space, [KEY]) == 1


def test_a_slot_that_is_dropped_is_aborted(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    fill(slot)
    del slot
    gc.collect()
    assert reserved(space) == 0
    assert not is_there(space, KEY)


def test_commit_and_abort_happen_once(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    fill(slot)
    assert slot.commit() is Put.STORED
    assert slot.commit() is Put.STORED
    slot.abort()  # too late: it is stored
    assert slot.status is Put.STORED
    assert got(space, [KEY]) == 1
    other = space.reserve(key(2))
    other.abort()
    other.abort()
    assert other.commit() is Put.NO_ROOM
    assert not is_there(space, key(2))
    assert space.pool.stats()["put_aborted"] == 1


def test_nobody_can_write_into_a_committed_block(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    fill(slot)
    memory = slot.buffer
    array = np.frombuffer(memory, np.uint8)
    with pytest.raises(BadArgument, match="delete them first"):
        slot.commit()
    assert not is_there(space, KEY)
    del array
    assert slot.commit() is Put.STORED
    with pytest.raises(ValueError, match="released"):
        memory[0] = 1  # type: ignore[index]
    assert got(space, [KEY]) == 1


def test_a_slice_that_is_still_held_blocks_the_commit(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    assert slot.buffer is not None
    part = slot.buffer[:16]
    slot.buffer[:] = payload(KEY)
    with pytest.raises(BadArgument, match="delete them first"):
        slot.commit()
    part.release()
    assert slot.commit() is Put.STORED
    assert got(space, [KEY]) == 1


def test_a_buffer_exported_directly_blocks_the_commit_as_well(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    fill(slot)
    assert slot.buffer is not None
    letters = (ctypes.c_char * BLOCK_BYTES).from_buffer(slot.buffer)
    with pytest.raises(BadArgument, match="delete them first"):
        slot.commit()
    assert letters.raw == payload(KEY)
    del letters
    gc.collect()
    assert slot.commit() is Put.STORED


def test_an_abort_waits_for_the_last_array(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    array = np.frombuffer(slot.buffer, np.uint8)
    slot.abort()
    assert slot.status is Put.NO_ROOM
    assert reserved(space) == 1  # whoever has the array may still write
    array[:] = 7
    del array
    assert reserved(space) == 0
    assert space.put([KEY], payload(KEY), timeout=0).stored == 1


def test_an_error_inside_the_with_is_not_hidden_by_an_array(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    array = np.frombuffer(slot.buffer, np.uint8)
    with pytest.raises(RuntimeError, match="of the engine"), slot:
        raise RuntimeError("of the engine")
    del array
    assert reserved(space) == 0
    assert not is_there(space, KEY)


def test_leaving_the_with_with_an_array_in_hand_is_told_and_gives_the_slot_back(
    space: kvpool.Namespace,
) -> None:
    with pytest.raises(BadArgument, match="delete them first"), space.reserve(KEY) as slot:
        array = np.frombuffer(slot.buffer, np.uint8)
    assert slot.status is Put.NO_ROOM
    del array
    assert reserved(space) == 0


def test_the_memory_of_a_slot_cannot_be_had_again_after_commit(space: kvpool.Namespace) -> None:
    slot = space.reserve(KEY)
    assert slot.buffer is not None
    exporter = slot.buffer.obj
    fill(slot)
    slot.commit()
    with pytest.raises(BufferError, match="was committed"):
        memoryview(exporter)


def test_a_get_can_write_straight_into_a_slot(space: kvpool.Namespace) -> None:
    other = space.pool.namespace(opaque(salt="copy"))
    space.put([KEY], payload(KEY))
    with other.reserve(KEY) as slot:
        assert space.get_into([KEY], slot.buffer) == 1
    assert got(other, [KEY]) == 1


def test_a_reserved_slot_is_never_evicted_and_counts_as_room() -> None:
    with opened(max_blocks=2) as pool:
        space = pool.namespace(opaque())
        with space.reserve(KEY) as slot:
            fill(slot)
            for number in range(10, 20):
                assert space.put(keys([number]), payloads(keys([number]))).stored == 1
            with space.reserve(key(2)) as other:
                fill(other, key(2))
                assert space.put(keys([30]), payloads(keys([30]))).reason is Reason.POOL_PINNED
                assert space.reserve(key(31)).reason is Reason.POOL_PINNED
        assert got(space, [KEY]) == 1
        assert got(space, [key(2)]) == 1


def test_the_parent_of_a_slot_is_kept_until_it_is_committed() -> None:
    with opened(max_blocks=3) as pool:
        space = pool.namespace(opaque())
        space.put([KEY], payload(KEY))
        with space.reserve(key(2), parent=KEY) as slot:
            fill(slot, key(2))
            for number in range(10, 20):
                space.put(keys([number]), payloads(keys([number])))
            assert is_there(space, KEY)
        assert pool.stats()["blocks_pinned"] == 0
        with space.reserve(key(3), parent=KEY) as aborted:
            aborted.abort()
        assert pool.stats()["blocks_pinned"] == 0


@pytest.mark.parametrize("how", ["drop", "remove"])
def test_a_namespace_that_is_emptied_meanwhile(space: kvpool.Namespace, how: str) -> None:
    slot = space.reserve(KEY)
    fill(slot)
    if how == "drop":
        space.drop()
        assert slot.commit() is Put.NO_ROOM
        assert slot.reason is Reason.DROPPED
        assert not is_there(space, KEY)
    else:
        assert space.remove([KEY]) == 0  # there is nothing to be removed yet
        assert slot.commit() is Put.STORED
        assert got(space, [KEY]) == 1
    assert reserved(space) == 0


def test_a_slot_of_a_closed_pool_cannot_be_committed() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        slot = space.reserve(KEY)
        other = space.reserve(key(2))
    fill(slot)  # the memory is there as long as the slot
    with pytest.raises(PoolClosed):
        slot.commit()
    other.abort()
    assert other.status is Put.NO_ROOM


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (b"short", BadArgument),
        (b"", BadArgument),
        (bytes(32), BadArgument),
        ("x" * 16, BadType),
        (None, BadType),
        (7, BadType),
        ([KEY], BadType),
    ],
    ids=shown,
)
def test_reserve_takes_one_key(space: kvpool.Namespace, given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="key is"):
        space.reserve(given)
    assert reserved(space) == 0


def test_a_key_of_keys_can_be_reserved(space: kvpool.Namespace) -> None:
    chain = space.keys([1, 2, 3])
    for number, each in enumerate(chain):
        with space.reserve(each, parent=chain[number - 1] if number else None) as slot:
            fill(slot, each.tobytes())
    assert got(space, [each.tobytes() for each in chain]) == 3
