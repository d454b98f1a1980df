"""How large a bench is: real sizes, or tiny ones that only show that it still runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from kvpool.bench.vllm_plan import USUAL_ENGINES, EngineOptions


def _say_nothing(_line: str) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """`seed` drives everything random; `is_quick` shrinks working sets and rounds.

    directory: where files go, None for a usual place. say: tells what a row has no field for.
    engines: what was asked of the bench that runs vLLM.
    """

    seed: int = 1
    is_quick: bool = False
    directory: Path | None = None
    say: Callable[[str], None] = _say_nothing
    engines: EngineOptions = USUAL_ENGINES

    def of(self, real: int, *, quick: int) -> int:
        return quick if self.is_quick else real
