"""What close() gives back, though somebody still holds a namespace or a view of the pool.

Memory is asked of the system: the pages of the arena's file, and the descriptors of this process.
"""

import gc
import os
import threading
import time
from pathlib import Path

import pytest

import kvpool
from kvpool import PoolClosed, Reason
from tests.pools import got, key, keys, opaque, opened, payload, payloads, wait_until
from tests.tiers import MIB, on_tier, put_each, served

SIZE = 64 << 10
QUICK_S = 5.0


def open_files() -> list[tuple[int, str]]:
    """Descriptor and name of each file that this process has open."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found.append((number, os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def arena_bytes() -> int:
    """Memory of the system that the arenas of this process take."""
    memory = [number for number, name in open_files() if "kvpool" in name and "memfd:" in name]
    return sum(os.fstat(number).st_blocks * 512 for number in memory)


def files_in(tier: Path) -> list[str]:
    return [name for _, name in open_files() if name.startswith(str(tier))]


def mapped_in(tier: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tier) in line]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def _nothing_is_left_of_others() -> None:
    gc.collect()


def test_memory_goes_back_though_a_namespace_is_held() -> None:
    before = arena_bytes()
    pool = kvpool.open("32MiB", prefault="off")
    space = pool.namespace(opaque(block_bytes=SIZE))
    some = keys(range(300))
    assert space.put(some, payloads(some, SIZE)).stored == 300
    assert arena_bytes() - before >= 300 * SIZE
    pool.close()
    assert arena_bytes() - before <= 64 << 10
    with pytest.raises(PoolClosed):
        space.lookup(some)
    del pool
    gc.collect()
    with pytest.raises(PoolClosed):  # what is held is safe to be asked
        space.put(some[:1], payload(some[0], SIZE))
    assert arena_bytes() - before <= 64 << 10


def test_memory_that_was_made_ready_goes_back() -> None:
    before = arena_bytes()
    pool = kvpool.open("16MiB", prefault="all", huge_pages=False)
    space = pool.namespace(opaque())
    wait_until(lambda: arena_bytes() - before >= 16 * MIB)
    pool.close()
    assert arena_bytes() - before <= 64 << 10
    assert space.pool is pool


def test_a_view_keeps_its_block_and_little_more() -> None:
    before = arena_bytes()
    pool = kvpool.open("32MiB", prefault="off")
    space = pool.namespace(opaque(block_bytes=SIZE))
    some = keys(range(300))
    space.put(some, payloads(some, SIZE))
    with space.view(some[100:101]) as blocks:
        pool.close()
        assert blocks[0] == payload(some[100], SIZE)
        assert arena_bytes() - before <= 2 * MIB + (64 << 10)  # a unit, and books
    del space, pool
    gc.collect()
    assert arena_bytes() == before


@pytest.mark.parametrize("durability", ["async", "durable", "relaxed"])
def test_a_tier_is_let_go_though_a_namespace_is_held(tmp_path: Path, durability: str) -> None:
    tier = tmp_path / "tier"
    memory, before = arena_bytes(), threads()
    with on_tier(tier, durability=durability) as pool:
        space = pool.namespace(opaque())
        assert put_each(pool, range(20)) == 20
        assert files_in(tier)
        assert mapped_in(tier)
    assert files_in(tier) == mapped_in(tier) == []
    assert arena_bytes() - memory <= 64 << 10
    assert threads() == before
    with on_tier(tier) as again:  # and the next may have it
        assert served(again, range(20)) == list(range(20))
        with pytest.raises(PoolClosed):
            space.lookup(keys([1]))


def test_a_view_of_a_block_that_came_from_the_ssd_outlives_the_tier(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with on_tier(tier) as pool:
        put_each(pool, range(20))
    with on_tier(tier) as pool, pool.namespace(opaque()).view(keys([7])) as blocks:
        pool.close()
        assert files_in(tier) == []
        with on_tier(tier) as again:
            assert served(again, range(20)) == list(range(20))
        assert blocks[0] == payload(key(7))


def test_a_pool_that_is_only_dropped_lets_its_tier_go(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    pool = kvpool.open(
        "2MiB", ssd=tier, ssd_capacity="8MiB", ssd_free_floor=0, durability="durable"
    )
    assert put_each(pool, range(5)) == 5
    del pool
    gc.collect()
    assert files_in(tier) == []
    with on_tier(tier) as pool:
        assert served(pool, range(5)) == list(range(5))


def test_many_threads_close_at_once(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with on_tier(tier, durability="async") as pool:
        some = keys(range(200))
        pool.namespace(opaque()).put(some, payloads(some))
        closers = [threading.Thread(target=pool.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(30)
            assert not closer.is_alive()
        assert files_in(tier) == []
    with on_tier(tier) as pool:
        assert got(pool.namespace(opaque()), some) == 200


def test_close_ends_a_put_that_waits_for_its_commit(tmp_path: Path) -> None:
    """Held between the payload and the commit, as on a slow disk."""
    with on_tier(tmp_path / "tier") as pool:
        pool._node.fault_pause("ssd.commit", 30)
        answers: list[kvpool.PutResult] = []
        space = pool.namespace(opaque())
        putter = threading.Thread(
            target=lambda: answers.append(space.put(keys([1]), payload(key(1)), timeout=30))
        )
        putter.start()
        wait_until(lambda: pool._node.fault_waiting("ssd.commit") == 1)
        closer = threading.Thread(target=pool.close)
        closer.start()
        putter.join(QUICK_S)  # it need not wait for the disk
        assert not putter.is_alive()
        assert answers[0].reason is Reason.FAILED
        pool._node.fault_clear()
        closer.join(QUICK_S)
        assert not closer.is_alive()
    with on_tier(tmp_path / "tier") as pool:
        assert served(pool, [1]) == [1]  # the group under way was ended


def test_close_in_no_time_leaves_the_queue_out(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with on_tier(tier, durability="async", ssd_admit="second_use") as pool:
        some = keys(range(100))
        pool.namespace(opaque()).put(some, payloads(some))
        start = time.monotonic()
        pool.close(flush_timeout=0)
        assert time.monotonic() - start < QUICK_S
    with on_tier(tier) as pool:
        assert pool.stats()["ssd_restored_blocks"] == 0


def test_open_and_close_again_and_again_leaks_nothing(tmp_path: Path) -> None:
    tier, held = tmp_path / "tier", []
    for turn in range(8):
        with on_tier(tier) as pool:
            held.append(pool.namespace(opaque()))
            assert put_each(pool, [turn]) == 1
            assert served(pool, range(turn + 1)) == list(range(turn + 1))
        if turn == 0:
            before = len([name for _, name in open_files() if "memfd" not in name]), threads()
        now = len([name for _, name in open_files() if "memfd" not in name]), threads()
        assert now == before


def test_a_pool_without_a_tier_closes_as_ever() -> None:
    with opened() as pool:
        pool.close(flush_timeout=0)
        pool.close()
        assert pool.closed
