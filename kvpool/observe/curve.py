"""What hit rate would another size of DRAM give? Read off the distances at which blocks are reused.

A use hits in an LRU cache of a size exactly if its reuse distance is no larger. So the counted
distances are the hit rate at every size at once: from a live node (Node.reuse()) or from a trace.

Relies on: distances counted by the core (_core.Reuse), sampled where there are many blocks.
Promises:  1. pure, but for of_trace(): the same counts give the same answers;
           2. hit rates never fall with the size, and lie in 0..1;
           3. what is not known is not said: `doubt` names the reason, and `error` how far off.
What it is not: a pool evicts by heat, which is at most some thousandths below LRU and often several
points above it; a chain whose head is missing counts block by block here, and as a whole there.
Where a block stays for less than a second, the order of uses that clients make through shared
memory is blurred (the node hears of them up to 50 ms later), and the curve lies too low.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvpool import _core
from kvpool.config import format_size
from kvpool.replay.trace import Batch, Trace, TraceError, batches

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
REFERENCES_MIN = 1000  # below, a curve says more about chance than about the workload
SAMPLED_MIN = 200
# Mean absolute error of the whole curve against the exact one is at most this over the square root
# of the blocks followed, in all workloads and traces that it was measured with; and 0.005 for bins.
ERROR_OF_ONE_SAMPLE = 2.0
ERROR_OF_BINS = 0.005


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Counted reuse distances. Uses are of blocks; all counts are faded by their age."""

    references: float  # uses
    sampled: float  # of these, by blocks that are followed
    samples: int  # those blocks
    rate: float  # their share of all blocks
    seen_bytes: float  # of all blocks that are remembered, about
    cold: float  # first uses: no size makes them hits
    bounds_bytes: list[float]
    counts: list[float]  # uses at distances up to that bound and above the one before

    def hit_ratio(self, size_bytes: float) -> float:
        """Share of the uses that an LRU of that size serves; 0 before there are any."""
        return float(what_if(self, [size_bytes])[0])

    def miss_ratio(self, size_bytes: float) -> float:
        """The other ones."""
        return 1.0 - self.hit_ratio(size_bytes)

    def error(self) -> float:
        """How far off the hit ratios are on average over sizes, as a rule at most; 0.005 where all
        blocks are followed. A single size may be off by two or three times that."""
        left_out = max(1.0 - self.rate, 0.0)
        return ERROR_OF_BINS + ERROR_OF_ONE_SAMPLE * math.sqrt(left_out / max(self.samples, 1))

    def doubt(self, size_bytes: float = 0.0) -> str:
        """Why nothing should be concluded for that size, in words; "" where that may be."""
        if self.references < REFERENCES_MIN or self.sampled < SAMPLED_MIN:
            return f"only {self.references:,.0f} uses counted lately; {REFERENCES_MIN:,} are needed"
        if size_bytes > self.seen_bytes:
            seen = format_size(int(self.seen_bytes))
            return f"only {seen} of different blocks were seen: larger sizes cannot be judged"
        return ""


def of_counts(counted: Mapping[str, Any]) -> Curve:
    """From `all`, or one of `spaces`, of Node.reuse(), or from _core.Reuse.curve()."""
    return Curve(**{name: counted[name] for name in Curve.__struct_fields__})


def what_if(curve: Curve, sizes_bytes: Sequence[float]) -> list[float]:
    """Hit ratios of an LRU of each size; uses inside a bin are taken as spread evenly."""
    if curve.references <= 0:
        return [0.0 for _ in sizes_bytes]
    bounds = np.concatenate([[0.0], curve.bounds_bytes])
    hits = np.concatenate([[0.0], np.cumsum(curve.counts)])
    ratios = np.interp(np.asarray(sizes_bytes, dtype=np.float64), bounds, hits) / curve.references
    return [float(each) for each in np.clip(ratios, 0.0, 1.0)]


# --- the table -----------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One size of DRAM. `hit` with the SSD tier as it is, where there is one."""

    factor: float  # of the present size
    dram_bytes: int
    hit_dram: float
    hit: float  # in DRAM or on the SSD
    doubt: str  # "" or why this row says little

    def __str__(self) -> str:
        return f"DRAM {self.factor:g}x ({format_size(self.dram_bytes)}): hit {self.hit:.0%}"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What sizes around the present one would give."""

    dram_bytes: int
    ssd_bytes: int
    rows: list[Row]
    error: float  # of the hit ratios; see Curve.error()
    doubt: str  # "" or why the whole table says little

    def now(self) -> Row:
        return next(row for row in self.rows if row.factor == 1)

    def lines(self) -> list[str]:
        """One line for each other size, as in "DRAM 2x (2.0 GiB): hit 41% -> 58%"."""
        before = self.now().hit
        return [
            f"DRAM {row.factor:g}x ({format_size(row.dram_bytes)}): hit {before:.0%} ->"
            f" {row.hit:.0%}" + (f" ({row.doubt})" if row.doubt and not self.doubt else "")
            for row in self.rows
            if row.factor != 1
        ]


def table(
    curve: Curve, dram_bytes: int, *, ssd_bytes: int = 0, factors: Iterable[float] = FACTORS
) -> Table:
    """Rows for `factors` times the present DRAM, 1 among them, smallest first.

    ssd_bytes: a second tier behind each of them; it holds what is used more than once, so together
    they are taken as one LRU of both sizes, which is what they come to where nothing leaves the SSD
    before it is written. ValueError for sizes and factors that are not positive.
    """
    chosen = sorted({*factors, 1.0})
    if dram_bytes <= 0 or ssd_bytes < 0 or chosen[0] <= 0:
        raise ValueError(f"no sizes: dram {dram_bytes}, ssd {ssd_bytes}, factors {chosen}")
    sizes = [round(dram_bytes * factor) for factor in chosen]
    in_dram = what_if(curve, sizes)
    in_both = what_if(curve, [size + ssd_bytes for size in sizes])
    rows = [
        Row(
            factor=factor,
            dram_bytes=size,
            hit_dram=dram,
            hit=both,
            doubt=curve.doubt(size + ssd_bytes),
        )
        for factor, size, dram, both in zip(chosen, sizes, in_dram, in_both, strict=True)
    ]
    return Table(
        dram_bytes=dram_bytes,
        ssd_bytes=ssd_bytes,
        rows=rows,
        error=curve.error(),
        doubt=curve.doubt(),
    )


# --- from a trace --------------------------------------------------------------------------------


class Distances:
    """Counts the reuse distances of requests: one use for each block of each, in order.

    exact: follow all blocks, with memory that grows with their number (some 100 bytes each); else
    16,384 of them, within 1 MiB. Nothing fades. One thread at a time.
    """

    def __init__(self, block_bytes: int, *, exact: bool = False, salt: int = 0) -> None:
        self._block_bytes = block_bytes
        self._reuse = _core.Reuse(exact=exact, half_life_s=0.0, salt=salt)

    def add(self, batch: Batch) -> None:
        self._reuse.add(batch.ids, self._block_bytes)

    def curve(self) -> Curve:
        return of_counts(self._reuse.curve())


def of_trace(path: str | os.PathLike[str], block_bytes: int, *, exact: bool = False) -> Curve:
    """The curve of a request trace (kvpool.replay.trace), read once as a stream.

    block_bytes: what a block takes of the pool. Raises TraceError for what is no trace and
    BadArgument for a size out of range. Some 0.1 us a block beside the reading.
    """
    distances = Distances(block_bytes, exact=exact)
    trace = Trace(path)
    for batch in batches(trace):
        distances.add(batch)
    if trace.skipped and not trace.requests:
        raise TraceError(f"{trace.path} has no request: {trace.problems[0]}")
    return distances.curve()
