"""A look at an SSD tier that no pool has open: what it holds, and whether its blocks are whole.

Both functions lock the directory while they run and change nothing of the tier. Whatever the files
hold, the answer is a refusal (TierRefused) or a list of damage.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvpool import _core, config
from kvpool.errors import TierRefused

_NOW_S_MAX = 1e12  # year 33658, and whole seconds are still exact
_FILES = ("slabs", "index.mdb")  # a directory without both never was a tier
_STEP_BYTES = 64 << 20  # read between two reports of progress


@dataclass(frozen=True, slots=True)
class Namespace:
    """The blocks of one namespace; `id` is its namespace id in hex."""

    id: str
    block_bytes: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Slabs that are cut into slots of one size."""

    slot_bytes: int
    slab_bytes: int
    slabs: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Age:
    """Blocks whose last use was less than `seconds_max` ago (None: longer than all of these).

    heat: uses, halved every tau_s, of all of them together, as of now.
    """

    seconds_max: int | None
    blocks: int
    bytes: int
    heat: float


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that cannot be served.

    kind: `entry` (the index entry is damaged), `space` (of a namespace that is not known),
    `outside` (its place is not in the slab file), `overlap` (another block has a part of its
    place), `payload` (not the bytes that were written), `unreadable` (the device gave none).
    namespace, hash: hex; the namespace is all zeros where it is not known.
    offset: in the slab file.
    """

    kind: str
    namespace: str
    hash: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the index says. `missing_parents` is no damage: a parent may have been in DRAM only."""

    path: str
    format_version: int
    tier_id: str
    node_id: str
    capacity_bytes: int
    payload_bytes_max: int  # room for slots
    slab_file_bytes: int
    index_bytes: int
    index_used_bytes: int
    blocks: int
    blocks_max: int  # what surely fits into the index
    bytes: int
    slot_bytes: int  # taken by the blocks, in whole pages
    commits: int
    tau_s: float
    missing_parents: int
    damaged: int  # by what the index says alone; verify() reads the blocks too
    namespaces: tuple[Namespace, ...]
    classes: tuple[SizeClass, ...]
    ages: tuple[Age, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of reading every block. `damage` has the first 1,000 of `damaged`."""

    path: str
    blocks: int
    bytes: int  # read and compared
    damaged: int
    seconds: float
    damage: tuple[Damage, ...]


Progress = Callable[[int, int, int], None]


def inspect(path: str | os.PathLike[str], *, now_s: float | None = None) -> Inspection:
    """Say what an SSD tier holds, without reading its blocks.

    now_s: seconds since 1970 from which ages are counted (default: now). Raises BadArgument for a
    path or a time that cannot be meant, TierRefused for a tier that is in use, damaged, of another
    version, or none at all. Releases the GIL while it reads the index: about 1.5 s and 96 MB for
    1,000,000 blocks.
    """
    now_s = time.time() if now_s is None else config.check_number("now_s", now_s, 0, _NOW_S_MAX)
    with _scanning(path) as scan:
        facts: dict[str, Any] = scan.facts()
        ages = scan.ages(int(now_s))
        _, _, damaged, _ = scan.verify_some(0)
    namespaces = tuple(Namespace(**each) for each in facts.pop("namespaces"))
    classes = tuple(SizeClass(**each) for each in facts.pop("classes"))
    return Inspection(
        path=os.fspath(path),
        **facts,
        damaged=damaged,
        namespaces=namespaces,
        classes=classes,
        ages=tuple(Age(**each) for each in ages),
    )


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Read every block of an SSD tier and compare it with its checksum.

    progress: called about every 64 MiB with (bytes done, bytes in all, damaged blocks so far).
    Raises as inspect() does; damage is an answer. Releases the GIL. Reads in the order of the
    file, past the page cache's memory.
    """
    begin = time.monotonic()
    with _scanning(path) as scan:
        facts = scan.facts()
        blocks, in_all = facts["blocks"], facts["bytes"]
        step = max(1, _STEP_BYTES * blocks // max(in_all, 1))
        is_done, count = False, 0
        while not is_done:
            _, done, damaged, is_done = scan.verify_some(count)
            count = step
            if progress is not None:
                progress(done, in_all, damaged)
        damage = tuple(Damage(**each) for each in scan.damage())
    seconds = time.monotonic() - begin
    return Verification(os.fspath(path), blocks, done, damaged, seconds, damage)


@contextlib.contextmanager
def _scanning(path: str | os.PathLike[str]) -> Iterator[_core.SsdScan]:
    folder = config.check_folder("path", path)
    _refuse_what_never_was_a_tier(folder)
    scan = _core.SsdScan(folder)
    try:
        yield scan
    finally:
        scan.close()


def _refuse_what_never_was_a_tier(folder: str) -> None:
    """Ahead of the core, whose words for it advise on where to make a new tier.

    Other refusals are the core's: a directory that cannot be listed, a tier that lost a file.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    if not set(_FILES).intersection(names):
        raise TierRefused(f"SSD tier in {folder}: holds no tier of kvpool")
