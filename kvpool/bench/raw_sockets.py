"""What sockets give without us: blocks between the memory of two processes, in both directions.

The floor of `kvpool bench tcp`, and the round trips of both channels. A peer process holds memory
of blocks and has a thread per connection; this side asks for places in it and moves the bytes with
one thread that takes connections by turns, as the pool's client does, up to 1 MiB per call. No
checksum, no index, no check of what arrives. Both are Python: a call into the system moves so much
that the interpreter does not show from 1 MiB on; for small blocks and round trips it adds some us.

    python -m kvpool.bench.raw_sockets FOLDER BYTES [HOST]   the peer; ends with its stdin
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvpool.bench.rows import BenchError, expect
from kvpool.bench.served import environment_of_child, first_line
from kvpool.replay.payload import Words

LOOPBACK = "127.0.0.1"
PIECE_BYTES = 1 << 20
_REQUEST = struct.Struct("<4sQQ44x")  # what, where in the peer's memory, how many bytes
_ECHO, _READ, _WRITE = b"echo", b"read", b"wrte"
_SOCKET_NAME = "raw.sock"

_Parts = list[tuple[socket.socket, memoryview]]
_Move = Callable[[socket.socket, memoryview], int]


class RawSockets:
    """Connections to a peer. One thread at a time."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """Owns the sockets."""
        self._sockets = list(sockets)

    def round_trip(self) -> None:
        """64 bytes there and back, on the first connection."""
        first = self._sockets[0]
        first.sendall(_REQUEST.pack(_ECHO, 0, 0))
        expect(len(first.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size, "no echo")

    def read(self, at: int, out: Words) -> None:
        """out = the peer's memory from byte `at` on, an equal part by each connection."""
        parts = self._ask(_READ, at, out.reshape(-1).view(np.uint8).data)
        _take_turns(parts, select.POLLIN, _receive)

    def write(self, at: int, data: Words) -> None:
        """The other way round; returns when the peer has all of it."""
        parts = self._ask(_WRITE, at, data.reshape(-1).view(np.uint8).data)
        _take_turns(parts, select.POLLOUT, _send)
        for sock, _ in parts:
            expect(len(sock.recv(1)) == 1, "the peer did not take what was sent")

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _ask(self, what: bytes, at: int, whole: memoryview) -> _Parts:
        pieces = min(len(self._sockets), max(1, whole.nbytes // (256 << 10)))
        part_bytes = -(-whole.nbytes // pieces)
        parts = []
        for number, sock in enumerate(self._sockets[:pieces]):
            part = whole[number * part_bytes : (number + 1) * part_bytes]
            sock.sendall(_REQUEST.pack(what, at + number * part_bytes, part.nbytes))
            parts.append((sock, part))
        return parts


class RawPeer:
    """The peer process, as this one sees it."""

    def __init__(self, folder: str, port: int) -> None:
        self._path = f"{folder}/{_SOCKET_NAME}"
        self.port = port

    def by_tcp(self, connections: int) -> RawSockets:
        """Raises OSError."""
        return connect_tcp(self.port, connections)

    def by_unix(self) -> RawSockets:
        """One connection. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self._path)
        return RawSockets([sock])


def connect_tcp(port: int, connections: int) -> RawSockets:
    """Connections to the peer that listens on this port of the loopback. Raises OSError."""
    return over([socket.create_connection((LOOPBACK, port)) for _ in range(connections)])


def over(sockets: Sequence[socket.socket]) -> RawSockets:
    """Over TCP connections to a peer, which are its own from here on."""
    for sock in sockets:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
    return RawSockets(sockets)


def peer_command(folder: str, memory_bytes: int, host: str = LOOPBACK) -> list[str]:
    """What makes a peer; it says its port when it is ready."""
    return [sys.executable, "-m", __name__, folder, str(memory_bytes), host]


@contextlib.contextmanager
def raw_peer(memory_bytes: int) -> Iterator[RawPeer]:
    """A peer with so much memory, gone when the `with` ends. Raises BenchError."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        subprocess.Popen(
            peer_command(folder, memory_bytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_child(),
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = first_line(process)
            if not line:
                raise BenchError("the process with the raw sockets did not begin")
            yield RawPeer(folder, int(line))
        finally:
            process.kill()


def _take_turns(parts: _Parts, event: int, move: _Move) -> None:
    poller = select.poll()
    left = {}
    for sock, part in parts:
        poller.register(sock, event)
        left[sock.fileno()] = (sock, part)
    while left:
        for number, _ in poller.poll():
            sock, part = left[number]
            done = move(sock, part[:PIECE_BYTES])
            expect(done > 0, "the peer with the raw sockets has ended")
            left[number] = (sock, part[done:])
            if done == part.nbytes:
                poller.unregister(sock)
                del left[number]


def _receive(sock: socket.socket, part: memoryview) -> int:
    return sock.recv_into(part, 0, socket.MSG_DONTWAIT)


def _send(sock: socket.socket, part: memoryview) -> int:
    return sock.send(part, socket.MSG_DONTWAIT)


# --- the peer ------------------------------------------------------------------------------------


def _serve(folder: str, memory_bytes: int, host: str = LOOPBACK) -> None:
    memory = np.ones(memory_bytes, dtype=np.uint8).data
    tcp = socket.create_server((host, 0))
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(f"{folder}/{_SOCKET_NAME}")
    unix.listen()
    for listener in (tcp, unix):
        threading.Thread(target=_accept, args=(listener, memory), daemon=True).start()
    print(tcp.getsockname()[1], flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket, memory: memoryview) -> None:
    while True:
        sock, _ = listener.accept()
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(sock, memory), daemon=True).start()


def _answer(sock: socket.socket, memory: memoryview) -> None:
    with contextlib.suppress(OSError), sock:
        while request := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
            what, at, count = _REQUEST.unpack(request)
            part = memory[at : at + count]
            if what == _ECHO:
                sock.sendall(request)
            elif what == _READ:
                for start in range(0, count, PIECE_BYTES):
                    sock.sendall(part[start : start + PIECE_BYTES])
            else:
                while part:
                    part = part[sock.recv_into(part[:PIECE_BYTES]) :]
                sock.sendall(b"!")


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    os._exit(0)
