"""Daemons that are members of one cluster, as processes: they meet, tell, give, and part."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from tests.cluster.etcd import Etcd, free_ports
from tests.cluster.town import (
    BLOCK,
    LATE_S,
    Town,
    are_known,
    blocks_at,
    comes,
    met,
    nodes_of,
    options_of,
    town,
)
from tests.operated import command, json_of
from tests.served import Served
from tests.tenants import TOKENS, configuration

CHAT = kvpool.Manifest(model="m", name="chat", layout="opaque", block_bytes=BLOCK, block_tokens=1)
COUNT = 8


@pytest.fixture(params=["static", "etcd"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Served]]:
    """Two daemons of one cluster."""
    with contextlib.ExitStack() as stack:
        etcd = None
        if request.param == "etcd":
            etcd = stack.enter_context(Etcd(tmp_path / "etcd"))
        yield stack.enter_context(town(tmp_path, etcd, 2)).daemons


def trouble_of(daemon: Served) -> str:
    """Why another one is not reached."""
    return " ".join(each["trouble"] for each in nodes_of(daemon)["nodes"])


def payload(number: int) -> Any:
    return np.full(BLOCK, number, np.uint8)


def test_what_one_has_the_other_finds_and_gets(pair: list[Served]) -> None:
    keys = [bytes([n]) * 16 for n in range(COUNT)]
    with pair[0].connect() as here, pair[1].connect() as there:
        space = here.namespace(CHAT)
        assert space.put(keys, np.concatenate([payload(n) for n in range(COUNT)])).stored == COUNT
        other = there.namespace(CHAT)
        comes(lambda: other.lookup(keys).blocks == COUNT, "the other finds them")
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


def test_a_member_that_is_killed_costs_misses_and_no_more(pair: list[Served]) -> None:
    keys = [bytes([n + 100]) * 16 for n in range(COUNT)]
    with pair[0].connect() as here, pair[1].connect() as there:
        data = np.concatenate([payload(n) for n in range(COUNT)])
        assert here.namespace(CHAT).put(keys, data).stored == COUNT
        other = there.namespace(CHAT)
        comes(lambda: other.lookup(keys).blocks == COUNT, "the other finds them")
        pair[0].signal(signal.SIGKILL)
        pair[0].process.wait(LATE_S)
        out = np.zeros(COUNT * BLOCK, np.uint8)
        begin = time.monotonic()
        got = other.get_into(keys, out)
        assert time.monotonic() - begin < 5
        for n in range(got):  # of before, if any
            assert (out[n * BLOCK : (n + 1) * BLOCK] == n).all()
        assert other.put([b"z" * 16], payload(7)).stored == 1
        assert other.lookup([b"z" * 16]).blocks == 1


def test_a_member_that_comes_back_gives_and_gets(pair: list[Served]) -> None:
    pair[0].kill()
    pair[0].start()
    comes(lambda: met(pair), "both are members again")
    for giver, taker, first in ((pair[0], pair[1], 0), (pair[1], pair[0], 100)):
        numbers = range(first, first + COUNT)
        with blocks_at(giver) as ours, blocks_at(taker) as theirs:
            ours.put_all(numbers)
            are_known(theirs, numbers)
            assert theirs.get(numbers) == COUNT


def test_who_has_a_wrong_token_serves_alone_and_the_others_say_why(tmp_path: Path) -> None:
    static = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    with contextlib.ExitStack() as stack:
        daemons = []
        for number, address in enumerate(static.split(",")):
            folder = tmp_path / f"node-{number}"
            folder.mkdir()
            told = options_of(folder, folder / "token", int(address[10:]), cluster_static=static)
            daemon = Served(folder, **told)
            stack.callback(daemon.close)
            daemons.append(daemon.start())
        with daemons[0].connect() as pool:
            assert pool.namespace(CHAT).put([b"k" * 16], payload(1)).stored == 1
            assert pool.namespace(CHAT).lookup([b"k" * 16]).blocks == 1
            begin = time.monotonic()
            assert pool.namespace(CHAT).lookup([b"m" * 16]).blocks == 0
            assert time.monotonic() - begin < 1
        comes(lambda: "token of the cluster" in trouble_of(daemons[0]), "the other one is refused")
        for each in daemons:
            each.stop()


def test_two_clusters_of_one_etcd_do_not_meet(tmp_path: Path, etcd: Etcd) -> None:
    with contextlib.ExitStack() as stack:
        towns = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            towns.append(stack.enter_context(town(tmp_path / name, etcd, 2, cluster_name=name)))
        with blocks_at(towns[0].daemons[0]) as here, blocks_at(towns[0].daemons[1]) as there:
            here.put_all(range(COUNT))
            are_known(there, range(COUNT))
        for each in towns[1].daemons:
            with blocks_at(each) as other:
                assert other.get(range(COUNT)) == 0
                assert other.space.lookup(other.keys(range(COUNT))).blocks == 0
            assert {node["address"] for node in nodes_of(each)["nodes"]} == {
                daemon.tcp_address.removeprefix("tcp://") for daemon in towns[1].daemons
            }


def test_members_of_another_cluster_in_the_list_are_told_from_ours(tmp_path: Path) -> None:
    static = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    with contextlib.ExitStack() as stack:
        daemons = []
        for name, address in zip(("one", "two"), static.split(","), strict=True):
            folder = tmp_path / name
            folder.mkdir()
            told = options_of(
                folder,
                tmp_path / "token",
                int(address[10:]),
                cluster_static=static,
                cluster_name=name,
            )
            daemon = Served(folder, **told)
            stack.callback(daemon.close)
            daemons.append(daemon.start())
        comes(lambda: "another cluster" in trouble_of(daemons[0]), "the other one is refused")
        for each in daemons:
            each.stop()


def test_tenants_get_their_own_blocks_from_other_nodes_and_nobody_elses(
    tmp_path: Path, etcd: Etcd
) -> None:
    with contextlib.ExitStack() as stack:
        made = Town(tmp_path, etcd, 2)
        stack.callback(made.close)
        for each in made.daemons:
            path = configuration(each.folder, {"a": 'dram_min = "8MiB"', "b": 'dram_min = "8MiB"'})
            each.options["config"] = str(path)
            each.start()
        here, there = made.daemons
        comes(lambda: met(made.daemons, token=TOKENS["admin"]), "both are members")
        ours, theirs, another = (
            stack.enter_context(blocks_at(daemon, token=TOKENS[name], tenant=name))
            for daemon, name in ((here, "a"), (there, "a"), (there, "b"))
        )
        numbers = range(COUNT)
        ours.put_all(numbers)
        are_known(theirs, numbers)
        assert theirs.get(numbers) == COUNT
        assert another.space.lookup(another.keys(numbers)).blocks == 0
        assert another.get(numbers) == 0
        made.stop()
