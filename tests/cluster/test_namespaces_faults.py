"""Any faults at any time: daemons are killed, stopped, restarted and cut off, the network falls
apart, disks fill up, etcd goes, while eight clients put and get.

Promises:  1. no wrong bytes, whatever happens;
           2. no call takes longer than it may;
           3. afterwards all is as before, and nothing is held by anybody.
The schedule follows from the run's seed; KVPOOL_FAULT_SECONDS=600 makes it longer.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np

import kvpool
from kvpool.lab.child import WAIT_S
from kvpool.lab.cluster import Lab
from kvpool.lab.node import Node
from tests.cluster.in_lab import SSD, blocks_at, make_whole, running
from tests.cluster.town import comes
from tests.served import Blocks, Worker, held, working

SECONDS = float(os.environ.get("KVPOOL_FAULT_SECONDS", "20"))
CLIENTS = 8
NODES = 5
NUMBERS = 600  # of blocks that all clients want; twice what one node's DRAM holds
BLOCK_BYTES = 64 << 10
AT_ONCE = 8
CALL_S = 2.0
MARGIN_S = 4.0  # the machine is busy: twice a call's time
LASTS_S = (0.2, 4.0)  # of one fault: up to more than a lease
TOGETHER = 2  # faults at a time


@dataclasses.dataclass
class Seen:
    """What one client has seen."""

    gets: int = 0
    hits: int = 0
    puts: int = 0
    slowest_s: float = 0.0
    wrong: str = ""


def put_and_get(pipe: Connection, address: str, seed: int) -> None:
    """Until it is told to end; says what it has seen."""
    random, seen = np.random.default_rng(seed), Seen()
    with kvpool.connect(address, timeout=CALL_S, connect_timeout=WAIT_S) as pool:
        blocks = Blocks(pool, BLOCK_BYTES)
        pipe.send("ready")
        while not pipe.poll():
            at = int(random.integers(0, NUMBERS - AT_ONCE))
            step(blocks, range(at, at + AT_ONCE), random.random() < 0.3, seen)
            if seen.wrong:
                break
    pipe.send(seen)


def step(blocks: Blocks, numbers: range, puts: bool, seen: Seen) -> None:
    keys = blocks.keys(numbers)
    out = np.full((len(numbers), BLOCK_BYTES // 8), 0xA5A5, np.uint64)
    begin = time.monotonic()
    got = blocks.space.get_into(keys, out)
    seen.slowest_s = max(seen.slowest_s, time.monotonic() - begin)
    seen.gets, seen.hits = seen.gets + 1, seen.hits + got
    wrong = [n for at, n in enumerate(numbers[:got]) if not blocks.is_right(n, out[at])]
    if wrong:
        kinds = [kind_of(blocks, out[n - numbers.start]) for n in wrong]
        seen.wrong = (
            f"{got} blocks from {numbers.start}, wrong: {dict(zip(wrong, kinds, strict=True))}"
        )
    if puts and got < len(numbers):
        payload = blocks.payload(numbers)
        begin = time.monotonic()
        seen.puts += blocks.space.put(keys, payload, timeout=CALL_S).stored
        seen.slowest_s = max(seen.slowest_s, time.monotonic() - begin)


def kind_of(blocks: Blocks, out: np.ndarray) -> str:
    """What a wrong block is."""
    untouched = int((out == 0xA5A5).sum())
    if untouched or not out.any():
        return f"{untouched} of {len(out)} words untouched, {int((out == 0).sum())} are 0"
    for number in range(NUMBERS):
        same = int((out == blocks.payload([number])[0]).sum())
        if same:
            return f"{same} words of {number}"
    return "something else"


class Trouble:
    """Faults, each with what ends it. A node has one of its own at most."""

    def __init__(self, lab: Lab, random: np.random.Generator) -> None:
        self._lab, self._random = lab, random
        self._under_way: list[tuple[float, str, Callable[[], object]]] = []
        self._busy: set[str] = set()
        self.told: list[str] = []

    def go_on(self) -> None:
        """One more, or the end of one."""
        now = time.monotonic()
        for each in [each for each in self._under_way if each[0] <= now]:
            self._end(each)
        if len(self._under_way) < TOGETHER:
            self._begin(now)

    def end(self) -> None:
        for each in list(self._under_way):
            self._end(each)

    def _begin(self, now: float) -> None:
        kinds = (
            self._kill,
            self._pause,
            self._pull,
            self._restart,
            self._fill,
            self._part,
            self._etcd,
        )
        kind = kinds[int(self._random.integers(0, len(kinds)))]
        free = [each for each in self._lab.nodes if each.name not in self._busy]
        node = free[int(self._random.integers(0, len(free)))]
        lasts_s = float(self._random.uniform(*LASTS_S))
        found = kind(node)
        if found is not None:
            what, undo = found
            self.told.append(f"{what} for {lasts_s:.1f} s")
            self._busy.add(what.split()[-1])
            self._under_way.append((now + lasts_s, what, undo))

    def _end(self, fault: tuple[float, str, Callable[[], object]]) -> None:
        _, what, undo = fault
        undo()
        self._busy.discard(what.split()[-1])
        self._under_way.remove(fault)

    def _kill(self, node: Node) -> tuple[str, Callable[[], object]]:
        node.kill()
        return f"kill {node.name}", node.start

    def _pause(self, node: Node) -> tuple[str, Callable[[], object]]:
        node.pause()
        return f"pause {node.name}", node.go_on

    def _pull(self, node: Node) -> tuple[str, Callable[[], object]]:
        self._lab.pull(node)
        return f"pull {node.name}", lambda: self._lab.plug(node)

    def _restart(self, node: Node) -> tuple[str, Callable[[], object]]:
        code = node.end()  # a busy machine may not have the time that a daemon gives itself
        return f"restart ({code}) {node.name}", node.start

    def _fill(self, node: Node) -> tuple[str, Callable[[], object]] | None:
        if node.disk is None:
            return None
        node.disk.fill()
        return f"fill the disk of {node.name}", node.disk.clear

    def _part(self, _: Node) -> tuple[str, Callable[[], object]] | None:
        if "network" in self._busy:
            return None
        nodes = [self._lab.nodes[at] for at in self._random.permutation(NODES)]
        self._lab.part(nodes[:2], [*nodes[2:], self._lab.etcd])
        return "part the network", self._lab.heal

    def _etcd(self, _: Node) -> tuple[str, Callable[[], object]] | None:
        if "etcd" in self._busy:
            return None
        self._lab.etcd.kill()
        return "kill etcd", self._lab.etcd.start


@contextlib.contextmanager
def clients(lab: Lab, seed: int) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(working(put_and_get, lab.nodes[at % NODES].unix_address, seed + at))
            for at in range(CLIENTS)
        ]
        for each in made:
            assert each.hear(WAIT_S) == "ready"
        yield made


def test_any_faults_at_any_time(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 32))
    with running(NODES, dram="16MiB", **SSD) as lab:
        trouble = Trouble(lab, np.random.default_rng(seed))
        with clients(lab, seed) as workers:
            end = time.monotonic() + SECONDS
            try:
                while time.monotonic() < end:
                    trouble.go_on()
                    time.sleep(0.1)
                trouble.end()
            finally:
                print(f"seed {seed}: " + ", ".join(trouble.told))
            for each in workers:
                with contextlib.suppress(BrokenPipeError):  # what it found, it has said
                    each.tell("end")
            seen = [each.hear(WAIT_S) for each in workers]
        print(
            f"{sum(each.gets for each in seen):,} gets of {AT_ONCE} blocks,"
            f" {sum(each.hits for each in seen):,} hits, {sum(each.puts for each in seen):,} puts;"
            f" the slowest call took {max(each.slowest_s for each in seen):.2f} s"
        )
        assert not [each.wrong for each in seen if each.wrong]
        assert max(each.slowest_s for each in seen) < CALL_S + MARGIN_S
        assert all(each.hits for each in seen)
        make_whole(lab)
        check_all_is_well(lab)


def check_all_is_well(lab: Lab) -> None:
    """What one puts all others get, and nobody holds anything."""
    fresh = range(NUMBERS, NUMBERS + 20)
    with blocks_at(lab.nodes[0], BLOCK_BYTES) as ours:
        ours.put_all(fresh)
    for each in lab.nodes:
        with blocks_at(each, BLOCK_BYTES) as theirs:
            comes(lambda at=theirs: at.get(fresh) == len(fresh), "all get it")
            comes(lambda at=theirs: not any(held(at.pool).values()), "all is let go")
