"""How large a bench is: real sizes, or tiny ones that only show that it still runs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """`seed` drives everything random; `is_quick` shrinks working sets and rounds."""

    seed: int = 1
    is_quick: bool = False

    def of(self, real: int, *, quick: int) -> int:
        return quick if self.is_quick else real
