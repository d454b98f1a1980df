"""Threads: a long call lets the others run, and everything may be called from anywhere."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpool
from tests.pools import keys, opaque, opened, payload, wait_until

CHAIN = keys(range(4))


def ticks_in_the_middle(call: Callable[[], Any]) -> int:
    """Turns of another Python thread in the middle eight tenths of the time that the call took.

    A call that kept the GIL would leave it none there, however long it took.
    """
    ticks: list[float] = []
    running, done = threading.Event(), threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            running.set()
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        running.wait()
        start = time.monotonic()
        call()
        end = time.monotonic()
    finally:
        done.set()
        thread.join()
    margin = (end - start) / 10
    return sum(start + margin < tick < end - margin for tick in ticks)


def test_hashing_many_tokens_does_not_hold_the_gil() -> None:
    tokens = np.zeros(4_000_000, np.int64)
    with opened() as pool:
        space = pool.namespace(opaque())
        assert ticks_in_the_middle(lambda: space.keys(tokens)) > 0


def test_the_count_of_ticks_tells_a_call_that_holds_the_gil() -> None:
    # Long enough that a late turn at its beginning does not reach into its middle.
    assert ticks_in_the_middle(lambda: sum(range(20_000_000))) == 0


@pytest.mark.parametrize(
    ("point", "name"),
    [("put.copy", "put"), ("put.copy", "save"), ("get.copy", "get_into"), ("get.copy", "load")],
)
def test_others_run_while_a_call_stands_still(point: str, name: str) -> None:
    """Exactly, at the step itself: this thread runs Python while that one is inside its copy."""
    size = 4096
    chain = keys(range(4))
    with opened() as pool:
        space = pool.namespace(opaque(block_bytes=size))
        layers = space.layers([np.zeros((4, size), np.uint8)])
        if point == "get.copy":
            space.put(chain, bytes(4 * size))
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: space.put(chain, bytes(4 * size)),
            "save": lambda: space.save(layers, range(4), chain),
            "get_into": lambda: space.get_into(chain, bytearray(4 * size)),
            "load": lambda: space.load(layers, range(4), chain),
        }
        pool._node.fault_pause(point, 30)
        thread = threading.Thread(target=calls[name])
        thread.start()
        wait_until(lambda: pool._node.fault_waiting(point) == 1)
        pool._node.fault_clear()
        thread.join()


def test_a_wait_does_not_hold_the_gil() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        slot = space.reserve(CHAIN[0])
        results: list[kvpool.PutResult] = []
        ticks = ticks_in_the_middle(
            lambda: results.append(space.put(CHAIN[:1], payload(CHAIN[0]), timeout=0.2))
        )
        assert results[0].reason is kvpool.Reason.TIMED_OUT
        assert ticks > 0
        slot.abort()


def test_handles_are_shared_freely() -> None:
    """One namespace, one region and one set of layers, used by many threads at once."""
    size = 4096
    chain = keys(range(16))
    with opened("16MiB") as pool:
        space = pool.namespace(opaque(block_bytes=size))
        space.put(chain, b"".join(payload(each, size) for each in chain))
        memory = np.zeros((8, 16, size), np.uint8)
        region = pool.register(memory)
        pages = np.zeros((8 * 16, size), np.uint8)
        layers = space.layers([pages])
        start = threading.Barrier(8)

        def use(number: int) -> None:
            start.wait()
            offsets = np.arange(16) * size + number * 16 * size
            table = np.arange(16) + number * 16
            for _ in range(20):
                assert space.get_into(chain, region, offsets=offsets) == 16
                assert space.load(layers, table, chain) == 16
                assert space.lookup(chain).blocks == 16

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = b"".join(payload(each, size) for each in chain)
        assert all(part.tobytes() == expected for part in memory)
        assert pages.tobytes() == expected * 8
