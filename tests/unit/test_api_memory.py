"""Elastic memory: what the kernel says the process holds, before and after."""

import gc
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import Reason
from tests.pools import BLOCK_BYTES, got, key, keys, opaque, opened, payload, payloads

MIB = 1 << 20
GIB = 1 << 30


def resident_bytes(of: str) -> int:
    """Bytes of memory in the mappings of that file, by the kernel's own count (smaps)."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counting = of in line
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def process_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"^Rss:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]


def arena_files() -> list[int]:
    """Descriptors of this process that are arenas."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "kvpool-arena" in target:
            found.append(int(name))
    return found


def fill(space: kvpool.Namespace, numbers: range, block_bytes: int) -> int:
    """Puts these blocks one by one; returns how many are in the pool in the end."""
    data = np.zeros(block_bytes, np.uint8)
    for number in numbers:
        data[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        space.put([key(number)], data)
    return present(space, numbers)


def present(space: kvpool.Namespace, numbers: range) -> int:
    return sum(space.lookup([key(number)]).blocks for number in numbers)


def check_marks(space: kvpool.Namespace, numbers: range, block_bytes: int) -> int:
    """Each block that is there has the mark that fill() wrote; returns how many are."""
    found = 0
    out = np.empty(block_bytes, np.uint8)
    for number in numbers:
        if space.get_into([key(number)], out) == 1:
            assert int.from_bytes(out[:8].tobytes(), "little") == number
            assert not out[8:].any()
            found += 1
    return found


def grow_and_shrink() -> None:
    with opened("192MiB") as pool:
        space = pool.namespace(opaque(block_bytes=MIB))
        assert resident_bytes("kvpool-arena") < 4 * MIB  # opened, but not used
        before = process_bytes()
        assert fill(space, range(160), MIB) == 160
        full = resident_bytes("kvpool-arena")
        assert 160 * MIB <= full <= 164 * MIB
        assert process_bytes() - before >= 160 * MIB

        committed = pool.resize("32MiB")
        assert committed <= 32 * MIB
        assert resident_bytes("kvpool-arena") <= 34 * MIB
        assert full - resident_bytes("kvpool-arena") >= 126 * MIB
        (descriptor,) = arena_files()
        assert os.fstat(descriptor).st_blocks * 512 <= 34 * MIB
        stats = pool.stats()
        assert stats["bytes_committed"] == committed
        assert stats["bytes_resident"] <= 34 * MIB
        # As many blocks as fit are still there, and whole.
        assert check_marks(space, range(160), MIB) == stats["blocks"] >= 28


def test_memory_comes_with_use_and_goes_with_a_shrink() -> None:
    gc.collect()
    assert not arena_files()
    grow_and_shrink()
    gc.collect()  # the pool and its namespace are gone now, and all memory with them
    assert not arena_files()
    assert resident_bytes("kvpool-arena") == 0


def test_the_address_stays_from_64_mib_to_8_gib() -> None:
    with opened("64MiB", dram_max="8GiB") as pool:
        space = pool.namespace(opaque(block_bytes=MIB))
        base = pool._node.base_address
        assert fill(space, range(48), MIB) == 48
        with space.view([key(7)]) as blocks:
            address = np.frombuffer(blocks[0], np.uint8).ctypes.data
            for size in ("8GiB", "1GiB", "64MiB", "8GiB", "256MiB"):
                pool.resize(size)
                assert pool._node.base_address == base
                assert np.frombuffer(blocks[0], np.uint8).ctypes.data == address
                assert int.from_bytes(bytes(blocks[0][:8]), "little") == 7
        # Room that growing gave is real.
        pool.resize("128MiB")
        assert fill(space, range(100, 220), MIB) >= 120
        assert pool.stats()["bytes_limit"] == 128 * MIB
        assert base <= address < base + 4 * 8 * GIB


@pytest.mark.parametrize("huge_pages", [False, True])
def test_slabs_pass_between_block_sizes_as_the_mix_shifts(huge_pages: bool) -> None:
    limit, small, large = 64 * MIB, 64 << 10, 2 * MIB
    with opened(limit, dram_max=limit, huge_pages=huge_pages) as pool:
        small_space = pool.namespace(opaque(salt="small", block_bytes=small))
        large_space = pool.namespace(opaque(salt="large", block_bytes=large))

        def taken() -> float:
            pool.check()
            stats = pool.stats()
            assert stats["bytes_committed"] <= limit
            assert stats["bytes_resident"] <= limit + 2 * MIB
            return float(stats["bytes_taken"]) / limit

        # Blocks are counted, not read: once used, they would be too warm to make way later.
        assert fill(small_space, range(1024), small) == 1024
        assert taken() >= 0.9
        # Only large ones now: the small ones are older, and make way.
        assert fill(large_space, range(10_000, 10_064), large) * large >= 0.9 * limit
        assert taken() >= 0.9
        # A mix: each size gets room.
        for number in range(40):
            fill(small_space, range(20_000 + 16 * number, 20_016 + 16 * number), small)
            fill(large_space, range(30_000 + number, 30_001 + number), large)
        assert taken() >= 0.9
        assert present(small_space, range(20_000, 20_640)) >= 64
        assert present(large_space, range(30_000, 30_040)) >= 8
        # And back to small ones only.
        assert fill(small_space, range(50_000, 52_048), small) * small >= 0.9 * limit
        assert taken() >= 0.9
        assert check_marks(small_space, range(50_000, 52_048), small) * small >= 0.9 * limit
        assert pool.stats()["slabs_moved"] > 0


def test_a_shrink_keeps_what_is_pinned_and_goes_on_when_it_is_let_go() -> None:
    with opened("64MiB") as pool:
        space = pool.namespace(opaque(block_bytes=2 * MIB))
        stored = keys(range(32))
        space.put(stored, b"".join(bytes([number]) * (2 * MIB) for number in range(32)))
        with space.view(stored) as blocks:
            assert pool.resize("4MiB", timeout=0.2) == 64 * MIB
            assert all(bytes(block[:1]) == bytes([number]) for number, block in enumerate(blocks))
            assert space.put([key(99)], bytes(2 * MIB)).reason is Reason.POOL_PINNED
        assert pool._node.settle(10)
        stats = pool.stats()
        assert stats["bytes_committed"] <= 4 * MIB
        assert stats["bytes_resident"] <= 6 * MIB
        assert stats["blocks"] <= 2


def test_blocks_survive_being_gathered(rng: np.random.Generator) -> None:
    """A shrink moves blocks out of slabs that are nearly empty; their bytes must come along."""
    size = 48 << 10
    with opened("32MiB") as pool:
        space = pool.namespace(opaque(block_bytes=size))
        everything = keys(range(600))
        space.put(everything, payloads(everything, size))
        kept = [each for each in everything if rng.random() < 0.2]
        space.remove([each for each in everything if each not in set(kept)])
        pool.resize("8MiB")
        stats = pool.stats()
        assert stats["blocks_moved"] > 0
        assert stats["bytes_committed"] <= 8 * MIB
        here = [each for each in kept if space.lookup([each]).blocks]
        assert len(here) == stats["blocks"] >= 0.8 * min(len(kept), 8 * MIB // size)
        assert all(got(space, [each]) == 1 for each in here)


def test_what_is_viewed_stays_where_it_is_while_its_slab_is_wanted_back() -> None:
    """Of many slabs a few blocks are left, half of them looked at: only the others may be moved."""
    size = 48 << 10
    with opened("32MiB") as pool:
        space = pool.namespace(opaque(block_bytes=size))
        everything = keys(range(600))
        space.put(everything, payloads(everything, size))
        viewed, kept = everything[10::60], everything[40::60]
        space.remove([each for each in everything if each not in {*viewed, *kept}])
        views = [space.view([each]) for each in viewed]
        blocks = [view.__enter__()[0] for view in views]
        pool.resize("2MiB", timeout=1)
        pool.resize("32MiB")
        others = keys(range(1000, 1600))
        for each in others:  # written to wherever there is room now
            space.put([each], b"\xee" * size)
        assert all(block == payload(of, size) for block, of in zip(blocks, viewed, strict=True))
        for view in views:
            view.__exit__(None, None, None)
        assert pool.stats()["blocks_pinned"] == 0


def test_the_arena_cannot_be_opened_for_writing_or_resized() -> None:
    gc.collect()  # pools of other tests
    with opened():
        (descriptor,) = arena_files()
        assert os.fstat(descriptor).st_mode & 0o777 == 0o400
        for size in (0, 1 << 40):
            with pytest.raises(OSError, match="Operation not permitted"):
                os.ftruncate(descriptor, size)


@pytest.mark.parametrize("block_bytes", [1, 100, 4095, 4096, 4097, 65536, 100_000, 3 * MIB])
def test_blocks_of_any_size_use_the_memory_well(block_bytes: int) -> None:
    limit = 16 * MIB
    with opened(limit, dram_max=limit, huge_pages=False) as pool:
        space = pool.namespace(opaque(block_bytes=block_bytes))
        slot = -(-block_bytes // 4096) * 4096
        count = min(limit // slot, 1500)
        chain = keys(range(count))
        result = space.put(chain, b"".join(payload(each, block_bytes) for each in chain))
        # Slots are whole pages, and a slab may end in a piece that is too short for one.
        assert result.stored >= 0.9 * count - 1
        assert got(space, chain[: result.stored]) == result.stored
        assert pool.stats()["bytes_taken"] == result.stored * slot


def test_a_block_that_can_never_fit_is_refused_at_once() -> None:
    with opened("4MiB", dram_max="8MiB") as pool:
        with pytest.raises(kvpool.BadArgument, match="does not fit"):
            pool.namespace(opaque(block_bytes=9 * MIB))
        # It may fit after a resize: no room until then, which is no error.
        space = pool.namespace(opaque(block_bytes=6 * MIB))
        result: Any = space.put([key(1)], bytes(6 * MIB))
        assert result.no_room == 1
        pool.resize("8MiB")
        assert space.put([key(1)], bytes(6 * MIB)).stored == 1


def test_books_stay_small() -> None:
    # Index, records, policy and books of the slabs, with a fixed part of some 100 KiB.
    blocks = 40_000
    with opened("192MiB") as pool:
        space = pool.namespace(opaque(block_bytes=BLOCK_BYTES))
        data = np.zeros(1000 * BLOCK_BYTES, np.uint8)
        many = np.random.default_rng(5).integers(0, 256, (blocks, 16), np.uint8)
        for start in range(0, blocks, 1000):
            assert space.put(many[start : start + 1000], data).stored == 1000
        stats = pool.stats()
        # The watch over LRU keeps a sample of a fixed size, whatever the pool's.
        sample_bytes = 200 << 10
        assert (stats["bytes_index_and_books"] - sample_bytes) / stats["blocks"] <= 128
