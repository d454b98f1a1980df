"""Nodes that a test makes up, sockets of ZMQ in a test's folder, and a reader of vLLM's wire that
shares no code with ours."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvpool.events.follower import Follower, Residents
from kvpool.events.plans import EventsPlan
from kvpool.events.publisher import Life, Place, Publisher
from kvpool.serve_log import open_log

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'kvpool[events]'")

WAIT_S = 60.0
DRAM, SSD = 1, 2
NONE = bytes(16)
SPACE = b"space".ljust(16, b"\0")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def row(
    at: int | bytes, before: int, after: int, parent: bytes = NONE, space: bytes = SPACE, number=0
) -> bytes:
    """As the core makes it."""
    name = key(at) if isinstance(at, int) else at
    packed = space + name + parent + number.to_bytes(4, "little")
    return packed + bytes([before, after, 0, 0])


class MadeUpNode:
    """What a core's feed is to a publisher. Rows are noted by a test, from its own thread."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.is_lost = True
        self.here: dict[bytes, int] = {}  # what a walk finds: key -> tiers
        self.piece = 3
        self.between: Callable[[], None] = lambda: None  # called before each piece of a walk

    def note(self, at: int, after: int) -> None:
        name = key(at)
        before = self.here.get(name, 0)
        self.rows.append(row(at, before, after))
        self.here[name] = after
        if not after:
            del self.here[name]

    def take(self) -> tuple[bool, bytes]:
        rows, self.rows = self.rows, []
        is_lost, self.is_lost = self.is_lost, False
        return not is_lost, b"".join(rows)

    def walk(self) -> Any:
        return _MadeUpWalk(self)


class _MadeUpWalk:
    """Key by key in their order, as they are when it comes to them."""

    def __init__(self, node: MadeUpNode) -> None:
        self._node = node
        self._left = sorted(node.here, reverse=True)

    def step(self) -> tuple[bool, bytes]:
        self._node.between()
        names = [self._left.pop() for _ in range(min(self._node.piece, len(self._left)))]
        here = self._node.here
        return bool(self._left), b"".join(
            row(each, 0, here[each]) for each in names if each in here
        )


@contextlib.contextmanager
def publishing(
    folder: Path, node: Any, *, incarnation: int = 7, begins: bool = True, **options: Any
) -> Iterator[Publisher]:
    usual = {
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "window_s": 0.002,
    }
    plan = EventsPlan(**{**usual, **options})
    places = [Place("", node, lambda: {0: ("made-up", 16)})]
    publisher = Publisher(plan, Life(b"n" * 16, incarnation), places, open_log("text", "error"))
    try:
        if begins:
            publisher.start()
        yield publisher
    finally:
        publisher.close()


@contextlib.contextmanager
def following(folder: Path, **options: Any) -> Iterator[Follower]:
    with Follower(f"ipc://{folder}/events", f"ipc://{folder}/replay", **options) as follower:
        yield follower


def follow_until(follower: Follower, known: Residents, is_there: Callable[[], bool]) -> None:
    """Applies what comes until it is so, and the follower knows all up to then."""
    deadline = time.monotonic() + WAIT_S
    while not (follower.is_whole and is_there()):
        assert time.monotonic() < deadline, (follower.counts, len(known))
        batch = follower.next(0.1)
        if batch is not None:
            known.apply(batch)


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class PlainReader:
    """Reads the wire as its page describes it: with pyzmq and msgpack, and nothing of kvpool."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.subscribe(b"")
        self.sub.connect(endpoint)
        self._replay = replay

    def __enter__(self) -> "PlainReader":
        return self

    def __exit__(self, *args: object) -> None:
        self._context.destroy(linger=0)

    def asker(self, kind: int = zmq.DEALER) -> Any:
        sock = self._context.socket(kind)
        sock.connect(self._replay)
        return sock

    def asked(self, sequence: int) -> list[tuple[bytes, int, Any]]:
        """The whole answer: topic, sequence and batch of each message before its end."""
        sock = self.asker()
        sock.send_multipart([b"", sequence.to_bytes(8, "big", signed=True)])
        found = []
        while True:
            assert sock.poll(WAIT_S * 1000)
            empty, topic, at, payload = sock.recv_multipart()
            assert empty == b""
            number = int.from_bytes(at, "big", signed=True)
            if number == -1:
                assert (topic, payload) == (b"", b"")
                assert not sock.poll(20)
                sock.close(0)
                return found
            found.append((topic, number, msgpack.unpackb(payload)))

    def event(self) -> tuple[bytes, int, Any]:
        assert self.sub.poll(WAIT_S * 1000)
        topic, at, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(at, "big"), msgpack.unpackb(payload)
