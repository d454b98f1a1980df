"""An SSD tier from Python: what open refuses, what outlives a pool, what each call promises."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import (
    BadArgument,
    BadType,
    Miss,
    NoResource,
    PoolClosed,
    Put,
    Reason,
    Tier,
    TierRefused,
)
from tests.pools import (
    BLOCK_BYTES,
    ROOT,
    got,
    is_there,
    keys,
    opaque,
    opened,
    payload,
    payloads,
)

MIB = 1 << 20
BLOCKS_IN_DRAM = 64


@contextmanager
def on_ssd(path: Path, **options: Any) -> Iterator[kvpool.Pool]:
    """A small pool over a small tier that writes every block."""
    usual = {
        "ssd": path / "tier",
        "ssd_capacity": "64MiB",
        "ssd_admit": "all",
        "ssd_free_floor": 0,
        "max_blocks": BLOCKS_IN_DRAM,
    }
    with opened(**{**usual, **options}) as pool:
        yield pool


def put_all(pool: kvpool.Pool, numbers: range) -> kvpool.Namespace:
    """Puts block by block, each flushed, so that none leaves DRAM unwritten."""
    space = pool.namespace(opaque())
    for number in numbers:
        assert space.put(keys([number]), payloads(keys([number]))).stored == 1
        assert pool.flush()
    return space


def tiers_of(space: kvpool.Namespace, numbers: range) -> list[int]:
    """The tier of each block, which are no chain here."""
    return [space.lookup(keys([number])).tiers[0] for number in numbers]


# --- what open refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ssd": ""}, "empty path"),
        ({"ssd": "a\0b"}, "NUL"),
        ({"ssd": os.fsdecode(b"odd\xff")}, "not UTF-8"),
        ({"ssd": "t", "ssd_capacity": 0}, "ssd_capacity is 0 bytes"),
        ({"ssd": "t", "ssd_capacity": "64K"}, "write KiB"),
        ({"ssd": "t", "ssd_capacity": 1 << 51}, "must be 1..1125899906842624"),
        ({"ssd": "t", "durability": "eventual"}, "async, durable, relaxed"),
        ({"ssd": "t", "ssd_admit": "some"}, "second_use, all"),
        ({"ssd": "t", "durability": "durable", "ssd_admit": "second_use"}, "writes every block"),
        ({"ssd": "t", "ssd_free_floor": -1}, "outside"),
        ({"ssd": "t", "ssd_io_threads": 0}, "ssd_io_threads is 0"),
        ({"ssd": "t", "ssd_io_threads": 65}, "must be 1..64"),
        ({"ssd_capacity": "1GiB"}, "ssd_capacity is '1GiB', but there is no SSD tier"),
        ({"durability": "durable"}, "durability is 'durable', but there is no SSD tier"),
        ({"ssd_admit": "all"}, "ssd_admit is 'all'"),
        ({"ssd_free_floor": 0}, "ssd_free_floor is 0"),
        ({"ssd_io_threads": 8}, "ssd_io_threads is 8"),
        ({"ssd_direct": True}, "ssd_direct is True"),
        ({"ssd": "t", "ssd_timeout": 0}, "0.001..3600"),
        ({"ssd": "t", "ssd_timeout": float("nan")}, "ssd_timeout is nan"),
        ({"ssd_timeout": 5.0}, "ssd_timeout is 5.0"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint) as caught:
        kvpool.open("8MiB", **options)
    assert not isinstance(caught.value, BadType)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ssd": 5}, "ssd is int"),
        ({"ssd": b"tier"}, "ssd is bytes"),
        ({"ssd": Path}, "ssd is type"),
        ({"ssd": "t", "ssd_capacity": 1.5}, "a size is"),
        ({"ssd": "t", "ssd_capacity": True}, "a size is"),
        ({"ssd": "t", "durability": None}, "durability is NoneType"),
        ({"ssd": "t", "ssd_admit": True}, "ssd_admit is bool"),
        ({"ssd": "t", "ssd_free_floor": 0.5}, "a size is"),
        ({"ssd": "t", "ssd_io_threads": 2.0}, "ssd_io_threads is float"),
        ({"ssd": "t", "ssd_io_threads": True}, "ssd_io_threads is bool"),
        ({"ssd": "t", "ssd_direct": 1}, "ssd_direct is int"),
        ({"ssd": "t", "ssd_timeout": "5"}, "ssd_timeout is str"),
    ],
)
def test_a_wrong_type_is_a_bad_type(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadType, match=complaint):
        kvpool.open("8MiB", **options)


def test_a_path_of_bytes_inside_a_pathlike_is_a_bad_type() -> None:
    class Odd:
        def __fspath__(self) -> bytes:
            return b"tier"

    with pytest.raises(BadType, match="path of bytes"):
        kvpool.open("8MiB", ssd=Odd())  # type: ignore[arg-type]


def test_what_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BadArgument):
        kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_capacity="64MiB", durability="x")
    assert not (tmp_path / "tier").exists()


def test_the_first_open_needs_a_capacity(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="capacity"):
        kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_free_floor=0)


def test_more_than_the_disk_has_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoResource):
        kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_capacity="900TiB")
    assert not any(tmp_path.rglob("slabs"))


def test_the_free_floor_is_kept(tmp_path: Path) -> None:
    with pytest.raises(NoResource, match="free"):
        kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_capacity="64MiB", ssd_free_floor="1000TiB")


def test_a_second_pool_on_the_directory_is_refused_by_name(tmp_path: Path) -> None:
    with on_ssd(tmp_path), pytest.raises(TierRefused, match="tier"), on_ssd(tmp_path):
        pass
    with on_ssd(tmp_path):
        pass


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "tier").write_bytes(b"x")
    with pytest.raises(kvpool.KvpoolError), on_ssd(tmp_path):
        pass
    assert (tmp_path / "tier").read_bytes() == b"x"


# --- what outlives a pool ------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["async", "durable", "relaxed"])
def test_blocks_outlive_the_pool(tmp_path: Path, durability: str) -> None:
    with on_ssd(tmp_path, durability=durability) as pool:
        put_all(pool, range(40))
    with on_ssd(tmp_path, durability=durability) as pool:
        assert pool.stats()["ssd_restored_blocks"] == 40
        space = pool.namespace(opaque())
        assert tiers_of(space, range(41)) == [Tier.SSD] * 40 + [Tier.ABSENT]
        assert sum(got(space, keys([number])) for number in range(41)) == 40
        stats = pool.stats()
        assert (stats["ssd_hits"], stats["ssd_restored_hits"]) == (40, 40)
        assert stats["ssd_hit_bytes"] == 40 * BLOCK_BYTES
        pool.check()


def test_close_writes_back_what_is_worth_it(tmp_path: Path) -> None:
    with on_ssd(tmp_path, ssd_admit="second_use") as pool:
        space = pool.namespace(opaque())
        used, unused = keys(range(10)), keys(range(100, 110))
        space.put(used, payloads(used))
        space.put(unused, payloads(unused))
        assert got(space, used) == 10
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        assert got(space, used) == 10


def test_close_in_no_time_leaves_a_sound_tier(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        space = put_all(pool, range(8))
        more = keys(range(50, 90))
        space.put(more, payloads(more))
        pool.close(flush_timeout=0)
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        assert sum(got(space, keys([number])) for number in range(8)) == 8
        for number in range(50, 90):
            got(space, keys([number]))  # right bytes or a miss


def test_the_capacity_is_as_it_was_when_not_said(tmp_path: Path) -> None:
    with on_ssd(tmp_path, ssd_capacity="48MiB"):
        pass
    with on_ssd(tmp_path, ssd_capacity=None) as pool:
        assert pool.stats()["ssd_capacity_bytes"] == 48 * MIB


def test_a_relative_path_is_of_where_the_pool_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with on_ssd(tmp_path, ssd="here") as pool:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        put_all(pool, range(3))
        pool.resize(ssd_capacity="80MiB")
    assert (tmp_path / "here" / "slabs").is_file()
    assert not any((tmp_path / "elsewhere").iterdir())


KILLED = """
import os, sys
import kvpool

pool = kvpool.open(
    "8MiB", ssd=sys.argv[1], ssd_capacity="64MiB", ssd_free_floor=0, durability="durable"
)
manifest = kvpool.Manifest(model="m", layout="opaque", block_tokens=1, block_bytes=4096)
space = pool.namespace(manifest)
for number in range(10_000):
    key = number.to_bytes(16, "little")
    if space.put([key], key * 256).stored:
        print(number, flush=True)
"""


def test_a_durable_put_outlives_a_kill(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "tier")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert writer.stdout is not None
    acknowledged = []
    for line in writer.stdout:
        acknowledged.append(int(line))
        if len(acknowledged) == 50:
            writer.kill()
    writer.wait(60)
    assert len(acknowledged) >= 50
    with kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_free_floor=0) as pool:
        space = pool.namespace(opaque())
        for number in acknowledged:
            key, out = number.to_bytes(16, "little"), bytearray(BLOCK_BYTES)
            assert space.get_into([key], out) == 1
            assert bytes(out) == key * 256


# --- two tiers as one pool -----------------------------------------------------------------------


def test_what_leaves_dram_is_on_ssd_and_comes_back(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        space = put_all(pool, range(3 * BLOCKS_IN_DRAM))
        tiers = tiers_of(space, range(3 * BLOCKS_IN_DRAM))
        assert Tier.ABSENT not in tiers
        assert tiers.count(Tier.DRAM) <= BLOCKS_IN_DRAM
        stats = pool.stats()
        assert stats["demotions"] == tiers.count(Tier.SSD) > 0
        assert stats["evicted_unwritten"] == 0
        for number in range(3 * BLOCKS_IN_DRAM):
            assert got(space, keys([number])) == 1
        pool.check()


def test_a_lookup_of_a_chain_says_the_tier_of_each_block(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        chain = keys(range(32))
        space.put(chain, payloads(chain))
        assert pool.flush()
        assert space.lookup(chain) == (32, bytes([Tier.DRAM] * 32), Miss.NONE)
        put_all(pool, range(1000, 1000 + BLOCKS_IN_DRAM + 16))
        hit = space.lookup([*chain, *keys([99])])
        assert hit.blocks == 32
        assert set(hit.tiers[:32]) <= {Tier.DRAM, Tier.SSD}
        assert Tier.SSD in hit.tiers
        assert hit.tiers[32] == Tier.ABSENT
        assert got(space, chain) == 32


def test_every_kind_of_read_reaches_the_ssd(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        put_all(pool, range(12))
    for kind in ("get_into", "view", "load", "put", "reserve"):
        with on_ssd(tmp_path) as pool:
            space = pool.namespace(opaque())
            chain = keys(range(12))
            expected = payloads(chain)
            if kind == "get_into":
                assert got(space, chain) == 12
            elif kind == "view":
                with space.view(chain) as blocks:
                    assert b"".join(blocks) == expected
            elif kind == "load":
                pages = [np.zeros((12, BLOCK_BYTES), np.uint8)]
                assert space.load(pages, list(range(12)), chain) == 12
                assert pages[0].tobytes() == expected
            elif kind == "put":
                assert space.put(chain, bytes(len(expected))).present == 12
                assert got(space, chain) == 12
            else:
                with space.reserve(chain[0]) as slot:
                    assert slot.buffer is None
                    assert slot.status is Put.PRESENT
            pool.check()


def test_what_is_removed_or_dropped_is_gone_after_a_restart(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        put_all(pool, range(8))
        other = pool.namespace(opaque("other"))
        other.put(keys(range(4)), payloads(keys(range(4))))
        assert pool.flush()
    with on_ssd(tmp_path) as pool:
        space, other = pool.namespace(opaque()), pool.namespace(opaque("other"))
        assert space.remove(keys([2, 3])) == 2
        assert other.drop() == 4
        assert not is_there(space, keys([2])[0])
    with on_ssd(tmp_path) as pool:
        space, other = pool.namespace(opaque()), pool.namespace(opaque("other"))
        assert tiers_of(space, range(8)) == [2, 2, 0, 0, 2, 2, 2, 2]
        assert tiers_of(other, range(4)) == [0] * 4


# --- flush, resize, close, stats -----------------------------------------------------------------


def test_flush_says_when_all_is_on_the_ssd(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        many = keys(range(48))
        space.put(many, payloads(many))
        assert pool.flush(timeout=30)
        stats = pool.stats()
        assert (stats["ssd_blocks"], stats["ssd_queue_blocks"]) == (48, 0)
        assert stats["ssd_written_bytes"] >= 48 * BLOCK_BYTES
        assert pool.flush(timeout=0)


def test_a_burst_into_a_pool_of_warm_blocks_is_not_lost(tmp_path: Path) -> None:
    # Each new block is colder than all that are there, so it would be the next one's victim.
    with on_ssd(tmp_path) as pool:
        space = put_all(pool, range(BLOCKS_IN_DRAM))
        for _ in range(3):
            assert got(space, keys(range(BLOCKS_IN_DRAM))) == BLOCKS_IN_DRAM
        pool.stats()  # the uses are counted
        for number in range(1000, 1016):
            assert space.put(keys([number]), payloads(keys([number]))).stored == 1
        assert pool.flush(timeout=30)
        assert pool.stats()["evicted_unwritten"] == 0
        assert all(is_there(space, key) for key in keys(range(1000, 1016)))


def test_flush_without_a_tier_has_nothing_to_do() -> None:
    with opened() as pool:
        assert pool.flush(timeout=0)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), 1e9])
def test_timeouts_that_cannot_be_meant_are_refused(tmp_path: Path, timeout: float) -> None:
    with on_ssd(tmp_path) as pool:
        with pytest.raises(BadArgument):
            pool.flush(timeout=timeout)
        with pytest.raises(BadArgument, match="flush_timeout"):
            pool.close(flush_timeout=timeout)
        assert not pool.closed


@pytest.mark.parametrize("timeout", [None, "1", True])
def test_timeouts_of_a_wrong_type_are_bad_types(tmp_path: Path, timeout: Any) -> None:
    with on_ssd(tmp_path) as pool:
        with pytest.raises(BadType, match="flush_timeout"):
            pool.close(flush_timeout=timeout)
        with pytest.raises(BadType, match="timeout"):
            pool.flush(timeout=timeout)
        assert not pool.closed


def test_flush_of_a_closed_pool_says_so(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        pool.close()
        with pytest.raises(PoolClosed):
            pool.flush()


def test_the_tier_grows_and_shrinks(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        space = put_all(pool, range(100))
        pool.resize(ssd_capacity="128MiB")
        assert pool.stats()["ssd_capacity_bytes"] == 128 * MIB
        assert used_bytes(tmp_path / "tier") <= 128 * MIB
        pool.resize(ssd_capacity="32MiB", timeout=30)
        assert pool.stats()["ssd_capacity_bytes"] == 32 * MIB
        assert used_bytes(tmp_path / "tier") <= 32 * MIB
        for number in range(100):
            assert got(space, keys([number])) in (0, 1)
        pool.check()
    with on_ssd(tmp_path, ssd_capacity=None) as pool:
        assert pool.stats()["ssd_capacity_bytes"] == 32 * MIB


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def test_the_tier_is_allocated_at_once_and_never_grows(tmp_path: Path) -> None:
    with on_ssd(tmp_path, ssd_capacity="32MiB") as pool:
        used = used_bytes(tmp_path / "tier")
        assert 24 * MIB <= used <= 32 * MIB
        space = pool.namespace(opaque(block_bytes=MIB))
        for number in range(80):
            one = keys([number])
            space.put(one, payload(one[0], MIB))
            pool.flush()
        assert used_bytes(tmp_path / "tier") == used
        assert pool.stats()["ssd_evictions"] > 0
        pool.check()


def test_a_resize_without_a_tier_is_refused() -> None:
    with opened() as pool, pytest.raises(BadArgument, match="no SSD tier"):
        pool.resize(ssd_capacity="1GiB")


@pytest.mark.parametrize("capacity", [0, "900TiB", 1 << 51])
def test_a_resize_that_cannot_be_changes_nothing(tmp_path: Path, capacity: Any) -> None:
    with on_ssd(tmp_path) as pool:
        space = put_all(pool, range(4))
        with pytest.raises((BadArgument, NoResource)):
            pool.resize(ssd_capacity=capacity)
        assert pool.stats()["ssd_capacity_bytes"] == 64 * MIB
        put_all(pool, range(10, 14))
        assert got(space, keys(range(4))) == 4


COUNTED = (
    "ssd_blocks", "ssd_capacity_bytes", "ssd_bytes_taken", "ssd_payload_bytes", "ssd_queue_blocks",
    "ssd_index_used_bytes", "ssd_index_bytes", "ssd_quarantined_blocks", "demotions", "promotions",
    "ssd_hits", "ssd_hit_bytes", "ssd_written_blocks", "ssd_written_bytes", "ssd_read_bytes",
    "ssd_evictions", "ssd_not_worth", "evicted_unwritten", "ssd_damaged", "ssd_read_faults",
    "ssd_write_faults", "ssd_timeouts", "ssd_restored_blocks", "ssd_restored_hits", "ssd_groups",
    "not_durable",
)  # fmt: skip


def test_stats_of_the_tier_are_there_without_one() -> None:
    with opened() as pool:
        stats = pool.stats()
    assert {name: stats[name] for name in COUNTED} == dict.fromkeys(COUNTED, 0)
    assert (stats["ssd_direct"], stats["ssd_read_only"]) == (False, False)
    assert stats["ssd_read_only_reason"] == ""


def test_durable_puts_are_on_the_ssd_when_they_return(tmp_path: Path) -> None:
    with on_ssd(tmp_path, durability="durable", ssd_admit=None) as pool:
        space = pool.namespace(opaque())
        some = keys(range(20))
        result = space.put(some, payloads(some))
        assert (result.stored, result.reason) == (20, Reason.NONE)
        stats = pool.stats()
        assert (stats["ssd_blocks"], stats["ssd_queue_blocks"]) == (20, 0)
        assert stats["not_durable"] == 0
        assert space.put(some, payloads(some)).present == 20


def test_second_use_leaves_what_is_used_once(tmp_path: Path) -> None:
    with on_ssd(tmp_path, ssd_admit=None) as pool:
        space = pool.namespace(opaque())
        for number in range(3 * BLOCKS_IN_DRAM):
            space.put(keys([number]), payloads(keys([number])))
        assert pool.flush()
        stats = pool.stats()
        assert stats["ssd_written_blocks"] == 0
        last = 3 * BLOCKS_IN_DRAM - 1
        assert got(space, keys([last])) == 1
        put_all(pool, range(1000, 1000 + 2 * BLOCKS_IN_DRAM))
        assert got(space, keys([last])) == 1


# --- when the SSD does not take it ---------------------------------------------------------------


def test_a_block_that_the_ssd_did_not_take_is_readable_and_says_so(tmp_path: Path) -> None:
    with on_ssd(tmp_path, durability="durable", ssd_admit=None) as pool:
        space = pool.namespace(opaque())
        pool._node.fault_fail("ssd.write", times=1)
        one = keys([1])
        result = space.put(one, payloads(one))
        assert pool._node.fault_hits("ssd.write") == 1
        assert (list(result), result.reason) == ([Put.NO_ROOM], Reason.NOT_DURABLE)
        assert pool.stats()["not_durable"] == 1
        assert got(space, one) == 1
        assert put_all(pool, range(2, 5)).lookup(keys([2])).blocks == 1
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        assert [got(space, keys([number])) for number in range(2, 5)] == [1, 1, 1]
        got(space, one)  # right bytes or a miss


def test_a_tier_that_lost_a_flush_reads_on_and_takes_nothing(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as pool:
        space = put_all(pool, range(3))
        pool._node.fault_fail("ssd.sync", times=1)
        assert space.put(keys([7]), payloads(keys([7]))).stored == 1
        assert not pool.flush(timeout=30)
        stats = pool.stats()
        assert stats["ssd_read_only"]
        assert stats["ssd_read_only_reason"]
        assert [got(space, keys([number])) for number in (0, 1, 2, 7)] == [1] * 4
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        assert sum(got(space, keys([number])) for number in range(3)) == 3
        assert not pool.stats()["ssd_read_only"]


@pytest.mark.parametrize("point", ["ssd.read", "ssd.read.short", "ssd.read.flip"])
def test_what_cannot_be_read_back_is_a_miss(tmp_path: Path, point: str) -> None:
    with on_ssd(tmp_path) as pool:
        put_all(pool, range(3))
    with on_ssd(tmp_path) as pool:
        space = pool.namespace(opaque())
        pool._node.fault_fail(point, times=1)
        assert got(space, keys([1])) == 0
        assert pool._node.fault_hits(point) == 1
        stats = pool.stats()
        assert stats["ssd_damaged"] + stats["ssd_read_faults"] == 1
        assert [got(space, keys([number])) for number in (0, 2)] == [1, 1]
        assert space.put(keys([1]), payloads(keys([1]))).no_room == 0
        assert got(space, keys([1])) == 1
        pool.check()


def test_chains_go_on_where_the_tier_is_no_larger_than_dram(tmp_path: Path) -> None:
    # Every block on the SSD then has a child in DRAM alone, and may not go before it.
    block_bytes = 64 << 10
    manifest = kvpool.Manifest(model="m", layout="opaque", block_tokens=16, block_bytes=block_bytes)
    with on_ssd(
        tmp_path, dram="64MiB", ssd_capacity="16MiB", max_blocks=None, durability="durable"
    ) as pool:
        space = pool.namespace(manifest)
        data = np.zeros((64, block_bytes), dtype=np.uint8)
        for chain in range(30):
            chain_keys = space.keys(np.arange(64 * 16) + chain * 100_000)
            result = space.put(chain_keys, data)
            assert result.stored == 64, result
            assert space.get_into(chain_keys, data) == 64
        assert pool.stats()["not_durable"] == 0
