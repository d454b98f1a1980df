"""The commands of an operator on a daemon that serves: what they tell is what happened to it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from tests.operated import command, json_of
from tests.pools import wait_until
from tests.served import Blocks, Served, served

CHAT = kvpool.Manifest(
    model="llama-3-8b", name="chat", layers=16, kv_heads=4, head_dim=32, block_tokens=8
)
BLOCK = 64 << 10
# Ten blocks. Ids so long that no log has one by chance, as a process id or a part of a time.
PROMPT = list(range(4_101_203_040, 4_101_203_120))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram="8MiB") as running:
        yield running


@pytest.fixture
def there(daemon: Served) -> tuple[str, str]:
    return ("--address", daemon.unix_address)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(PROMPT))
    return path


def put(space: kvpool.Namespace, tokens: list[int]) -> int:
    """Blocks stored of a prompt, each filled with its place."""
    keys = space.keys(tokens)
    data = np.repeat(np.arange(len(keys), dtype=np.uint8), BLOCK)
    return space.put(keys, data).stored


def push_out(space: kvpool.Namespace) -> None:
    """Puts twice what the pool holds, under other keys."""
    for start in range(0, 256, 16):
        put(space, [10**6 + 8 * start + at for at in range(8 * 16)])


def test_the_size_of_a_block() -> None:
    assert CHAT.block_bytes == BLOCK


def test_stat_counts_what_was_asked(daemon: Served, there: tuple[str, str]) -> None:
    with daemon.connect() as pool:
        space = pool.namespace(CHAT)
        assert put(space, PROMPT) == 10
        keys = space.keys([*PROMPT, *range(16)])  # two blocks more than there are
        assert space.lookup(keys).blocks == 10
        assert space.get_into(keys[:10], np.empty(10 * BLOCK, np.uint8)) == 10

        def tenant() -> Any:
            return json_of("stat", *there)["tenants"][0]

        wait_until(lambda: tenant()["traffic"]["gets"] == 1)
        traffic = tenant()["traffic"]
        (client,) = [each for each in tenant()["clients"] if each["has_shm"]]
        text = command("stat", *there).stdout
    assert (traffic["lookups"], traffic["requested"], traffic["hit_dram"]) == (1, 12, 10)
    assert traffic["missed"] == {"absent": 1, "behind": 1}
    assert (traffic["loaded_dram"], traffic["stored"]) == (10, 10)
    assert traffic["requested_tokens"] == 96
    assert client["loaded"] == 10
    assert "llama-3-8b" in text
    assert "83%" in text


def test_explain_names_an_eviction(daemon: Served, there: tuple[str, str], tokens: Path) -> None:
    words = ("explain", "--namespace", "chat", "--tokens", tokens, *there)
    with daemon.connect() as pool:
        space = pool.namespace(CHAT)
        assert json_of(*words)["cause"] == "never_stored"
        put(space, PROMPT)
        assert json_of(*words)["cause"] == "present"
        push_out(space)
        told = json_of(*words)
    assert told["cause"] == "evicted"
    missing = told["explained"][told["first_missing"]]
    assert missing["gone"]["why"] == "evicted"
    assert missing["gone"]["ago_s"] < 60
    assert told["coldest"] is not None
    assert "was evicted from DRAM" in command(*words).stdout
    log = daemon.log()
    assert "client connected" in log  # it says something of what was done
    assert not any(str(token) in log for token in PROMPT)


def test_explain_names_a_drop(daemon: Served, there: tuple[str, str], tokens: Path) -> None:
    with daemon.connect() as pool:
        put(pool.namespace(CHAT), PROMPT)
        assert json_of("drop", "chat", "--yes", *there)["blocks"] == 10
        told = json_of("explain", "--namespace", "chat", "--tokens", tokens, *there)
    assert told["cause"] == "dropped"


def test_what_is_pinned_stays(daemon: Served, there: tuple[str, str], tokens: Path) -> None:
    with daemon.connect() as pool:
        space = pool.namespace(CHAT)
        put(space, PROMPT)
        words = ("pin", "system", "--namespace", "chat", "--tokens", tokens, *there)
        assert json_of(*words) == {"name": "system", "asked": 10, "blocks": 10}
        push_out(space)
        assert space.lookup(space.keys(PROMPT)).blocks == 10
        (pin,) = json_of("pins", *there)
        assert (pin["tenant"], pin["name"], pin["blocks"]) == ("default", "system", 10)
        assert json_of("stat", *there)["tenants"][0]["pinned_prefixes"] == 1
        assert json_of("unpin", "system", *there)["blocks"] == 10
        push_out(space)
        push_out(space)
        assert space.lookup(space.keys(PROMPT)).blocks < 10


def test_top_shows_who_is_there(daemon: Served, there: tuple[str, str]) -> None:
    with daemon.connect(name="engine of the test") as pool:
        space = pool.namespace(CHAT)
        put(space, PROMPT)
        space.get_into(space.keys(PROMPT), np.empty(10 * BLOCK, np.uint8))
        text = command("top", "--once", *there).stdout
    assert "engine of the test" in text
    assert "hottest prefixes (1 of 1)" in text
    assert space.keys(PROMPT)[-1].tobytes().hex()[:8] in text


def test_size_tells_what_more_would_give(daemon: Served, there: tuple[str, str]) -> None:
    # By TCP: the node hears of every use when it is made. Of uses through shared memory it hears up
    # to 50 ms later, in which these rounds, quicker than any engine's, would look like others.
    with daemon.connect("tcp") as pool:
        space = pool.namespace(CHAT)
        for _ in range(8):
            for start in range(0, 250, 10):
                prompt = [10**6 + 8 * start + at for at in range(80)]
                if not space.get_into(space.keys(prompt), np.empty(10 * BLOCK, np.uint8)):
                    put(space, prompt)
        (told,) = json_of("size", "--namespace", "chat", *there)
        text = command("size", *there).stdout
    hits = {row["factor"]: row["hit"] for row in told["rows"]}
    assert told["dram_bytes"] == 8 << 20
    assert hits[1] < 0.2  # 250 blocks in turn, where 128 fit: an LRU hits nothing
    assert hits[2] > 0.8
    assert "doubling DRAM (8 MiB -> 16 MiB)" in text


def test_two_tenants_are_apart(tmp_path: Path, tokens: Path) -> None:
    config = tmp_path / "kvpool.toml"
    config.write_text("[tenants.acme]\nuids = [4001]\n[tenants.umbrella]\nuids = [4002]\n")
    with served(tmp_path, config=str(config), tcp=False, dram="32MiB") as daemon:
        there = ("--address", daemon.unix_address)
        with daemon.connect(tenant="acme") as pool:
            put(pool.namespace(CHAT), PROMPT)
        with daemon.connect(tenant="umbrella") as pool:
            pool.namespace(CHAT)
        told = {each["name"]: each for each in json_of("stat", *there)["tenants"]}
        assert (told["acme"]["dram"]["blocks"], told["umbrella"]["dram"]["blocks"]) == (10, 0)
        (only,) = json_of("stat", "--tenant", "acme", *there)["tenants"]
        assert only["name"] == "acme"
        words = ("explain", "--namespace", "chat", "--tokens", tokens, *there)
        assert "name a --tenant" in command(*words, status=2).stderr
        told = json_of(*words, "--tenant", "acme")
        assert told["cause"] == "present"
        assert {each["of"] for each in json_of("size", *there)} == {
            "tenant acme",
            "tenant umbrella",
        }


def test_a_reload_reads_the_file_again(tmp_path: Path) -> None:
    config = tmp_path / "kvpool.toml"
    config.write_text('[log]\nlevel = "info"\n')
    with served(tmp_path, config=str(config), tcp=False) as daemon:
        config.write_text('[pool]\nmax_blocks = 77\npolicy = "lru"\n')
        there = ("--address", daemon.unix_address)
        assert json_of("reload", *there) == {
            "changed": ["[pool] max_blocks"],
            "needs_restart": ["[pool] policy"],
            "refused": [],
        }
        with daemon.connect() as pool:
            assert put(pool.namespace(CHAT), list(range(800))) == 77  # of 100
        config.write_text("[pool]\nmax_blocks = 'many'\n")
        assert "max_blocks" in command("reload", *there, status=2).stderr


def test_trim_says_what_came_back(tmp_path: Path) -> None:
    with served(tmp_path, tcp=False, dram="64MiB") as daemon, daemon.connect() as pool:
        Blocks(pool).put_all(range(400))
        Blocks(pool).space.drop()
        done = command("trim", "--address", daemon.unix_address).stdout
        assert done.startswith("gave back ")
        assert pool.stats()["bytes_committed"] < 26 << 20
