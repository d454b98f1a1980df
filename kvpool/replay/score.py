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
class OnSsd:
    """What an SSD tier under the pool did. Hits are the Score's, by the tier they came from.

    `restored_*`: blocks found at a restart, and hits on those. `demotions`: blocks that left DRAM
    and stay on SSD. `unflushed`: requests after which not everything could be written.
    """

    dram_hit_blocks: int
    ssd_hit_blocks: int
    restored_blocks: int
    restored_hits: int
    demotions: int
    promotions: int
    evictions: int
    written_blocks: int
    written_bytes: int
    read_bytes: int
    unflushed: int
    is_direct: bool

    @property
    def writes_per_hit(self) -> float | None:
        """Blocks written to the SSD per block served from it: what a hit costs in wear."""
        return self.written_blocks / self.ssd_hit_blocks if self.ssd_hit_blocks else None


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """One policy at one capacity over one trace.

    A hit is a block of the leading run that is resident when its request comes. `hit_tokens` and
    `copied` are known only when bytes went through a pool. `seconds`: wall time of this replay.
    `ssd_capacity_blocks` is 0 without an SSD tier; a score with one, but without `on_ssd`, was
    simulated with both capacities as one tier.
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
    ssd_capacity_blocks: int = 0
    on_ssd: OnSsd | None = None

    @property
    def hit_rate(self) -> float:
        """Hits over blocks; 0 for a trace without blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


def json_fields(trace: str, score: Score) -> dict[str, object]:
    """The line that `kvpool replay --json` prints; zero bytes moved: only the policy ran."""
    copied = score.copied
    fields: dict[str, object] = {
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
    return fields | _ssd_fields(score) if score.ssd_capacity_blocks else fields


_COUNTS = (
    "dram_hit_blocks",
    "ssd_hit_blocks",
    "restored_blocks",
    "restored_hits",
    "demotions",
    "promotions",
)


def _ssd_fields(score: Score) -> dict[str, object]:
    """Null is for what only a pool knows, and for writes per hit where there was none."""
    done = score.on_ssd
    names = (*_COUNTS, "written_bytes", "read_bytes")
    found = {name: getattr(done, name) if done else None for name in names}
    wear = done.writes_per_hit if done else None
    return {
        "ssd_capacity_blocks": score.ssd_capacity_blocks,
        **{name: found[name] for name in _COUNTS},
        "ssd_written_bytes": found["written_bytes"],
        "ssd_read_bytes": found["read_bytes"],
        "ssd_writes_per_hit": None if wear is None else round(wear, 6),
    }
