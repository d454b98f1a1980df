"""The curve of hit rates against sizes: exact against a list, sampled against exact, and the words
that are made of it."""

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.observe.curve import (
    REFERENCES_MIN,
    Curve,
    Distances,
    of_counts,
    of_trace,
    table,
    what_if,
)
from kvpool.replay.simulate import simulate
from kvpool.replay.trace import Request, Trace, TraceError, batches, write_line
from kvpool.replay.workload import WorkloadOptions, generate

MIB = 1 << 20
SALTS = 5


def curve_of(requests: Iterable[Request], *, exact: bool = False, salt: int = 0) -> Curve:
    distances = Distances(MIB, exact=exact, salt=salt)
    for batch in batches(requests):
        distances.add(batch)
    return distances.curve()


def lru_block_hits(requests: Iterable[Request], capacity: int) -> float:
    """Share of the blocks that are there at their turn, one after the other; a plain LRU."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = uses = 0
    for request in requests:
        for block in request.block_ids:
            uses += 1
            hits += block in resident
            resident[block] = None
            resident.move_to_end(block)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits / uses


def sizes_of(requests: Iterable[Request]) -> list[float]:
    unique = len({block for request in requests for block in request.block_ids})
    return [float(size) * MIB for size in np.geomspace(50, unique, 100)]


def mean_error(curve: Curve, exact: Curve, sizes: list[float]) -> float:
    difference = np.subtract(what_if(curve, sizes), what_if(exact, sizes))
    return float(np.abs(difference).mean())


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(generate(WorkloadOptions(seed=5, requests=3000)))


def test_the_exact_curve_is_that_of_a_list(requests: list[Request]) -> None:
    curve = curve_of(requests, exact=True)
    assert curve.rate == 1
    for capacity in (30, 100, 333, 1000, 3000, 9000):
        # What is left is that uses inside a bin are taken as spread evenly.
        assert curve.hit_ratio(capacity * MIB) == pytest.approx(
            lru_block_hits(requests, capacity), abs=0.005
        )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_samples_tell_the_curve_of_a_workload(seed: int, rng: np.random.Generator) -> None:
    made = list(generate(WorkloadOptions(seed=seed, requests=8000, sessions_per_s=20)))
    exact, sizes = curve_of(made, exact=True), sizes_of(made)
    curve = curve_of(made, salt=int(rng.integers(2**63)))
    assert curve.samples <= 1 << 14
    assert curve.rate < 0.6
    error = mean_error(curve, exact, sizes)
    print(f"mean error {error:.4f} at {curve.samples} samples, stated {curve.error():.4f}")
    assert error < 0.02


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_samples_tell_the_curve_of_a_public_trace(
    traces: Path, name: str, rng: np.random.Generator
) -> None:
    made = list(Trace(traces / f"{name}_trace.jsonl", strict=True))
    exact, sizes = curve_of(made, exact=True), sizes_of(made)
    errors = []
    for _ in range(SALTS):
        curve = curve_of(made, salt=int(rng.integers(2**63)))
        errors.append(mean_error(curve, exact, sizes))
    print(f"{name}: mean errors {[f'{each:.4f}' for each in errors]}, stated {curve.error():.4f}")
    assert np.mean(errors) < 0.02  # 0.006 and 0.002, over many draws
    assert max(errors) < 0.03  # 0.019 and 0.009 at the worst of 60


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_pool_that_is_lru_hits_what_the_curve_says(traces: Path, name: str) -> None:
    trace = Trace(traces / f"{name}_trace.jsonl", strict=True)
    curve = curve_of(trace, exact=True)
    capacities = (1000, 2000, 5000, 10_000, 20_000, 30_000)
    for score in simulate(batches(trace), ["lru"], capacities):
        promised = curve.hit_ratio(score.capacity_blocks * MIB)
        print(f"{name} {score.capacity_blocks}: {score.hit_rate:.4f}, curve {promised:.4f}")
        assert score.hit_rate == pytest.approx(promised, abs=0.01)


def made_curve(counts: list[float], cold: float = 0, **fields: float) -> Curve:
    total = sum(counts) + cold
    known = {"references": total, "sampled": total, "samples": 5000, "rate": 1.0}
    counted = {"seen_bytes": 1e15, "cold": cold, "counts": counts, **known, **fields}
    bounds = [float(1024 << i) for i in range(len(counts))]
    return of_counts({**counted, "bounds_bytes": bounds, "anything": 0})


@given(
    st.lists(st.floats(0, 1e6), max_size=40),
    st.floats(0, 1e6),
    st.lists(st.floats(0, 1e16), min_size=2, max_size=20),
)
def test_hit_ratios_are_shares_and_never_fall(
    counts: list[float], cold: float, sizes: list[float]
) -> None:
    ratios = what_if(made_curve(counts, cold), sorted(sizes))
    assert all(0 <= each <= 1 for each in ratios)
    assert ratios == sorted(ratios)


def test_a_table_says_what_another_size_would_give() -> None:
    # 1 KiB: 10 %, 2 KiB: 30 %, 4 KiB: 60 %; 40 % are first uses.
    made = table(made_curve([1000, 2000, 3000], 4000), 2048)
    assert [row.factor for row in made.rows] == [0.25, 0.5, 1, 2, 4, 8, 16]
    assert [round(row.hit, 3) for row in made.rows] == [0.05, 0.1, 0.3, 0.6, 0.6, 0.6, 0.6]
    assert [row.hit for row in made.rows] == [row.hit_dram for row in made.rows]
    assert made.doubt == ""
    assert made.lines()[2] == "DRAM 2x (4 KiB): hit 30% -> 60%"
    assert str(made.now()) == "DRAM 1x (2 KiB): hit 30%"


def test_an_ssd_is_a_second_tier_behind_every_size() -> None:
    made = table(made_curve([1000, 2000, 3000], 4000), 1024, ssd_bytes=1024, factors=[3, 0.5])
    assert [row.factor for row in made.rows] == [0.5, 1, 3]
    assert [round(row.hit_dram, 3) for row in made.rows] == [0.05, 0.1, 0.45]
    assert [round(row.hit, 3) for row in made.rows] == [0.2, 0.3, 0.6]


def test_too_few_uses_say_nothing_and_say_so() -> None:
    few = made_curve([REFERENCES_MIN / 2], 10)
    assert "are needed" in table(few, 1024).doubt
    assert made_curve([REFERENCES_MIN]).doubt() == ""
    assert "are needed" in made_curve([1e6], sampled=3).doubt()
    empty = of_counts(
        dict.fromkeys(["references", "sampled", "samples", "rate", "seen_bytes", "cold"], 0)
        | {"bounds_bytes": [], "counts": []}
    )
    assert empty.hit_ratio(1024) == 0
    assert empty.doubt()
    # A young node: what is larger than all it has seen cannot be judged.
    young = table(made_curve([5000.0], seen_bytes=3000), 1024)
    assert [bool(row.doubt) for row in young.rows] == [False] * 4 + [True] * 3
    assert "2.9 KiB" in young.lines()[-1]


def test_the_stated_error_shrinks_with_the_samples() -> None:
    small = made_curve([1e5], rate=0.01, samples=500)
    large = made_curve([1e5], rate=0.01, samples=16000)
    assert made_curve([1e5]).error() < large.error() < small.error()


@pytest.mark.parametrize("sizes", [(0, 0, 1), (1024, -1, 1), (1024, 0, 0)])
def test_no_size_is_refused(sizes: tuple[int, int, int]) -> None:
    dram, ssd, factor = sizes
    with pytest.raises(ValueError, match="no sizes"):
        table(made_curve([1.0]), dram, ssd_bytes=ssd, factors=[factor])


def test_a_trace_file_has_a_curve(requests: list[Request], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(write_line(request) for request in requests))
    curve = of_trace(path, MIB)
    assert curve == curve_of(requests)
    assert curve.references == sum(len(request.block_ids) for request in requests)
    assert of_trace(path, 2 * MIB, exact=True).hit_ratio(2000 * MIB) == pytest.approx(
        curve_of(requests, exact=True).hit_ratio(1000 * MIB), abs=0.001
    )
    with pytest.raises(TraceError):
        of_trace(tmp_path / "none", MIB)
    (tmp_path / "other").write_text("no JSON\n" * 3)
    with pytest.raises(TraceError, match="has no request: line 1"):
        of_trace(tmp_path / "other", MIB)
