"""Clients and questions for tests with daemons that each have a network of their own."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvpool.lab.child import WAIT_S
from kvpool.lab.cluster import Lab
from kvpool.lab.node import Node
from kvpool.observe.cluster import Link
from tests.cluster.town import comes
from tests.served import Blocks

BLOCK = 64 << 10
FETCH_S = 1.0  # of a get that names no time of its own
SLACK_S = 3.0  # for a machine that is busy with other things
CHEAP_MS = 5.0  # of a question that nobody answers any more
SSD = {
    "disk_bytes": 48 << 20,
    "ssd": "{disk}/tier",
    "ssd_capacity": "32MiB",
    "ssd_free_floor": "0",
    "durability": "durable",
}
_numbers = iter(range(0, 1 << 40, 1 << 20))


def fresh(count: int) -> range:
    """Numbers of blocks that no other test has used."""
    first = next(_numbers)
    return range(first, first + count)


@contextlib.contextmanager
def running(count: int, **options: Any) -> Iterator[Lab]:
    """A cluster that has met. Whoever is still running at the end must end well. Blocks are where a
    test has put them, unless it asks for copies."""
    if os.geteuid() != 0:
        pytest.skip("only root can make networks")
    with Lab(count, **{"cluster_max_replicas": 1, **options}) as lab:
        lab.start()
        yield lab
        lab.stop()
        for each in lab.nodes:
            assert "Traceback" not in each.log(), each.log()


def make_whole(lab: Lab) -> None:
    """Whatever a test has done to it."""
    lab.heal()
    for each in (lab.etcd, *lab.nodes):
        lab.plug(each)
        if each.is_running:
            each.go_on()
        else:
            each.start()
    lab.meet()


@contextlib.contextmanager
def blocks_at(node: Node, block_bytes: int = BLOCK, **options: Any) -> Iterator[Blocks]:
    """Blocks as a client on that host puts and gets them, every byte looked at."""
    with node.connect(connect_timeout=WAIT_S, **options) as pool:
        yield Blocks(pool, block_bytes)


def known(at: Blocks, numbers: Sequence[int]) -> int:
    """How many of them the cluster says that it has, each asked for by itself."""
    return sum(at.space.lookup(at.keys([number])).blocks for number in numbers)


def are_known(at: Blocks, numbers: Sequence[int]) -> None:
    keys = at.keys(numbers)
    comes(lambda: at.space.lookup(keys).blocks == len(numbers), "all blocks are known")


def cost_ms(at: Blocks, number: int) -> float:
    """Of a get of a block that does not come."""
    keys, out = at.keys([number]), np.zeros(at.block_bytes, np.uint8)
    begin = time.perf_counter()
    assert at.space.get_into(keys, out) == 0
    return (time.perf_counter() - begin) * 1e3


def costs(at: Blocks, numbers: Sequence[int], what: str) -> None:
    """The first of these gets may take its time, the others must be cheap."""
    first, *others = [cost_ms(at, number) for number in numbers]
    others.sort()
    median = others[len(others) // 2]
    print(f"{what}: the first get {first:.0f} ms, the next ones {median:.2f} (median)", end="")
    print(f", {others[-1]:.1f} at most")
    assert first < (FETCH_S + SLACK_S) * 1e3
    assert median < CHEAP_MS


def link(node: Node, other: str) -> Link:
    """How it sees the member of that id."""
    (found,) = [each for each in node.told().nodes if each.id == other]
    return found.links[0]


def holders(node: Node, at: Blocks, numbers: Sequence[int]) -> list[set[str]]:
    """Which members have each block, as this node finds out."""
    return node.locate(at.space.manifest, at.keys(numbers).tobytes())
