"""The demo with a daemon runs small, tells wrong bytes from right ones, and fails plainly."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvpool
from kvpool import cli
from kvpool.bench.served import served
from kvpool.replay import demo_client, demo_served
from kvpool.replay.demo_client import Done, Engine, Setup
from kvpool.replay.demo_served import Handover, Step

PROMPTS, PROMPT_BLOCKS, SHARED_BLOCKS = 4, 32, 8
OWN_BLOCKS = PROMPT_BLOCKS - SHARED_BLOCKS


@pytest.fixture(scope="module")
def done() -> list[Step | Handover]:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(demo_served, "PROMPTS", PROMPTS)
        small.setattr(demo_served, "PROMPT_BLOCKS", PROMPT_BLOCKS)
        small.setattr(demo_served, "SHARED_BLOCKS", SHARED_BLOCKS)
        small.setattr(demo_served, "DRAM_BYTES", 64 << 20)
        told: list[str] = []
        found = list(demo_served.steps(7, told.append))
    assert told[0] == "a daemon and two clients"
    return found


def test_every_step_of_both_channels_is_shown(done) -> None:
    steps = [(each.channel, each.work) for each in done if isinstance(each, Step)]
    assert steps == [
        ("shm", "put"), ("shm", "get"), ("shm", "view"), ("tcp", "put"), ("tcp", "get"),
    ]  # fmt: skip
    handed = [each for each in done if isinstance(each, Handover)]
    assert [(each.channel, each.prompts) for each in handed] == [("shm", 2), ("tcp", 2)]
    assert all(each.awake_us >= 0 for each in handed)


def test_a_shared_prompt_is_put_once_and_read_with_each(done) -> None:
    blocks = {(e.channel, e.work): e.done.blocks for e in done if isinstance(e, Step)}
    for channel in ("shm", "tcp"):
        assert blocks[channel, "put"] == 2 * OWN_BLOCKS  # the shared part came by the handover
        assert blocks[channel, "get"] == 2 * PROMPTS * PROMPT_BLOCKS
    assert blocks["shm", "view"] == PROMPTS * PROMPT_BLOCKS


def test_no_byte_was_wrong(done) -> None:
    assert demo_served.mismatches(done) == 0


def test_lines_of_json_say_what_the_table_does(done) -> None:
    lines = [json.loads(demo_served.json_line(each)) for each in done]
    assert [line["part"] for line in lines if line["channel"] == "tcp"] == [
        "handover", "daemon", "daemon",
    ]  # fmt: skip
    for line in lines:
        if line["part"] == "daemon":
            rate = {"p50_us"} if line["work"] == "view" else {"GBps", "memcpy_GBps"}
            assert rate < set(line)
            assert all(line[name] > 0 for name in rate)
    console = Console(width=200, record=True)
    for part in demo_served.summary(done):
        console.print(part)
    shown = console.export_text()
    for word in ("shm", "tcp", "view in place", "memcpy", "by prefix hash"):
        assert word in shown


def test_wrong_bytes_and_missing_blocks_are_counted(monkeypatch) -> None:
    setup = Setup("", "shm", PROMPTS, PROMPT_BLOCKS, SHARED_BLOCKS, seed=7)
    with served(64 << 20) as daemon, kvpool.connect(daemon.unix) as pool:
        engine = Engine(setup, pool)
        engine.hand()
        engine.put()
        assert engine.get().mismatches == engine.view().mismatches == 0
        keys = engine._prompts[-1]
        engine._space.remove(keys[-3:])
        assert engine.get().mismatches == 2 * 3  # each prompt is read twice
        honest = kvpool._core.Space.get_into

        def flipping(space, keys, out, **kept) -> int:
            count = honest(space, keys, out, **kept)
            out[0, 0] ^= np.uint64(1)
            return count

        monkeypatch.setattr(kvpool.Namespace, "get_into", flipping, raising=False)
        assert engine.get().mismatches == 2 * (3 + PROMPTS)


def test_prompts_are_the_same_in_both_processes_and_begin_alike() -> None:
    setup = Setup("", "shm", PROMPTS, PROMPT_BLOCKS, SHARED_BLOCKS, seed=7)
    first, again = demo_client.prompts(setup), demo_client.prompts(setup)
    shared = SHARED_BLOCKS * demo_client.BLOCK_TOKENS
    for tokens, same in zip(first, again, strict=True):
        assert np.array_equal(tokens, same)
        assert np.array_equal(tokens[:shared], first[0][:shared])
    assert len({tokens[shared:].tobytes() for tokens in first}) == PROMPTS


def test_a_daemon_that_does_not_come_up_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(demo_served, "DRAM_BYTES", 1 << 60)
    done = CliRunner().invoke(cli.app, ["demo"])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "more memory than there is" in done.stderr


def test_a_client_that_fails_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(demo_served, "DRAM_BYTES", 64 << 20)
    monkeypatch.setattr(demo_served, "SHARED_BLOCKS", demo_served.PROMPT_BLOCKS + 1)
    with pytest.raises(demo_served.ServedError, match="client of the daemon failed: ValueError"):
        list(demo_served.steps(7, lambda _: None))


def test_wrong_bytes_of_either_kind_count() -> None:
    step = Step("shm", "get", Done(mismatches=2), 0.0)
    assert demo_served.mismatches([step, Handover("shm", 1, 1.0, mismatches=3)]) == 5
    assert demo_served.mismatches([dataclasses.replace(step, done=Done())]) == 0
