"""fork: the child is told, the parent goes on, and neither hangs or falls over."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import ForkedProcess, PoolClosed
from tests.pools import BLOCK_BYTES, got, keys, opaque, opened, payload, payloads, run_python

SOME = keys(range(4))
CHILD_TIMEOUT_S = 300  # a hang, not slowness


def exit_of_child(work: Callable[[], Any]) -> int:
    """Forks, runs the work there and returns how the child ended, as waitstatus_to_exitcode has it.

    A child that hangs is killed, which is an end like no other: -SIGALRM.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        signal.alarm(CHILD_TIMEOUT_S)
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def every_call(pool: kvpool.Pool, space: kvpool.Namespace) -> dict[str, Callable[[], Any]]:
    room = bytearray(4 * BLOCK_BYTES)
    layers = space.layers([np.zeros((4, BLOCK_BYTES), np.uint8)])
    return {
        "namespace": lambda: pool.namespace(opaque()),
        "new namespace": lambda: pool.namespace(opaque(salt="new")),
        "register": lambda: pool.register(room),
        "resize": lambda: pool.resize("4MiB"),
        "trim": pool.trim,
        "stats": pool.stats,
        "check": pool.check,
        "lookup": lambda: space.lookup(SOME),
        "put": lambda: space.put(SOME, room),
        "get_into": lambda: space.get_into(SOME, room),
        "view": lambda: space.view(SOME).__enter__(),
        "reserve": lambda: space.reserve(SOME[0]),
        "save": lambda: space.save(layers, range(4), SOME),
        "load": lambda: space.load(layers, range(4), SOME),
        "remove": lambda: space.remove(SOME),
        "drop": space.drop,
        "temperature": lambda: space.temperature(SOME[0]),
        "aput": lambda: asyncio.run(space.aput(SOME, room)),
        "aget_into": lambda: asyncio.run(space.aget_into(SOME, room)),
    }


def test_every_call_in_the_child_says_what_is_wrong() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(SOME, payloads(SOME))
        asyncio.run(space.aput(SOME, payloads(SOME)))  # its threads are not in the child
        calls = every_call(pool, space)

        def child() -> None:
            for call in calls.values():
                with pytest.raises(ForkedProcess, match="fork"):
                    call()
            assert issubclass(ForkedProcess, PoolClosed)
            assert pool.closed
            pool.close()
            pool.close()

        assert exit_of_child(child) == 0
        assert not pool.closed
        assert got(space, SOME) == 4
        assert pool.stats()["puts"] == 4


def test_a_child_can_open_a_pool_of_its_own() -> None:
    with opened() as pool:
        pool.namespace(opaque())

        def child() -> None:
            with opened() as other:
                space = other.namespace(opaque())
                assert space.put(SOME, payloads(SOME)).stored == 4
                assert got(space, SOME) == 4
                asyncio.run(space.aput(SOME, payloads(SOME)))

        assert exit_of_child(child) == 0


@pytest.mark.parametrize("held", ["view", "array", "slot", "region", "nothing"])
def test_what_the_child_inherits_is_let_go_quietly(held: str) -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(SOME, payloads(SOME))
        things: list[Any] = []
        if held in ("view", "array"):
            view = space.view(SOME)
            blocks = view.__enter__()
            things += [view, blocks]
            if held == "array":
                things.append(np.frombuffer(blocks[0], np.uint8))
        elif held == "slot":
            things.append(space.reserve(keys([9])[0]))
        elif held == "region":
            things.append(pool.register(bytearray(10)))

        def child() -> None:
            if held == "slot":
                with pytest.raises(ForkedProcess):
                    things[0].commit()
                things[0].abort()
            if held == "view":
                things[0].__exit__(None, None, None)
            things.clear()

        assert exit_of_child(child) == 0
        # The parent has lost nothing by it.
        stats = pool.stats()
        assert stats["blocks_pinned"] == (4 if held in ("view", "array") else 0)
        assert stats["blocks_reserved"] == (held == "slot")
        if held in ("view", "array"):
            assert [bytes(block) for block in blocks] == [payload(each) for each in SOME]
        assert got(space, SOME) == 4
        things.clear()


def test_a_view_read_in_the_child_faults_and_shows_nothing() -> None:
    # The parent may reuse what it shows at any time: no answer is better than a wrong one.
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(SOME, payloads(SOME))
        with space.view(SOME) as blocks:
            block = blocks[0]

            def child() -> None:
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os._exit(bytes(block)[0] and 1)

            assert exit_of_child(child) == -signal.SIGSEGV
            assert bytes(block) == payload(SOME[0])


def test_a_fork_in_the_middle_of_everything() -> None:
    """Locks may be held by threads that the child does not have; it must not wait for them."""
    with opened() as pool:
        space = pool.namespace(opaque())
        space.put(SOME, payloads(SOME))
        done = threading.Event()

        def work(number: int) -> None:
            out = bytearray(4 * BLOCK_BYTES)
            while not done.is_set():
                space.get_into(SOME, out)
                other = keys(range(100 * number, 100 * number + 4))
                space.put(other, payloads(other))
                pool.namespace(opaque(salt=str(number)))
                space.remove(other)
                with space.view(SOME):
                    pass

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 4)]
        for thread in threads:
            thread.start()
        calls = every_call(pool, space)

        def child() -> None:
            for name in ("lookup", "put", "namespace", "stats", "view", "aput"):
                with pytest.raises(ForkedProcess):
                    calls[name]()
            pool.close()

        try:
            codes = [exit_of_child(child) for _ in range(10)]
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert codes == [0] * 10
        assert got(space, SOME) == 4


def in_process(queue: Any, space: kvpool.Namespace) -> None:
    try:
        space.lookup(SOME)
    except ForkedProcess as error:
        queue.put(str(error))


def test_multiprocessing_with_fork() -> None:
    context = multiprocessing.get_context("fork")
    with opened() as pool:
        space = pool.namespace(opaque())
        queue = context.Queue()
        process = context.Process(target=in_process, args=(queue, space))
        process.start()
        text = queue.get(timeout=CHILD_TIMEOUT_S)
        process.join(CHILD_TIMEOUT_S)
        assert process.exitcode == 0
        assert "spawn" in text
        assert space.put(SOME, payloads(SOME)).stored == 4


def test_a_pool_cannot_be_sent_to_another_process() -> None:
    import pickle

    with opened() as pool:
        space = pool.namespace(opaque())
        for thing in (pool, space, pool.register(bytearray(1)), space.view([])):
            with pytest.raises(TypeError):
                pickle.dumps(thing)


FORK_AND_EXIT = """
import os, sys, threading
import kvpool

pool = kvpool.open("16MiB", prefault="all")
space = pool.namespace(kvpool.Manifest(model="m", layout="opaque", block_bytes=4096))
keys = [bytes([i]) * 16 for i in range(8)]
space.put(keys, bytes(8 * 4096))
view = space.view(keys)
blocks = view.__enter__()
slot = space.reserve(b"s" * 16)


def copy_on():
    out = bytearray(8 * 4096)
    try:
        while True:
            space.get_into(keys, out)
    except kvpool.PoolClosed:
        pass


for _ in range(2):
    threading.Thread(target=copy_on, daemon=True).start()
pid = os.fork()
if pid == 0:
    sys.exit(0)  # through all of Python's own end, unlike os._exit
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert space.lookup(keys).blocks == 8
sys.exit(code)
"""


def test_a_child_that_ends_like_any_program_is_clean_and_silent() -> None:
    for _ in range(3):
        assert run_python(FORK_AND_EXIT) == (0, "", "")
