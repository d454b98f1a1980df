"""Places for handshakes: who says nothing keeps nobody else out."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool import serve_handshakes, wire
from kvpool.serve_handshakes import Handshakes
from tests.daemons import answer_to, asked, connected, hello, serving

PLENTY_S = 30.0


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(PLENTY_S):
            await case()

    asyncio.run(limited())


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_handshake_that_takes_too_long_is_cancelled() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def case() -> None:
        handshakes = Handshakes(limit_s=0.05)
        await handshakes.begin(work)
        while len(handshakes):
            await asyncio.sleep(0.001)

    run(case)
    assert ends == ["cancelled"]


def test_the_oldest_silent_one_makes_room() -> None:
    async def case() -> None:
        handshakes = Handshakes(places=3, limit_s=PLENTY_S, crowded_s=0.05)
        ended: list[int] = []

        def work(number: int) -> Callable[[], Any]:
            async def wait() -> None:
                try:
                    await forever()
                finally:
                    ended.append(number)

            return wait

        for number in range(3):
            await handshakes.begin(work(number))
        assert ended == []
        await handshakes.begin(work(3))
        assert ended == [0]
        assert len(handshakes) == 3
        await asyncio.sleep(0)  # a task that never began would not say that it ended
        await handshakes.end()
        assert sorted(ended) == [0, 1, 2, 3]

    run(case)


def test_who_has_spoken_keeps_its_place() -> None:
    async def case() -> None:
        handshakes = Handshakes(places=2, limit_s=PLENTY_S, crowded_s=0.01)
        finish, ended = asyncio.Event(), []

        def work(name: str, speaks: bool) -> Callable[[], Any]:
            async def wait() -> None:
                try:
                    if speaks:
                        handshakes.heard()
                        await finish.wait()
                    await forever()
                finally:
                    ended.append(name)

            return wait

        await handshakes.begin(work("speaks", True))
        await handshakes.begin(work("silent", False))
        await asyncio.sleep(0)
        await handshakes.begin(work("third", True))
        assert ended == ["silent"]
        late = asyncio.create_task(handshakes.begin(work("fourth", False)))
        done, _ = await asyncio.wait([late], timeout=0.1)
        assert not done  # both places are taken by some that have spoken: it waits for them
        late.cancel()
        await handshakes.end()

    run(case)


def test_a_place_that_comes_free_is_taken_at_once() -> None:
    async def case() -> None:
        handshakes = Handshakes(places=1, limit_s=PLENTY_S, crowded_s=PLENTY_S)
        go = asyncio.Event()

        async def short() -> None:
            await go.wait()

        await handshakes.begin(short)
        second = asyncio.create_task(handshakes.begin(forever))
        await asyncio.sleep(0)
        go.set()
        await second
        assert len(handshakes) == 1
        await handshakes.end()

    run(case)


def test_silent_strangers_in_every_place_keep_a_client_waiting_a_second(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        silent = [connected(daemon) for _ in range(serve_handshakes.PLACES + 8)]
        begin = time.monotonic()
        with connected(daemon) as sock:
            assert asked(sock, hello())["ok"] is True
        # The client is behind eight more of them, each of which waits for the one before it.
        assert time.monotonic() - begin < wire.HANDSHAKE_S - 1
        for each in silent:
            each.close()


def test_who_is_too_slow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Handshakes.__init__,
        "__kwdefaults__",
        {
            **Handshakes.__init__.__kwdefaults__,
            "limit_s": 0.1,
        },
    )
    with serving(tmp_path) as daemon, connected(daemon) as sock:
        answer = answer_to(sock, wire.pack_hello(hello())[:-1])
    assert answer["error"] == "late"
    assert "did not come in time" in answer["message"]
