"""Views: zero copy, read-only, and pinned for exactly as long as somebody looks."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvpool
from kvpool import Put, Reason
from tests.pools import BLOCK_BYTES, got, is_there, key, keys, opaque, opened, payload, payloads

KEYS = keys(range(4))


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened(max_blocks=4, policy="lru") as pool:
        space = pool.namespace(opaque())
        space.put(KEYS, payloads(KEYS))
        yield space


def pins(space: kvpool.Namespace) -> int:
    return int(space.pool.stats()["blocks_pinned"])


def push_everything_out(space: kvpool.Namespace) -> int:
    """Puts other blocks until nothing that can go is left; returns how many were stored."""
    others = keys(range(1000, 1008))
    return sum(space.put([other], payload(other)).stored for other in others)


def test_a_view_shows_the_leading_blocks_in_place(space: kvpool.Namespace) -> None:
    with space.view([*KEYS[:2], key(9), KEYS[2]]) as blocks:
        assert len(blocks) == 2
        for block, of in zip(blocks, KEYS, strict=False):
            assert isinstance(block, memoryview)
            assert (block.nbytes, block.readonly, block.format) == (BLOCK_BYTES, True, "B")
            assert bytes(block) == payload(of)
        # The same memory each time, inside the pool's own: nothing was copied.
        with space.view(KEYS) as again:
            first, second = (np.frombuffer(each, np.uint8) for each in (blocks[0], again[0]))
            assert first.ctypes.data == second.ctypes.data
            assert 0 <= first.ctypes.data - space.pool._node.base_address < 4 * 8 << 20


def test_a_view_cannot_be_written(space: kvpool.Namespace) -> None:
    with space.view(KEYS) as blocks:
        with pytest.raises(TypeError, match="read-only"):
            blocks[0][0] = 1
        array = np.frombuffer(blocks[0], np.uint8)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(TypeError, match="read-only"):
            memoryview(blocks[0].obj)[0] = 1
    assert got(space, KEYS) == 4


def test_what_is_viewed_is_not_evicted(space: kvpool.Namespace) -> None:
    with space.view(KEYS[:3]) as blocks:
        assert pins(space) == 3
        assert push_everything_out(space) > 0
        assert got(space, KEYS[:3]) == 3
        assert not is_there(space, KEYS[3])
        assert [bytes(block) for block in blocks] == [payload(each) for each in KEYS[:3]]
    assert pins(space) == 0
    push_everything_out(space)
    assert not any(is_there(space, each) for each in KEYS)


def test_a_pool_that_is_all_viewed_refuses_puts_and_recovers(space: kvpool.Namespace) -> None:
    other = keys([500])
    with space.view(KEYS):
        assert space.put(other, payloads(other)).reason is Reason.POOL_PINNED
        assert space.reserve(other[0]).reason is Reason.POOL_PINNED
    assert space.put(other, payloads(other))[0] is Put.STORED


@pytest.mark.parametrize("how", ["remove", "drop", "resize"])
def test_viewed_bytes_outlive_their_key(space: kvpool.Namespace, how: str) -> None:
    with space.view(KEYS) as blocks:
        if how == "remove":
            assert space.remove(KEYS) == 4
        elif how == "drop":
            assert space.drop() == 4
        else:
            space.pool.resize("2MiB", max_blocks=1, timeout=0.1)
        if how != "resize":
            assert space.lookup(KEYS).blocks == 0
            # The same keys can be stored again, elsewhere: the old places are still looked at.
            space.pool.resize(max_blocks=0)
            other = [bytes(BLOCK_BYTES)] * 4
            assert space.put(KEYS, other).stored == 4
        assert [bytes(block) for block in blocks] == [payload(each) for each in KEYS]
        space.pool.check()
    assert space.pool._node.settle(10)
    stats = space.pool.stats()
    assert (stats["blocks_pinned"], stats["blocks_removed_while_pinned"]) == (0, 0)
    assert stats["bytes_taken"] == stats["blocks"] * BLOCK_BYTES


def test_memoryviews_end_with_the_view(space: kvpool.Namespace) -> None:
    with space.view(KEYS) as blocks:
        pass
    for block in blocks:
        with pytest.raises(ValueError, match="released"):
            bytes(block)
    assert pins(space) == 0


def test_an_array_outlives_the_with_and_keeps_its_pin(space: kvpool.Namespace) -> None:
    with space.view(KEYS) as blocks:
        array = np.frombuffer(blocks[1], np.uint8)
        part = array[100:200]
    del array
    assert pins(space) == 4  # one view, one pin for all of it
    push_everything_out(space)
    assert part.tobytes() == payload(KEYS[1])[100:200]
    assert got(space, KEYS) == 4
    del part
    assert pins(space) == 0
    assert push_everything_out(space) == 8


def test_a_slice_outlives_the_with_and_keeps_its_pin(space: kvpool.Namespace) -> None:
    with space.view(KEYS[:1]) as blocks:
        part = blocks[0][10:20]
    push_everything_out(space)
    assert bytes(part) == payload(KEYS[0])[10:20]
    assert pins(space) == 1
    part.release()
    assert pins(space) == 0


def test_looking_through_the_exporter_neither_ends_the_pin_nor_outlives_it(
    space: kvpool.Namespace,
) -> None:
    with space.view(KEYS) as blocks:
        exporter = blocks[0].obj
        memoryview(exporter).release()
        assert pins(space) == 4
        push_everything_out(space)
        assert [bytes(block) for block in blocks] == [payload(each) for each in KEYS]
        more = memoryview(exporter)
    assert pins(space) == 4
    more.release()
    assert pins(space) == 0
    with pytest.raises(BufferError, match="released"):
        memoryview(exporter)


def test_views_nest_and_overlap(space: kvpool.Namespace) -> None:
    with space.view(KEYS) as outer:
        with space.view(KEYS[:2]) as inner:
            assert pins(space) == 6
            assert bytes(inner[0]) == bytes(outer[0])
        assert pins(space) == 4
        assert bytes(outer[0]) == payload(KEYS[0])
    assert pins(space) == 0


def test_one_view_can_be_entered_again(space: kvpool.Namespace) -> None:
    view = space.view(KEYS)
    assert pins(space) == 0  # nothing happens before the with
    with view as outer:
        with view as inner:
            assert pins(space) == 8
        assert pins(space) == 4
        assert bytes(outer[3]) == payload(KEYS[3])
        with pytest.raises(ValueError, match="released"):
            bytes(inner[3])
    assert pins(space) == 0
    space.remove(KEYS[1:])
    with view as blocks:
        assert len(blocks) == 1


def test_an_exception_releases(space: kvpool.Namespace) -> None:
    with pytest.raises(RuntimeError, match="inside"), space.view(KEYS):
        raise RuntimeError("inside")
    assert pins(space) == 0


def test_a_changed_list_does_not_change_what_is_released(space: kvpool.Namespace) -> None:
    with space.view(KEYS) as blocks:
        blocks.clear()
    assert pins(space) == 0
    with space.view(KEYS) as blocks:
        blocks[0].release()
        assert pins(space) == 4
    assert pins(space) == 0


def test_a_view_that_was_never_left_ends_with_its_memory(space: kvpool.Namespace) -> None:
    blocks = space.view(KEYS).__enter__()
    assert pins(space) == 4
    del blocks
    gc.collect()
    assert pins(space) == 0


def test_the_same_key_twice_is_pinned_twice(space: kvpool.Namespace) -> None:
    with space.view([KEYS[0], KEYS[0]]) as blocks:
        assert pins(space) == 2
        assert bytes(blocks[0]) == bytes(blocks[1])
    assert pins(space) == 0


def test_views_stay_readable_after_close() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(KEYS, payloads(KEYS))
        view = space.view(KEYS)
        blocks = view.__enter__()
        array = np.frombuffer(blocks[2], np.uint8)
    del pool, space
    gc.collect()
    assert [bytes(block) for block in blocks] == [payload(each) for each in KEYS]
    view.__exit__(None, None, None)
    del view, blocks
    gc.collect()
    assert array.tobytes() == payload(KEYS[2])


def test_a_view_heats_what_it_shows() -> None:
    clock = kvpool.ManualClock()
    with opened(clock=clock, max_blocks=3) as pool:
        space = pool.namespace(opaque())
        for at, each in enumerate(KEYS[:3]):
            clock.set(at)
            space.put([each], payload(each))
        clock.set(10)
        with space.view(KEYS[:1]):
            pass
        space.put(KEYS[3:], payload(KEYS[3]))
        assert [is_there(space, each) for each in KEYS] == [True, False, True, True]


def test_views_of_many_threads_release_everything(space: kvpool.Namespace) -> None:
    def look() -> None:
        for _ in range(100):
            with space.view(KEYS) as blocks:
                assert [bytes(block[:8]) for block in blocks] == [
                    payload(each)[:8] for each in KEYS
                ]

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pins(space) == 0


def test_a_large_view(space: kvpool.Namespace) -> None:
    space.pool.resize(max_blocks=0)
    many = keys(range(2000, 3000))
    space.put(many, payloads(many))
    with space.view(many) as blocks:
        assert len(blocks) == 1000
        assert pins(space) == 1000
        assert all(bytes(block) == payload(of) for block, of in zip(blocks, many, strict=True))
    assert pins(space) == 0
