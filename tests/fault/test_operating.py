"""A daemon as its operator has it: two tenants under load, watched apart by every means there is, a
miss that was provoked and is explained, and memory that is changed while it runs.
"""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvpool
from kvpool.keys import prefix_keys
from kvpool.observe import report
from tests.fault.test_tenants import connect, daemon_of
from tests.operated import command, json_of
from tests.served import Served, served, wait_for, working

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
CHAT = kvpool.Manifest(name="chat", model="m", layout="opaque", block_bytes=BLOCK_BYTES)
OTHER_SALT = kvpool.Manifest(
    name="chat-b", model="m", layout="opaque", block_bytes=BLOCK_BYTES, salt="b"
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    """Of the tenants a and b, 16 MiB each to begin with; HTTP has tokens of its own."""
    (tmp_path / "http").write_text("reads all")
    (tmp_path / "http-a").write_text("reads a")
    more = f'[pool]\ndram = "32MiB"\n[http]\ntoken_file = "{tmp_path / "http"}"'
    tenants = {"a": f'http_token_file = "{tmp_path / "http-a"}"', "b": ""}
    with daemon_of(tmp_path, tenants, more, http="127.0.0.1:0") as running:
        yield running


def fetch(daemon: Served, path: str, token: str | None = "reads all") -> bytes:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(daemon.http_address + path, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return bytes(answer.read())


def report_of(daemon: Served, token: str = "reads all") -> report.Report:
    return report.from_json(fetch(daemon, "/v1/stats", token))


def use(space: kvpool.Namespace, tokens: range) -> None:
    """As an engine does: looks up, loads what is there, puts the rest."""
    keys = space.keys(np.array(tokens, dtype=np.int32))
    found = space.lookup(keys).blocks
    out = np.empty((len(keys), BLOCK_BYTES), np.uint8)
    loaded = space.get_into(keys[:found], out) if found else 0
    if loaded < len(keys):
        out[loaded:] = 1
        space.put(keys[loaded:], out[loaded:], parent=keys[loaded - 1] if loaded else None)


def samples(text: bytes, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


def test_tenants_are_watched_apart_by_every_means(daemon: Served, tmp_path: Path) -> None:
    with connect(daemon, "a") as of_a, connect(daemon, "b") as of_b:
        chat, other = of_a.namespace(CHAT), of_b.namespace(OTHER_SALT)
        for _ in range(4):
            use(chat, range(160))
        use(other, range(320))
        told = report_of(daemon)
        hits = {each.name: each.traffic.hit_ratio() for each in told.tenants}
        assert hits == {"a": 0.75, "b": 0.0}
        metrics = fetch(daemon, "/metrics")
        requested = samples(metrics, "kvpool_requested_blocks_total")
        assert requested[("namespace", "chat"), ("tenant", "a")] == 40
        assert requested[("namespace", "chat-b"), ("tenant", "b")] == 20
        # A tenant's reader sees its own part, and is told of no other.
        own = fetch(daemon, "/v1/stats", "reads a") + fetch(daemon, "/metrics", "reads a")
        assert b"chat-b" not in own
        assert b'"b"' not in own
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(daemon, "/v1/stats", None)
        # So do a tenant's commands; root's on the unix socket see all.
        reach = ("--address", daemon.unix_address)
        token = ("--token-file", tmp_path / "b")
        assert [each["name"] for each in json_of("stat", *reach)["tenants"]] == ["a", "b"]
        as_b = json_of("stat", "--address", daemon.tcp_address, *token)
        assert [each["name"] for each in as_b["tenants"]] == ["b"]
        top = command("top", "--once", *reach).stdout
        assert "chat" in top


def test_a_provoked_miss_is_explained(daemon: Served, tmp_path: Path) -> None:
    tokens = list(range(160))
    prompt = tmp_path / "tokens"
    prompt.write_text(" ".join(map(str, tokens)))
    with connect(daemon, "a") as of_a, connect(daemon, "b") as of_b:
        chat, other = of_a.namespace(CHAT), of_b.namespace(OTHER_SALT)
        words = ("--tenant", "a", "--namespace", "chat", "--tokens", prompt)
        reach = ("--address", daemon.unix_address)

        def cause() -> Any:
            return json_of("explain", *words, *reach)["cause"]

        use(other, range(160))
        assert cause() in ("other_tenant", "never_stored")
        use(chat, range(160))
        assert cause() == "present"
        keys = chat.keys(np.array(tokens, dtype=np.int32))
        chat.remove(keys[3:4])
        told = json_of("explain", *words, *reach)
        assert (told["cause"], told["first_missing"]) == ("removed", 3)
        use(chat, range(160))
        for first in range(1000, 41_000, 160):  # 2,500 blocks through room for some hundreds
            use(chat, range(first, first + 160))
        assert cause() == "evicted"
        chat.drop()
        assert cause() in ("dropped", "evicted")
        # Keys are computed where the tokens are.
        assert keys[0].tobytes() == prefix_keys(CHAT.namespace_id, tokens, 16)[0].tobytes()


def test_a_pinned_prefix_outlives_a_flood(daemon: Served, tmp_path: Path) -> None:
    prompt = tmp_path / "tokens"
    prompt.write_text(" ".join(map(str, range(160))))
    reach = ("--address", daemon.unix_address, "--tenant", "a")
    with connect(daemon, "a") as of_a:
        chat = of_a.namespace(CHAT)
        use(chat, range(160))
        told = json_of("pin", "system", "--namespace", "chat", "--tokens", prompt, *reach)
        assert told["blocks"] == 10
        for first in range(1000, 41_000, 160):
            use(chat, range(first, first + 160))
        assert chat.lookup(chat.keys(np.arange(160, dtype=np.int32))).blocks == 10
        (pin,) = json_of("pins", *reach)
        assert (pin["name"], pin["bytes"]) == ("system", 10 * BLOCK_BYTES)
        assert json_of("unpin", "system", *reach)["blocks"] == 10
        for first in range(1000, 41_000, 160):
            use(chat, range(first, first + 160))
        assert chat.lookup(chat.keys(np.arange(160, dtype=np.int32))).blocks == 0


def test_memory_is_doubled_live_and_the_curve_keeps_its_word(tmp_path: Path) -> None:
    """Uniform uses of 400 blocks, of which 256 fit: LRU hits 64 % of them, with twice the memory
    all.

    By TCP, where the node itself sees each use at once. By shared memory it hears of them some
    milliseconds later, which is longer than a block stays in a pool of 16 MiB at this pace.
    """
    more = '[pool]\ndram = "16MiB"\ndram_max = "64MiB"\npolicy = "lru"\nevict_ahead = 0.0'
    config = tmp_path / "kvpool.toml"
    config.write_text(more)
    rng = np.random.default_rng(7)

    def hits(space: kvpool.Namespace, uses: int) -> float:
        out = np.empty(BLOCK_BYTES, np.uint8)
        found = 0
        for number in rng.integers(0, 400, uses):
            key = int(number).to_bytes(16, "little")
            if space.get_into([key], out):
                found += 1
            else:
                space.put([key], out)
        return found / uses

    with (
        daemon_of_one(tmp_path, config) as daemon,
        daemon.connect("tcp") as pool,
    ):
        space = pool.namespace(CHAT)
        hits(space, 1000)
        before = hits(space, 3000)
        (told,) = json_of("size", "--address", daemon.unix_address)
        promised = {row["factor"]: row["hit"] for row in told["rows"]}
        assert promised[1] == pytest.approx(before, abs=0.08)  # less first uses
        command("resize", "--dram", "32MiB", "--address", daemon.unix_address)
        assert pool.stats()["bytes_limit"] == 32 * MIB
        hits(space, 1000)
        after = hits(space, 2000)
        first_uses = 400 / 4000  # are misses at any size, and over by now
        assert after == pytest.approx(promised[2] + first_uses, abs=0.05)
        assert after > before + 0.3


def daemon_of_one(folder: Path, config: Path) -> contextlib.AbstractContextManager[Served]:
    return served(folder, dram=None, config=str(config))


def engine(pipe: Any, address: str, token: str, seed: int) -> None:
    """Uses prefixes until it is told to end, or is killed."""
    rng = np.random.default_rng(seed)
    with kvpool.connect(address, token=token) as pool:
        space = pool.namespace(CHAT)
        pipe.send("ready")
        while not pipe.poll():
            first = int(rng.integers(0, 64)) * 1000
            use(space, range(first, first + 16 * int(rng.integers(1, 12))))
        pipe.send("done")


def test_counters_reconcile_under_load_and_deaths(daemon: Served) -> None:
    """requested = hit + missed, asked = loaded + failed, given = stored + present + refused, of
    every namespace, whoever was killed meanwhile; and what is shown is what was counted."""
    seed = 20261130
    print(f"seed {seed}")
    addresses = [daemon.unix_address, daemon.tcp_address]
    for round_number in range(3):
        with (
            working(engine, addresses[0], "token of a", seed + round_number) as shm,
            working(engine, addresses[1], "token of b", seed + 10 + round_number) as tcp,
            working(engine, addresses[0], "token of b", seed + 20 + round_number) as victim,
        ):
            for each in (shm, tcp, victim):
                assert each.pipe.recv() == "ready"
            wait_for(lambda: all(tenant.traffic.loaded > 0 for tenant in report_of(daemon).tenants))
            victim.kill()
            for each in (shm, tcp):
                each.pipe.send("end")
                assert each.pipe.recv() == "done"
        wait_for(lambda: not any(tenant.clients for tenant in report_of(daemon).tenants))
        check_sums(report_of(daemon))
    told = json.loads(fetch(daemon, "/v1/stats"))
    asked = samples(fetch(daemon, "/metrics"), "kvpool_asked_blocks_total")
    for tenant in told["tenants"]:
        for space in tenant["namespaces"]:
            labels = (("namespace", space["name"]), ("tenant", tenant["name"]))
            assert asked[labels] == space["traffic"]["asked"]


def check_sums(told: report.Report) -> None:
    for tenant in told.tenants:
        for traffic in (tenant.traffic, *(space.traffic for space in tenant.namespaces)):
            assert traffic.requested == traffic.hit + sum(traffic.missed.values())
            assert traffic.asked == traffic.loaded + sum(traffic.failed.values())
            assert traffic.given == traffic.stored + traffic.present + sum(traffic.refused.values())
            assert traffic.loaded > 0
