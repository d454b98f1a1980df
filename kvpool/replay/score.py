"""What a replay found out, one Score per (policy, capacity). Plain values."""

from __future__ import annotations

import dataclasses

ONLINE_POLICIES = ("temperature", "lru", "lfu", "fifo", "s3fifo")
ORACLE = "belady"  # knows the future: replay only, the most that any policy could hit
POLICIES = (*ONLINE_POLICIES, ORACLE)


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """Bytes that really went through a pool, and how fast.

    Seconds are spent inside the pool's calls, summed over threads; `memcpy_bytes_per_s` is one
    thread's rate, sampled between those calls.
    """

    got_bytes: int
    put_bytes: int
    get_s: float
    put_s: float
    memcpy_bytes_per_s: float
    mismatches: int
    first_mismatch: str | None

    @property
    def moved_bytes(self) -> int:
        return self.got_bytes + self.put_bytes

    @property
    def bytes_per_s(self) -> float:
        """Of one thread, gets and puts together."""
        seconds = self.get_s + self.put_s
        return self.moved_bytes / seconds if seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """One policy at one capacity over one trace.

    A hit is a block of the leading run that is resident when its request comes. `hit_tokens` and
    `copied` are known only when bytes went through a pool. `seconds`: wall time of this replay.
    """

    policy: str
    capacity_blocks: int
    requests: int
    blocks: int
    hit_blocks: int
    evictions: int
    seconds: float
    hit_tokens: int | None = None
    copied: Copied | None = None

    @property
    def hit_rate(self) -> float:
        """Hits over blocks; 0 for a trace without blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


def json_fields(trace: str, score: Score) -> dict[str, object]:
    """The line that `kvpool replay --json` prints; zero bytes moved: only the policy ran."""
    copied = score.copied
    return {
        "trace": trace,
        "policy": score.policy,
        "capacity_blocks": score.capacity_blocks,
        "requests": score.requests,
        "blocks": score.blocks,
        "hit_blocks": score.hit_blocks,
        "hit_rate": round(score.hit_rate, 6),
        "bytes_moved": copied.moved_bytes if copied else 0,
        "mismatches": copied.mismatches if copied else 0,
        "seconds": round(score.seconds, 6),
    }
