"""Reads an SSD tier of format 1 by docs/formats.md alone: no kvpool, no LMDB.

What it knows of an LMDB file is the little that formats.md says of its pages. It checks every sum
it meets, with asserts: it is for tests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

PAGE, UNIT, DATA_OFFSET = 4096, 2 << 20, 64 << 10
MAGIC, VERSION = b"KVPSSD1\0", 1
META = struct.Struct("<8sII16s16sQQQQdQ16s16s")
ENTRY = struct.Struct("<IIII16s16sQfI")
SPACE = struct.Struct("<16sQQ")
TREE = struct.Struct("<IHHQQQQQ")
NO_PAGE, BRANCH, LEAF = 2**64 - 1, 1, 2


def sum128(data: bytes) -> bytes:
    """XXH3-128 as the files have it: low 8 bytes first."""
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")


@dataclass(frozen=True)
class Meta:
    tier_id: bytes
    capacity_bytes: int
    units: int
    index_bytes: int
    next_space: int
    tau_s: float
    groups: int


@dataclass(frozen=True)
class Block:
    space: int
    hash: bytes
    parent: bytes | None
    payload: bytes
    stamp_s: int
    heat: float
    generation: int


def records(index: bytes, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one database, in order."""
    metas = [index[at + 16 : at + 16 + 136] for at in (0, PAGE)]
    assert all(struct.unpack_from("<II", meta) == (0xBEEFC0DE, 1) for meta in metas)
    newest = max(metas, key=lambda meta: struct.unpack_from("<Q", meta, 128))
    named = dict(walk(index, newest[72:120]))  # behind it lies the tree of free pages
    return walk(index, named[name])


def walk(index: bytes, tree: bytes) -> Iterator[tuple[bytes, bytes]]:
    root = TREE.unpack(tree)[-1]
    if root != NO_PAGE:
        yield from walk_page(index, root)


def walk_page(index: bytes, number: int) -> Iterator[tuple[bytes, bytes]]:
    page = index[number * PAGE : (number + 1) * PAGE]
    kind, lower = struct.unpack_from("<10xHH", page)
    assert number == struct.unpack_from("<Q", page)[0]
    assert kind in (BRANCH, LEAF)
    for (at,) in struct.iter_unpack("<H", page[16:lower]):
        low, high, flags, key_bytes = struct.unpack_from("<HHHH", page, at)
        if kind == BRANCH:
            yield from walk_page(index, low | high << 16 | flags << 32)
            continue
        value = at + 8 + key_bytes
        yield page[at + 8 : value], page[value : value + (low | high << 16)]


def read_meta(index: bytes) -> Meta:
    ((key, value),) = records(index, b"meta")
    assert key == b"tier"
    magic, version, align, tier, _, capacity, units, size, space, tau, groups, zero, total = (
        META.unpack(value)
    )
    assert (magic, version, align, zero) == (MAGIC, VERSION, PAGE, bytes(16))
    assert total == sum128(value[:112])
    return Meta(tier, capacity, units, size, space, tau, groups)


def read_slab_header(slabs: bytes) -> bytes:
    """The tier's id."""
    magic, version, align, tier, total = struct.unpack_from("<8sII16s16s", slabs)
    assert (magic, version, align) == (MAGIC, VERSION, PAGE)
    assert total == sum128(slabs[:32])
    assert not any(slabs[48:DATA_OFFSET])
    return bytes(tier)


def read_spaces(index: bytes) -> dict[int, tuple[bytes, int]]:
    """By number: namespace id, bytes of a block."""
    found = {}
    for key, value in records(index, b"spaces"):
        space, block_bytes, check = SPACE.unpack(value)
        assert check.to_bytes(8, "little") == sum128(key + value[:24])[:8]
        found[int.from_bytes(key, "little")] = (space, block_bytes)
    return found


def read_classes(index: bytes) -> dict[int, int]:
    """By slot size: units of a slab."""
    return {
        int.from_bytes(key, "little"): int.from_bytes(value, "little")
        for key, value in records(index, b"classes")
    }


def read_blocks(index: bytes, slabs: bytes) -> Iterator[Block]:
    classes = read_classes(index)
    for key, value in records(index, b"blocks"):
        unit, slot, size, stamp, total, parent, generation, heat, check = ENTRY.unpack(value)
        assert check.to_bytes(4, "little") == sum128(key + value[:60])[:4]
        slot_bytes = -(-size // PAGE) * PAGE
        assert slot < classes[slot_bytes] * UNIT // slot_bytes
        at = DATA_OFFSET + unit * UNIT + slot * slot_bytes
        payload = slabs[at : at + size]
        assert sum128(payload) == total
        assert not any(slabs[at + size : at + slot_bytes])
        yield Block(
            space=int.from_bytes(key[:4], "big"),
            hash=key[4:],
            parent=parent if any(parent) else None,
            payload=payload,
            stamp_s=stamp,
            heat=heat,
            generation=generation,
        )


def read_files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "index.mdb").read_bytes(), (folder / "slabs").read_bytes()
