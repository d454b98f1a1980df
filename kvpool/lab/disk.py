"""A small disk that only one node sees, in memory, and that can be filled."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvpool.lab.linux import in_mounts, new_mounts

_STEPS_BYTES = (1 << 20, 4096)


class Disk:
    """Mounted on `folder` for who enters `mounts`. What is on it lasts until close()."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.mounts = new_mounts(str(folder), size_bytes)
        self._ballast = folder / "ballast"

    def close(self) -> None:
        """Idempotent. It is gone when nobody runs there any more."""
        if self.mounts >= 0:
            os.close(self.mounts)
        self.mounts = -1

    def fill(self) -> None:
        """Somebody else takes all that is left."""
        in_mounts(self.mounts, self._fill)

    def clear(self) -> None:
        """And gives it back. Idempotent."""
        in_mounts(self.mounts, lambda: self._ballast.unlink(missing_ok=True))

    def free_bytes(self) -> int:
        facts = in_mounts(self.mounts, lambda: os.statvfs(self.folder))
        return facts.f_bavail * facts.f_frsize

    def _fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as ballast:
            for step in _STEPS_BYTES:
                with contextlib.suppress(OSError):
                    while ballast.write(bytes(step)) == step:
                        pass
