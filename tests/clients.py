"""What the client processes of the tests do: each function is the work of one process.

They speak first when they are ready, and then do what they do until they are killed, or until the
test says something.
"""

import contextlib
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


def put_and_tell(pipe: Connection, address: str, first: int, block_bytes: int) -> None:
    """As put_for_ever(), but says what became of each chain. A put waits two seconds at most."""
    with kvpool.connect(address, timeout=2) as pool:
        blocks = Blocks(pool, block_bytes)
        pipe.send("ready")
        for turn in itertools.count():
            numbers = [first + turn % 4 * 4 + i for i in range(4)]
            blocks.space.remove(keys_of(numbers))
            pipe.send(blocks.put(numbers, timeout=2).stored)


def put_same(pipe: Connection, address: str, turns: int, chain: int) -> None:
    """Each turn, when told to: the chain of that turn. Says the outcomes, as numbers."""
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, 64 << 10)
        for turn in range(turns):
            numbers = range(turn * chain, (turn + 1) * chain)
            keys, payload = keys_of(list(numbers)), blocks.payload(numbers)
            pipe.send("ready")
            pipe.recv()
            result = blocks.space.put(keys, payload)
            pipe.send(([int(each) for each in result], [int(each) for each in result.reasons]))
            assert blocks.get(numbers) == chain


def live(pipe: Connection, addresses: list[str], seed: int, turns: int) -> None:
    """Several clients in one process, each doing anything at all, until it was `turns` times."""
    random = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(kvpool.connect(each)) for each in addresses]
        pipe.send("ready")
        crowd = [Blocks(pool) for pool in pools]
        for _ in range(turns):
            do_anything(crowd[random.integers(len(crowd))], random)
    pipe.send("done")


def do_anything(blocks: Blocks, random: np.random.Generator) -> None:
    """On a chain of up to eight blocks, of a few hundred that all clients share."""
    first = int(random.integers(300))
    numbers = list(range(first, first + int(random.integers(1, 9))))
    keys = keys_of(numbers)
    what = random.integers(10)
    if what < 4:
        blocks.get(numbers)
    elif what < 7:
        blocks.put(numbers)
    elif what == 7:
        with blocks.space.view(keys) as viewed:
            blocks.space.remove(keys[: len(numbers) // 2])
            assert all(map(blocks.is_right, numbers, viewed)), "wrong bytes in a view"
    elif what == 8:
        slot = blocks.space.reserve(keys[:1])
        if slot.buffer is not None:
            slot.buffer[:] = blocks.payload(numbers[:1]).tobytes()
            slot.commit()
    else:
        blocks.space.wait(keys, 0.01)


def put_one(pipe: Connection, address: str, number: int, block_bytes: int) -> None:
    """Says what became of it, if it comes so far."""
    with kvpool.connect(address) as pool:
        blocks = Blocks(pool, block_bytes)
        pipe.send("ready")
        pipe.send([int(each) for each in blocks.put([number], timeout=60)])
