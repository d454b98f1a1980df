"""Flags with several values, and values that are checked before any work begins."""

from pathlib import Path

import pytest
import typer

from kvpool.replay import arguments
from kvpool.replay.arguments import ReplayArguments, spread_values
from kvpool.replay.score import POLICIES

TAKES = {"--n": str.isdigit, "--policy": str.isalpha}


@pytest.mark.parametrize(
    ("args", "spread"),
    [
        ("f --n 1 2 3", "f --n 1 --n 2 --n 3"),
        ("--n 1 2 f", "--n 1 --n 2 f"),
        ("--n=1 2 f", "--n=1 --n 2 f"),
        ("--n 1 --n 2 3", "--n 1 --n 2 --n 3"),
        ("--policy a b --n 1 2 --other 3 4", "--policy a --policy b --n 1 --n 2 --other 3 4"),
        ("--n", "--n"),
        ("--n --policy a", "--n --policy a"),
        ("--n 1 -- 2 3", "--n 1 -- 2 3"),
        ("--n -- 2", "--n -- --n 2"),
        ("--number 1 2", "--number 1 2"),
        ("", ""),
    ],
)
def test_values_after_one_flag_are_spread(args: str, spread: str) -> None:
    assert spread_values(args.split(), TAKES) == spread.split()


def asked(**changed: object) -> ReplayArguments:
    return ReplayArguments(path=Path("trace.jsonl"), **{"block_bytes": 65536, **changed})


def test_what_is_not_said_has_a_use() -> None:
    plan = asked().plan()
    assert plan.policies == ("temperature",)
    assert plan.capacities_blocks == (1000, 10_000, 50_000)
    assert plan.block_bytes is None
    with_bytes = asked(with_bytes=True).plan()
    assert with_bytes.capacities_blocks == (5000,)
    assert with_bytes.block_bytes == 65536


def test_all_is_every_policy_and_none_counts_twice() -> None:
    assert asked(policy=["lru", "all"]).plan().policies == POLICIES
    plan = asked(policy=["lru", "fifo", "lru"], capacity_blocks=[7, 5, 7]).plan()
    assert plan.policies == ("lru", "fifo")
    assert plan.capacities_blocks == (7, 5)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"policy": ["temprature"]}, "did you mean 'temperature'"),
        ({"policy": ["clock"]}, "choose from temperature"),
        ({"threads": 2}, "needs --bytes"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(changed: dict, complaint: str) -> None:
    with pytest.raises(typer.BadParameter, match=complaint):
        asked(**changed).plan()


@pytest.mark.parametrize(("text", "size"), [("64KiB", 65536), ("8", 8), ("1MB", 1_000_000)])
def test_block_size_is_read(text: str, size: int) -> None:
    assert arguments.block_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "12", "64K", "-8", "x"])
def test_block_size_that_payload_cannot_fill_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        arguments.block_bytes(text)


def test_a_word_that_names_a_file_is_the_trace_not_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests").touch()
    takes = arguments._is_policy_like
    assert not takes("requests")
    assert not takes("trace.jsonl")
    assert not takes("../trace")
    assert takes("lru")
    assert takes("temprature")
