"""Small SSD tiers for tests that spoil them: blocks that are no chain, each alone in its extent."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from tests.pools import BLOCK_BYTES, got, key, opaque, opened, payload

MIB = 1 << 20
DATA_OFFSET = 64 << 10  # of the first unit in the slab file
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def on_tier(tier: Path, **options: Any) -> Iterator[kvpool.Pool]:
    """A pool over a tier of 8 MiB that promises every put; a tier that is there stays as it is."""
    is_new = not (tier / "slabs").exists()
    usual: dict[str, Any] = {"ssd": tier, "ssd_free_floor": 0, "durability": "durable"}
    if is_new:
        usual["ssd_capacity"] = 8 * MIB
    given = {**usual, **options}
    if given["durability"] != "durable":
        given.setdefault("ssd_admit", "all")
    with opened(given.pop("dram", "8MiB"), **given) as pool:
        yield pool


def put_each(pool: kvpool.Pool, numbers: Iterable[int], size: int = BLOCK_BYTES) -> int:
    """Puts block by block, none the child of another; how many were stored as promised."""
    space = pool.namespace(opaque(block_bytes=size))
    return sum(space.put([key(n)], payload(key(n), size), timeout=60).stored for n in numbers)


def served(pool: kvpool.Pool, numbers: Iterable[int], size: int = BLOCK_BYTES) -> list[int]:
    """The numbers of the blocks that a get delivers; wrong bytes fail the test."""
    space = pool.namespace(opaque(block_bytes=size))
    return [number for number in numbers if got(space, [key(number)]) == 1]


def make_tier(tier: Path, blocks: int, **options: Any) -> Path:
    with on_tier(tier, **options) as pool:
        assert put_each(pool, range(blocks)) == blocks
    return tier


def extent(tier: Path, number: int) -> int:
    """Where in the slab file the block lies, by its content."""
    return (tier / "slabs").read_bytes().index(payload(key(number)))


def contents(tier: Path) -> dict[str, bytes]:
    """What must not change when a tier is refused: every file but the locks."""
    return {file.name: file.read_bytes() for file in tier.iterdir() if "lock" not in file.name}


def disk_bytes(tier: Path) -> int:
    """What the files of a tier take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in tier.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """At rest: ext4 knows what a file really takes only once it is written to the disk."""
    place = os.open(path, os.O_RDONLY)
    try:
        if LIBC.syncfs(place) != 0:
            raise OSError(ctypes.get_errno(), "syncfs", str(path))
        facts = os.fstatvfs(place)
    finally:
        os.close(place)
    return facts.f_bavail * facts.f_frsize


def fill_disk(path: Path) -> None:
    """Somebody else takes every block that is left."""
    with (path / "ballast").open("wb", buffering=0) as ballast:
        for step in (MIB, 4096):
            with contextlib.suppress(OSError):
                while ballast.write(bytes(step)) == step:
                    pass
    assert free_bytes(path) < 64 << 10


def run_or_skip(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(folder: Path, kind: str, mib: int = 48, options: str = "rw") -> Iterator[Path]:
    """A filesystem of its own, as small as wanted; skips the test where none can be mounted.

    kind: tmpfs, or ext4 in a file.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    place = folder / f"on-{kind}"
    place.mkdir()
    if kind == "tmpfs":
        run_or_skip("mount", "-t", "tmpfs", "-o", f"size={mib}m,{options}", "none", place)
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 here")
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(mib * MIB)
        run_or_skip("mkfs.ext4", "-q", "-m", "0", "-J", "size=4", image)
        run_or_skip("mount", "-o", f"loop,{options}", image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
