"""What the client processes of the tests do: each function is the work of one process.

They speak first when they are ready, and then do what they do until they are killed, or until the
test says something.
"""

import itertools
from multiprocessing.connection import Connection

import numpy as np

import kvpool
from kvpool.replay.payload import keys_of
from tests.served import Blocks

LARGE_BYTES = 8 << 20


def put_for_ever(pipe: Connection, address: str, first: int, block_bytes: int) -> None:
    """Chains of four new blocks, the same 16 again and again: between two rounds they are removed.

    Says each number before it is put.
    """
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, block_bytes)
        pipe.send("ready")
        for turn in itertools.count():
            numbers = [first + turn % 4 * 4 + i for i in range(4)]
            blocks.space.remove(keys_of(numbers))
            blocks.put(numbers)


def reserve_and_hold(pipe: Connection, address: str, number: int, block_bytes: int) -> None:
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, block_bytes)
        slot = blocks.space.reserve(keys_of([number]))
        assert slot.buffer is not None, slot.reason
        slot.buffer[: block_bytes // 2] = bytes(block_bytes // 2)  # half of it, and wrong
        pipe.send("ready")
        pipe.recv()
        slot.abort()


def get_for_ever(pipe: Connection, address: str, numbers: list[int], block_bytes: int) -> None:
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, block_bytes)
        keys = keys_of(numbers)
        out = np.empty(len(numbers) * block_bytes, np.uint8)
        assert blocks.get(numbers) == len(numbers)
        pipe.send("ready")
        while True:
            blocks.space.get_into(keys, out)


def view_and_hold(pipe: Connection, address: str, numbers: list[int], block_bytes: int) -> None:
    """Says how many it holds; when told to, whether they are still right."""
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, block_bytes)
        with blocks.space.view(keys_of(numbers)) as viewed:
            pipe.send(len(viewed))
            while pipe.recv() == "look":
                pipe.send(
                    all(map(blocks.is_right, numbers, viewed))  # shorter than numbers, perhaps
                )


def wait_for_ever(pipe: Connection, address: str, number: int, block_bytes: int) -> None:
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, block_bytes)
        pipe.send("ready")
        pipe.send(blocks.space.wait(keys_of([number]), 600))
