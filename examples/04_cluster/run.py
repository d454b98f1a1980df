"""One pool on three nodes: put on one, get on another, kill the first, still served.

    sudo .venv/bin/python examples/04_cluster/run.py

etcd and three daemons, each in a network of its own with a cable to one router: a cluster on one
machine (kvpool.lab). An engine on the first node puts a prompt; one on the third finds and gets it;
the first is killed, and the others serve what they have; its cable is pulled, and so on. Every byte
that comes is compared. Needs root, iproute2 and etcd; takes half a minute, and leaves nothing
behind.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

import kvpool
from kvpool.lab.cluster import Lab
from kvpool.lab.linux import LabError
from kvpool.lab.node import Node

MANIFEST = kvpool.Manifest(
    model="toy-1b", dtype="float16", layers=16, kv_heads=4, head_dim=64, block_tokens=16
)
TOKENS = 256 * MANIFEST.block_tokens


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32_000, TOKENS)


def kv_of(tokens: np.ndarray) -> np.ndarray:
    """What a GPU would compute: per block an array that depends on all tokens up to its end."""
    ends = np.cumsum(tokens)[MANIFEST.block_tokens - 1 :: MANIFEST.block_tokens]
    halves = (MANIFEST.block_bytes or 0) // 2
    return (ends[:, None] * 31 + np.arange(halves)).astype(np.uint16).view(np.float16)


SHARED, LONELY = prompt(1), prompt(2)


@dataclass
class Step:
    what: str
    node: str = ""
    blocks: str = ""
    took_ms: float | None = None
    note: str = ""


class Engine:
    """An engine beside a node, which it reaches by shared memory."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._pool = node.connect()
        self._space = self._pool.namespace(MANIFEST)

    def put(self, what: str, tokens: np.ndarray) -> Step:
        keys, kv = self._space.keys(tokens), kv_of(tokens)
        began = time.perf_counter()
        stored = self._space.put(keys, kv).stored
        return self._step(f"put {what}", f"{stored} stored", began)

    def get(self, what: str, tokens: np.ndarray, note: str) -> Step:
        keys, wanted = self._space.keys(tokens), kv_of(tokens)
        kv = np.empty_like(wanted)
        began = time.perf_counter()
        got = self._space.get_into(keys, kv)
        step = self._step(f"get {what}", f"{got} of {len(keys)}", began, note)
        assert np.array_equal(kv[:got].view(np.uint16), wanted[:got].view(np.uint16))
        return step

    def finds(self, tokens: np.ndarray) -> None:
        """Waits until the cluster says that it has all of it; puts are told behind their back."""
        keys = self._space.keys(tokens)
        while self._space.lookup(keys).blocks < len(keys):
            time.sleep(0.001)

    def waits(self, what: str, tokens: np.ndarray, note: str) -> Step:
        began = time.perf_counter()
        self.finds(tokens)
        return self._step(what, f"{len(tokens) // MANIFEST.block_tokens}", began, note)

    def _step(self, what: str, blocks: str, began: float, note: str = "") -> Step:
        return Step(what, self.node.name, blocks, (time.perf_counter() - began) * 1e3, note)


def walk(lab: Lab) -> Iterator[Step]:
    one, two, three = (Engine(node) for node in lab.nodes)
    yield one.put("a prompt", SHARED)
    three.finds(SHARED)
    yield three.get("it", SHARED, "fetched from node-0")
    yield three.get("it again", SHARED, "from its own memory, where a copy was left")
    yield one.put("another prompt", LONELY)
    two.finds(LONELY)
    one.node.kill()
    yield Step("kill -9", one.node.name)
    yield three.get("the prompt", SHARED, "still served: its own copy")
    yield two.get("the prompt", SHARED, "node-0 kept a third of the directory: until it has left")
    yield two.waits("find it again", SHARED, "node-2 has told the two that are left what it has")
    yield two.get("the prompt", SHARED, "still served: fetched from node-2")
    yield two.get("the other prompt", LONELY, "only node-0 had it: a miss, to be computed")
    yield two.get("it again", LONELY, "nobody waits for the dead a second time")
    one.node.start()
    lab.meet()
    yield Step("start again", one.node.name, note="empty; the others know it by its id")
    yield Engine(one.node).get("the prompt", SHARED, "fetched from node-1 and node-2 at a time")
    lab.pull(three.node)
    yield Step("pull the cable", three.node.name)
    yield three.get("the prompt", SHARED, "cut off, it serves what it has")
    lab.plug(three.node)
    lab.meet()
    yield Step("plug it in", three.node.name, note="all are members again")


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with Lab(3, dram="320MiB") as lab:
            with console.status("etcd and three nodes"):
                lab.start()
            shown = Table("step", "node", "blocks", "took", "", box=None, pad_edge=False)
            for column in (2, 3):
                shown.columns[column].justify = "right"
            with console.status("") as status:
                for each in walk(lab):
                    status.update(each.what)
                    took = "" if each.took_ms is None else f"{each.took_ms:,.1f} ms"
                    shown.add_row(each.what, each.node, each.blocks, took, each.note)
            hosts = ", ".join(f"{each.name} {each.host.address}" for each in lab.nodes)
            console.print(f"etcd {lab.etcd.host.address}; {hosts}\n", shown, sep="\n")
            mib = (MANIFEST.block_bytes or 0) * TOKENS // MANIFEST.block_tokens >> 20
            console.print(f"\na prompt is {mib} MiB; every byte that came was what was put")
    except LabError as error:
        sys.exit(f"this machine cannot have a cluster: {error}")


if __name__ == "__main__":
    main()
