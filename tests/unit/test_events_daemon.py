"""A daemon, its clients and its subscribers: three processes at least, and what they agree on."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.events.embedded import publishing
from kvpool.events.follower import Follower, Residents
from kvpool.keys import prefix_keys
from kvpool.manifest import Manifest
from kvpool.operate.client import Operator, Reach
from tests.eventful import WAIT_S, PlainReader, follow_until, wait_for
from tests.operated import command
from tests.pools import ROOT
from tests.serve_process import Served, served

CHAT = Manifest(model="m", name="chat", layers=2, kv_heads=1, head_dim=8, block_tokens=4)
DOCS = Manifest(model="m", name="docs", layers=2, kv_heads=1, head_dim=16, block_tokens=8)


def flags(folder: Path) -> tuple[str, ...]:
    return (
        *("--events", f"ipc://{folder}/events"),
        *("--events-replay-endpoint", f"ipc://{folder}/replay"),
        *("--events-window", "0.005"),
    )


def follower_of(folder: Path) -> Follower:
    return Follower(f"ipc://{folder}/events", f"ipc://{folder}/replay")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, *flags(tmp_path)) as running:
        yield running


def put(space: Any, keys: Any) -> None:
    payload = bytes(space.manifest.block_bytes * len(keys))
    result = space.put(keys, payload)
    assert result.stored + result.present == len(keys)


def names(keys: Any) -> list[bytes]:
    return [bytes(each) for each in keys]


def test_a_subscriber_knows_what_clients_put_and_drop(daemon: Served, tmp_path: Path) -> None:
    known = Residents()
    with kvpool.connect(daemon.address) as pool, follower_of(tmp_path) as follower:
        chat, docs = pool.namespace(CHAT), pool.namespace(DOCS)
        keys, others = chat.keys(range(40)), docs.keys(range(80))
        put(chat, keys[:4])
        follow_until(follower, known, lambda: known.of("CPU") == {*names(keys[:4])})
        put(chat, keys)
        put(docs, others)
        wanted = {*names(keys), *names(others)}
        follow_until(follower, known, lambda: known.of("CPU") == wanted)
        assert {space for _, space, _ in known.keys} == {chat.id, docs.id}
        chat.remove(keys[5:])
        follow_until(follower, known, lambda: known.of("CPU") == {*names(keys[:5]), *names(others)})
        docs.drop()
        follow_until(follower, known, lambda: known.of("CPU") == {*names(keys[:5])})
        assert follower.counts["gaps"] == 0


def test_events_say_where_a_chain_goes_on(daemon: Served, tmp_path: Path) -> None:
    with (
        kvpool.connect(daemon.address) as pool,
        PlainReader(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as reader,
    ):
        chat = pool.namespace(CHAT)
        keys = chat.keys(range(40))
        put(chat, keys[:3])
        put_next = chat.put(keys[3:], bytes(CHAT.block_bytes or 0) * len(keys[3:]), parent=keys[2])
        assert put_next.stored == len(keys) - 3
        told: dict[bytes, bytes | None] = {}
        deadline = time.monotonic() + WAIT_S
        while len(told) < len(keys):
            assert time.monotonic() < deadline
            for _, _, batch in reader.asked(0):
                for event in batch[1]:
                    if event["type"] != "BlockStored":
                        continue
                    assert (event["block_size"], event["medium"]) == (4, "CPU")
                    assert batch[3]["name"] == "chat"
                    assert batch[3]["namespace"] == chat.id
                    before = event["parent_block_hash"]
                    for key in event["block_hashes"]:
                        told[key], before = before, key
        chain = names(keys)
        assert told == dict(zip(chain, [None, *chain[:-1]], strict=True))


def test_all_is_right_after_puts_and_evictions_during_snapshots(tmp_path: Path) -> None:
    """The pool is too small for what is put; late joiners come all the time."""
    with (
        served(tmp_path, *flags(tmp_path), "--max-blocks", "700") as daemon,
        kvpool.connect(daemon.address) as pool,
    ):
        chat = pool.namespace(CHAT)
        is_over = threading.Event()

        def churn() -> None:
            for seed in range(150):
                keys = prefix_keys(chat.id, [seed, *range(1, 40)], 4)
                chat.put(keys, bytes((CHAT.block_bytes or 0) * len(keys)))
                if seed % 3 == 0:
                    chat.remove(keys[4:])
            is_over.set()

        putting = threading.Thread(target=churn)
        putting.start()
        followers = []
        while len(followers) < 2 or (not is_over.is_set() and len(followers) < 12):
            follower, known = follower_of(tmp_path), Residents()
            followers.append((follower, known))
            follow_until(follower, known, lambda: True)
        putting.join()
        with PlainReader(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as reader:
            wait_for(lambda: not _grew(reader))
            wanted = {
                key
                for _, _, batch in reader.asked(-1)
                for event in batch[1]
                for key in event.get("block_hashes", [])
            }
        assert 0 < len(wanted) <= 700
        for follower, known in followers:
            follow_until(follower, known, lambda known=known: known.of("CPU") == wanted)
            follower.close()
        with Operator.connect(Reach(daemon.address, None, None)) as operator:
            told = operator.report().events
        assert told is not None
        assert told.snapshots >= len(followers)
        assert told.failures == 0


def _grew(reader: PlainReader) -> bool:
    """Whether something happens still."""
    before = reader.event()[1]
    return any(batch[1] for _, _, batch in [reader.event()] if before)


def test_blocks_are_told_of_in_each_tier(tmp_path: Path) -> None:
    words = (*flags(tmp_path), "--ssd", str(tmp_path / "ssd"), "--ssd-capacity", "64MiB")
    known = Residents()
    with served(tmp_path, *words, "--ssd-admit", "all", "--max-blocks", "20") as daemon:
        with kvpool.connect(daemon.address) as pool, follower_of(tmp_path) as follower:
            chat = pool.namespace(CHAT)
            keys = chat.keys(range(40))
            put(chat, keys)
            follow_until(
                follower,
                known,
                lambda: known.of("CPU") == known.of("STORAGE") == {*names(keys)},
            )
            wanted = {*names(keys)}
            for seed in range(100, 108):  # into their place in DRAM
                more = prefix_keys(chat.id, [seed, *range(39)], 4)
                put(chat, more)
                assert pool.flush(WAIT_S)
                wanted |= {*names(more)}
            follow_until(
                follower,
                known,
                lambda: len(known.of("CPU")) <= 20 and known.of("STORAGE") == wanted,
            )
        assert daemon.end()[0] == 0
    with served(tmp_path, *words, "--ssd-admit", "all"), follower_of(tmp_path) as follower:
        known = Residents()
        follow_until(follower, known, lambda: known.of("STORAGE") == wanted)
        assert not known.of("CPU")


def test_another_life_has_the_same_node_and_a_larger_incarnation(tmp_path: Path) -> None:
    lives = []
    known = Residents()
    with follower_of(tmp_path) as follower:
        for _ in range(2):
            with served(tmp_path, *flags(tmp_path)) as daemon:
                with kvpool.connect(daemon.address) as pool:
                    chat = pool.namespace(CHAT)
                    put(chat, chat.keys(range(8)))
                    follow_until(follower, known, lambda: len(known) == 2)
                lives.append(follower._life)
                assert daemon.is_logged("publishing events")
                if len(lives) == 2:
                    daemon.kill()  # no goodbye
                else:
                    assert daemon.end()[0] == 0
                    follow_until(follower, known, lambda: len(known) == 0)
    assert lives[0][0] == lives[1][0]
    assert lives[0][1] < lives[1][1]


def test_tenants_are_told_apart(tmp_path: Path) -> None:
    import os

    (tmp_path / "token").write_text("a" * 32)
    (tmp_path / "kvpool.toml").write_text(
        f'[tenants.one]\nuids = [{os.getuid()}]\n[tenants.two]\ntoken_file = "{tmp_path}/token"\n'
    )
    known = Residents()
    with (
        served(tmp_path, *flags(tmp_path), "--config", f"{tmp_path}/kvpool.toml") as daemon,
        kvpool.connect(daemon.address, tenant="one") as one,
        kvpool.connect(daemon.address, tenant="two", token="a" * 32) as two,
        follower_of(tmp_path) as follower,
    ):
        for pool in (one, two):
            space = pool.namespace(CHAT)
            put(space, space.keys(range(8)))
        follow_until(follower, known, lambda: len(known) == 4)
        assert {tenant: len(keys) for (tenant, _, _), keys in known.keys.items()} == {
            "one": 2,
            "two": 2,
        }
        assert len({space for _, space, _ in known.keys}) == 2


def test_the_example_of_the_page_follows(daemon: Served, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    reader = subprocess.Popen(
        [sys.executable, "-c", example, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        with kvpool.connect(daemon.address) as pool:
            chat = pool.namespace(CHAT)
            put(chat, chat.keys(range(40)))
            deadline = time.monotonic() + WAIT_S
            while not reader.stdout.readline().endswith(" 10\n"):
                assert time.monotonic() < deadline
            chat.remove(chat.keys(range(40))[3:])
            while not reader.stdout.readline().endswith(" 3\n"):
                assert time.monotonic() < deadline
    finally:
        reader.kill()
        reader.wait()
        assert reader.stdout is not None
        reader.stdout.close()


def test_the_command_prints_what_comes(daemon: Served, tmp_path: Path) -> None:
    words = (f"ipc://{tmp_path}/events", "--replay", f"ipc://{tmp_path}/replay")
    with kvpool.connect(daemon.address) as pool:
        chat = pool.namespace(CHAT)
        keys = chat.keys(range(12))
        put(chat, keys)
        wait_for(lambda: _stored(daemon) == 3)
        text = command("events", *words, "--count", "3").stdout
        assert re.search(r" \d+ snapshot begin\n.* AllBlocksCleared\n", text)
        first, last = (names(keys)[at].hex()[:8] for at in (0, -1))
        assert f" BlockStored CPU chat 3 {first}..{last}\n" in text
        assert text.endswith(" snapshot whole, 3 blocks\n")
        lines = command("events", *words, "--count", "3", "--json").stdout.splitlines()
        stored = json.loads(lines[1])
        assert stored["events"][0]["block_hashes"] == [each.hex() for each in names(keys)]
        assert stored["events"][0]["type"] == "BlockStored"
        assert stored["source"]["namespace"] == chat.id.hex()
        assert command("events", *words, "--seconds", "0").stdout == ""


def _stored(daemon: Served) -> int:
    with Operator.connect(Reach(daemon.address, None, None)) as operator:
        told = operator.report().events
    assert told is not None
    return told.stored


def test_an_endpoint_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    daemon = Served(tmp_path, "--events", f"ipc://{tmp_path}/nowhere/events")
    try:
        assert daemon.wait() == 1
        assert daemon.is_logged(f"error: events cannot bind ipc://{tmp_path}/nowhere/events: ")
    finally:
        assert daemon.process.stdout is not None
        daemon.process.stdout.close()


def test_a_pool_in_this_process_publishes_too(tmp_path: Path) -> None:
    known = Residents()
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    with kvpool.open(dram="16MiB") as pool, Follower(*endpoints) as follower:
        chat = pool.namespace(CHAT)
        put(chat, chat.keys(range(8)))
        with publishing(pool, *endpoints):
            put(chat, chat.keys(range(40)))
            follow_until(follower, known, lambda: known.of("CPU") == {*names(chat.keys(range(40)))})
        follow_until(follower, known, lambda: len(known) == 0)


def test_at_most_so_many_listen(tmp_path: Path) -> None:
    from kvpool import _core

    with kvpool.open(dram="16MiB") as pool:
        feeds = [_core.ChangeFeed.open(pool._node, 64) for _ in range(4)]
        with pytest.raises(kvpool.NoResource, match="at most 4"):
            _core.ChangeFeed.open(pool._node, 64)
        with pytest.raises(kvpool.BadArgument, match="changes_max"):
            _core.ChangeFeed.open(pool._node, 63)
        del feeds[0]
        chat = pool.namespace(CHAT)
        feed = _core.ChangeFeed.open(pool._node, 64)
        assert feed.take() == (False, b"")
        put(chat, chat.keys(range(8)))
        is_whole, rows = feed.take()
        assert (is_whole, len(rows)) == (True, 2 * 56)
        is_more, walked = feed.walk().step()
        assert (is_more, sorted(_keys(walked))) == (False, sorted(_keys(rows)))
    with pytest.raises(kvpool.PoolClosed):
        feed.take()


def _keys(rows: bytes) -> list[bytes]:
    return [rows[at + 16 : at + 32] for at in range(0, len(rows), 56)]
