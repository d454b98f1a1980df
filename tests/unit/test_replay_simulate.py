"""The simulator against a slow model that shares no code with it, and against known values."""

from collections import OrderedDict
from pathlib import Path

import pytest

from kvpool.replay.score import ONLINE_POLICIES, POLICIES, Score
from kvpool.replay.simulate import simulate
from kvpool.replay.trace import Request, Trace, batches
from kvpool.replay.workload import WorkloadOptions, generate

CAPACITIES = (50, 400, 3000)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(generate(WorkloadOptions(seed=5, requests=1500)))


@pytest.fixture(scope="module")
def scores(requests: list[Request]) -> dict[tuple[str, int], Score]:
    found = simulate(batches(requests), POLICIES, CAPACITIES)
    return {(score.policy, score.capacity_blocks): score for score in found}


def lru_hits(requests: list[Request], capacity: int) -> int:
    """Leading resident blocks; all blocks used, tail first; the running request stays."""
    resident: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits = 0
    for request in requests:
        leading = True
        for block in request.block_ids:
            leading = leading and block in resident
            hits += leading
        for block in reversed(request.block_ids):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", CAPACITIES[1:])  # the first is shorter than some requests
def test_lru_hits_as_a_list_would(requests, scores, capacity: int) -> None:
    assert scores["lru", capacity].hit_blocks == lru_hits(requests, capacity)


def test_every_pair_sees_the_whole_trace(requests, scores) -> None:
    assert set(scores) == {(policy, capacity) for policy in POLICIES for capacity in CAPACITIES}
    blocks = sum(len(request.block_ids) for request in requests)
    assert {(s.requests, s.blocks) for s in scores.values()} == {(len(requests), blocks)}


def test_batches_do_not_matter(requests, scores) -> None:
    again = simulate(batches(requests, blocks_max=1), POLICIES, CAPACITIES)
    assert [s.hit_blocks for s in again] == [s.hit_blocks for s in scores.values()]


def test_no_policy_beats_belady_and_temperature_is_not_under_lru(scores) -> None:
    for capacity in CAPACITIES:
        for policy in ONLINE_POLICIES:
            assert scores[policy, capacity].hit_blocks <= scores["belady", capacity].hit_blocks
        assert scores["temperature", capacity].hit_rate >= scores["lru", capacity].hit_rate - 0.002


def test_with_room_for_all_every_policy_hits_whatever_was_seen(requests) -> None:
    unique = {block for request in requests for block in request.block_ids}
    (*found,) = simulate(batches(requests), POLICIES, [len(unique)])
    blocks = found[0].blocks
    assert {score.hit_blocks for score in found} == {blocks - len(unique)}


def test_a_fixed_half_life_is_another_policy(requests) -> None:
    (short,) = simulate(batches(requests), ["temperature"], [400], tau_s=0.5)
    (long,) = simulate(batches(requests), ["temperature"], [400], tau_s=5000)
    assert short.hit_blocks != long.hit_blocks


def test_an_unknown_policy_or_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no policy 'clock'"):
        simulate([], ["clock"], [10])
    with pytest.raises(ValueError, match="capacity"):
        simulate([], ["lru"], [0])


# Hit rates that two independent simulators agree on, and the row that temperature must reach.
KNOWN = {
    ("conversation", "lru"): (
        (1000, 5000, 10_000, 20_000, 30_000, 50_000),
        (0.0445, 0.1118, 0.2116, 0.2878, 0.3257, 0.3546),
    ),
    ("conversation", "belady"): ((1000, 5000, 10_000), (0.1907, 0.3412, 0.3664)),
    ("synthetic", "lru"): (
        (1000, 2000, 5000, 10_000, 20_000),
        (0.0841, 0.1464, 0.2793, 0.4239, 0.5718),
    ),
    ("synthetic", "belady"): (
        (1000, 2000, 5000, 10_000, 20_000),
        (0.2767, 0.3795, 0.5263, 0.6180, 0.6396),
    ),
}
REFERENCE = {
    "conversation": (
        (1000, 5000, 10_000, 20_000, 30_000, 50_000),
        (0.0800, 0.1564, 0.2282, 0.2976, 0.3298, 0.3549),
    ),
    "synthetic": (
        (1000, 2000, 5000, 10_000, 20_000),
        (0.0857, 0.1512, 0.2896, 0.4390, 0.5799),
    ),
}


@pytest.mark.parametrize(("name", "policy"), KNOWN)
def test_known_hit_rates(traces: Path, name: str, policy: str) -> None:
    capacities, rates = KNOWN[name, policy]
    trace = Trace(traces / f"{name}_trace.jsonl", strict=True)
    found = simulate(batches(trace), [policy], capacities)
    assert [score.hit_rate for score in found] == pytest.approx(list(rates), abs=0.001)


@pytest.mark.parametrize("name", REFERENCE)
def test_temperature_reaches_its_reference(traces: Path, name: str) -> None:
    capacities, rates = REFERENCE[name]
    trace = Trace(traces / f"{name}_trace.jsonl", strict=True)
    found = simulate(batches(trace), ["temperature"], capacities)
    for score, rate in zip(found, rates, strict=True):
        allowed = 0.006 if score.capacity_blocks == 1000 else 0.002
        assert score.hit_rate >= rate - allowed, score
