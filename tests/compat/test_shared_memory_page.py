"""The pages on shared memory are enough to write a client: one written from them alone works."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from kvpool import Manifest
from tests.compat.nodes import beside_a_node
from tests.compat.plain_client import Control, Lane, SharedMemory
from tests.pools import wait_until

BLOCK_BYTES = 3000  # no multiple of a cache line
MANIFEST = Manifest(model="m", layout="opaque", block_bytes=BLOCK_BYTES)
DICE = random.Random(8)
KEYS = [DICE.randbytes(16) for _ in range(40)]
BLOCKS = [DICE.randbytes(BLOCK_BYTES) for _ in KEYS]
ABSENT, STORED, PRESENT, IN_DRAM = 1, 0, 1, 1
GETS, HELD = "gets", "slots_held_for_views"


class Plain:
    """A client, with one lane in use and a namespace."""

    def __init__(self, path: str) -> None:
        self.control = Control(path)
        self.memory = SharedMemory(path, self.control)
        self.space = self.control.ask("open_namespace", manifest=MANIFEST.pack())["number"]
        self.lane = Lane(self.memory, 1, 64 << 10, 256 << 10)

    def put_all(self) -> None:
        assert self.lane.put(self.space, KEYS, BLOCKS) == [STORED] * len(KEYS)

    def node(self, counter: str) -> int:
        return int(self.control.ask("stats")["node"][counter])


Work = Callable[[Plain], None]


def puts_and_reads(plain: Plain) -> None:
    plain.put_all()
    for key, block in zip(KEYS, BLOCKS, strict=True):
        record = plain.memory.find(plain.space, key)
        assert record is not None
        assert record.tier == IN_DRAM
        assert record.sum == xxhash.xxh3_128_intdigest(block).to_bytes(16, "little")
        assert plain.memory.payload(record) == block
    assert plain.memory.find(plain.space, bytes(16)) is None
    assert plain.lane.put(plain.space, KEYS[:2], BLOCKS[:2]) == [PRESENT] * 2


def gets_by_a_lane(plain: Plain) -> None:
    plain.put_all()
    assert plain.lane.get(plain.space, KEYS[3:9], BLOCK_BYTES) == (BLOCKS[3:9], 0)
    asked = [KEYS[0], bytes(16), KEYS[1]]
    assert plain.lane.get(plain.space, asked, BLOCK_BYTES) == (BLOCKS[:1], ABSENT)


def keeps_what_it_names(plain: Plain) -> None:
    plain.put_all()
    record = plain.memory.find(plain.space, KEYS[0])
    assert record is not None
    plain.memory.pin(5, record)
    assert plain.control.ask("drop", number=plain.space)["blocks"] == len(KEYS)
    assert plain.memory.find(plain.space, KEYS[0]) is None
    wait_until(lambda: plain.node("blocks_dropped_not_swept") == 0)
    assert plain.node(HELD) == 1
    assert plain.memory.payload(record) == BLOCKS[0]
    plain.memory.unpin(5)
    wait_until(lambda: plain.node(HELD) == 0)


def tells_what_it_used(plain: Plain) -> None:
    plain.put_all()
    record = plain.memory.find(plain.space, KEYS[7])
    assert record is not None
    asked = {"number": plain.space, "key": KEYS[7]}
    before = plain.control.ask("temperature", **asked)["temperature"]
    plain.memory.touch(record)
    assert plain.control.ask("temperature", **asked)["temperature"] > before
    gets = plain.node(GETS)
    plain.memory.count(7, plain.space, 64, 3)
    assert plain.node(GETS) == gets + 3


@pytest.mark.parametrize(
    "work", [puts_and_reads, gets_by_a_lane, keeps_what_it_names, tells_what_it_used]
)
def test_a_client_written_from_the_pages(tmp_path: Path, work: Work) -> None:
    def client(path: str) -> None:
        plain = Plain(path)
        try:
            work(plain)
        finally:
            plain.memory.close()
            plain.control.sock.close()

    beside_a_node(tmp_path, client)
