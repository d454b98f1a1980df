"""A device that refuses, gives less, or lies: un-stored or a miss, counted, and never an exception.

The named points of the core stand for the device. Whatever they do, DRAM works as without a tier,
what was acknowledged is there after the next open, and every call ends in time.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvpool
from kvpool import NoResource, Put, Reason, Tier, TierRefused, ssd
from tests.pools import (
    ROOT,
    got,
    key,
    keys,
    opaque,
    opened,
    payload,
    payloads,
    run_python,
    wait_until,
)
from tests.tiers import make_tier, mounted, on_tier, put_each, served

FAULTS_MAX = 16
QUICK_S = 5.0
SOME = range(20)
WRITE_POINTS = ("ssd.write", "ssd.write.short")
READ_POINTS = ("ssd.read", "ssd.read.short")


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return make_tier(tmp_path / "tier", len(SOME))


@pytest.fixture
def pool(tier: Path) -> Iterator[kvpool.Pool]:
    """Over a tier that has the blocks SOME."""
    with on_tier(tier) as pool:
        yield pool


def put_one(pool: kvpool.Pool, number: int) -> kvpool.PutResult:
    return pool.namespace(opaque()).put([key(number)], payload(key(number)))


def reopened_has(tier: Path, numbers: list[int]) -> None:
    """Another pool finds all of them, and nothing in the tier is damaged."""
    assert ssd.verify(tier).damaged == 0
    with on_tier(tier) as pool:
        assert set(served(pool, numbers)) == set(numbers)


# --- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_write_that_fails_is_told_and_tried_elsewhere(
    pool: kvpool.Pool, tier: Path, point: str
) -> None:
    pool._node.fault_fail(point, times=1)
    result = put_one(pool, 100)
    assert pool._node.fault_hits(point) == 1
    assert (result[0], result.reason) == (Put.NO_ROOM, Reason.NOT_DURABLE)
    assert served(pool, [100]) == [100]  # from DRAM
    stats = pool.stats()
    assert (stats["ssd_write_faults"], stats["not_durable"]) == (1, 1)
    assert stats["ssd_quarantined_blocks"] == 1
    assert not stats["ssd_read_only"]
    again = put_one(pool, 100)
    assert (again[0], again.reason) == (Put.PRESENT, Reason.NONE)
    assert pool.stats()["ssd_quarantined_blocks"] == 1
    assert pool.flush()
    pool.close()
    reopened_has(tier, [*SOME, 100])


@pytest.mark.parametrize("point", WRITE_POINTS)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_chain_is_durable_up_to_the_write_that_failed(
    pool: kvpool.Pool, tier: Path, point: str, at: int
) -> None:
    chain = keys(range(100, 108))
    space = pool.namespace(opaque())
    pool._node.fault_fail(point, times=1, skip=at)
    result = space.put(chain, payloads(chain))
    assert pool._node.fault_hits(point) == 1
    # If its group got something to the disk, the rest is tried again, and the put waits for it.
    stored = result.stored
    assert list(result) == [Put.STORED] * stored + [Put.NO_ROOM] * (8 - stored)
    assert set(result.reasons[stored:]) <= {Reason.NOT_DURABLE}
    assert stored in (0, at, 8)
    assert at > 0 or stored == 0
    assert got(space, chain) == 8
    durable = chain[:stored]
    pool.close(flush_timeout=0)
    with on_tier(tier) as reopened:
        space = reopened.namespace(opaque())
        assert space.lookup(chain).blocks >= len(durable)
        assert got(space, durable) == len(durable)


@pytest.mark.parametrize("point", ["ssd.write", "ssd.commit"])
def test_what_failed_in_the_background_is_written_at_flush_or_close(
    tmp_path: Path, point: str
) -> None:
    chain = keys(SOME)
    for end in ("flush", "close"):
        with on_tier(tmp_path / end, durability="async") as pool:
            pool._node.fault_fail(point, times=1)
            space = pool.namespace(opaque())
            result = space.put(chain, payloads(chain))
            assert (result.stored, result.reason) == (len(chain), Reason.NONE)
            wait_until(lambda pool=pool: pool._node.fault_hits(point) == 1)  # type: ignore[misc]
            if end == "flush":
                assert pool.flush()
                pool.close(flush_timeout=0)
        reopened_has(tmp_path / end, list(SOME))


def test_a_commit_that_fails_leaves_nothing_of_its_group(pool: kvpool.Pool, tier: Path) -> None:
    chain = keys(range(100, 110))
    pool._node.fault_fail("ssd.commit", times=1)
    result = pool.namespace(opaque()).put(chain, payloads(chain))
    assert pool._node.fault_hits("ssd.commit") == 1
    assert Reason.NOT_DURABLE in result.reasons
    assert pool.stats()["ssd_commit_faults"] == 1
    assert pool.stats()["ssd_quarantined_blocks"] == 0  # the slots are as good as before
    result = pool.namespace(opaque()).put(chain, payloads(chain))
    assert (result.present, result.reason) == (10, Reason.NONE)
    pool.close()
    reopened_has(tier, [*SOME, *range(100, 110)])


def test_reservations_learn_that_they_are_not_durable(pool: kvpool.Pool) -> None:
    pool._node.fault_fail("ssd.write", times=1)
    with pool.namespace(opaque()).reserve(key(100)) as slot:
        assert slot.buffer is not None
        slot.buffer[:] = payload(key(100))
    assert pool._node.fault_hits("ssd.write") == 1
    assert pool.stats()["not_durable"] == 1
    assert served(pool, [100]) == [100]


# --- read-only -----------------------------------------------------------------------------------


def make_read_only(pool: kvpool.Pool, how: str) -> None:
    """By one fault more than are allowed, or by a flush that failed."""
    if how == "ssd.sync":
        pool._node.fault_fail(how, times=1)
        assert put_one(pool, 500).reason is Reason.NOT_DURABLE
    else:
        pool._node.fault_fail(how, times=FAULTS_MAX + 1)
        for number in range(500, 501 + 2 * FAULTS_MAX):
            if not pool.stats()["ssd_read_only"]:
                assert put_one(pool, number).reason is Reason.NOT_DURABLE
    assert pool.stats()["ssd_read_only"]


@pytest.mark.parametrize("how", ["ssd.write", "ssd.write.short", "ssd.commit", "ssd.sync"])
def test_a_tier_that_only_reads_says_why_and_holds_nobody_up(
    pool: kvpool.Pool, tier: Path, how: str
) -> None:
    make_read_only(pool, how)
    stats = pool.stats()
    told = "flush of the slab file failed" if how == "ssd.sync" else "more than 16"
    assert told in stats["ssd_read_only_reason"]
    start = time.monotonic()
    assert served(pool, SOME) == list(SOME)  # reads go on
    assert pool.stats()["ssd_hits"] == len(SOME)
    space = pool.namespace(opaque())
    result = space.put(keys(range(600, 610)), payloads(keys(range(600, 610))), timeout=60)
    assert list(result) == [Put.NO_ROOM] * 10
    assert set(result.reasons) == {Reason.NOT_DURABLE}
    assert served(pool, range(600, 610)) == list(range(600, 610))
    assert not pool.flush(timeout=60)
    with pytest.raises(TierRefused, match="only reads"):
        pool.resize(ssd_capacity="16MiB", timeout=60)
    with pytest.raises(NoResource, match="dropped"):
        space.drop()
    assert space.lookup(keys([600])).blocks == 0
    assert time.monotonic() - start < QUICK_S
    pool.check()
    start = time.monotonic()
    pool.close(flush_timeout=60)
    assert time.monotonic() - start < QUICK_S
    reopened_has(tier, list(SOME))
    with on_tier(tier) as reopened:  # it ends with the next open
        assert reopened.stats()["ssd_read_only_reason"] == ""
        assert put_each(reopened, range(700, 710)) == 10


def test_the_first_reason_stays(pool: kvpool.Pool) -> None:
    make_read_only(pool, "ssd.sync")
    pool._node.fault_fail("ssd.read", times=40)
    served(pool, SOME)
    assert "flush of the slab file failed" in pool.stats()["ssd_read_only_reason"]


def test_sixteen_faults_are_not_too_many(pool: kvpool.Pool, tier: Path) -> None:
    pool._node.fault_fail("ssd.write", times=FAULTS_MAX)
    for number in range(500, 500 + FAULTS_MAX):
        put_one(pool, number)
    wait_until(lambda: pool._node.fault_hits("ssd.write") == FAULTS_MAX)
    assert not pool.stats()["ssd_read_only"]
    assert put_each(pool, range(600, 605)) == 5
    assert pool.flush()
    pool.close()
    reopened_has(tier, [*SOME, *range(500, 500 + FAULTS_MAX), *range(600, 605)])


def test_a_put_that_waits_ends_when_the_tier_stops_writing(pool: kvpool.Pool) -> None:
    """Ten puts wait for one commit; the flush before it fails under them."""
    pool._node.fault_fail("ssd.sync", times=1)
    reasons: list[Reason] = []
    start = time.monotonic()
    threads = [
        threading.Thread(
            target=lambda number: reasons.append(put_one(pool, number).reason), args=(n,)
        )
        for n in range(100, 110)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - start < QUICK_S
    assert len(reasons) == 10
    assert set(reasons) <= {Reason.NOT_DURABLE, Reason.NONE}
    assert Reason.NOT_DURABLE in reasons


def test_what_cannot_be_written_any_more_is_evicted_like_without_a_tier(tier: Path) -> None:
    with on_tier(tier, max_blocks=32) as pool:
        make_read_only(pool, "ssd.sync")
        for number in range(1000, 1200):
            result = put_one(pool, number)
            assert (result[0], result.reason) == (Put.NO_ROOM, Reason.NOT_DURABLE)
        assert served(pool, [1199]) == [1199]
        assert pool.stats()["evictions"] >= 150
        assert served(pool, SOME) == list(SOME)
        pool.check()


# --- reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", [*READ_POINTS, "ssd.read.flip"])
def test_a_read_that_fails_is_a_miss_once(pool: kvpool.Pool, tier: Path, point: str) -> None:
    pool._node.fault_fail(point, times=1)
    assert served(pool, [3]) == []
    assert pool._node.fault_hits(point) == 1
    space = pool.namespace(opaque())
    assert space.lookup([key(3)]).tiers[0] == Tier.ABSENT
    stats = pool.stats()
    counter = "ssd_damaged" if point == "ssd.read.flip" else "ssd_read_faults"
    assert (stats[counter], stats["ssd_lost_blocks"]) == (1, 1)
    assert stats["ssd_damaged"] + stats["ssd_read_faults"] == 1
    wait_until(lambda: pool.stats()["ssd_quarantined_blocks"] == 1)
    assert served(pool, SOME) == [number for number in SOME if number != 3]
    assert put_each(pool, [3]) == 1
    pool.check()
    pool.close()
    reopened_has(tier, list(SOME))


def test_a_window_of_reads_loses_the_one_that_failed_and_what_is_behind(tmp_path: Path) -> None:
    tier, chain = tmp_path / "tier", keys(range(12))
    with on_tier(tier) as pool:
        assert pool.namespace(opaque()).put(chain, payloads(chain)).stored == 12
    with on_tier(tier, ssd_io_threads=1) as pool:  # one after the other
        pool._node.fault_fail("ssd.read", times=1, skip=5)
        space = pool.namespace(opaque())
        assert got(space, chain) == 5
        assert got(space, chain[6:]) == 6
        assert (pool.stats()["ssd_read_faults"], pool.stats()["ssd_lost_blocks"]) == (1, 1)
        with space.view(chain) as blocks:
            assert len(blocks) == 5


def test_too_many_failed_reads_make_the_tier_read_only_and_the_rest_is_read(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "tier", 40)
    with on_tier(tier) as pool:
        pool._node.fault_fail("ssd.read", times=FAULTS_MAX + 1)
        assert served(pool, range(40)) == list(range(FAULTS_MAX + 1, 40))
        stats = pool.stats()
        assert (stats["ssd_read_faults"], stats["ssd_read_only"]) == (FAULTS_MAX + 1, True)
        assert "could not be read" in stats["ssd_read_only_reason"]
        assert put_one(pool, 100).reason is Reason.NOT_DURABLE
        pool.check()
    # It could not be told to delete them: they are tried again, and are whole.
    reopened_has(tier, list(range(40)))


# --- O_DIRECT ------------------------------------------------------------------------------------


def test_direct_io_that_is_refused_late_is_given_up_for_good(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with on_tier(tier) as pool:
        if not pool.stats()["ssd_direct"]:
            pytest.skip(f"no O_DIRECT here: {pool.stats()['ssd_buffered_reason']}")
        assert pool.stats()["ssd_buffered_reason"] == ""
        pool._node.fault_fail("ssd.direct", times=1)
        assert put_each(pool, SOME) == len(SOME)
        stats = pool.stats()
        assert (stats["ssd_direct"], stats["ssd_direct_refusals"]) == (False, 1)
        assert "EINVAL" in stats["ssd_buffered_reason"]
        assert (stats["ssd_write_faults"], stats["not_durable"]) == (0, 0)
    with on_tier(tier) as pool:
        pool._node.fault_fail("ssd.direct", times=1)
        assert served(pool, SOME) == list(SOME)
        stats = pool.stats()
        assert (stats["ssd_direct"], stats["ssd_direct_refusals"]) == (False, 1)
        assert (stats["ssd_read_faults"], stats["ssd_lost_blocks"]) == (0, 0)


def test_a_filesystem_without_direct_io_is_told_as_a_warning(tmp_path: Path) -> None:
    with mounted(tmp_path, "ext4", options="data=journal") as disk:  # where ext4 has none
        with pytest.warns(kvpool.TierBuffered, match="O_DIRECT") as told:
            tier = make_tier(disk / "tier", len(SOME))
        assert str(tier) in str(told[0].message)
        assert told[0].filename != kvpool.local.__file__
        with pytest.warns(kvpool.TierBuffered):
            pool = kvpool.open("2MiB", ssd=tier, ssd_free_floor=0)
        with pool:
            stats = pool.stats()
            assert (stats["ssd_direct"], stats["ssd_direct_refusals"]) == (False, 0)
            assert stats["ssd_buffered_reason"] in str(told[0].message)
            assert served(pool, SOME) == list(SOME)


@pytest.mark.filterwarnings("error")
def test_who_asks_for_the_page_cache_is_not_warned(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with on_tier(tier, ssd_direct=False) as pool:
        assert put_each(pool, SOME) == len(SOME)
        assert not pool.stats()["ssd_direct"]
    with kvpool.open("2MiB"):
        pass


def test_a_warning_made_an_error_leaves_the_tier_closed(tmp_path: Path) -> None:
    code = (
        "import sys, warnings, kvpool\n"
        "warnings.simplefilter('error', kvpool.TierBuffered)\n"
        "try: kvpool.open('2MiB', ssd=sys.argv[1], ssd_capacity='8MiB', ssd_free_floor=0)\n"
        "except kvpool.TierBuffered: pass\n"
        "warnings.simplefilter('ignore')\n"
        "kvpool.open('2MiB', ssd=sys.argv[1], ssd_free_floor=0).close()\n"
        "print('opened')\n"
    )
    with mounted(tmp_path, "ext4", options="data=journal") as disk:
        assert run_python(code, str(disk / "tier")) == (0, "opened\n", "")


# --- processes -----------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from tests.tiers import on_tier
with on_tier(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def open_elsewhere(tier: Path) -> Iterator[int]:
    """Another process has the tier open, with that number."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tier)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        yield holder.pid


def test_a_second_process_is_refused_with_the_number_of_the_first(tier: Path) -> None:
    with open_elsewhere(tier) as holder:
        for call in (lambda: kvpool.open("2MiB", ssd=tier), lambda: ssd.verify(tier)):
            with pytest.raises(TierRefused, match=rf"another process \({holder}\)") as refused:
                call()
            assert str(tier) in str(refused.value)
    reopened_has(tier, list(SOME))


def test_a_process_that_was_killed_holds_nothing(tier: Path) -> None:
    with open_elsewhere(tier) as holder:
        os.kill(holder, signal.SIGKILL)
    reopened_has(tier, list(SOME))


def test_a_forked_child_takes_nothing_from_its_parent(pool: kvpool.Pool, tier: Path) -> None:
    put_one(pool, 100)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        failed = 1
        try:
            space = pool.namespace
            for call in (pool.stats, pool.flush, lambda: space(opaque())):
                with pytest.raises(kvpool.ForkedProcess):
                    call()
            pool.close()
            with pytest.raises(TierRefused, match=rf"\({os.getppid()}\)"):
                kvpool.open("2MiB", ssd=tier)
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(TierRefused, match="this one"):
        kvpool.open("2MiB", ssd=tier)
    assert put_one(pool, 101).reason is Reason.NONE
    assert served(pool, SOME) == list(SOME)
    pool.close()
    reopened_has(tier, [*SOME, 100, 101])


def test_a_child_that_lives_on_does_not_keep_the_directory(tier: Path) -> None:
    """Forked while the pool was open; closing is up to the parent."""
    with on_tier(tier):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        reopened_has(tier, list(SOME))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_view_without_pages_for_its_slot_is_a_miss(tmp_path: Path) -> None:
    # The block is then read past DRAM, and its slot is somebody else's: nothing to look at.
    with opened(ssd=tmp_path / "tier", ssd_capacity="64MiB", ssd_admit="all") as pool:
        space = pool.namespace(opaque())
        assert space.put(keys(range(4)), payloads(keys(range(4)))).stored == 4
        assert pool.flush()
    with opened(ssd=tmp_path / "tier", prefault="off") as pool:
        space = pool.namespace(opaque())
        pool._node.fault_fail("put.pages", times=4)
        with space.view(keys(range(4))) as blocks:
            for key, block in zip(keys(range(4)), blocks, strict=False):
                assert bytes(block) == payloads([key])
        assert pool._node.fault_hits("put.pages") > 0
        pool._node.fault_clear()
        assert got(space, keys(range(4))) == 4
        with space.view(keys(range(4))) as blocks:
            assert len(blocks) == 4
