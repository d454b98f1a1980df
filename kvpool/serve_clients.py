"""The clients of a daemon: how many there may be, and their control connections.

Promises:  1. a client ends with its control connection, and all its other connections with it;
           2. its requests are answered in the order they came, and none keeps the daemon from
              noticing that it is gone;
           3. one tenant's clients take no place that was promised to another: each has a limit of
              its own beside that of all.
Thread rule: the event loop's; what can block goes to a thread by the caller's `in_thread`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from kvpool import wire, wire_node
from kvpool.serve_control import Requests
from kvpool.tenants.tenant import Client, Peer, Tenant

AHEAD_MAX = 2  # requests of one client that are read before their turn

# Runs a call in a thread of the daemon and gives its result; `slow`: it may wait for a disk.
InThread = Callable[..., Awaitable[Any]]


class Clients:
    """All that are connected, by the id that names them in their hellos. Bounded."""

    def __init__(self, clients_max: int, sources_max: int, tenants: Mapping[str, Tenant]) -> None:
        self.clients_max = clients_max
        self._sources_max = sources_max
        self._tenants = tenants
        self._by_id: dict[bytes, Client] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_id.values()))

    def require_place(self, tenant: Tenant | None) -> None:
        """Raises RefusedByPeer, as what the peer is to be told."""
        if tenant is not None and len(tenant.clients) >= tenant.limits.max_clients:
            text = f"there are {len(tenant.clients)} clients of this tenant, its limit"
            if tenant.limits.max_clients < self.clients_max:
                raise wire.RefusedByPeer("full", text, "tenant_full")
        if len(self._by_id) >= self.clients_max:
            raise wire.RefusedByPeer("full", f"the node has {self.clients_max} clients, its limit")

    def require_sources(self, client: Client, count: int, most: int) -> None:
        """Room for so many more connections and lanes of a client. Raises RefusedByPeer."""
        assert client.tenant is not None  # looked at by the caller
        sources = sum(each.server.sources for each in self._tenants.values())
        if sources + count > self._sources_max:
            text = f"the node has {self._sources_max} connections, its limit"
            raise wire.RefusedByPeer("full", text)
        if client.tenant.server.sources_of(client.number) + count > most:
            raise wire.RefusedByPeer("full", f"a client has {most} connections at most")

    def add(self, client: Client) -> None:
        self._by_id[client.id] = client
        if client.tenant is not None:
            client.tenant.clients.append(client)

    def remove(self, client: Client) -> None:
        """Idempotent."""
        if self._by_id.pop(client.id, None) is not None and client.tenant is not None:
            client.tenant.clients.remove(client)

    def of(self, hello: wire.Hello, peer: Peer) -> Client:
        """Whose connection this is. Raises RefusedByPeer: nobody's, or not from there.

        The id is a secret between a client and its node, and enough on a machine's own sockets;
        still it is of no use to another user. Over TCP it may be overheard: then a signature that
        was not seen before has to come with it.
        """
        client = self._by_id.get(hello.client) if hello.client is not None else None
        if client is None or not _is_from(client, peer):
            text = "there is no such client (any more): its control connection comes first"
            raise wire.RefusedByPeer("client", text)
        if client.verifier is not None:
            reason = client.verifier.check(hello)
            if reason is not None:
                code = "replayed" if reason == "replayed" else "token"
                text = "this connection is not signed as its client would have signed it"
                raise wire.RefusedByPeer(code, text, reason)
        if client.tenant is None:
            text = "this client is an administrator and no tenant; name one to have its blocks"
            raise wire.RefusedByPeer("tenant", text, "no_tenant")
        return client


def _is_from(client: Client, peer: Peer) -> bool:
    return client.peer.is_unix == peer.is_unix and client.peer.uid == peer.uid


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


def answers_of(requests: Requests, client: Client, in_thread: InThread) -> Answers:
    """Requests.answer() of a client in a thread; slow ones in threads of their own, and those that
    take turns when it is their tenant's."""

    async def answer(request: wire.Map) -> wire.Map:
        op, tenant = request.get("op"), client.tenant
        turn = tenant.turn if tenant is not None and requests.takes_turns(op) else nullcontext()
        async with turn:
            answered: wire.Map = await in_thread(
                requests.answer, request, client, slow=requests.is_slow(op)
            )
        return answered

    return answer
