"""Where a bench of the SSD tier puts its files, and the raw disk that it is held to.

Promises:  1. files lie on a disk: a filesystem in memory is refused, not measured;
           2. the directory is new, and gone afterwards with all that is in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvpool import _core
from kvpool.bench.buffers import groups
from kvpool.bench.rows import BenchError, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import Work
from kvpool.config import format_size

IO_THREADS = 8  # in flight, of the tier and of the raw disk beside it
FREE_FLOOR_BYTES = 1 << 30
_IN_MEMORY = ("tmpfs", "ramfs")


@contextlib.contextmanager
def bench_directory(scale: Scale, needed_bytes: int) -> Iterator[Path]:
    """A directory of the bench's own; BenchError where there is no disk or no room."""
    parent = _parent(scale)
    free_bytes = shutil.disk_usage(parent).free
    expect(
        free_bytes >= needed_bytes + FREE_FLOOR_BYTES,
        f"{parent} has {format_size(free_bytes)} free; this bench needs"
        f" {format_size(needed_bytes)} and leaves {format_size(FREE_FLOOR_BYTES)}; see --dir",
    )
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir=parent) as path:
        yield Path(path)


def has_room(scale: Scale, needed_bytes: int) -> bool:
    return shutil.disk_usage(_parent(scale)).free >= needed_bytes + FREE_FLOOR_BYTES


def _parent(scale: Scale) -> Path:
    if scale.directory is not None:
        kind = filesystem_of(scale.directory)
        expect(scale.directory.is_dir(), f"{scale.directory} is no directory")
        expect(kind not in _IN_MEMORY, f"{scale.directory} is {kind}: that is memory, not a disk")
        return scale.directory
    for parent in (Path(tempfile.gettempdir()), Path.cwd()):
        if filesystem_of(parent) not in _IN_MEMORY:
            return parent
    raise BenchError("the folder for temporary files and this one are in memory; name a --dir")


def filesystem_of(path: Path) -> str:
    """Kind of the filesystem that a path lies on, such as ext4; "" where the system won't say."""
    target = os.path.realpath(path)
    found = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields, _, after = line.partition(" - ")
            mount = fields.split()[4]  # spaces in it are written \040: such a mount is not found
            inside = target == mount or target.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(found[0]):
                found = (mount, after.split()[0])
    return found[1]


def forget_pages(directory: Path) -> None:
    """Takes the files below a directory out of the page cache, so that reads are from the disk.

    Only of this machine: what a host below it caches is not ours to drop.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


class RawFile:
    """A file of `count` blocks, all of them written before anything is timed."""

    def __init__(self, path: Path, count: int, block_bytes: int, batch_max: int) -> None:
        self._count = count
        self._disk = _core.RawDisk(str(path), count, block_bytes, batch_max, IO_THREADS)
        for start in range(0, count, batch_max):
            self._disk.write(list(range(start, min(start + batch_max, count))))

    def reads(self, batch: int, seed: int) -> Work:
        """Per step one read of each block of a group, all in flight that may be."""
        steps = self._steps(batch, seed)
        return lambda: self._disk.read(next(steps))

    def writes(self, batch: int, seed: int) -> Work:
        """Per step one write of each block of a group, then one fdatasync."""
        steps = self._steps(batch, seed)
        return lambda: self._disk.write(next(steps))

    def _steps(self, batch: int, seed: int) -> Iterator[list[int]]:
        of_group = [
            list(range(start, start + batch)) for start in range(0, self._count - batch + 1, batch)
        ]
        order = itertools.islice(groups(self._count, batch, seed), len(of_group))
        return itertools.cycle([of_group[group] for group in order])
