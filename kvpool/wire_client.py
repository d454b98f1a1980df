"""Hellos and control messages as a client sends them: blocking sockets, until a time.monotonic().

Promises:  1. every call ends by its deadline, with a TimeoutError if need be;
           2. descriptors that came along are given to the caller or closed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvpool import wire
from kvpool.wire_proof import Exchange, Signer, is_same

_INT = struct.Struct("i")


def ask(sock: socket.socket, hello: Mapping[str, Any], deadline: float) -> wire.Map:
    """Sends a hello and returns the answer. Raises RefusedByPeer, WireError, OSError."""
    fields, fds = ask_with_descriptors(sock, hello, deadline, descriptors_max=0)
    assert not fds
    return fields


def ask_with_proof(
    sock: socket.socket, hello: Mapping[str, Any], token: str, deadline: float
) -> tuple[wire.Map, Signer]:
    """As ask(), on a control connection, after both sides have proved that they have the token.

    Raises RefusedByPeer, too, for a node that does not: it is not the one that was meant.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    challenge = ask(sock, {**hello, "nonce": nonce}, deadline).get("challenge")
    if not isinstance(challenge, bytes) or len(challenge) != wire.NONCE_BYTES:
        raise wire.WireError("the node's answer lacks the challenge")
    exchange = Exchange(nonce, challenge, str(hello.get("tenant", "")))
    facts = ask(sock, {"proof": exchange.client_proof(token)}, deadline)
    proof = facts.pop("proof", None)
    if not is_same(exchange.node_proof(token), proof if isinstance(proof, bytes) else None):
        raise wire.RefusedByPeer("impostor", "what answers there does not have the token itself")
    return facts, Signer(exchange.session_key(token))


def ask_with_descriptors(
    sock: socket.socket,
    hello: Mapping[str, Any],
    deadline: float,
    *,
    descriptors_max: int = wire.DESCRIPTORS_MAX,
) -> tuple[wire.Map, list[int]]:
    """As ask(), with the descriptors that came along; they are the caller's to close."""
    # A node that said no before it read this has closed: its answer is there to be read.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        send_until(sock, wire.pack_hello(hello), deadline)
    fds: list[int] = []
    try:
        head = _receive_head(sock, deadline, fds, descriptors_max)
        version, length = wire.read_head(head)
        return wire.read_answer(version, _receive_until(sock, length, deadline)), fds
    except BaseException:
        close_all(fds)
        raise


def send_until(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Raises TimeoutError, OSError; the connection is of no use then."""
    sock.settimeout(_left(deadline))
    sock.sendall(data)


class Messages:
    """The control messages that a socket brings. A wait that ends early loses no byte."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._bytes = bytearray()

    def next(self, deadline: float) -> wire.Map:
        """Raises TimeoutError (and can be asked again), WireError, OSError."""
        self._fill(wire.LENGTH_BYTES, deadline)
        end = wire.LENGTH_BYTES + wire.read_length(bytes(self._bytes[: wire.LENGTH_BYTES]))
        self._fill(end, deadline)
        body = bytes(self._bytes[wire.LENGTH_BYTES : end])
        del self._bytes[:end]
        return wire.read_map(body)

    def _fill(self, count: int, deadline: float) -> None:
        while len(self._bytes) < count:
            self._sock.settimeout(_left(deadline))
            part = self._sock.recv(count - len(self._bytes))
            if not part:
                raise wire.WireError("the node closed the connection")
            self._bytes += part


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors that nobody took."""
    for fd in fds:
        os.close(fd)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _receive_head(
    sock: socket.socket, deadline: float, fds: list[int], descriptors_max: int
) -> bytes:
    if not descriptors_max:
        return _receive_until(sock, wire.HEAD_BYTES, deadline)
    sock.settimeout(_left(deadline))
    room = socket.CMSG_LEN(descriptors_max * _INT.size)
    # Not recv_fds(): that drops its flags, and the descriptors would be inherited.
    head, ancillary, got_flags, _ = sock.recvmsg(wire.HEAD_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = content[: len(content) // _INT.size * _INT.size]
            fds.extend(fd for (fd,) in _INT.iter_unpack(whole))
    if not head:
        raise wire.WireError("the node closed the connection")
    if got_flags & socket.MSG_CTRUNC:
        raise wire.WireError(
            "descriptors were lost on the way: too many are open, or too many came"
        )
    return head + _receive_until(sock, wire.HEAD_BYTES - len(head), deadline)


def _receive_until(sock: socket.socket, count: int, deadline: float) -> bytes:
    parts = b""
    while len(parts) < count:
        sock.settimeout(_left(deadline))
        part = sock.recv(count - len(parts))
        if not part:
            raise wire.WireError("the node closed the connection")
        parts += part
    return parts
