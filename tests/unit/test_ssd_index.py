"""The index of an SSD tier, read by another program: py-lmdb, hashlib and xxhash know none of ours.

What is said here about bytes is what docs/formats.md promises.
"""

import itertools
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
import xxhash

import kvpool
from kvpool import TierRefused, ssd
from tests.pools import BLOCK_BYTES, keys, opaque, opened, payload, payloads

BLOCKS = 300
SPACES = ("first", "second")
UNIT_BYTES, DATA_OFFSET = 2 << 20, 64 << 10
MAGIC = (0x3144535350564B).to_bytes(8, "little")


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed tier: BLOCKS blocks in each of two namespaces, of one and of three pages."""
    path = tmp_path_factory.mktemp("index") / "tier"
    with opened(ssd=path, ssd_capacity="64MiB", ssd_free_floor=0, durability="durable") as pool:
        for i, model in enumerate(SPACES):
            size = BLOCK_BYTES * (1 + 2 * i)
            space = pool.namespace(opaque(model, block_bytes=size))
            assert space.put(keys(range(BLOCKS)), payloads(keys(range(BLOCKS)), size)).stored
        assert pool.flush()
    return path


class Index:
    """The four databases as lists of (key, value), read in a process of its own.

    LMDB must not have a file open twice in one process, and this one may have it open as a pool.
    """

    def __init__(self, tier: Path) -> None:
        code = (
            "import sys, lmdb, pickle\n"
            "env = lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False, max_dbs=8)\n"
            "txn = env.begin()\n"
            "names = [b'meta', b'spaces', b'classes', b'blocks']\n"
            "dbs = {n.decode(): env.open_db(n, txn, create=False) for n in names}\n"
            "all = {n: list(txn.cursor(db)) for n, db in dbs.items()}\n"
            "sys.stdout.buffer.write(pickle.dumps(all))\n"
        )
        command = [sys.executable, "-c", code, str(tier / "index.mdb")]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        databases = pickle.loads(done.stdout)
        self.meta: bytes = dict(databases["meta"])[b"tier"]
        self.spaces: dict[bytes, bytes] = dict(databases["spaces"])
        self.classes: dict[bytes, bytes] = dict(databases["classes"])
        self.blocks: dict[bytes, bytes] = dict(databases["blocks"])


@pytest.fixture(scope="module")
def index(tier: Path) -> Index:
    return Index(tier)


def sum_of(data: bytes) -> bytes:
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")


def test_files_are_as_large_as_the_meta_record_says(tier: Path, index: Index) -> None:
    assert len(index.meta) == 128
    magic, version, align = struct.unpack_from("<8sII", index.meta)
    assert (magic, version, align) == (MAGIC, 1, 4096)
    capacity, units, index_bytes, next_space = struct.unpack_from("<QQQQ", index.meta, 48)
    assert capacity == 64 << 20
    assert (tier / "index.mdb").stat().st_size == index_bytes
    assert (tier / "slabs").stat().st_size == DATA_OFFSET + units * UNIT_BYTES
    assert next_space > max(int.from_bytes(number, "little") for number in index.spaces)
    assert index.meta[112:] == sum_of(index.meta[:112])
    assert sum(file.stat().st_blocks * 512 for file in tier.iterdir()) <= capacity


def test_namespaces_have_their_ids(index: Index) -> None:
    found = {value[:16] for value in index.spaces.values()}
    assert found == {
        opaque(name, block_bytes=BLOCK_BYTES * (1 + 2 * i)).namespace_id
        for i, name in enumerate(SPACES)
    }
    for number, value in index.spaces.items():
        (size,) = struct.unpack_from("<Q", value, 16)
        assert size in (BLOCK_BYTES, 3 * BLOCK_BYTES)
        assert value[24:] == sum_of(number + value[:24])[:8]


def entries(index: Index) -> Iterator[tuple[int, bytes, bytes]]:
    """Bytes of a block of that namespace, its key, its entry."""
    sizes = {
        int.from_bytes(n, "little"): struct.unpack_from("<Q", v, 16)[0]
        for n, v in index.spaces.items()
    }
    for key, value in index.blocks.items():
        yield sizes[int.from_bytes(key[:4], "big")], key, value


def test_each_entry_names_the_bytes_of_its_block(tier: Path, index: Index) -> None:
    slabs = (tier / "slabs").read_bytes()
    expected = set(keys(range(BLOCKS)))
    extents = []
    assert len(index.blocks) == BLOCKS * len(SPACES)
    for size, key, value in entries(index):
        assert len(key) == 20
        assert key[4:] in expected
        unit, slot, length, _stamp = struct.unpack_from("<IIII", value)
        assert length == size
        place = unit * UNIT_BYTES + slot * size  # of whole pages here
        data = slabs[DATA_OFFSET + place : DATA_OFFSET + place + size]
        assert data == payload(key[4:], size)
        assert value[16:32] == sum_of(data)
        assert value[60:64] == sum_of(key + value[:60])[:4]
        extents.append((place, place + size))
    extents.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(extents))


def test_parents_make_the_chains_that_were_put(index: Index) -> None:
    chain = keys(range(BLOCKS))
    before = dict(zip(chain, [bytes(16), *chain], strict=False))
    for _, key, value in entries(index):
        assert value[32:48] == before[key[4:]]


def test_classes_say_how_slabs_are_cut(index: Index) -> None:
    found = {
        int.from_bytes(k, "little"): int.from_bytes(v, "little") for k, v in index.classes.items()
    }
    assert found.keys() == {BLOCK_BYTES, 3 * BLOCK_BYTES}
    assert all(1 <= units <= 16 for units in found.values())


# --- what another program leaves -----------------------------------------------------------------


def test_index_that_another_program_copied_is_served(tier: Path, tmp_path: Path) -> None:
    """A compacted copy has no free pages and lies otherwise; padded to its size, it is as good."""
    copy = tmp_path / "tier"
    copy.mkdir()
    (copy / "slabs").write_bytes((tier / "slabs").read_bytes())
    size = (tier / "index.mdb").stat().st_size
    with (
        lmdb.open(
            str(tier / "index.mdb"), subdir=False, readonly=True, lock=False, map_size=size
        ) as env,
        (copy / "index.mdb").open("wb") as file,
    ):
        env.copyfd(file.fileno(), compact=True)
        file.truncate(size)
    assert ssd.verify(copy).blocks == BLOCKS * len(SPACES)
    with opened(ssd=copy, ssd_free_floor=0) as pool:
        space = pool.namespace(opaque(SPACES[0]))
        assert space.lookup(keys(range(BLOCKS))).blocks == BLOCKS


def test_lmdb_file_of_somebody_else_is_refused(tier: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "tier"
    foreign.mkdir()
    (foreign / "slabs").write_bytes((tier / "slabs").read_bytes())
    with (
        lmdb.open(str(foreign / "index.mdb"), subdir=False, map_size=1 << 20) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"blocks", b"mine")
    with (foreign / "index.mdb").open("r+b") as file:
        file.truncate(1 << 20)
    for look in (ssd.inspect, lambda path: opened(ssd=path).__enter__()):
        with pytest.raises(TierRefused, match="is not the index of a kvpool tier"):
            look(foreign)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: b"", "shorter than two pages"),
        (lambda data: b"\0" * len(data), "not an LMDB file"),
        (lambda data: data[: len(data) // 2], "cut short"),
        (lambda data: data[:8192] + b"\0" * (len(data) - 8192), "damaged: page"),
        (lambda data: data[4096:8192] + data[:4096] + data[8192:], "damaged: page 0"),
    ],
    ids=["empty", "zeros", "half", "no-pages", "swapped"],
)
def test_damaged_index_is_refused_in_words(
    tier: Path, tmp_path: Path, damage: object, told: str
) -> None:
    assert callable(damage)
    bad = tmp_path / "tier"
    bad.mkdir()
    (bad / "slabs").write_bytes((tier / "slabs").read_bytes())
    (bad / "index.mdb").write_bytes(damage((tier / "index.mdb").read_bytes()))
    for look in (ssd.inspect, ssd.verify, lambda path: kvpool.open("8MiB", ssd=path)):
        with pytest.raises(TierRefused, match=told) as refused:
            look(bad)
        assert str(bad) in str(refused.value)
        assert "starts an empty tier" in str(refused.value)
