"""Places for connections that have not said yet who they are.

Promises:  1. at most PLACES of them at a time, and none for longer than HANDSHAKE_S;
           2. those who say nothing keep others waiting for CROWDED_S at most: while every place is
              taken, the oldest of them that has been silent for so long loses its place.
Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvpool.wire import HANDSHAKE_S

PLACES = 64
CROWDED_S = 1.0


class Handshakes:
    """The tasks of connections that are being made."""

    def __init__(
        self,
        *,
        places: int = PLACES,
        limit_s: float = HANDSHAKE_S,
        crowded_s: float = CROWDED_S,
    ) -> None:
        self._places = places
        self._limit_s = limit_s
        self._crowded_s = crowded_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], float] = {}  # since when, the oldest first

    async def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits for a place and starts the work in it; cancels it when its time is up."""
        await self._place()
        task = asyncio.create_task(self._limited(work))
        self._tasks.add(task)
        self._silent[task] = asyncio.get_running_loop().time()
        task.add_done_callback(self._ended)

    def heard(self) -> None:
        """From within the work: the other side has said who it is."""
        task: asyncio.Task[Any] | None = asyncio.current_task()
        if task is not None:
            self._silent.pop(task, None)

    async def end(self) -> None:
        """Cancels all of them and waits for that."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    async def _limited(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await work()
        except TimeoutError:
            return

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._silent.pop(task, None)

    async def _place(self) -> None:
        while len(self._tasks) >= self._places:
            patience_s: float | None = None
            if self._silent:
                oldest, since = next(iter(self._silent.items()))
                patience_s = since + self._crowded_s - asyncio.get_running_loop().time()
                if patience_s <= 0:
                    oldest.cancel()
                    patience_s = None  # it ends at once, and its place is free
            await asyncio.wait(self._tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
