"""Daemons that are members of one cluster, as processes: they meet, tell, give, and part."""

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import _core
from tests.cluster.etcd import Etcd, free_ports
from tests.operated import command, json_of
from tests.served import Served

# The core's part is not in every build yet.
pytestmark = pytest.mark.skipif(not hasattr(_core, "Cluster"), reason="a core without clusters")

LATE_S = 60.0
BLOCK = 64 << 10
CHAT = kvpool.Manifest(model="m", name="chat", layout="opaque", block_bytes=BLOCK, block_tokens=1)
COUNT = 8


def comes(is_so: Callable[[], Any], what: str) -> Any:
    """What is_so() gives once that is true."""
    deadline = time.monotonic() + LATE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"it never came that {what}"
        time.sleep(0.02)
    return found


def options_of(folder: Path, port: int, **where: str) -> dict[str, Any]:
    token = folder.parent / "token"
    if not token.exists():
        token.write_text(secrets.token_hex(32))
    return {
        "dram": "32MiB",
        "listen": f"127.0.0.1:{port}",
        "cluster_token_file": str(token),
        "cluster_state_dir": str(folder / "state"),
        **where,
    }


@pytest.fixture(params=["static", "etcd"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Served]]:
    """Two daemons of one cluster."""
    with contextlib.ExitStack() as stack:
        ports = free_ports(2)
        if request.param == "static":
            where = {"cluster_static": ",".join(f"127.0.0.1:{port}" for port in ports)}
        else:
            etcd = stack.enter_context(Etcd(tmp_path / "etcd"))
            where = {"cluster_etcd": str(etcd.endpoint), "cluster_ttl": "3"}
        daemons = []
        for at, port in enumerate(ports):
            folder = tmp_path / f"node-{at}"
            folder.mkdir()
            daemon = Served(folder, **options_of(folder, port, **where))
            stack.callback(daemon.close)
            daemons.append(daemon.start())
        yield daemons


def nodes_of(daemon: Served) -> Any:
    return json_of("nodes", "--json", "--address", daemon.unix_address)


def met(daemons: list[Served]) -> bool:
    told = [nodes_of(each) for each in daemons]
    return all(len(each["nodes"]) == len(daemons) and each["is_entered"] for each in told)


def payload(number: int) -> Any:
    return np.full(BLOCK, number, np.uint8)


def test_what_one_has_the_other_finds_and_gets(pair: list[Served]) -> None:
    comes(lambda: met(pair), "both are members")
    keys = [bytes([n]) * 16 for n in range(COUNT)]
    with pair[0].connect() as here, pair[1].connect() as there:
        space = here.namespace(CHAT)
        assert space.put(keys, np.concatenate([payload(n) for n in range(COUNT)])).stored == COUNT
        other = there.namespace(CHAT)
        comes(lambda: other.lookup(keys) == COUNT, "the other finds them")
        out = np.zeros(COUNT * BLOCK, np.uint8)
        assert other.get_into(keys, out) == COUNT
        for n in range(COUNT):
            assert (out[n * BLOCK : (n + 1) * BLOCK] == n).all()
        told = ["--namespace", "chat", "--address", pair[1].unix_address, "--json"]
        told += [word for each in keys for word in ("--key", each.hex())]
        own = nodes_of(pair[0])["own"]
        located = json_of("locate", *told)["blocks"]
        assert all(own in each["nodes"] for each in located)
        (link,) = next(each for each in nodes_of(pair[1])["nodes"] if each["id"] == own)["links"]
        assert link["streams"] > 0
        assert link["fetched_blocks"] >= COUNT
    shown = command("nodes", "--address", pair[1].unix_address).stdout
    assert "closed" in shown
    for each in pair:
        each.stop()


def test_a_member_that_is_killed_costs_misses_and_no_more(pair: list[Served]) -> None:
    comes(lambda: met(pair), "both are members")
    keys = [bytes([n + 100]) * 16 for n in range(COUNT)]
    with pair[0].connect() as here, pair[1].connect() as there:
        data = np.concatenate([payload(n) for n in range(COUNT)])
        assert here.namespace(CHAT).put(keys, data).stored == COUNT
        other = there.namespace(CHAT)
        comes(lambda: other.lookup(keys) == COUNT, "the other finds them")
        pair[0].signal(signal.SIGKILL)
        pair[0].process.wait(LATE_S)
        out = np.zeros(COUNT * BLOCK, np.uint8)
        begin = time.monotonic()
        got = other.get_into(keys, out)
        assert time.monotonic() - begin < 5
        for n in range(got):  # of before, if any
            assert (out[n * BLOCK : (n + 1) * BLOCK] == n).all()
        assert other.put([b"z" * 16], payload(7)).stored == 1
        assert other.lookup([b"z" * 16]) == 1
    pair[1].stop()


def test_a_daemon_alone_with_a_wrong_token_serves_and_says_why(tmp_path: Path) -> None:
    ports = free_ports(2)
    static = ",".join(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        daemons = []
        for at, port in enumerate(ports):
            folder = tmp_path / f"{at}" / "node"
            folder.mkdir(parents=True)
            daemon = Served(folder, **options_of(folder, port, cluster_static=static))
            stack.callback(daemon.close)
            daemons.append(daemon.start())
        with daemons[0].connect() as pool:
            assert pool.namespace(CHAT).put([b"k" * 16], payload(1)).stored == 1
        told = comes(
            lambda: [each["trouble"] for each in nodes_of(daemons[0])["nodes"] if each["trouble"]],
            "the other one is not reached",
        )
        assert "token of the cluster" in told[0]
        for each in daemons:
            each.stop()
