"""What somebody or something did to a closed tier: right bytes or a miss, or a refusal in words.

The slab file and the index are spoilt as a bad disk, a broken copy or a stranger would. The pool
must tell from its checksums alone, serve all the rest, and never fall over; where it could, it is
opened in a process of its own.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

import kvpool
from kvpool import Reason, TierRefused, ssd
from tests.pools import (
    BLOCK_BYTES,
    ROOT,
    key,
    keys,
    opaque,
    payload,
    payloads,
    run_python,
    wait_until,
)
from tests.tiers import contents, extent, make_tier, on_tier, put_each, served

BLOCKS = 40
ALL = range(BLOCKS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tier(tmp_path_factory.mktemp("damage") / "tier", BLOCKS)


@pytest.fixture
def tier(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole one, to be spoilt."""
    return Path(shutil.copytree(whole, tmp_path / "tier"))


# --- payload -------------------------------------------------------------------------------------


def write_at(tier: Path, offset: int, data: bytes) -> None:
    with (tier / "slabs").open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(at: int) -> Callable[[Path], set[int]]:
    def damage(tier: Path) -> set[int]:
        byte = payload(key(7))[at]
        write_at(tier, extent(tier, 7) + at, bytes([byte ^ 0x10]))
        return {7}

    return damage


def zero_extents(tier: Path) -> set[int]:
    for number in (3, 20):
        write_at(tier, extent(tier, number), bytes(BLOCK_BYTES))
    return {3, 20}


def swap_extents(tier: Path) -> set[int]:
    first, second = extent(tier, 5), extent(tier, 6)
    write_at(tier, first, payload(key(6)))
    write_at(tier, second, payload(key(5)))
    return {5, 6}


def half_of_another(tier: Path) -> set[int]:
    """A write that the power cut in two, over an older block."""
    write_at(tier, extent(tier, 11), payload(key(12))[: BLOCK_BYTES // 2])
    return {11}


def all_zero(tier: Path) -> set[int]:
    size = (tier / "slabs").stat().st_size
    write_at(tier, 64 << 10, bytes(size - (64 << 10)))
    return set(ALL)


def punch_holes(tier: Path) -> set[int]:
    """A copy by a tool that dropped pages it could not read."""
    at = extent(tier, 9)
    command = ["fallocate", "--punch-hole", "-o", str(at), "-l", str(BLOCK_BYTES)]
    subprocess.run([*command, str(tier / "slabs")], check=True)
    return {9}


DAMAGES = {
    "first byte": flip(0),
    "last byte": flip(BLOCK_BYTES - 1),
    "zeroed": zero_extents,
    "swapped": swap_extents,
    "half": half_of_another,
    "all zero": all_zero,
    "hole": punch_holes,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_payload_is_a_miss_and_all_else_is_served(tier: Path, name: str) -> None:
    lost = DAMAGES[name](tier)
    found = ssd.verify(tier)
    assert {each.hash for each in found.damage} == {key(number).hex() for number in lost}
    assert {each.kind for each in found.damage} == {"payload"}
    with on_tier(tier) as pool:
        assert pool.stats()["ssd_restored_blocks"] == BLOCKS
        assert served(pool, ALL) == sorted(set(ALL) - lost)
        stats = pool.stats()
        assert stats["ssd_damaged"] == stats["ssd_lost_blocks"] == len(lost)
        assert stats["ssd_hits"] == BLOCKS - len(lost)
        assert (stats["ssd_read_faults"], stats["ssd_read_only"]) == (0, False)
        # Nobody writes there any more, once the index has let the entries go.
        wait_until(lambda: pool.stats()["ssd_quarantined_blocks"] == len(lost))
        assert served(pool, lost) == []  # gone, and not looked for again
        assert pool.stats()["ssd_damaged"] == len(lost)
        assert put_each(pool, lost) == len(lost)
        assert served(pool, ALL) == list(ALL)
    assert ssd.verify(tier).damaged == 0
    with on_tier(tier) as pool:
        assert served(pool, ALL) == list(ALL)
        assert pool.stats()["ssd_hits"] == BLOCKS


def test_more_damage_than_faults_are_allowed_leaves_the_tier_writable(tier: Path) -> None:
    """Other bytes are no sign of a device that refuses; only those make a tier read-only."""
    all_zero(tier)
    with on_tier(tier) as pool:
        assert served(pool, ALL) == []
        assert pool.stats()["ssd_damaged"] == BLOCKS > 16
        assert not pool.stats()["ssd_read_only"]
        assert put_each(pool, range(100, 120)) == 20


@pytest.mark.parametrize("way", ["get_into", "view", "load", "after get, put"])
def test_a_damaged_block_ends_a_chain_in_every_kind_of_read(tmp_path: Path, way: str) -> None:
    tier, chain, bad = tmp_path / "tier", keys(range(8)), 4
    with on_tier(tier) as pool:
        assert pool.namespace(opaque()).put(chain, payloads(chain)).stored == 8
    write_at(tier, extent(tier, bad) + 100, b"\0" * 100)
    with on_tier(tier) as pool:
        space = pool.namespace(opaque())
        assert space.lookup(chain).blocks == 8  # nobody has looked at the payload yet
        if way == "view":
            with space.view(chain) as blocks:
                assert b"".join(blocks) == payloads(chain[:bad])
        elif way == "load":
            pages = [np.zeros((8, BLOCK_BYTES), np.uint8)]
            assert space.load(pages, range(8), chain) == bad
            assert pages[0][:bad].tobytes() == payloads(chain[:bad])
        else:
            out = np.zeros(8 * BLOCK_BYTES, np.uint8)
            assert space.get_into(chain, out) == bad
            assert out[: bad * BLOCK_BYTES].tobytes() == payloads(chain[:bad])
        assert space.lookup(chain).blocks == bad
        assert pool.stats()["ssd_damaged"] == 1
        # The engine computes the rest again; the blocks behind the damaged one were there still.
        result = space.put(chain[bad:], payloads(chain[bad:]), parent=chain[bad - 1])
        assert (result.stored, result.present) == (1, 3)
        assert served(pool, range(8)) == list(range(8))
    assert ssd.verify(tier).damaged == 0
    with on_tier(tier) as pool:
        assert served(pool, range(8)) == list(range(8))
        assert pool.stats()["ssd_restored_orphans"] == 0


def test_verify_as_a_program_names_the_block_and_fails(tier: Path) -> None:
    swap_extents(tier)
    command = [sys.executable, "-m", "kvpool", "ssd", "verify", str(tier), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert {each["hash"] for each in json.loads(done.stdout)["damage"]} == {
        key(5).hex(),
        key(6).hex(),
    }


def test_damage_under_a_pool_that_has_it_open(tier: Path) -> None:
    """Another program writes over the file, and cuts it, while a pool reads from it."""
    with on_tier(tier) as pool:
        lost = swap_extents(tier)
        assert served(pool, ALL) == sorted(set(ALL) - lost)
        assert pool.stats()["ssd_damaged"] == 2
    with on_tier(tier) as pool:
        os.truncate(tier / "slabs", 64 << 10)
        assert served(pool, range(10)) == []
        stats = pool.stats()
        assert stats["ssd_read_faults"] + stats["ssd_damaged"] == stats["ssd_lost_blocks"] > 0
        space = pool.namespace(opaque())
        assert space.put(keys([900]), payloads(keys([900]))).reason in (
            Reason.NONE,
            Reason.NOT_DURABLE,
        )
        assert served(pool, [900]) == [900]


# --- the index -----------------------------------------------------------------------------------

ENTRY = struct.Struct("<IIII16s16sQfI")
META_VERSION_AT, META_SUM_AT = 8, 112


def sum_of(data: bytes) -> bytes:
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")


def change(tier: Path, database: bytes, edit: Callable[[Any], None]) -> None:
    """Writes to the index with another LMDB. No pool of this process has the file open."""
    size = (tier / "index.mdb").stat().st_size
    index = str(tier / "index.mdb")
    with lmdb.open(index, subdir=False, lock=False, max_dbs=8, map_size=size) as env:
        db = env.open_db(database, create=False)
        with env.begin(write=True, db=db) as txn:
            edit(txn)


def entries(txn: Any) -> dict[bytes, tuple[bytes, tuple[Any, ...]]]:
    """Key and fields of each entry, by the block's key."""
    return {bytes(k[4:]): (bytes(k), ENTRY.unpack(v)) for k, v in txn.cursor()}


def put_entry(txn: Any, at: bytes, fields: tuple[Any, ...]) -> None:
    body = ENTRY.pack(*fields[:-1], 0)[:-4]
    txn.put(at, body + sum_of(at + body)[:4])


def set_version(number: int, seal: bool) -> Callable[[Path], None]:
    def damage(tier: Path) -> None:
        def edit(txn: Any) -> None:
            meta = bytearray(txn.get(b"tier"))
            struct.pack_into("<I", meta, META_VERSION_AT, number)
            if seal:
                meta[META_SUM_AT:] = sum_of(bytes(meta[:META_SUM_AT]))
            txn.put(b"tier", bytes(meta))

        change(tier, b"meta", edit)

    return damage


def overwrite_index(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(tier: Path) -> None:
        index = tier / "index.mdb"
        index.write_bytes(make(index.read_bytes()))

    return damage


def take_foreign(name: str) -> Callable[[Path], None]:
    def damage(tier: Path) -> None:
        other = make_tier(tier.parent / "other", 3)
        shutil.copy(other / name, tier / name)

    return damage


def slab_version_2(tier: Path) -> None:
    header = bytearray((tier / "slabs").read_bytes()[:32])
    struct.pack_into("<I", header, 8, 2)
    write_at(tier, 0, bytes(header) + sum_of(bytes(header)))


def replace_by_fifo(name: str) -> Callable[[Path], None]:
    def damage(tier: Path) -> None:
        (tier / name).unlink()
        os.mkfifo(tier / name)

    return damage


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (lambda tier: (tier / "index.mdb").unlink(), "empty the directory"),
    "no slab file": (lambda tier: (tier / "slabs").unlink(), "empty the directory"),
    "empty index": (overwrite_index(lambda _: b""), "starts an empty tier"),
    "half an index": (overwrite_index(lambda data: data[: len(data) // 2]), "empty tier"),
    "a bit of an index": (overwrite_index(lambda data: data[:5000]), "empty tier"),
    "random index": (overwrite_index(lambda data: np.random.default_rng(7).bytes(len(data))), ""),
    "foreign index": (take_foreign("index.mdb"), "different tiers"),
    "foreign slab file": (take_foreign("slabs"), "different tiers"),
    "index of version 2": (set_version(2, seal=True), "version 2"),
    "index of version 2, unsealed": (set_version(2, seal=False), "version 2"),
    "index of version 0": (set_version(0, seal=True), "version 0"),
    "slab file of version 2": (slab_version_2, "version 2"),
    "empty slab file": (lambda tier: os.truncate(tier / "slabs", 0), "restore the directory"),
    "slab file is a fifo": (replace_by_fifo("slabs"), "not an ordinary file"),
    "index is a fifo": (replace_by_fifo("index.mdb"), "not an ordinary file"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_tier_that_cannot_be_trusted_is_refused_and_left_alone(tier: Path, name: str) -> None:
    damage, words = REFUSALS[name]
    damage(tier)
    before = None if "fifo" in name else contents(tier)
    for call in (lambda: kvpool.open("8MiB", ssd=tier), lambda: ssd.verify(tier)):
        with pytest.raises(TierRefused) as refused:
            call()
        assert str(tier) in str(refused.value)
        assert words in str(refused.value)
    assert before is None or contents(tier) == before
    with pytest.raises(TierRefused), on_tier(tier):  # the lock was let go
        pass


def test_a_slab_file_that_was_cut_is_refused_and_verify_counts_what_is_left(tier: Path) -> None:
    os.truncate(tier / "slabs", extent(tier, BLOCKS // 2))
    before = contents(tier)
    with pytest.raises(TierRefused, match=rf"{tier}.*restore the directory.*or empty it"):
        kvpool.open("8MiB", ssd=tier, ssd_free_floor=0)
    found = ssd.verify(tier)
    assert found.damaged == BLOCKS // 2
    assert {each.kind for each in found.damage} <= {"outside", "unreadable"}
    assert contents(tier) == before


# Opens each of the tiers named on its standard input, reads what is in it, and tells. A word is
# printed before each, so that a crash has a name.
LOOK = """
import json, sys, os
from pathlib import Path
import kvpool
from kvpool import TierRefused, ssd
from tests.tiers import on_tier, put_each, served

for tier in map(Path, sys.stdin.read().split()):
    print(tier.name, end=" ", flush=True)
    try:
        told = ssd.verify(tier).damaged
        with on_tier(tier) as pool:
            there = served(pool, range(int(sys.argv[1])))
            pool.check()
            stored = put_each(pool, range(1000, 1010))
        print("opened", told, len(there), stored, flush=True)
    except TierRefused as error:
        assert str(tier) in str(error), error
        print("refused", flush=True)
"""


def look(tiers: list[Path]) -> dict[str, list[str]]:
    """By name of the tier: "refused", or "opened" with counts of damage, served and stored."""
    command = [sys.executable, "-X", "faulthandler", "-c", LOOK, str(BLOCKS)]
    names = "\n".join(map(str, tiers))
    done = subprocess.run(
        command, input=names, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def test_random_damage_of_the_index_never_ends_the_process(
    whole: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Bytes, runs of zeros and swapped pages, in the pages that are in use."""
    used = int(ssd.inspect(whole).index_used_bytes) + 4 * 4096
    for name in map(str, range(24)):
        tier = Path(shutil.copytree(whole, tmp_path / name))
        index = bytearray((tier / "index.mdb").read_bytes())
        for at in rng.integers(0, used, int(rng.integers(1, 4))):
            kind = rng.integers(3)
            if kind == 0:
                index[at] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                index[at : at + 64] = bytes(64)
            else:
                page = int(at) // 4096 * 4096
                index[page : page + 4096], index[:4096] = index[:4096], index[page : page + 4096]
        (tier / "index.mdb").write_bytes(index)
    found = look(sorted(tmp_path.iterdir()))
    assert len(found) == 24
    assert ["refused"] in found.values()  # the damage was seen by somebody


def test_entries_that_lie_are_misses(tier: Path) -> None:
    """Sealed as the pool would: only the checksum of the payload tells."""

    def edit(txn: Any) -> None:
        by_hash = entries(txn)
        (at_0, one), (at_1, two) = by_hash[key(0)], by_hash[key(1)]
        put_entry(txn, at_0, (*two[:2], *one[2:]))  # each other's place
        put_entry(txn, at_1, (*one[:2], *two[2:]))
        at_2, third = by_hash[key(2)]
        put_entry(txn, at_2, (*third[:4], bytes(16), *third[5:]))  # another checksum
        at_3, fourth = by_hash[key(3)]
        put_entry(txn, at_3, (*fourth[:2], 100, *fourth[3:]))  # another length
        at_4, fifth = by_hash[key(4)]
        txn.put(at_4, ENTRY.pack(*fifth[:3], fifth[3] + 1, *fifth[4:]))  # not sealed
        at_5, sixth = by_hash[key(5)]
        put_entry(txn, at_5, (1 << 31, *sixth[1:]))  # nowhere

    change(tier, b"blocks", edit)
    kinds = {each.hash: each.kind for each in ssd.verify(tier).damage}
    assert set(kinds) == {key(number).hex() for number in range(6)}
    with on_tier(tier) as pool:
        assert pool.stats()["ssd_restored_blocks"] == BLOCKS - 3  # length, seal and place show
        assert served(pool, ALL) == list(ALL)[6:]
        assert pool.stats()["ssd_damaged"] == 3
        assert put_each(pool, range(6)) == 6
    assert ssd.verify(tier).damaged == 0


def test_two_entries_of_one_place_are_not_both_believed(tier: Path) -> None:
    def edit(txn: Any) -> None:
        by_hash = entries(txn)
        at, thief = by_hash[key(0)]
        put_entry(txn, at, (*by_hash[key(1)][1][:2], *thief[2:]))

    change(tier, b"blocks", edit)
    assert ssd.verify(tier).damaged >= 1
    with on_tier(tier) as pool:
        assert set(served(pool, ALL)) >= set(ALL) - {0, 1}
        # The place is given to one block at most, whatever comes and goes.
        assert put_each(pool, [0, *range(200, 260)]) >= 60
        assert served(pool, range(200, 260)) == list(range(200, 260))
    assert ssd.verify(tier).damaged == 0


def test_an_older_index_beside_newer_slabs_gives_no_wrong_bytes(tmp_path: Path) -> None:
    """Its entries are in order, but their places have been written again since."""
    tier = make_tier(tmp_path / "tier", BLOCKS)
    older = (tier / "index.mdb").read_bytes()
    with on_tier(tier) as pool:
        assert pool.namespace(opaque()).remove(keys(range(0, BLOCKS, 2))) == BLOCKS // 2
        assert put_each(pool, range(500, 560)) == 60
    (tier / "index.mdb").write_bytes(older)
    with on_tier(tier) as pool:
        there = served(pool, ALL)
        assert set(there) >= set(range(1, BLOCKS, 2))
        lost = BLOCKS - len(there)
        assert pool.stats()["ssd_damaged"] == lost > 0
        assert served(pool, range(500, 560)) == []
        assert put_each(pool, range(500, 560)) == 60
    assert ssd.verify(tier).damaged == 0


# --- the directory -------------------------------------------------------------------------------


def test_a_tier_with_other_files_in_it_is_served_and_they_stay(tier: Path) -> None:
    (tier / "notes.txt").write_bytes(b"mine")
    (tier / "more").mkdir()
    with on_tier(tier) as pool:
        assert served(pool, ALL) == list(ALL)
    assert (tier / "notes.txt").read_bytes() == b"mine"
    assert (tier / "more").is_dir()


def test_other_files_and_no_tier_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(b"x" * 100)
    with pytest.raises(TierRefused, match=r"garbage.*name an empty directory"):
        kvpool.open("8MiB", ssd=tmp_path, ssd_capacity="8MiB", ssd_free_floor=0)
    assert [file.name for file in tmp_path.iterdir()] == ["garbage"]


def test_a_link_to_the_directory_is_the_directory(tier: Path) -> None:
    link = tier.parent / "link"
    link.symlink_to(tier, target_is_directory=True)
    with on_tier(link) as pool:
        assert served(pool, ALL) == list(ALL)
        with pytest.raises(TierRefused, match="has it open"):
            kvpool.open("8MiB", ssd=tier)


@pytest.mark.parametrize("name", ["slabs", "index.mdb", "lock", "index.mdb-lock"])
def test_links_in_the_directory_are_not_followed(tier: Path, name: str) -> None:
    target = tier.parent / "target"
    shutil.copy(tier / name, target)
    (tier / name).unlink()
    (tier / name).symlink_to(target)
    before = target.read_bytes()
    with pytest.raises(kvpool.KvpoolError, match=r"link|not an ordinary file"), on_tier(tier):
        pass
    assert target.read_bytes() == before


def test_a_link_to_nothing_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "tier").symlink_to(tmp_path / "nothing")
    with pytest.raises(kvpool.KvpoolError, match="tier"):
        kvpool.open("8MiB", ssd=tmp_path / "tier", ssd_capacity="8MiB", ssd_free_floor=0)
    assert not (tmp_path / "nothing").exists()


def test_a_lock_file_that_is_something_else_is_refused(tier: Path) -> None:
    (tier / "lock").unlink()
    (tier / "lock").mkdir()
    with pytest.raises(kvpool.KvpoolError, match="lock file"), on_tier(tier):
        pass


AS_NOBODY = """
import os, sys
import kvpool
from kvpool import KvpoolError, ssd

os.setgid(65534)
os.setuid(65534)
for call in (
    lambda: kvpool.open("8MiB", ssd=sys.argv[1], ssd_capacity="8MiB", ssd_free_floor=0),
    lambda: ssd.inspect(sys.argv[1]),
):
    try:
        call()
        print("opened")
    except KvpoolError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that other users reach."""
    folder = tmp_path_factory.mktemp("shared")
    for each in (folder, *folder.parents):
        if each.owner() == "root" and each.name.startswith("pytest"):
            each.chmod(0o755)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("mode_of_directory", "mode_of_files"),
    [(0o000, 0o666), (0o555, 0o600), (0o555, 0o444), (0o777, 0o600)],
    ids=["unreadable", "files too", "read-only", "files only"],
)
def test_a_directory_of_somebody_else_is_refused_in_words(
    whole: Path, shared: Path, mode_of_directory: int, mode_of_files: int
) -> None:
    tier = Path(shutil.copytree(whole, shared / "tier"))
    for file in tier.iterdir():
        file.chmod(mode_of_files)
    tier.chmod(mode_of_directory)
    before = contents(tier)
    code, out, err = run_python(AS_NOBODY, str(tier))
    assert (code, err) == (0, "")
    for line in out.splitlines():
        assert line != "opened"
        assert str(tier) in line
        assert "Permission denied" in line
    assert contents(tier) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_directory_that_cannot_be_written_gets_no_tier(shared: Path) -> None:
    (shared / "tier").mkdir(mode=0o555)
    code, out, err = run_python(AS_NOBODY, str(shared / "tier"))
    assert (code, err) == (0, "")
    assert "Permission denied" in out
    code, out, err = run_python(AS_NOBODY, str(shared / "new"))
    assert (code, err) == (0, "")
    assert "Permission denied" in out
    assert [each.name for each in shared.iterdir()] == ["tier"]


def test_a_lock_of_another_program_is_respected(tier: Path) -> None:
    with (tier / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TierRefused, match="has it open"), on_tier(tier):
            pass
    with on_tier(tier) as pool:
        assert served(pool, [1]) == [1]
