"""Async twins: the event loop goes on, and cancelling or closing loses nothing."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import kvpool
from kvpool import BadArgument, BadType, PoolClosed
from tests.pools import BLOCK_BYTES, got, keys, opaque, opened, payloads, wait_until

SOME = keys(range(4))


def run(make: Callable[[kvpool.Namespace], Coroutine[Any, Any, None]]) -> None:
    with opened() as pool:
        asyncio.run(make(pool.namespace(opaque())))


def test_the_twins_do_what_their_originals_do() -> None:
    async def use(space: kvpool.Namespace) -> None:
        result = await space.aput(SOME, payloads(SOME))
        assert result.stored == 4
        assert (await space.aput(SOME, payloads(SOME))).present == 4
        out = bytearray(4 * BLOCK_BYTES)
        assert await space.aget_into(SOME, out) == 4
        assert out == payloads(SOME)
        region = space.pool.register(bytearray(4 * BLOCK_BYTES))
        assert await space.aget_into(SOME[:2], region, offsets=[0, BLOCK_BYTES]) == 2
        more = keys(range(10, 12))
        parts = [payloads(more[:1]), payloads(more[1:])]
        assert (await space.aput(more, parts, parent=SOME[-1], timeout=1)).stored == 2
        wide = bytearray(3 * BLOCK_BYTES)
        assert await space.aget_into(SOME[:2], wide, 2 * BLOCK_BYTES) == 2
        assert got(space, more) == 2

    run(use)


def test_bad_arguments_raise_in_the_coroutine() -> None:
    async def use(space: kvpool.Namespace) -> None:
        with pytest.raises(BadArgument, match="16384"):
            await space.aput(SOME, b"short")
        with pytest.raises(BadType):
            await space.aget_into(SOME, "text")
        with pytest.raises(BadType, match="timeout"):
            await space.aput(SOME, payloads(SOME), timeout="1")  # type: ignore[arg-type]

    run(use)


def test_the_loop_ticks_while_a_writer_is_waited_for() -> None:
    async def use(space: kvpool.Namespace) -> None:
        slot = space.reserve(SOME[0])
        waiting = asyncio.ensure_future(space.aput(SOME, payloads(SOME), timeout=30))
        ticks = 0
        while ticks < 100:
            await asyncio.sleep(0)
            ticks += 1
        assert not waiting.done()
        slot.abort()
        assert (await waiting).stored == 4

    run(use)


@pytest.mark.parametrize("point", ["put.copy", "get.copy"])
def test_the_loop_goes_on_while_a_copy_stands_still(point: str) -> None:
    """Exactly, at the step itself: the loop comes round while that thread is inside its copy."""

    async def use(space: kvpool.Namespace) -> None:
        node = space.pool._node
        out = bytearray(4 * BLOCK_BYTES)
        if point == "get.copy":
            space.put(SOME, payloads(SOME))
        node.fault_pause(point, 30)
        call = asyncio.ensure_future(
            space.aput(SOME, payloads(SOME)) if point == "put.copy" else space.aget_into(SOME, out)
        )
        while not node.fault_waiting(point):
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        node.fault_clear()
        await call
        assert got(space, SOME) == 4

    run(use)


def test_many_calls_at_once() -> None:
    async def use(space: kvpool.Namespace) -> None:
        chains = [keys(range(start, start + 8)) for start in range(0, 256, 8)]
        results = await asyncio.gather(*(space.aput(each, payloads(each)) for each in chains))
        assert all(result.stored == 8 for result in results)
        outs = [bytearray(8 * BLOCK_BYTES) for _ in chains]
        counts = await asyncio.gather(
            *(space.aget_into(each, out) for each, out in zip(chains, outs, strict=True))
        )
        assert counts == [8] * len(chains)
        assert all(out == payloads(each) for out, each in zip(outs, chains, strict=True))

    run(use)


def test_a_cancelled_put_is_whole_or_absent() -> None:
    async def use(space: kvpool.Namespace) -> None:
        node = space.pool._node
        node.fault_pause("put.copy", 30)
        call = asyncio.ensure_future(space.aput(SOME, payloads(SOME)))
        while not node.fault_waiting("put.copy"):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        node.fault_clear()
        # Its thread finishes what it began.
        wait_until(lambda: space.lookup(SOME).blocks == 4)
        assert got(space, SOME) == 4

    run(use)


def test_a_call_cancelled_before_it_began_does_nothing() -> None:
    async def use(space: kvpool.Namespace) -> None:
        node = space.pool._node
        node.fault_pause("put.copy", 30)
        busy = [asyncio.ensure_future(space.aput([each], payloads([each]))) for each in SOME[:2]]
        while node.fault_waiting("put.copy") < 2:
            await asyncio.sleep(0)
        queued = asyncio.ensure_future(space.aput(SOME[2:], payloads(SOME[2:])))
        await asyncio.sleep(0)
        queued.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await queued
        node.fault_clear()
        await asyncio.gather(*busy)
        assert space.lookup(SOME[:2]).blocks == 2
        assert space.lookup(SOME[2:]).blocks == 0

    run(use)


def test_timeouts_of_asyncio_apply() -> None:
    async def use(space: kvpool.Namespace) -> None:
        slot = space.reserve(SOME[0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(space.aput(SOME, payloads(SOME), timeout=0.2), 0.01)
        slot.abort()

    run(use)


def test_a_closed_pool_refuses_at_once() -> None:
    async def use(space: kvpool.Namespace) -> None:
        await space.aput(SOME, payloads(SOME))
        space.pool.close()
        with pytest.raises(PoolClosed):
            await space.aput(SOME, payloads(SOME))
        with pytest.raises(PoolClosed):
            await space.aget_into(SOME, bytearray(4 * BLOCK_BYTES))

    run(use)


def test_close_while_calls_are_under_way_loses_none() -> None:
    """Each call ends in its answer or in PoolClosed, and close() comes back."""

    async def use(space: kvpool.Namespace) -> None:
        node = space.pool._node
        node.fault_pause("put.copy", 30)
        calls = [
            asyncio.ensure_future(space.aput([each], payloads([each])))
            for each in keys(range(100, 110))
        ]
        while node.fault_waiting("put.copy") < 2:
            await asyncio.sleep(0)
        closing = threading.Thread(target=space.pool.close)
        closing.start()
        while not space.pool.closed:
            await asyncio.sleep(0)
        closing.join(0.02)
        assert closing.is_alive()  # close() waits for the two that are inside
        node.fault_clear()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        closing.join()
        results = [answer for answer in answers if isinstance(answer, kvpool.PutResult)]
        refused = [answer for answer in answers if isinstance(answer, PoolClosed)]
        assert len(results) + len(refused) == len(calls)
        assert len(results) >= 2

    run(use)


def test_two_loops_share_a_pool() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())

        def loop(start: int) -> None:
            async def use() -> None:
                for at in range(start, start + 20):
                    chain = keys([at])
                    assert (await space.aput(chain, payloads(chain))).stored == 1
                    out = bytearray(BLOCK_BYTES)
                    assert await space.aget_into(chain, out) == 1
                    assert out == payloads(chain)

            asyncio.run(use())

        threads = [threading.Thread(target=loop, args=(100 * number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats()["blocks"] == 40
