"""What travels on a stream, packed by hand (docs/protocol.md), and connections that say it.

For tests of what no client of ours sends; shares no code with the core.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool import _core, wire, wire_client
from kvpool.address import parse_address
from kvpool.manifest import Manifest
from kvpool.wire_proof import Signer
from tests.served import WAIT_S

REQUEST_MAGIC, ANSWER_MAGIC, BLOCK_MAGIC = 0x5152564B, 0x4E41564B, 0x4C42564B
LOOKUP, GET, PUT, REMOVE, WAIT, ACQUIRE, RELEASE = range(1, 8)
HAS_PARENT = 1
REQUEST = struct.Struct("<IBBHQIIII")
ANSWER = struct.Struct("<IBBBBQIIQ")
BLOCK = struct.Struct("<IB3xQIIQQQQQ")  # without its check
CHECK = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    op: int
    space: int
    keys: Sequence[bytes] = ()
    id: int = 1
    flags: int = 0
    skip: int = 0
    deadline_ms: int = 1000
    count: int | None = None  # as many as there are keys
    magic: int = REQUEST_MAGIC
    version: int = 1

    def pack(self) -> bytes:
        count = len(self.keys) - (self.flags & HAS_PARENT) if self.count is None else self.count
        head = (self.magic, self.version, self.op, self.flags, self.id)
        return REQUEST.pack(
            *head, self.space, count & 0xFFFFFFFF, self.skip, self.deadline_ms
        ) + b"".join(self.keys)


@dataclass(frozen=True)
class Block:
    id: int
    index: int
    key: bytes
    payload: bytes = field(repr=False)
    size: int | None = None  # that of the payload
    sum: bytes | None = None
    generation: int = 0
    magic: int = BLOCK_MAGIC
    version: int = 1
    check: int | None = None

    def pack(self) -> bytes:
        low, high = struct.unpack("<QQ", self.key)
        sums = struct.unpack("<QQ", self.sum or _core.checksum(self.payload))
        size = len(self.payload) if self.size is None else self.size
        head = BLOCK.pack(
            self.magic, self.version, self.id, self.index, size, low, high, self.generation, *sums
        )
        check = CHECK.unpack(_core.checksum(head)[:8])[0] if self.check is None else self.check
        return head + CHECK.pack(check) + self.payload


def put(
    space: int,
    keys: Sequence[bytes],
    payloads: Sequence[bytes],
    id: int = 1,
    deadline_ms: int = 1000,
) -> list[bytes]:
    """The frames of a whole put, one element each."""
    blocks = [
        Block(id, index, key, payload)
        for index, (key, payload) in enumerate(zip(keys, payloads, strict=True))
    ]
    return [
        Request(PUT, space, keys, id, deadline_ms=deadline_ms).pack(),
        *(each.pack() for each in blocks),
    ]


@dataclass(frozen=True)
class Answer:
    op: int
    miss: int
    failed: int
    id: int
    count: int
    body: bytes


class RawClient:
    """A client's control connection, and as many streams as it asks for.

    A client has so many streams in its life; then this one connects as a new client.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self._address = parse_address(address)
        self._token = token
        self._signer: Signer | None = None
        self._connect()

    def _connect(self) -> None:
        self.control = self._address.open(WAIT_S)
        hello = self.hello("control")
        if self._token is None:
            self.facts = wire_client.ask(self.control, hello, deadline())
        else:
            self.facts, self._signer = wire_client.ask_with_proof(
                self.control, hello, self._token, deadline()
            )
        self._messages = wire_client.Messages(self.control)
        self._streams_left = int(self.facts["streams_max"])

    def hello(self, kind: wire.Kind, **more: Any) -> wire.Map:
        if self._signer is not None and kind != "control":
            more |= self._signer.signed(kind, self.facts["client"])
        return {"kind": kind, "name": "raw", "pid": os.getpid(), **more}

    def connected(self) -> socket.socket:
        """A connection that has said nothing yet."""
        return self._address.open(WAIT_S)

    def stream(self) -> "Stream":
        if self._streams_left == 0:
            self.close()
            self._connect()
        self._streams_left -= 1
        sock = self.connected()
        wire_client.ask(sock, self.hello("stream", client=self.facts["client"]), deadline())
        return Stream(sock)

    def shm(self) -> tuple[socket.socket, list[int], wire.Map]:
        """The socket, and what came by it: arena, index, control, staging, bells."""
        sock = self.connected()
        hello = self.hello("shm", client=self.facts["client"])
        facts, fds = wire_client.ask_with_descriptors(sock, hello, deadline())
        return sock, fds, facts

    def ask(self, op: str, **fields: Any) -> wire.Map:
        message = wire.pack_message({"id": 1, "op": op, **fields})
        wire_client.send_until(self.control, message, deadline())
        return self._messages.next(deadline())

    def space(self, manifest: Manifest) -> int:
        answer = self.ask("open_namespace", manifest=manifest.pack())
        assert answer["ok"], answer
        return int(answer["number"])

    def close(self) -> None:
        self.control.close()


class Stream:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.settimeout(WAIT_S)

    def send(self, data: bytes) -> None:
        """As much as it takes: it may be closed before it was sent all."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def answer(self) -> Answer:
        """The next one; for requests that deliver no block."""
        magic, version, op, miss, failed, id, count, size, _ = ANSWER.unpack(
            self.receive(ANSWER.size)
        )
        assert (magic, version) == (ANSWER_MAGIC, 1)
        return Answer(op, miss, failed, id, count, self.receive(size))

    def receive(self, count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            part = self.socket.recv(count - len(parts))
            assert part, f"closed after {len(parts)} of {count} bytes"
            parts += part
        return parts

    def rest(self) -> bytes:
        """All until it is closed. Fails if it is not, in time."""
        everything = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while part := self.socket.recv(1 << 16):
                everything += part
        return bytes(everything)

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def raw_client(address: str) -> Iterator[RawClient]:
    client = RawClient(address)
    try:
        yield client
    finally:
        client.close()


def deadline() -> float:
    return time.monotonic() + WAIT_S
