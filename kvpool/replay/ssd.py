"""The SSD tier of a replay: how large, in which directory, and what it did.

Promises:  1. every pool gets a directory that was not there before, so that no block of an earlier
              run can be hit;
           2. only directories that this module made are ever removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpool import _core
from kvpool.replay.score import OnSsd

FREE_FLOOR_BYTES = 256 << 20  # left free on the filesystem


class SsdError(Exception):
    """The directory named for the SSD tier cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class SsdOptions:
    """An SSD tier for every pool of a replay, each in a directory of its own below `folder`.

    restart_at: share of the requests after which the pool is closed and opened again.
    """

    folder: Path
    capacity_blocks: int
    admit: str = "second_use"
    restart_at: float | None = None
    is_kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TierOptions:
    """An SSD tier for one pool. restart_after: that many requests; None: no restart."""

    path: Path
    capacity_blocks: int
    admit: str
    restart_after: int | None = None


def tier_bytes(capacity_blocks: int, block_bytes: int) -> int:
    """A capacity that holds that many blocks, its index included; a few more may fit."""
    return _core.ssd_capacity_for(capacity_blocks, block_bytes)


def open_arguments(tier: TierOptions, block_bytes: int) -> dict[str, Any]:
    """What kvpool.open() is to be given for this tier."""
    return {
        "ssd": tier.path,
        "ssd_capacity": tier_bytes(tier.capacity_blocks, block_bytes),
        "ssd_admit": tier.admit,
        "ssd_free_floor": FREE_FLOOR_BYTES,
    }


def check_folder(folder: Path) -> None:
    """Raises SsdError for a folder that is not empty, or is none, before the work begins."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise SsdError(f"{folder} is not empty; name a new or an empty directory")
    except OSError as error:
        raise SsdError(f"cannot use {folder} for the SSD tier: {error.strerror}") from None


@contextlib.contextmanager
def directory(options: SsdOptions, name: str) -> Iterator[Path]:
    """A new directory below the folder, taken away at the end unless it is to be kept."""
    path = options.folder / name
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise SsdError(f"cannot make {path} for the SSD tier: {error.strerror}") from None
    try:
        yield path
    finally:
        if not options.is_kept:
            shutil.rmtree(path, ignore_errors=True)
            for each in made[1:]:
                with contextlib.suppress(OSError):  # somebody else put something there
                    os.rmdir(each)


_COUNTED = {
    "restored_blocks": "ssd_restored_blocks",
    "restored_hits": "ssd_restored_hits",
    "demotions": "demotions",
    "promotions": "promotions",
    "written_blocks": "ssd_written_blocks",
    "written_bytes": "ssd_written_bytes",
    "read_bytes": "ssd_read_bytes",
    "evictions": "ssd_evictions",
}


class Tally:
    """Adds up what the SSD tier did in each life of a pool, out of stats() before close()."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_COUNTED, 0)
        self._is_direct = True

    def add(self, stats: dict[str, Any]) -> None:
        for field, counter in _COUNTED.items():
            self._sums[field] += stats[counter]
        self._is_direct = self._is_direct and bool(stats["ssd_direct"])

    def result(self, *, dram_hit_blocks: int, ssd_hit_blocks: int, unflushed: int) -> OnSsd:
        return OnSsd(
            dram_hit_blocks=dram_hit_blocks,
            ssd_hit_blocks=ssd_hit_blocks,
            unflushed=unflushed,
            is_direct=self._is_direct,
            **self._sums,
        )
