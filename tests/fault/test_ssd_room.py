"""Disks that are too small, fill up, or are filled by somebody else.

All room is taken when a tier is made or grows, so there is where a full disk is met: as a refusal
with numbers, that leaves everything as it was. Small filesystems are mounted for it, which only
root can do; limits on the size of a file stand in for them elsewhere.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpool
from kvpool import BadArgument, NoResource, Reason, ssd
from tests.pools import key, opaque, payload, run_python
from tests.tiers import (
    MIB,
    contents,
    disk_bytes,
    fill_disk,
    free_bytes,
    make_tier,
    mounted,
    on_tier,
    put_each,
    served,
)

LEAST_BYTES = 3_330_048
NUMBERS = re.compile(r"needs (\d+) bytes more and (\d+) bytes are to stay free.*has (\d+) bytes")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, request.param) as place:
        yield place


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*")} - {"lost+found"}


def numbers_of(error: pytest.ExceptionInfo[NoResource]) -> tuple[int, int, int]:
    found = NUMBERS.search(str(error.value))
    assert found, error.value
    return int(found[1]), int(found[2]), int(found[3])


# --- a tier is made ------------------------------------------------------------------------------


def test_a_disk_without_room_refuses_with_numbers_and_nothing_is_left(disk: Path) -> None:
    before = free_bytes(disk)
    for tier in (disk / "tier", disk):  # one that is made for it, and one that was there
        with pytest.raises(NoResource, match=re.escape(str(tier))) as error:
            kvpool.open("8MiB", ssd=tier, ssd_capacity=2 * before, ssd_free_floor=0)
        needed, floor, free = numbers_of(error)
        assert floor == 0
        assert before - 16384 <= free <= before  # the lock and the mark are there already
        assert before < needed <= 2 * before
    assert names(disk) == set()
    assert free_bytes(disk) == before
    with on_tier(disk / "tier") as pool:  # and the disk is as good as before
        assert put_each(pool, range(4)) == 4


def test_the_free_floor_is_kept_to_the_byte(disk: Path) -> None:
    before = free_bytes(disk)
    with pytest.raises(NoResource) as error:
        kvpool.open("8MiB", ssd=disk / "tier", ssd_capacity="8MiB", ssd_free_floor=before)
    needed, floor, free = numbers_of(error)
    assert floor == before
    assert needed <= 8 * MIB
    floor = free - needed + 1
    with pytest.raises(NoResource):
        kvpool.open("8MiB", ssd=disk / "tier", ssd_capacity="8MiB", ssd_free_floor=floor)
    assert names(disk) == set()
    floor = before - needed - MIB  # for the filesystem's own books
    with on_tier(disk / "tier", ssd_free_floor=floor):
        assert free_bytes(disk) >= floor


def test_by_default_a_gigabyte_is_left(disk: Path) -> None:
    with pytest.raises(NoResource) as error:
        kvpool.open("8MiB", ssd=disk / "tier", ssd_capacity="8MiB")
    assert numbers_of(error)[1] == 1 << 30


def test_a_disk_that_is_out_of_files_refuses_at_each_of_them(tmp_path: Path) -> None:
    """ENOSPC from the system itself, at each step that makes a file in turn."""
    told: list[str] = []
    for inodes in range(1, 12):
        (tmp_path / str(inodes)).mkdir()
        with mounted(tmp_path / str(inodes), "tmpfs", options=f"nr_inodes={inodes}") as place:
            try:
                with on_tier(place / "tier") as pool:
                    assert put_each(pool, range(4)) == 4
                    break
            except NoResource as error:
                told.append(str(error))
            assert str(place) in told[-1]
            assert names(place) == set()
    else:
        pytest.fail("never enough")
    assert all("No space left on device" in each for each in told)
    assert len(told) >= 5  # directory, lock, mark, slab file, index, its lock


UNDER_A_LIMIT = """
import os, resource, signal, sys
from pathlib import Path
import kvpool
from tests.tiers import MIB, disk_bytes, on_tier, put_each, served

tier, mib = Path(sys.argv[1]), int(sys.argv[2])
# The pool's own memory is a file of 8 MiB as well.
resource.setrlimit(resource.RLIMIT_FSIZE, (mib * MIB, mib * MIB))
try:
    kvpool.open("2MiB", dram_max="2MiB", ssd=tier, ssd_capacity=4 * mib * MIB, ssd_free_floor=0)
    sys.exit("not refused")
except kvpool.NoResource as error:
    assert str(tier) in str(error) and "File too large" in str(error), error
if tier.exists():
    with on_tier(tier, dram="2MiB", dram_max="2MiB") as pool:
        before = disk_bytes(tier), pool.stats()["ssd_capacity_bytes"]
        try:
            pool.resize(ssd_capacity=(mib + 6) * MIB)
            sys.exit("not refused")
        except kvpool.NoResource as error:
            assert str(tier) in str(error), error
        assert (disk_bytes(tier), pool.stats()["ssd_capacity_bytes"]) == before
        assert not pool.stats()["ssd_read_only"]
        assert served(pool, range(10)) == list(range(10))
        assert put_each(pool, range(50, 60)) == 10
"""


def test_room_that_ends_while_it_is_taken(tmp_path: Path) -> None:
    """What was free when asked is gone when taken; a limit on files plays the other process."""
    code, out, err = run_python(UNDER_A_LIMIT, str(tmp_path / "new"), "20")
    assert (code, out, err) == (0, "", "")
    assert names(tmp_path) == set()
    tier = make_tier(tmp_path / "tier", 10)
    code, out, err = run_python(UNDER_A_LIMIT, str(tier), "20")
    assert (code, out, err) == (0, "", "")
    assert disk_bytes(tier) <= 8 * MIB
    with on_tier(tier) as pool:
        assert served(pool, range(60)) == [*range(10), *range(50, 60)]


@pytest.mark.parametrize("capacity", [1, "1MiB", LEAST_BYTES - 1])
def test_too_little_is_refused_with_the_least(tmp_path: Path, capacity: int | str) -> None:
    with pytest.raises(BadArgument, match=rf"least is {LEAST_BYTES} bytes"):
        kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_capacity=capacity, ssd_free_floor=0)
    assert names(tmp_path) == set()


def test_the_least_is_enough(tmp_path: Path) -> None:
    with on_tier(tmp_path / "tier", ssd_capacity=LEAST_BYTES) as pool:
        assert put_each(pool, range(40)) == 40
        assert served(pool, range(40)) == list(range(40))
        assert disk_bytes(tmp_path / "tier") <= LEAST_BYTES
        with pytest.raises(BadArgument, match="the least is"):
            pool.resize(ssd_capacity=LEAST_BYTES - 1)
    with on_tier(tmp_path / "tier") as pool:
        assert served(pool, range(40)) == list(range(40))


# --- a tier grows --------------------------------------------------------------------------------


def test_growth_without_room_changes_nothing(disk: Path) -> None:
    tier = make_tier(disk / "tier", 10)
    (disk / "others").write_bytes(bytes(free_bytes(disk) - 12 * MIB))
    used, before = disk_bytes(tier), free_bytes(disk)
    with on_tier(tier) as pool:
        with pytest.raises(NoResource) as error:
            pool.resize("4MiB", ssd_capacity="24MiB")
        assert numbers_of(error)[1:] == (0, before)
        stats = pool.stats()
        assert stats["ssd_capacity_bytes"] == 8 * MIB
        assert stats["bytes_limit"] == 8 * MIB  # the other half of that resize is not done either
        assert not stats["ssd_read_only"]
        assert (disk_bytes(tier), free_bytes(disk)) == (used, before)
        assert served(pool, range(10)) == list(range(10))
        assert put_each(pool, range(20, 30)) == 10
        pool.resize(ssd_capacity=16 * MIB)  # what there is room for goes on
        assert pool.stats()["ssd_capacity_bytes"] == 16 * MIB
    kept = contents(tier)
    with pytest.raises(NoResource):
        kvpool.open("8MiB", ssd=tier, ssd_capacity="1GiB", ssd_free_floor=0)
    assert contents(tier) == kept
    with on_tier(tier) as pool:
        assert pool.stats()["ssd_capacity_bytes"] == 16 * MIB
        assert served(pool, range(30)) == [*range(10), *range(20, 30)]


def test_growth_keeps_the_floor(disk: Path) -> None:
    with on_tier(disk / "tier", ssd_free_floor="24MiB") as pool:
        with pytest.raises(NoResource) as error:
            pool.resize(ssd_capacity="26MiB")
        assert numbers_of(error)[1] == 24 * MIB
        pool.resize(ssd_capacity="12MiB")
        assert free_bytes(disk) >= 24 * MIB


# --- somebody else fills the disk ----------------------------------------------------------------


def test_a_disk_that_others_fill_hurts_nothing(disk: Path) -> None:
    tier = disk / "tier"
    with on_tier(tier, dram="4MiB", max_blocks=64) as pool:
        assert put_each(pool, range(10)) == 10
        fill_disk(disk)
        size = 64 << 10  # three times what fits, so that every slot is written again
        space = pool.namespace(opaque("large", block_bytes=size))
        for number in range(200):
            space.put([key(number)], payload(key(number), size))
        last = 199
        assert space.put([key(last)], payload(key(last), size)).reason is Reason.NONE
        stats = pool.stats()
        assert stats["ssd_evictions"] > 100
        assert (stats["ssd_write_faults"], stats["ssd_commit_faults"]) == (0, 0)
        assert not stats["ssd_read_only"]
        with pytest.raises(NoResource):
            pool.resize(ssd_capacity="16MiB")
        assert pool.flush()
    assert ssd.verify(tier).damaged == 0
    with on_tier(tier) as pool:  # an open needs no room either
        space = pool.namespace(opaque("large", block_bytes=size))
        out = bytearray(size)
        assert space.get_into([key(last)], out) == 1
        assert out == payload(key(last), size)
        assert put_each(pool, range(700, 720)) == 20


ON_A_FULL_DISK = """
import sys
from pathlib import Path
import kvpool
from tests.tiers import on_tier, put_each, served

try:
    with on_tier(Path(sys.argv[1])) as pool:
        assert served(pool, range(10)) == list(range(10))
        assert put_each(pool, range(50, 60)) == 10
    print("opened")
except kvpool.NoResource as error:
    assert sys.argv[1] in str(error), error
    print("refused")
"""


@pytest.mark.parametrize("gone", ["index.mdb-lock", "lock", "both"])
def test_a_tier_that_came_to_a_full_disk_without_its_locks(disk: Path, gone: str) -> None:
    """A copy need not bring them, and a full disk may have no room for them: opened or refused."""
    tier = make_tier(disk / "tier", 10)
    for name in ["index.mdb-lock", "lock"] if gone == "both" else [gone]:
        (tier / name).unlink()
    fill_disk(disk)
    code, out, err = run_python(ON_A_FULL_DISK, str(tier))
    assert (code, err) == (0, "")
    assert out.strip() in ("opened", "refused")
    (disk / "ballast").unlink()
    with on_tier(tier) as pool:
        assert served(pool, range(10)) == list(range(10))


# --- what it takes, and gives back ---------------------------------------------------------------


@pytest.mark.parametrize("capacity", [LEAST_BYTES, 5_000_001, 20 * MIB])
def test_it_never_takes_more_than_it_may(tmp_path: Path, capacity: int) -> None:
    tier = tmp_path / "tier"
    with on_tier(tier, ssd_capacity=capacity, durability="async") as pool:
        assert capacity - 3 * MIB < disk_bytes(tier) <= capacity
        for size in (100, 4096, 10_000, 70_000, 300_000):
            space = pool.namespace(opaque(block_bytes=size))
            for number in range(min(600, 2 * capacity // size)):
                space.put([key(number)], payload(key(number), size))
            pool.flush()
            assert disk_bytes(tier) <= capacity  # the filesystem's own books grow a little
        assert pool.stats()["ssd_written_bytes"] > capacity // 2
    assert disk_bytes(tier) <= capacity
    with on_tier(tier):
        assert disk_bytes(tier) <= capacity
    assert ssd.verify(tier).damaged == 0


def test_shrinking_gives_the_space_back(disk: Path) -> None:
    tier, size = disk / "tier", 64 << 10
    before = free_bytes(disk)
    with on_tier(tier, ssd_capacity="32MiB", dram="2MiB") as pool:
        full = free_bytes(disk)
        assert before - full <= 32 * MIB
        put_each(pool, range(200), size)
        for mib in (24, 12, 8):
            pool.resize(ssd_capacity=mib * MIB, timeout=30)
            assert pool.stats()["ssd_capacity_bytes"] == mib * MIB
            assert disk_bytes(tier) <= mib * MIB
            assert free_bytes(disk) >= full + (31 - mib) * MIB
        assert served(pool, range(200), size) != []
        pool.check()
    with on_tier(tier) as pool:
        assert pool.stats()["ssd_capacity_bytes"] == 8 * MIB
        assert len(served(pool, range(200), size)) > 20
    assert ssd.verify(tier).damaged == 0


def test_a_removed_directory_gives_everything_back(disk: Path) -> None:
    before = free_bytes(disk)
    shutil.rmtree(make_tier(disk / "tier", 10))
    assert before - free_bytes(disk) <= 64 << 10  # the filesystem's own books
