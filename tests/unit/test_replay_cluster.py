"""Clusters in `kvpool replay`: what is printed, what is refused, and figures that must agree."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import typer

from kvpool import _core
from kvpool.replay import cluster_report
from kvpool.replay.arguments import ReplayArguments
from kvpool.replay.cluster import ClusterOptions, ClusterPlan, ClusterScore, replay_clusters
from kvpool.replay.score import ONLINE_POLICIES
from kvpool.replay.shapes import SHAPES, ShapeOptions, made_up, shaped
from kvpool.replay.simulate import simulate
from kvpool.replay.trace import Request, Trace, TraceError, batches, spread, write_line


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "zipf.jsonl"
    path.write_bytes(b"".join(map(write_line, made_up("zipf", seed=3, requests=1500))))
    return path


def run(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpool.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


def scores_of(path: Path, nodes: Iterable[int], capacity: int, **changed: object) -> list:
    policies = changed.pop("policies", ("temperature",))
    sizes = tuple((each, capacity) for each in nodes)
    plan = ClusterPlan(Trace(path), policies, sizes, ClusterOptions(**changed))
    return replay_clusters(plan, lambda _, requests: requests)


# --- the command ---------------------------------------------------------------------------------


def test_json_has_a_line_for_each_policy_and_size(trace: Path) -> None:
    words = ["--nodes", 1, 4, 32, "--policy", "lru", "temperature", "--json"]
    done = run("replay", trace, *words, "--capacity-blocks", 2000)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["policy"], row["nodes"]) for row in rows] == [
        (policy, nodes) for policy in ("lru", "temperature") for nodes in (1, 4, 32)
    ]
    assert done.stderr == ""
    for row in rows:
        hits = row["local_hit_blocks"] + row["remote_hit_blocks"]
        assert row["hit_rate"] == pytest.approx(hits / row["blocks"], abs=1e-6)
        assert row["one_pool_hit_rate"] <= row["belady_hit_rate"]
        assert row["sharding"] == ("by_run" if row["nodes"] > 16 else "by_key")
        assert row["by_run"]["asks_per_request"] <= row["by_key"]["asks_per_request"]
        assert row["by_key"]["asks_max"] < row["nodes"]
        mean, most = row["sent_bytes_mean"], row["sent_bytes_max"]
        assert mean <= most <= mean * row["nodes"] + row["nodes"]
    one = rows[0]
    assert one["hit_rate"] == one["one_pool_hit_rate"]
    assert one["sent_skew"] is None
    assert one["by_key"]["asks_per_request"] == 0


def test_tables_name_what_was_asked(trace: Path) -> None:
    words = ["--nodes", 4, "--blocks-each", 500, "--replicate-above", 3, "--spare-last", 2]
    text = run("replay", trace, *words, "--route", "prefix").stdout
    for said in ("requests by prefix", "replicas above heat 3", "2 last copies spared", "2,000"):
        assert said in text
    assert "Belady" in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--nodes 0", "--nodes"),
        ("--nodes 4096", "--nodes"),
        ("--nodes many", "valid integer"),
        ("--nodes 4 --capacity-blocks 3", "none for some of 4 nodes"),
        ("--nodes 4 --blocks-each 5 --capacity-blocks 9", "does not go with --capacity-blocks"),
        ("--nodes 4 --blocks-each 1073741824", "too many"),
        ("--nodes 4 --route prefx", "did you mean 'prefix'"),
        ("--nodes 4 --keep some", "choose from warm"),
        ("--nodes 4 --pick last", "there is no 'last'"),
        ("--nodes 4 --replicate-above -1", "--replicate-above"),
        ("--nodes 4 --bytes", "does not go with --nodes"),
        ("--nodes 4 --plot x.png", "does not go with --nodes"),
        ("--nodes 4 --policy belady", "no node can run belady"),
        ("--blocks-each 5", "needs --nodes"),
        ("--route random", "needs --nodes"),
        ("--max-replicas 1", "needs --nodes"),
    ],
)
def test_a_bad_argument_is_a_usage_error(trace: Path, words: str, complaint: str) -> None:
    told = run("replay", trace, *words.split(), status=2).stderr
    assert complaint in " ".join(told.replace("│", " ").split())


def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "holds no request" in run("replay", empty, "--nodes", 2, status=1).stderr


def test_each_shape_can_be_written_and_no_other() -> None:
    for shape in SHAPES:
        lines = run("workload", "--shape", shape, "--requests", 20).stdout.splitlines()
        assert len(lines) == 20
    assert "there is no shape" in run("workload", "--shape", "round", status=2).stderr


# --- figures -------------------------------------------------------------------------------------


def test_one_node_is_one_pool(trace: Path) -> None:
    pools = {
        score.policy: score for score in simulate(batches(Trace(trace)), ONLINE_POLICIES, [700])
    }
    for score in scores_of(trace, [1], 700, policies=ONLINE_POLICIES):
        pool = pools[score.policy]
        assert (score.hits, score.evictions) == (pool.hit_blocks, pool.evictions)
        assert score.one_pool_hits == pool.hit_blocks


@pytest.mark.parametrize("route", ["round-robin", "random", "prefix"])
def test_books_add_up(trace: Path, route: str) -> None:
    for score in scores_of(trace, [2, 7, 64], 3000, route=route, replicate_above=3.0):
        assert sum(score.routed) == score.requests
        assert sum(score.sent) == score.remote_hits + score.replicas
        assert score.kept <= score.remote_hits
        assert score.hits <= score.blocks
        assert score.by_key.asks >= score.by_run.asks
        assert score.by_key.busiest <= score.by_key.asks + score.by_key.told


def test_with_room_for_all_a_cluster_hits_what_one_pool_hits(trace: Path) -> None:
    (score,) = scores_of(trace, [8], 8 * 30_000)
    assert score.hits == score.one_pool_hits == score.belady_hits
    assert score.evictions == 0


def test_copies_that_are_not_kept_are_sent_again(trace: Path) -> None:
    (never,) = scores_of(trace, [8], 8 * 30_000, keep="never")
    (warm,) = scores_of(trace, [8], 8 * 30_000)
    assert never.kept == 0 < warm.kept
    assert never.hits == warm.hits
    assert never.remote_hits > warm.remote_hits


def test_by_prefix_most_hits_are_local(trace: Path) -> None:
    (by_turns,) = scores_of(trace, [16], 8000)
    (by_prefix,) = scores_of(trace, [16], 8000, route="prefix")
    assert by_prefix.remote_share < by_turns.remote_share


def test_the_same_seed_gives_the_same_figures(trace: Path) -> None:
    def figures(seed: int) -> ClusterScore:
        (score,) = scores_of(trace, [5], 2000, route="random", seed=seed)
        return dataclasses.replace(score, seconds=0)

    assert figures(1) == figures(1)
    assert figures(1).routed != figures(2).routed


def test_no_request_no_share() -> None:
    messages = dict.fromkeys(
        (
            "asks", "asked_keys", "asks_p99", "asks_max", "publishes", "withdraws", "told_keys",
            "busiest",
        ),
        0,
    )  # fmt: skip
    numbers = {
        field.name: 0
        for field in dataclasses.fields(ClusterScore)
        if field.name not in ("policy", "routed", "sent", "by_key", "by_run")
    }
    core = _core.ClusterReplay()
    core.add(2, 2)
    core.finish()
    (row,) = core.results()
    assert row["by_key"] == messages
    from kvpool.replay.cluster import Messages

    none = ClusterScore(
        policy="lru", routed=(0, 0), sent=(0, 0), by_key=Messages(**messages),
        by_run=Messages(**messages), **numbers | {"nodes": 2},
    )  # fmt: skip
    assert none.sent_skew is None
    assert none.by_key.skew(2) is None
    plan = ClusterPlan(Trace("a"), ("lru",), ((2, 2),), ClusterOptions())
    assert json.loads(cluster_report.json_line(plan, none))["hit_rate"] == 0


def test_an_absent_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        scores_of(tmp_path / "absent", [2], 100)


# --- the core and the arguments ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"nodes": 0}, ValueError),
        ({"nodes": 4096}, ValueError),
        ({"capacity_blocks": 1}, ValueError),
        ({"capacity_blocks": 2**31}, ValueError),
        ({"policy": "belady"}, ValueError),
        ({"route": "none"}, ValueError),
        ({"keep": "some"}, ValueError),
        ({"pick": "any"}, ValueError),
        ({"route_blocks": 0}, ValueError),
        ({"tau_s": float("nan")}, ValueError),
        ({"replicate_above": -1.0}, ValueError),
        ({"spare_last": -1}, ValueError),
        ({"colour": 1}, TypeError),
    ],
)
def test_the_core_refuses_what_makes_no_cluster(changed: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        _core.ClusterReplay().add(**{"nodes": 2, "capacity_blocks": 10, **changed})


def test_the_core_wants_its_calls_in_order() -> None:
    replay = _core.ClusterReplay()
    replay.add(2, 10)
    no_requests = np.zeros(0), np.zeros(0, np.uint32), np.zeros(0, np.int64)
    with pytest.raises(RuntimeError):
        replay.results()
    replay.feed(*no_requests)
    with pytest.raises(RuntimeError):
        replay.add(2, 10)
    with pytest.raises(ValueError, match="lengths add up"):
        replay.feed(np.zeros(1), np.ones(1, np.uint32), np.zeros(0, np.int64))
    replay.finish()
    with pytest.raises(RuntimeError):
        replay.feed(*no_requests)


def test_sizes_are_of_all_nodes_together() -> None:
    def sizes(**changed: object) -> tuple:
        asked = ReplayArguments(path=Path("t"), block_bytes=65536, **changed)
        return asked.cluster_plan().sizes

    assert sizes(nodes=[4, 16, 4]) == ((4, 50_000), (16, 50_000))
    assert sizes(nodes=[4], capacity_blocks=[8, 9]) == ((4, 8), (4, 9))
    assert sizes(nodes=[4, 8], blocks_each=10) == ((4, 40), (8, 80))
    with pytest.raises(typer.BadParameter):
        sizes(nodes=[4], capacity_blocks=[2])


def test_requests_of_one_tick_are_spread_until_the_next() -> None:
    times = [0.0, 0.0, 0.0, 3.0, 5.0, 5.0]
    spread_out = list(spread(Request(time, 1, 1, [at]) for at, time in enumerate(times)))
    assert [request.time_s for request in spread_out] == [0, 1, 2, 3, 5, 5]
    assert [request.block_ids for request in spread_out] == [[at] for at in range(6)]
    assert list(spread([])) == []


def test_a_tick_of_very_many_is_not_held_in_memory() -> None:
    requests = [Request(float(at == 9), 1, 1, [at]) for at in range(10)]
    times = [request.time_s for request in spread(requests, together_max=4)]
    assert times == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    requests = [Request(float(at // 4), 1, 1, [at]) for at in range(8)]
    times = [request.time_s for request in spread(requests, together_max=4)]
    assert times == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]


# --- shapes --------------------------------------------------------------------------------------


def first_blocks(requests: Iterable[Request]) -> list[float]:
    """Shares of requests by first block, the most popular first."""
    counts: dict[int, int] = {}
    for request in requests:
        counts[request.block_ids[0]] = counts.get(request.block_ids[0], 0) + 1
    total = sum(counts.values())
    return sorted((count / total for count in counts.values()), reverse=True)


def test_zipf_has_a_popular_head_and_a_long_tail() -> None:
    shares = first_blocks(shaped("zipf", ShapeOptions(requests=20_000, prefixes=1000)))
    expected = 1 / sum(1 / rank for rank in range(1, 1001))
    assert shares[0] == pytest.approx(expected, rel=0.1)
    assert shares[9] == pytest.approx(expected / 10, rel=0.3)
    assert len(shares) > 800


def test_three_hot_has_three_first_blocks_in_their_shares() -> None:
    shares = first_blocks(shaped("three-hot", ShapeOptions(requests=20_000)))
    assert shares == pytest.approx([0.4637, 0.3901, 0.1462], abs=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_repeat_and_an_id_names_one_prefix(shape: str) -> None:
    requests = list(made_up(shape, seed=9, requests=300))
    assert requests == list(made_up(shape, seed=9, requests=300))
    assert requests != list(made_up(shape, seed=8, requests=300))
    before: dict[int, int] = {}
    for request in requests:
        for parent, block in zip([-1, *request.block_ids], request.block_ids, strict=False):
            assert before.setdefault(block, parent) == parent
    times = [request.time_s for request in requests]
    assert times == sorted(times)


def test_there_is_no_other_shape() -> None:
    with pytest.raises(ValueError, match="choose from chat"):
        made_up("round", seed=1, requests=1)
