"""open, limits, stats, close: a pool's life, and what it refuses."""

import gc
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType, KvpoolError, PoolClosed
from tests.pools import (
    BLOCK_BYTES,
    got,
    keys,
    opaque,
    opened,
    payloads,
    run_python,
    shown,
    wait_until,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dram": "64 parsecs"}, "parsecs"),
        ({"dram": -1}, "-1"),
        ({"dram": 0}, "must be 2097152"),
        ({"dram": "1MiB"}, "1048576"),
        ({"dram": 1 << 45}, "must be 2097152..17592186044416"),
        ({"dram": "9" * 60}, "more than"),
        ({"dram": "٤GiB"}, "not a size"),
        ({"dram": "8MiB", "dram_max": "4MiB"}, "less than dram"),
        ({"policy": "LRU"}, "temperature, lru"),
        ({"policy": ""}, "it can be"),
        ({"prefault": "yes"}, "off, ahead, all"),
        ({"evict_ahead": 0.6}, "0..0.5"),
        ({"evict_ahead": float("nan")}, "0..0.5"),
        ({"evict_ahead": -0.1}, "0..0.5"),
        ({"tau_s": 0}, "0.001"),
        ({"tau_s": float("inf")}, "inf"),
        ({"max_blocks": -1}, "-1"),
        ({"max_blocks": 1 << 31}, "no limit"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint) as caught:
        kvpool.open(**{"dram": "8MiB", **options})
    assert not isinstance(caught.value, BadType)


@pytest.mark.parametrize(
    "options",
    [
        {"dram": None},
        {"dram": 8.5},
        {"dram": True},
        {"dram": b"8MiB"},
        {"dram": ["8MiB"]},
        {"dram_max": 1.0},
        {"policy": None},
        {"policy": np.array(["lru", "lfu"])},
        {"prefault": True},
        {"evict_ahead": "0.1"},
        {"evict_ahead": None},
        {"tau_s": "10"},
        {"tau_s": True},
        {"max_blocks": 1.0},
        {"max_blocks": "7"},
        {"max_blocks": True},
        {"huge_pages": 1},
        {"huge_pages": None},
        {"clock": 5},
        {"clock": kvpool.ManualClock},
    ],
    ids=shown,
)
def test_a_wrong_type_is_a_bad_type(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(BadType, match=name if name not in ("dram", "dram_max") else "a size is"):
        kvpool.open(**{"dram": "8MiB", **options})


def test_every_error_is_of_the_tree_and_of_the_builtin_kind() -> None:
    with pytest.raises(KvpoolError):
        kvpool.open("x")
    with pytest.raises(ValueError, match="x"):
        kvpool.open("x")
    with pytest.raises(TypeError, match="None"):
        kvpool.open(None)  # type: ignore[arg-type]


def test_numbers_may_come_from_numpy_and_fractions() -> None:
    with opened(evict_ahead=np.float32(0.25), tau_s=Fraction(5)) as pool:
        assert pool.stats()["tau_s"] == 5.0


def test_limits_are_whole_units_and_four_times_by_default() -> None:
    with opened(3 * MIB) as pool:
        stats = pool.stats()
        assert stats["bytes_limit"] == 4 * MIB
        assert stats["bytes_max"] == 12 * MIB
        assert stats["blocks_limit"] == 0
    with opened("4MiB", dram_max="4MiB", max_blocks=7) as pool:
        stats = pool.stats()
        assert (stats["bytes_max"], stats["blocks_limit"]) == (4 * MIB, 7)


@pytest.mark.parametrize("prefault", ["off", "ahead", "all"])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_is_made_ready_as_asked(prefault: str, huge_pages: bool) -> None:
    with opened("72MiB", prefault=prefault, huge_pages=huge_pages) as pool:
        assert pool._node.settle(30)
        # `ahead` keeps 16 units of 2 MiB ready; `all` makes everything, and never more than that.
        expected = {"off": 0, "ahead": 32 * MIB, "all": 72 * MIB}[prefault]
        wait_until(lambda: pool.stats()["bytes_committed"] == expected)
        stats = pool.stats()
        assert abs(stats["bytes_resident"] - expected) <= 2 * MIB
        if not huge_pages:
            assert stats["units_huge"] == 0


@pytest.mark.parametrize("policy", ["temperature", "lru", "lfu", "fifo", "s3fifo"])
def test_every_policy_keeps_a_working_pool(policy: str) -> None:
    with opened(policy=policy, max_blocks=8, tau_s=1.0) as pool:
        space = pool.namespace(opaque())
        for start in range(0, 64, 4):
            part = keys(range(start, start + 4))
            assert space.put(part, payloads(part)).stored == 4
            assert got(space, part) == 4
            assert pool.stats()["blocks"] <= 8
            pool.check()
        assert pool.stats()["evictions"] == 64 - 8


def test_stats_are_numbers_with_units_in_their_names() -> None:
    with opened() as pool:
        stats = pool.stats()
        words = {name for name, value in stats.items() if not isinstance(value, int | float)}
        assert words == {"ssd_read_only_reason", "ssd_buffered_reason"}
        assert {name for name in stats if name.startswith("bytes_")} >= {
            "bytes_limit",
            "bytes_committed",
            "bytes_taken",
            "bytes_resident",
        }


def test_stats_count_what_was_done() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        here, gone = keys(range(4)), keys(range(100, 102))
        space.put(here, payloads(here))
        space.put(here, payloads(here))
        assert got(space, here) == 4
        assert got(space, [*here[:2], *gone]) == 2
        space.remove(here[3:])
        stats = pool.stats()
        assert (stats["puts"], stats["put_present"], stats["put_not_stored"]) == (4, 4, 0)
        assert (stats["gets"], stats["get_blocks"], stats["missed_absent"]) == (2, 6, 1)
        assert stats["put_bytes"] == 4 * BLOCK_BYTES
        assert stats["get_bytes"] == 6 * BLOCK_BYTES
        assert (stats["blocks"], stats["removed"], stats["namespaces"]) == (3, 1, 1)
        assert stats["bytes_taken"] == 3 * BLOCK_BYTES


def test_resize_changes_one_limit_and_leaves_the_other() -> None:
    with opened("8MiB", max_blocks=50) as pool:
        pool.resize("16MiB")
        assert (pool.stats()["bytes_limit"], pool.stats()["blocks_limit"]) == (16 * MIB, 50)
        pool.resize(max_blocks=7)
        assert (pool.stats()["bytes_limit"], pool.stats()["blocks_limit"]) == (16 * MIB, 7)
        pool.resize(max_blocks=0)
        assert pool.stats()["blocks_limit"] == 0
        assert pool.resize() == pool.stats()["bytes_committed"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dram": "1GiB"},
        {"dram": 1},
        {"dram": "2 parsecs"},
        {"max_blocks": -1},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": 1e9},
    ],
    ids=shown,
)
def test_resize_refuses_what_it_cannot_do(arguments: dict[str, Any]) -> None:
    with opened("8MiB") as pool:
        before = pool.stats()
        with pytest.raises(BadArgument):
            pool.resize(**arguments)
        assert pool.stats() == before


def test_resize_of_a_wrong_type() -> None:
    with opened("8MiB") as pool:
        for arguments in ({"dram": 1.5}, {"max_blocks": "7"}, {"timeout": "1"}, {"timeout": None}):
            with pytest.raises(BadType):
                pool.resize(**arguments)  # type: ignore[arg-type]


def test_fewer_blocks_leave_the_coldest_out() -> None:
    clock = kvpool.ManualClock()
    with opened(clock=clock) as pool:
        space = pool.namespace(opaque())
        for number in range(10):
            clock.set(number)
            space.put(keys([number]), payloads(keys([number])))
        pool.resize(max_blocks=4)
        pool._node.settle(10)
        assert [number for number in range(10) if got(space, keys([number]))] == [6, 7, 8, 9]


def test_trim_gives_free_memory_back_and_keeps_blocks() -> None:
    with opened("16MiB") as pool:
        space = pool.namespace(opaque(block_bytes=MIB))
        stored = keys(range(12))
        space.put(stored, payloads(stored, MIB))
        space.remove(stored[2:])
        assert pool.stats()["bytes_resident"] >= 12 * MIB
        pool.trim()
        stats = pool.stats()
        assert stats["bytes_committed"] == stats["bytes_in_slabs"] == 2 * MIB
        assert stats["bytes_resident"] <= 4 * MIB
        assert got(space, stored[:2]) == 2


def test_close_is_idempotent_and_from_any_thread() -> None:
    pool = kvpool.open("8MiB")
    space = pool.namespace(opaque())
    assert not pool.closed
    assert pool.shares_memory
    threads = [threading.Thread(target=pool.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert pool.closed
    with pool, pytest.raises(PoolClosed):  # a closed pool may still leave its `with`
        space.lookup(keys(range(1)))
    pool.close()


def every_call(pool: kvpool.Pool, space: kvpool.Namespace) -> dict[str, Callable[[], Any]]:
    some = keys(range(2))
    room = bytearray(2 * BLOCK_BYTES)
    layers = space.layers([np.zeros((4, BLOCK_BYTES), np.uint8)])
    return {
        "namespace": lambda: pool.namespace(opaque()),
        "register": lambda: pool.register(room),
        "resize": lambda: pool.resize("4MiB"),
        "flush": lambda: pool.flush(0),
        "trim": pool.trim,
        "stats": pool.stats,
        "check": pool.check,
        "lookup": lambda: space.lookup(some),
        "put": lambda: space.put(some, room),
        "get_into": lambda: space.get_into(some, room),
        "view": lambda: space.view(some).__enter__(),
        "reserve": lambda: space.reserve(some[0]),
        "save": lambda: space.save(layers, [0, 1], some),
        "load": lambda: space.load(layers, [0, 1], some),
        "remove": lambda: space.remove(some),
        "drop": space.drop,
        "temperature": lambda: space.temperature(some[0]),
    }


def test_every_call_on_a_closed_pool_says_so() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        calls = every_call(pool, space)
    for call in calls.values():
        with pytest.raises(PoolClosed, match="closed"):
            call()


def test_what_needs_no_pool_works_after_close() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
    assert len(space.keys([1, 2, 3])) == 3
    assert space.manifest.namespace_id == space.id


def test_a_pool_that_nobody_holds_is_closed() -> None:
    # A namespace holds its pool, so that blocks do not vanish under an engine that kept only that.
    space = kvpool.open("8MiB", prefault="off").namespace(opaque())
    gc.collect()
    assert space.put(keys([1]), payloads(keys([1]))).stored == 1
    space.pool.close()


def test_many_pools_beside_each_other() -> None:
    with opened("4MiB") as one, opened("4MiB") as other:
        spaces = [pool.namespace(opaque()) for pool in (one, other)]
        spaces[0].put(keys([1]), payloads(keys([1])))
        assert [space.lookup(keys([1])).blocks for space in spaces] == [1, 0]


AT_EXIT = """
import asyncio, sys, threading
import numpy as np
import kvpool

pool = kvpool.open("16MiB")
space = pool.namespace(kvpool.Manifest(model="m", layout="opaque", block_bytes=65536))
keys = [bytes([number]) * 16 for number in range(32)]
data = bytes(32 * 65536)
space.put(keys, data)
started = threading.Barrier(4)


def hold_views():
    view = space.view(keys)
    blocks = view.__enter__()
    return view, np.frombuffer(blocks[0], np.uint8), memoryview(blocks[1])[5:6]


def hold_slot():
    slot = space.reserve(b"s" * 16)
    return slot, slot.buffer[:10]


def hold_registered():
    return pool.register(np.zeros(4096, np.uint8)), space.layers([np.zeros((2, 65536), np.uint8)])


def make_cycle():
    pool.itself = [pool, space]
    space.cycle = space


def put_async():
    asyncio.run(space.aput([b"a" * 16], data[:65536]))


def in_daemons(work):
    def run():
        started.wait()
        try:
            work()
        except kvpool.PoolClosed:
            pass

    for _ in range(3):
        threading.Thread(target=run, daemon=True).start()
    started.wait()


def copy_on():
    out = bytearray(len(data))
    while True:
        space.get_into(keys, out)
        space.put(keys, data)
        space.drop()


def hash_on():
    tokens = np.arange(200_000)
    while True:
        space.keys(tokens)


def wait_for_a_writer():
    space.put([b"p" * 16], data[:65536], timeout=60)


cases = {
    "views": hold_views,
    "slot": hold_slot,
    "registered": hold_registered,
    "cycle": make_cycle,
    "async": put_async,
    "copying": lambda: in_daemons(copy_on),
    "hashing": lambda: in_daemons(hash_on),
    "waiting": lambda: (space.reserve(b"p" * 16), in_daemons(wait_for_a_writer)),
}
kept = cases[sys.argv[1]]()
"""


@pytest.mark.parametrize(
    "case",
    ["views", "slot", "registered", "cycle", "async", "copying", "hashing", "waiting"],
)
def test_exit_without_close_is_clean_and_silent(case: str) -> None:
    # Three times where threads of other speeds meet the end at other places.
    for _ in range(3 if case in ("copying", "hashing") else 1):
        assert run_python(AT_EXIT, case) == (0, "", "")
