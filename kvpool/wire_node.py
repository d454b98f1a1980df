"""Hellos and control messages as a node receives them: non-blocking sockets under asyncio.

Promises:  1. never a byte more is read than the message has: a socket can be handed on after it;
           2. a refusal reaches the other side, if that reads what comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Iterator, Sequence

from kvpool import wire

_LINGER_BYTES_MAX = 256 << 10
_LINGER_S = 0.5
_READ_BYTES_MAX = 64 << 10  # a read makes room for what it asks for, whatever comes


async def receive_hello(sock: socket.socket) -> wire.Hello:
    """Raises WireError, or RefusedByPeer for a hello that is whole but of another version."""
    version, length = wire.read_head(await _receive(sock, wire.HEAD_BYTES))
    return wire.read_hello(version, await _receive(sock, length))


async def receive_proof(sock: socket.socket) -> bytes:
    """Raises WireError."""
    version, length = wire.read_head(await _receive(sock, wire.HEAD_BYTES))
    return wire.read_proof(version, await _receive(sock, length))


async def receive_message(sock: socket.socket) -> wire.Map | None:
    """The next control message; None when the other side has closed between two."""
    loop = asyncio.get_running_loop()
    first = await loop.sock_recv(sock, wire.LENGTH_BYTES)
    if not first:
        return None
    rest = await _receive(sock, wire.LENGTH_BYTES - len(first))
    return wire.read_map(await _receive(sock, wire.read_length(first + rest)))


async def send(sock: socket.socket, data: bytes) -> None:
    """Raises OSError."""
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def send_with_descriptors(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """For the first bytes that go out on a unix socket: its buffer is empty, so none waits."""
    sent = socket.send_fds(sock, [data], list(fds))
    await send(sock, data[sent:])


@contextlib.contextmanager
def end_of(sock: socket.socket) -> Iterator[asyncio.Future[None]]:
    """Done once the other side has closed, whatever is still unread. Raises OSError.

    For when nothing is to be read: an end is behind what came before it. Costs a descriptor.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    # One of its own: the loop itself watches a socket for bytes only, which are there all the time.
    with select.epoll() as watch:
        watch.register(sock, select.EPOLLRDHUP)
        loop.add_reader(watch, _finish, ended)
        try:
            yield ended
        finally:
            loop.remove_reader(watch)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def refuse(sock: socket.socket, code: str, message: str) -> None:
    """Says no so that the other side can read it, and closes. Never raises OSError.

    A socket that is closed while it holds unread bytes resets the connection, and the answer is
    lost on the way: so what still comes is read, for a short while.
    """
    with sock:
        try:
            async with asyncio.timeout(_LINGER_S):
                await send(sock, wire.pack_hello(wire.refusal(code, message[:1024])))
                sock.shutdown(socket.SHUT_WR)
                for _ in range(_LINGER_BYTES_MAX >> 12):
                    if not await asyncio.get_running_loop().sock_recv(sock, 1 << 12):
                        return
        except (OSError, TimeoutError):
            return


async def _receive(sock: socket.socket, count: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), b""
    while len(parts) < count:
        part = await loop.sock_recv(sock, min(count - len(parts), _READ_BYTES_MAX))
        if not part:
            raise wire.WireError(f"closed after {len(parts)} of {count} bytes")
        parts += part
    return parts
