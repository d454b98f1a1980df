"""The clients of a daemon: what each has connected, and its control connection.

Promises:  1. a client ends with its control connection, and all its other connections with it;
           2. its requests are answered in the order they came, and none keeps the daemon from
              noticing that it is gone.
Thread rule: the event loop's; what can block goes to a thread by the caller's `in_thread`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool import wire, wire_node
from kvpool.serve_control import Requests, Server

AHEAD_MAX = 2  # requests of one client that are read before their turn

# Runs a call in a thread of the daemon and gives its result; `slow`: it may wait for a disk.
InThread = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a connection comes from. pid: 0 if the kernel does not tell."""

    name: str
    pid: int
    is_unix: bool

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, eq=False)
class Client:
    """One connected pool object of some process."""

    number: int  # the core's
    name: str
    pid: int
    peer: Peer
    id: bytes = field(default_factory=lambda: secrets.token_bytes(wire.CLIENT_ID_BYTES))
    has_shm: bool = False

    def described(self) -> dict[str, Any]:
        """Its fields in a log line."""
        return {"client": self.number, "name": self.name, "pid": self.pid, "peer": self.peer}


class Clients:
    """All that are connected, by the id that names them in their hellos. Bounded."""

    def __init__(self, clients_max: int, sources_max: int, server: Server) -> None:
        self._clients_max = clients_max
        self._sources_max = sources_max
        self._server = server
        self._by_id: dict[bytes, Client] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def require_place(self) -> None:
        """Raises RefusedByPeer, as what the peer is to be told."""
        if len(self._by_id) >= self._clients_max:
            raise wire.RefusedByPeer("full", f"the node has {self._clients_max} clients, its limit")

    def require_sources(self, client: Client, count: int, most: int) -> None:
        """Room for so many more connections and lanes of a client. Raises RefusedByPeer."""
        if self._server.sources + count > self._sources_max:
            text = f"the node has {self._sources_max} connections, its limit"
            raise wire.RefusedByPeer("full", text)
        if self._server.sources_of(client.number) + count > most:
            raise wire.RefusedByPeer("full", f"a client has {most} connections at most")

    def add(self, client: Client) -> None:
        self._by_id[client.id] = client

    def remove(self, client: Client) -> None:
        self._by_id.pop(client.id, None)

    def named(self, id: bytes | None) -> Client:
        """Raises RefusedByPeer."""
        client = self._by_id.get(id) if id is not None else None
        if client is None:
            text = "there is no such client (any more): its control connection comes first"
            raise wire.RefusedByPeer("client", text)
        return client


class Answers(Protocol):
    """Does one request off the event loop."""

    async def __call__(self, request: wire.Map) -> wire.Map: ...


async def serve_control(sock: socket.socket, answer: Answers) -> str:
    """Answers requests until the client closes, and says why it ended. Never raises OSError."""
    waiting: asyncio.Queue[wire.Map] = asyncio.Queue(AHEAD_MAX)
    reader = asyncio.create_task(_read(sock, waiting))
    writer = asyncio.create_task(_write(sock, waiting, answer))
    try:
        await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        return reader.result() if reader.done() else writer.result()
    finally:
        for task in (reader, writer):
            task.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
        sock.close()


async def _read(sock: socket.socket, waiting: asyncio.Queue[wire.Map]) -> str:
    try:
        while (request := await wire_node.receive_message(sock)) is not None:
            if not await _is_queued(sock, waiting, request):
                break
    except (OSError, wire.WireError) as error:
        return str(error)
    return "closed by the client"


async def _is_queued(
    sock: socket.socket, waiting: asyncio.Queue[wire.Map], request: wire.Map
) -> bool:
    """False: the client closed while there was no place, and what it still asks is of no use."""
    if not waiting.full():
        waiting.put_nowait(request)
        return True
    putting = asyncio.create_task(waiting.put(request))
    try:
        with wire_node.end_of(sock) as ended:
            await asyncio.wait((putting, ended), return_when=asyncio.FIRST_COMPLETED)
        return putting.done()
    finally:
        putting.cancel()


async def _write(sock: socket.socket, waiting: asyncio.Queue[wire.Map], answer: Answers) -> str:
    try:
        while True:
            await wire_node.send(sock, wire.pack_message(await answer(await waiting.get())))
    except (OSError, wire.WireError) as error:
        return str(error)


def answers_of(requests: Requests, in_thread: InThread, slow: frozenset[str]) -> Answers:
    """Requests.answer() in a thread; those named `slow` in threads of their own."""

    async def answer(request: wire.Map) -> wire.Map:
        is_slow = request.get("op") in slow if isinstance(request.get("op"), str) else False
        answered: wire.Map = await in_thread(requests.answer, request, slow=is_slow)
        return answered

    return answer
