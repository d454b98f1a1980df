"""Is loading quicker than computing? Both are measured here, as they happen.

Prefill: tokens per second of steps with many tokens. Loads: bytes per second, and what a load costs
whatever its size. A prefix that would be computed sooner than it is loaded is left alone, but for
one of `_TRY_EVERY`, so that a pool that became quicker is noticed (MemServe's rule, with measured
numbers; a fixed threshold is wrong on every other machine).

Thread rule: one thread. Time is given.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2  # of the newest sample
_PREFILL_TOKENS_MIN = 64  # a step of fewer tokens says little about prefill
_LOAD_BYTES_MIN = 1 << 20
_TRY_EVERY = 16
LOAD_OVERHEAD_S = 0.002  # an asynchronous load costs a step of its own


@dataclass
class Pace:
    """Rates, None until there was a sample."""

    prefill_tokens_per_s: float | None = None
    load_bytes_per_s: float | None = None
    _declined: int = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took so long."""
        if tokens >= _PREFILL_TOKENS_MIN and seconds > 0:
            self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, tokens / seconds)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """Loads of so many bytes took so long."""
        if size_bytes >= _LOAD_BYTES_MIN and seconds > 0:
            self.load_bytes_per_s = _mixed(self.load_bytes_per_s, size_bytes / seconds)

    def is_worth(self, tokens: int, size_bytes: int) -> bool:
        """Whether to load `size_bytes` rather than compute `tokens`. True while unknown."""
        if self.prefill_tokens_per_s is None or self.load_bytes_per_s is None:
            return True
        load_s = LOAD_OVERHEAD_S + size_bytes / self.load_bytes_per_s
        if load_s <= tokens / self.prefill_tokens_per_s:
            return True
        self._declined += 1
        return self._declined % _TRY_EVERY == 0


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
