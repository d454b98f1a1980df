"""Serves an ASGI app inside an event loop that has other work to do.

Promises:  1. serve() ends within END_S of being told, whoever is connected;
           2. it never raises but when cancelled, and touches neither signals nor logging: what goes
              wrong is told to its caller, and the loop serves on. What uvicorn would log is
              dropped;
           3. connections are bounded, and each in time: one that says no whole request in HEAD_S,
              or does not take its answer in ANSWER_S, is cut.
Relies on: uvicorn, whose server and protocol classes are extended here.
Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX = 64  # that are answered; a request on one more gets 503
CONNECTIONS_TAKEN_MAX = 2 * CONNECTIONS_MAX  # what is beyond this is cut unheard
HEAD_BYTES_MAX = 16 << 10
HEAD_S = 10.0
ANSWER_S = 30.0
END_S = 1.0
_BACKLOG = 64
_GRACE_S = 0.5  # of END_S: for answers under way
_CUT_S = 0.4  # and for the end of those that were cut


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError. port 0: the kernel finds one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


async def serve(
    app: Any, sock: socket.socket, stop: asyncio.Event, failed: Callable[[BaseException], None]
) -> None:
    """Serves on `sock`, of listen(), until `stop` is set; closes it.

    failed: told of an exception that ended the server, or that a request ran into.
    """
    server = _Server(_config(app, failed))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await asyncio.wait([serving], timeout=_GRACE_S)
        server.force_exit = True
        server.cut()
        await asyncio.wait([serving], timeout=_CUT_S)
        serving.cancel()
        sock.close()
    error = serving.exception() if serving.done() and not serving.cancelled() else None
    if error is not None or not stop.is_set():
        failed(error or RuntimeError("the HTTP server ended by itself"))


def _config(app: Any, failed: Callable[[BaseException], None]) -> uvicorn.Config:
    return uvicorn.Config(
        _caught(app, failed),
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        timeout_keep_alive=int(HEAD_S),
        timeout_graceful_shutdown=1,  # a second is the least; serve() cuts before
        backlog=_BACKLOG,
    )


def _caught(app: Any, failed: Callable[[BaseException], None]) -> Any:
    """The app, with what it raises told and not handed to uvicorn, which would write a trace to a
    log of its own. Nothing is answered then that was not before, and the connection is closed."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            failed(error)

    return call


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they are the process's."""
        yield

    def cut(self) -> None:
        """Ends every connection, whatever was not sent yet."""
        for each in list(self.server_state.connections):
            if isinstance(each, _Protocol):
                each.cut()


class _Protocol(H11Protocol):
    """As uvicorn's, with a deadline for whatever the other side is to do next."""

    _watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect(HEAD_S)
        if len(self.connections) > CONNECTIONS_TAKEN_MAX:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        was_idle = self._is_idle()
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # garbage behind a request that is being answered
            self.cut()
            return
        if was_idle and not self._is_idle():
            self._expect(ANSWER_S)

    def on_response_complete(self) -> None:
        self._expect(HEAD_S)
        super().on_response_complete()  # may begin with a request that has come already
        if not self._is_idle():
            self._expect(ANSWER_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def cut(self) -> None:
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect(self, within_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self.loop.call_later(within_s, self.cut)
