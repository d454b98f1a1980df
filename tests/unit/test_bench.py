"""Benches run tiny, with the fields that they promise; the harness counts right."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool import cli
from kvpool.bench import keys, local, rows, suite, timing
from kvpool.bench.arguments import Bench
from kvpool.bench.buffers import Buffers, Memory, groups
from kvpool.bench.scale import Scale

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "local": {"work", "block_bytes", "batch", "GBps", "p50_us", "p99_us", "memcpy_GBps", "ratio"},
    "keys": {"work", "hash", "tokens", "block_tokens", "p50_us", "p99_us"},
    "lookup": {"work", "channel", "entries", "keys", "p50_us", "p99_us"},
    "policy": {
        "work", "policy", "capacity_blocks", "requests", "blocks", "seconds", "ns_per_block",
    },
    "memory": {"work", "blocks", "bytes_per_block", "bytes_per_ghost", "rss_bytes_per_block"},
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict]]:
    found = {}
    for name in FIELDS:
        done = CliRunner().invoke(cli.app, ["bench", name, "--json", "--quick"])
        assert done.exit_code == 0, done.output
        found[name] = [json.loads(line) for line in done.stdout.splitlines()]
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_rows_have_exactly_their_fields(measured, name: str) -> None:
    assert measured[name]
    assert all(set(row) == FIELDS[name] for row in measured[name])


def test_every_bench_is_tested_somewhere() -> None:
    # test_ssd_bench.py, test_bench_served.py, test_bench_vllm.py, tests/cluster/test_lab.py
    elsewhere = {"ssd", "shm", "tcp", "observed", "cluster", "vllm"}
    assert set(suite.BENCHES) == {*FIELDS, *elsewhere}


def test_local_measures_every_work_size_and_batch(measured) -> None:
    works = ("memcpy_same_pages", "get_into", "view", "load", "put", "save")
    wanted = set(itertools.product(works, local.QUICK_BLOCK_BYTES, local.BATCHES))
    assert {(r["work"], r["block_bytes"], r["batch"]) for r in measured["local"]} == wanted
    assert all(row["p50_us"] <= row["p99_us"] for row in measured["local"])


def test_lookup_measures_1_256_and_8192_keys_by_every_channel(measured) -> None:
    wanted = list(itertools.product(("local", "shm", "tcp"), (1, 256, 8192)))
    assert [(row["channel"], row["keys"]) for row in measured["lookup"]] == wanted


def test_memory_is_within_reason(measured) -> None:
    (row,) = measured["memory"]
    assert 64 < row["bytes_per_block"] <= 256
    assert 8 < row["bytes_per_ghost"] <= 64


def test_the_command_offers_what_there_is() -> None:
    assert {bench.value for bench in Bench} == {"all", *suite.BENCHES}


def test_table_has_bars_and_names_machine_and_seed_on_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "bench", "policy", "--quick", "--seed", "9"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    assert "seconds <= 1: holds" in done.stdout
    assert "seed 9" in done.stderr
    assert "cores" in done.stderr


def test_a_bench_with_wrong_answers_fails(monkeypatch) -> None:
    def lie(_scale: Scale):
        rows.expect(False, "wrong bytes")
        yield

    monkeypatch.setitem(suite.BENCHES, "keys", lie)
    done = CliRunner().invoke(cli.app, ["bench", "keys", "--quick"])
    assert done.exit_code == 1
    assert "error: wrong bytes" in done.stderr


def test_a_wrong_byte_in_the_pool_is_found(monkeypatch) -> None:
    honest = local.kvpool.Namespace.get_into

    def flipping(space, key_array, out, **kept) -> int:
        count = honest(space, key_array, out, **kept)
        out[-1, -1] ^= out.dtype.type(1)
        return count

    monkeypatch.setattr(local.kvpool.Namespace, "get_into", flipping, raising=False)
    with pytest.raises(rows.BenchError, match="get_into gave wrong bytes"):
        list(local.local(Scale(is_quick=True)))


def test_rows_are_held_to_their_bars() -> None:
    assert rows.at_least("ratio", 0.85, {"ratio": 0.9}).holds
    assert not rows.at_least("ratio", 0.95, {"ratio": 0.9}).holds
    assert rows.at_most("p50_us", 12, {"p50_us": 12.0}).holds
    assert not rows.at_most("p50_us", 12, {"p50_us": 12.1}).holds


def test_json_keeps_four_digits_and_whole_numbers() -> None:
    row = rows.Row({"work": "put", "batch": 131072, "p50_us": 1234.5678, "ratio": 0.123456})
    assert json.loads(rows.json_line(row)) == {
        "work": "put",
        "batch": 131072,
        "p50_us": 1235.0,
        "ratio": 0.1235,
    }


def test_percentiles_are_samples() -> None:
    samples = list(range(100, 0, -1))
    assert timing.percentile(samples, 0.5) == 51
    assert timing.percentile(samples, 0.99) == 100
    assert timing.percentile([7], 0.99) == 7
    with pytest.raises(ValueError, match="no samples"):
        timing.percentile([], 0.5)


def test_works_run_in_turn_and_as_often() -> None:
    calls: list[str] = []
    timings = timing.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4
    )
    assert "".join(calls) == "ab" + "abbaabba"  # one round to warm up
    assert [len(one.steps_us) for one in timings.values()] == [4, 4]


def test_rate_is_that_of_the_median_step() -> None:
    assert timing.Timing([1.0, 2.0, 900.0]).gb_per_s(4000) == pytest.approx(2.0)


def test_groups_visit_every_group_before_any_twice() -> None:
    numbers = list(itertools.islice(groups(37, 4, seed=3), 18))
    assert sorted(numbers[:9]) == list(range(9))
    assert numbers[9:] == numbers[:9] != sorted(numbers[:9])


def test_memcpy_moves_whole_groups() -> None:
    buffers = Buffers(Memory(1 << 20), 65536)
    step = buffers.memcpy(4, seed=1)
    for _ in range(4):
        step()
    assert sorted(map(bytes, buffers.target)) == sorted(map(bytes, buffers.source))


def test_the_check_of_keys_sees_a_key_that_forgets_its_prefix() -> None:
    class Forgetful:
        def keys(self, tokens):
            return tokens.reshape(-1, keys.BLOCK_TOKENS).view("V64").reshape(-1)

    tokens = timing_tokens()
    with pytest.raises(rows.BenchError, match="first token"):
        keys._check(Forgetful(), tokens)


def timing_tokens():
    import numpy as np

    return np.random.default_rng(1).integers(0, 1000, keys.TOKENS, dtype=np.uint32)
