"""The node as a service: handshakes, clients and their requests, from readiness to a clean end.

The event loop, in the main thread, moves no payload: a connection that is to carry blocks is handed
to the core's server when its hello was answered, and is never seen here again.

Promises:  1. a connection that says garbage, or nothing, is closed with a reason and disturbs
              nobody;
           2. a client is all of its connections: when the control one ends, the others do;
           3. run() returns `drain_s` after it was told to stop, plus what the core takes to close.
Thread rule: the event loop's. Core calls that may block run in a few threads and release the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kvpool import _core, wire, wire_node
from kvpool.address import host_and_port
from kvpool.errors import KvpoolError
from kvpool.manifest import BLOCK_BYTES_MAX
from kvpool.serve_clients import Client, Clients, Peer, answers_of, serve_control
from kvpool.serve_control import SLOW, Requests, Server
from kvpool.serve_handshakes import Handshakes
from kvpool.serve_listen import Acceptor, Listeners
from kvpool.serve_log import EventLog
from kvpool.serve_plan import Plan

QUICK_THREADS = 2
SLOW_THREADS = 4
STREAMS_PER_CLIENT_MAX = 96  # for blocks, and one for each wait() under way
_DRAIN_SHARE = 0.25  # of the time for ending; the rest is for writing what is not on the SSD yet
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Daemon:
    """Serves one node to many clients. The node and the server are closed when run() returns."""

    def __init__(
        self,
        plan: Plan,
        node: _core.Node,
        server: Server,
        listeners: Listeners,
        log: EventLog,
        version: str,
    ) -> None:
        self._plan = plan
        self._node = node
        self._server = server
        self._listeners = listeners
        self._log = log
        self._version = version
        self._boot = secrets.token_bytes(16)  # tells one life of the daemon from the next
        self._clients = Clients(plan.clients_max, plan.server["max_sources"], server)
        self._handshakes = Handshakes()
        self._controls: set[asyncio.Task[None]] = set()
        self._quick = ThreadPoolExecutor(QUICK_THREADS, "kvpool-quick")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, "kvpool-slow")
        self._answers = answers_of(Requests(node, server, log), self._in_thread, SLOW)

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Listens, calls ready(), and serves until `stop` is set; then ends in order."""
        self._listeners.listen()
        acceptors = [
            asyncio.create_task(Acceptor(each, self._admit, self._log).run())
            for each in self._listeners.sockets
        ]
        ready()
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, *acceptors], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            for each in acceptors:
                each.cancel()
            ended = await asyncio.gather(*acceptors, return_exceptions=True)
            await self._end()
        for error in ended:
            if isinstance(error, Exception):
                raise error  # our bug: an acceptor ends by being cancelled, and no other way

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._plan.drain_s
        self._listeners.close()
        await self._handshakes.end()
        drained = await self._in_thread(self._server.drain, self._plan.drain_s * _DRAIN_SHARE)
        self._log.info("drained", all_done=drained, clients=len(self._clients))
        for each in self._controls:
            each.cancel()
        await asyncio.gather(*self._controls, return_exceptions=True)
        await self._in_thread(self._server.close)
        await self._in_thread(self._node.close, max(0.0, end - loop.time()))
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, call: Callable[..., Any], *args: Any, slow: bool = False) -> Any:
        pool = self._slow if slow else self._quick
        return await asyncio.get_running_loop().run_in_executor(pool, partial(call, *args))

    # --- a connection ----------------------------------------------------------------------------

    async def _admit(self, sock: socket.socket, is_unix: bool) -> None:
        await self._handshakes.begin(partial(self._handshake, sock, is_unix))

    async def _handshake(self, sock: socket.socket, is_unix: bool) -> None:
        """Ends with the socket refused, or handed on: then this object of it is an empty one."""
        peer = _peer_of(sock, is_unix)
        begin = {
            "control": self._begin_client,
            "stream": self._begin_stream,
            "shm": self._begin_shm,
        }
        with sock:
            try:
                hello = await wire_node.receive_hello(sock)
                self._handshakes.heard()
                self._require_token(hello, is_unix)
                await begin[hello.kind](sock, hello, peer)
            except wire.WireError as error:
                self._log.often(logging.INFO, "refused", peer=peer, reason=error)
                await wire_node.refuse(sock, "malformed", str(error))
            except wire.RefusedByPeer as error:
                self._log.often(logging.INFO, "refused", peer=peer, error=error.code, reason=error)
                await wire_node.refuse(sock, error.code, str(error))
            except asyncio.CancelledError:
                self._log.often(logging.INFO, "no hello in time", peer=peer)
                _say_at_once(sock, "late", "the hello did not come in time")
                raise
            except (OSError, KvpoolError) as error:
                self._log.often(logging.WARNING, "handshake failed", peer=peer, reason=error)
                _say_at_once(sock, "failed", f"the node could not: {error}")
            except Exception as error:  # our bug: one connection is lost, the daemon serves on
                self._log.error("handshake failed by a bug", peer=peer, reason=repr(error))
                _say_at_once(sock, "internal", "the node failed at this; its log says at what")

    def _require_token(self, hello: wire.Hello, is_unix: bool) -> None:
        """On a unix socket the file's mode has decided already."""
        if is_unix or self._plan.token is None:
            return
        given = (hello.token or "").encode()
        if not hmac.compare_digest(given, self._plan.token.encode()):
            told = "needs a token" if hello.token is None else "does not know this token"
            raise wire.RefusedByPeer("token", f"the node {told}: give connect() the right one")

    async def _begin_client(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        self._clients.require_place()
        client = Client(self._server.add_client(), hello.name, peer.pid or hello.pid, peer)
        self._clients.add(client)
        answer = {
            "ok": True,
            "client": client.id,
            "boot": self._boot,
            "version": self._version,
            "shm": peer.is_unix,
            "block_bytes_max": BLOCK_BYTES_MAX,
            "streams_max": STREAMS_PER_CLIENT_MAX,
        }
        try:
            await wire_node.send(sock, wire.pack_hello(answer))
        except BaseException:
            self._clients.remove(client)
            await self._in_thread(self._server.drop_client, client.number)
            raise
        control = socket.socket(fileno=sock.detach())
        control.setblocking(False)
        task = asyncio.create_task(self._serve_client(control, client))
        self._controls.add(task)
        task.add_done_callback(self._control_ended)

    async def _begin_stream(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        client = self._clients.named(hello.client)
        lanes = 1 + self._plan.server["lanes"] if client.has_shm else 0
        self._clients.require_sources(client, 1, STREAMS_PER_CLIENT_MAX + lanes)
        await wire_node.send(sock, wire.pack_hello({"ok": True}))
        self._server.add_stream(client.number, sock.detach())

    async def _begin_shm(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        client = self._clients.named(hello.client)
        if not peer.is_unix:
            raise wire.RefusedByPeer(
                "shm", "shared memory goes through the node's unix socket only"
            )
        if client.has_shm:
            raise wire.RefusedByPeer("shm", "this client has its shared memory already")
        lanes = 1 + self._plan.server["lanes"]
        self._clients.require_sources(client, lanes, STREAMS_PER_CLIENT_MAX + lanes)
        client.has_shm = True
        # The socket is the core's from here on, whatever becomes of this; the answer needs one too.
        with sock.dup() as reply:
            try:
                fds, facts = await self._offer_for(client, sock.detach())
            except KvpoolError as error:
                self._log.often(logging.WARNING, "no shared memory", peer=peer, reason=error)
                await wire_node.refuse(reply, "shm", str(error))
                return
            try:
                answer = wire.pack_hello({"ok": True, **facts})
                await wire_node.send_with_descriptors(reply, answer, fds)
            finally:
                for fd in fds:
                    os.close(fd)
                self._server.start_shm(client.number)  # sees the end of a client that is gone too

    async def _offer_for(self, client: Client, fd: int) -> tuple[list[int], wire.Map]:
        """Descriptors that are to be sent and closed, and what the client must know."""
        making = asyncio.ensure_future(self._in_thread(self._server.make_shm, client.number, fd))
        try:
            # Shielded: a call that were taken back before it began would leave `fd` to nobody.
            offer: tuple[list[int], wire.Map] = await asyncio.shield(making)
        except asyncio.CancelledError:  # the handshake's time is up: nobody will send them
            making.add_done_callback(_close_offer)
            raise
        return offer

    async def _serve_client(self, sock: socket.socket, client: Client) -> None:
        self._log.often(logging.INFO, "client connected", **client.described())
        reason = "the daemon ends"
        try:
            reason = await serve_control(sock, self._answers)
        finally:
            self._clients.remove(client)
            self._log.often(logging.INFO, "client gone", **client.described(), reason=reason)
            await self._in_thread(self._server.drop_client, client.number)

    def _control_ended(self, task: asyncio.Task[None]) -> None:
        self._controls.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a client was lost by a bug", reason=repr(task.exception()))


def _close_offer(making: asyncio.Future[Any]) -> None:
    """The rest of it ends with its client."""
    if not making.cancelled() and making.exception() is None:
        for fd in making.result()[0]:
            os.close(fd)


def _peer_of(sock: socket.socket, is_unix: bool) -> Peer:
    if is_unix:
        size = _CREDENTIALS.size
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return Peer(f"uid:{uid}", pid, is_unix=True)
    with contextlib.suppress(OSError):  # gone already
        return Peer(host_and_port(*sock.getpeername()[:2]), 0, is_unix=False)
    return Peer("gone", 0, is_unix=False)


def _say_at_once(sock: socket.socket, code: str, message: str) -> None:
    """Where there is no time to wait, or nobody to wait for. Nothing, for a socket handed on."""
    with contextlib.suppress(OSError):
        sock.send(wire.pack_hello(wire.refusal(code, message)))
