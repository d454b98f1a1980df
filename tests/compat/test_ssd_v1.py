"""An SSD tier that format 1 was written in once is read by this version, and by the page alone.

tests/data/ssd_v1/ was made by make_ssd_v1.py; contents.json says what lies in it.
"""

import hashlib
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import Tier, TierRefused
from tests.compat import plain_reader
from tests.pools import ROOT, opened

DATA = ROOT / "tests" / "data" / "ssd_v1"
CONTENTS: dict[str, Any] = json.loads((DATA / "contents.json").read_text())
BLOCKS = sum(len(each["blocks"]) for each in CONTENTS["namespaces"])
MAGIC_AND_VERSION = b"KVPSSD1\0" + struct.pack("<I", 1)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir()
    with tarfile.open(DATA / "tier.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def open_tier(folder: Path, **options: Any) -> Any:
    return opened(ssd=folder, ssd_free_floor=0, **options)


def spaces_of(pool: kvpool.Pool) -> list[tuple[kvpool.Namespace, list[dict[str, Any]]]]:
    found = []
    for each in CONTENTS["namespaces"]:
        space = pool.namespace(kvpool.Manifest(**each["manifest"]))
        assert space.id.hex() == each["id"]
        found.append((space, each["blocks"]))
    return found


def check_every_block(pool: kvpool.Pool) -> None:
    """Each by itself: the keys are not one chain."""
    for space, blocks in spaces_of(pool):
        out = np.zeros(space.block_bytes, np.uint8)
        for block in blocks:
            assert space.get_into([bytes.fromhex(block["key"])], out) == 1
            assert hashlib.sha256(out.tobytes()).hexdigest() == block["sha256"]


def test_every_block_comes_back_with_its_bytes(tier: Path) -> None:
    with open_tier(tier) as pool:
        for space, blocks in spaces_of(pool):
            for block in blocks:
                assert space.lookup([bytes.fromhex(block["key"])]).tiers[0] == Tier.SSD
        check_every_block(pool)
        stats = pool.stats()
        assert (stats["ssd_restored_blocks"], stats["ssd_restored_orphans"]) == (BLOCKS, 0)
        assert (stats["ssd_hits"], stats["ssd_damaged"]) == (BLOCKS, 0)


@pytest.mark.parametrize("now_s", [0, 4e9], ids=["a clock at 1970", "the year 2096"])
def test_no_clock_keeps_a_block_away(tier: Path, now_s: float) -> None:
    clock = kvpool.ManualClock()
    clock.set(now_s)
    with open_tier(tier, clock=clock) as pool:
        check_every_block(pool)


def test_what_was_removed_or_dropped_stays_away(tier: Path) -> None:
    with open_tier(tier) as pool:
        by_id = {space.id.hex(): space for space, _ in spaces_of(pool)}
        for each in CONTENTS["removed"]:
            key = bytes.fromhex(each["key"])
            assert by_id[each["namespace"]].lookup([key]).blocks == 0
        assert pool.stats()["blocks"] == BLOCKS


def test_more_is_written_to_it_and_all_of_that_comes_back(tier: Path) -> None:
    fresh = hashlib.sha256(b"fresh").digest()[:16]
    with open_tier(tier, durability="durable") as pool:
        space, blocks = spaces_of(pool)[0]
        data = bytes(range(256)) * (space.block_bytes // 256)
        parent = bytes.fromhex(blocks[0]["key"])
        assert space.put([fresh], data, parent=parent).stored == 1
    with open_tier(tier) as pool:
        check_every_block(pool)
        out = bytearray(len(data))
        assert spaces_of(pool)[0][0].get_into([fresh], out) == 1
        assert bytes(out) == data


# --- the files by themselves ---------------------------------------------------------------------


def test_the_page_on_formats_suffices_to_read_it(tier: Path) -> None:
    index, slabs = plain_reader.read_files(tier)
    meta = plain_reader.read_meta(index)
    assert plain_reader.read_slab_header(slabs) == meta.tier_id
    assert len(slabs) == plain_reader.DATA_OFFSET + meta.units * plain_reader.UNIT
    assert len(index) == meta.index_bytes
    assert len(slabs) + len(index) <= meta.capacity_bytes

    spaces = plain_reader.read_spaces(index)
    assert {space.hex() for space, _ in spaces.values()} == {
        each["id"] for each in CONTENTS["namespaces"]
    }
    assert max(spaces) < meta.next_space
    found = {}
    for block in plain_reader.read_blocks(index, slabs):
        space, block_bytes = spaces[block.space]
        assert len(block.payload) == block_bytes
        assert 0 < block.generation <= meta.groups
        found[space.hex(), block.hash.hex()] = (
            None if block.parent is None else block.parent.hex(),
            hashlib.sha256(block.payload).hexdigest(),
        )
    assert found == {
        (each["id"], block["key"]): (block["parent"], block["sha256"])
        for each in CONTENTS["namespaces"]
        for block in each["blocks"]
    }


def test_a_use_is_written_as_heat(tier: Path) -> None:
    index, slabs = plain_reader.read_files(tier)
    heat = {block.hash.hex(): block.heat for block in plain_reader.read_blocks(index, slabs)}
    used, fresh = CONTENTS["namespaces"]
    assert heat[used["blocks"][0]["key"]] > 1.5  # put, and used once
    assert 0 < heat[fresh["blocks"][0]["key"]] < 1.5


# --- another version -----------------------------------------------------------------------------


def rewrite_version(path: Path, version: int) -> None:
    data = path.read_bytes()
    assert MAGIC_AND_VERSION in data
    path.write_bytes(data.replace(MAGIC_AND_VERSION, b"KVPSSD1\0" + struct.pack("<I", version)))


@pytest.mark.parametrize(("file", "name"), [("slabs", "slab file"), ("index.mdb", "index")])
def test_version_2_is_refused_by_name_and_left_as_it_is(tier: Path, file: str, name: str) -> None:
    rewrite_version(tier / file, 2)
    before = plain_reader.read_files(tier)
    with pytest.raises(TierRefused, match="has format version 2") as refused, open_tier(tier):
        pass
    assert name in str(refused.value)
    assert str(tier) in str(refused.value)
    assert plain_reader.read_files(tier) == before
    rewrite_back(tier / file)
    with open_tier(tier) as pool:
        check_every_block(pool)


def rewrite_back(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"KVPSSD1\0" + struct.pack("<I", 2), MAGIC_AND_VERSION))
