"""Real bytes through a real pool: right, counted, and hit for hit what the simulator says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kvpool
from kvpool import cli
from kvpool.replay import demo, through_pool
from kvpool.replay.payload import Payload
from kvpool.replay.run import Plan, ReplayError, replay
from kvpool.replay.score import ONLINE_POLICIES
from kvpool.replay.simulate import simulate
from kvpool.replay.through_pool import PoolOptions
from kvpool.replay.trace import Request, Trace, TraceError, batches, write_line
from kvpool.replay.workload import WorkloadOptions, generate

BLOCK_BYTES = 65536  # small blocks would leave no room for the ghosts that the simulator has
WORKLOAD = WorkloadOptions(seed=2, requests=300)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(generate(WORKLOAD))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    path.write_bytes(b"".join(map(write_line, generate(WORKLOAD))))
    return path


def without_watching(_step: str, requests):
    return requests


@pytest.mark.parametrize("capacity", [40, 250, 900])
@pytest.mark.parametrize("policy", ["temperature", "lru"])
def test_hits_are_those_of_the_simulator(requests, policy: str, capacity: int) -> None:
    score = through_pool.through_pool(requests, PoolOptions(policy, capacity, BLOCK_BYTES))
    (simulated,) = simulate(batches(requests), [policy], [capacity])
    assert score.hit_blocks == simulated.hit_blocks > 0
    assert score.evictions == simulated.evictions > 0
    assert (score.requests, score.blocks) == (simulated.requests, simulated.blocks)
    assert score.copied.mismatches == 0


@pytest.mark.parametrize("policy", ["lfu", "fifo", "s3fifo"])
def test_hits_of_policies_without_chains_are_nearly_those_of_the_simulator(
    requests, policy: str
) -> None:
    # The simulator keeps all of a running request, a put only what is before it in its own call.
    score = through_pool.through_pool(requests, PoolOptions(policy, 250, BLOCK_BYTES))
    (simulated,) = simulate(batches(requests), [policy], [250])
    assert score.hit_rate == pytest.approx(simulated.hit_rate, abs=0.005)
    assert score.copied.mismatches == 0


def test_half_life_reaches_the_pool(requests) -> None:
    options = PoolOptions("temperature", 250, BLOCK_BYTES, tau_s=2.0)
    (simulated,) = simulate(batches(requests), ["temperature"], [250], tau_s=2.0)
    (follows,) = simulate(batches(requests), ["temperature"], [250])
    assert simulated.hit_blocks != follows.hit_blocks
    assert through_pool.through_pool(requests, options).hit_blocks == simulated.hit_blocks


def test_bytes_are_those_of_the_blocks(requests) -> None:
    score = through_pool.through_pool(requests, PoolOptions("lru", 250, 4096))
    assert score.copied.got_bytes == score.hit_blocks * 4096
    assert score.copied.put_bytes == (score.blocks - score.hit_blocks) * 4096
    assert 0 < score.copied.get_s + score.copied.put_s < score.seconds
    assert score.copied.memcpy_bytes_per_s > 0


def test_tokens_not_recomputed_are_those_of_the_hits() -> None:
    first = Request(0.0, 1000, 1, [1, 2])  # the second block holds 488 tokens of 512
    again = Request(1.0, 1000, 1, [1, 2])
    longer = Request(2.0, 2048, 1, [1, 2, 3, 4])
    score = through_pool.through_pool([first, again, longer], PoolOptions("lru", 10, 4096))
    assert score.hit_blocks == 4
    assert score.hit_tokens == 1000 + 1024


def test_threads_give_right_bytes_and_every_request(requests) -> None:
    options = PoolOptions("temperature", 250, 4096, threads=3)
    score = through_pool.through_pool(requests, options)
    assert score.copied.mismatches == 0
    assert (score.requests, score.blocks) == (
        len(requests),
        sum(len(request.block_ids) for request in requests),
    )
    assert score.hit_blocks > 0


def test_requests_longer_than_the_buffer_are_moved_in_pieces(requests, monkeypatch) -> None:
    whole = through_pool.through_pool(requests, PoolOptions("lru", 250, BLOCK_BYTES))
    monkeypatch.setattr(through_pool, "BUFFER_BYTES_MAX", 3 * BLOCK_BYTES)
    pieces = through_pool.through_pool(requests, PoolOptions("lru", 250, BLOCK_BYTES))
    assert pieces.hit_blocks == whole.hit_blocks
    assert pieces.copied.mismatches == 0


def test_requests_longer_than_the_pool_and_without_blocks() -> None:
    requests = [Request(0.0, 10, 1, list(range(50))), Request(1.0, 0, 1, [])] * 2
    score = through_pool.through_pool(requests, PoolOptions("temperature", 8, 4096))
    assert (score.requests, score.blocks, score.hit_blocks) == (4, 100, 8)
    assert score.copied.mismatches == 0


class Liar:
    """A namespace that delivers wrong bytes once, or counts blocks that it did not deliver."""

    def __init__(self, space: kvpool.Namespace, lie: str) -> None:
        self.space, self.lie, self.told = space, lie, False
        self.lookup, self.put = space.lookup, space.put

    def get_into(self, keys, out) -> int:
        if self.lie == "nothing":
            return len(keys)
        count = self.space.get_into(keys, out)
        if not self.told and count > 1:
            self.told = True
            if self.lie == "swap":
                out[[0, 1]] = out[[1, 0]]
            else:
                out[1, 7] ^= np.uint64(1)
        return count


@pytest.mark.parametrize(("lie", "wrong"), [("flip", 1), ("swap", 2), ("nothing", None)])
def test_wrong_bytes_are_counted_and_named(requests, monkeypatch, lie: str, wrong) -> None:
    honest = kvpool.Pool.namespace
    monkeypatch.setattr(kvpool.Pool, "namespace", lambda pool, m: Liar(honest(pool, m), lie))
    score = through_pool.through_pool(requests, PoolOptions("lru", 250, 4096))
    assert score.copied.mismatches == (score.hit_blocks if wrong is None else wrong)
    assert "block id" in score.copied.first_mismatch


def test_wrong_bytes_fail_the_command(path: Path, monkeypatch) -> None:
    honest = kvpool.Pool.namespace
    monkeypatch.setattr(kvpool.Pool, "namespace", lambda pool, m: Liar(honest(pool, m), "flip"))
    words = ["replay", str(path), "--bytes", "--block-bytes", "4KiB", "--capacity-blocks", "250"]
    done = CliRunner().invoke(cli.app, [*words, "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["mismatches"] == 1
    assert "error: 1 wrong blocks under temperature at 250; the first: block id" in done.stderr


def test_an_error_in_one_thread_ends_the_replay(requests, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(Payload, "write", fail)
    with pytest.raises(RuntimeError, match="made to fail"):
        through_pool.through_pool(requests, PoolOptions("lru", 250, 4096, threads=2))


def test_a_plan_with_bytes_simulates_only_what_no_pool_can(path: Path) -> None:
    plan = Plan(Trace(path), ("temperature", "belady"), (250,), block_bytes=4096)
    scores = list(replay(plan, without_watching, references=("lru",)))
    assert [(s.policy, s.copied is not None) for s in scores] == [
        ("lru", False),
        ("belady", False),
        ("temperature", True),
    ]


def test_more_memory_than_there_is_is_refused_before_the_work(path: Path) -> None:
    plan = Plan(Trace(path), ("lru",), (2**30,), block_bytes=1 << 20)
    with pytest.raises(ReplayError, match=r"1,073,741,824 blocks of 1 MiB need 1 PiB"):
        list(replay(plan, without_watching))


def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text("x\n")
    for block_bytes in (None, 4096):
        plan = Plan(Trace(tmp_path / "odd.jsonl"), ("lru",), (250,), block_bytes=block_bytes)
        with pytest.raises(TraceError, match="1 bad lines"):
            list(replay(plan, without_watching))


def test_demo_shows_every_policy_with_right_bytes(monkeypatch) -> None:
    monkeypatch.setattr(demo, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(demo, "CAPACITY_BLOCKS", 500)
    scores = list(demo.demo(WORKLOAD, without_watching))
    assert [score.policy for score in scores] == ["belady", *ONLINE_POLICIES]
    for score in scores[1:]:
        assert score.copied.mismatches == 0
        assert 0 < score.hit_blocks <= scores[0].hit_blocks
        fields = json.loads(demo.json_line(WORKLOAD, score))
        assert fields["hit_tokens"] == score.hit_blocks * WORKLOAD.block_tokens
        assert fields["evictions"] > 0
        assert fields["GBps"] > 0 < fields["memcpy_GBps"]
    assert len(demo.summary(WORKLOAD, scores)) == 4


def test_a_public_trace_comes_back_byte_for_byte(traces: Path) -> None:
    command = ["replay", str(traces / "conversation_trace.jsonl"), "--bytes", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", *command, "--block-bytes", "4KiB"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=300,
        check=True,
    )
    (row,) = map(json.loads, done.stdout.splitlines())
    assert (row["requests"], row["blocks"], row["mismatches"]) == (12_031, 288_500, 0)
    assert row["bytes_moved"] == 288_500 * 4096
