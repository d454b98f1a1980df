"""A client of a node from docs/protocol.md and docs/formats.md; it shares no code with kvpool.

Its loads and stores come in no order that a machine would have to keep: enough for a test in which
nobody else works at the same moment, and for nothing else.
"""

import hashlib
import hmac
import mmap
import os
import socket
import struct
import time
from typing import Any, NamedTuple

import msgpack

WAIT_S = 10.0
MASK = (1 << 64) - 1
HEAD = struct.Struct("<6sHI")

INCARNATIONS = 4096  # offsets in the index
IN_USE, HAZARDS, ROWS_IN_USE, TRAFFIC = 4096, 4160, 6208, 6272  # in the control memory
CLAIMED, TOUCHES, LANES = 22_656, 22_728, 221_184
ASKED, STAGED, TAKEN, ANSWERED, DONE, MISS, REFUSED = 0, 128, 192, 256, 272, 280, 288  # in a lane
NODE_POLLS, STATUS = 264, 320
PUT, GET = 1, 2


def exactly(sock: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        assert part, f"closed after {parts!r}"
        parts += part
    return parts


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(path)
    return sock


def hello(sock: socket.socket, **fields: Any) -> tuple[dict[str, Any], list[int]]:
    """The answer, which must say yes, and the descriptors that came with its first byte."""
    said = msgpack.packb(fields)
    sock.sendall(HEAD.pack(b"kvpool", 2, len(said)) + said)
    first, fds, _, _ = socket.recv_fds(sock, 1, 20)
    magic, version, length = HEAD.unpack(first + exactly(sock, HEAD.size - 1))
    answer = msgpack.unpackb(exactly(sock, length))
    assert (magic, version, answer["ok"]) == (b"kvpool", 2, True), answer
    return answer, list(fds)


class Proving:
    """The page's "Proof of a token": what follows from a token and what both sides have said."""

    def __init__(self, token: bytes, nonce: bytes, challenge: bytes, tenant: bytes) -> None:
        said = nonce + challenge + tenant
        self.client_proof, self.node_proof, self.key = (
            hmac.new(token, label + said, hashlib.sha256).digest()
            for label in (b"kvpool client 2", b"kvpool node 2", b"kvpool session 2")
        )

    def signature(self, kind: str, client: bytes, counter: int) -> bytes:
        said = kind.encode("ascii") + client + struct.pack("<Q", counter)
        return hmac.new(self.key, said, hashlib.sha256).digest()


class Control:
    """The control connection, with a proof if there is a token."""

    def __init__(self, path: str, token: str = "", tenant: str = "") -> None:
        self.sock = connected(path)
        self.counter = 0
        self.proving: Proving | None = None
        if not token:
            self.facts = hello(self.sock, kind="control")[0]
        else:
            nonce = os.urandom(32)
            answer, _ = hello(self.sock, kind="control", nonce=nonce, tenant=tenant)
            said = (nonce, answer["challenge"], tenant.encode())
            self.proving = Proving(token.encode(), *said)
            self.facts = hello(self.sock, proof=self.proving.client_proof)[0]
            assert self.facts["proof"] == self.proving.node_proof
        self.client = self.facts["client"]

    def hello(self, kind: str) -> dict[str, Any]:
        """Of one more connection of this client."""
        said = {"kind": kind, "client": self.client}
        if self.proving is None:
            return said
        self.counter += 1
        mac = self.proving.signature(kind, self.client, self.counter)
        return {**said, "counter": self.counter, "mac": mac}

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        said = msgpack.packb({"id": 1, "op": op, **fields})
        self.sock.sendall(struct.pack("<I", len(said)) + said)
        answer = msgpack.unpackb(exactly(self.sock, struct.unpack("<I", exactly(self.sock, 4))[0]))
        assert answer["ok"], answer
        return dict(answer)


class Record(NamedTuple):
    number: int
    generation: int
    offset: int
    length: int
    sum: bytes
    tier: int


class SharedMemory:
    """What comes with the answer to an shm hello, mapped."""

    def __init__(self, path: str, control: Control) -> None:
        self.sock = connected(path)
        self.facts, fds = hello(self.sock, **control.hello("shm"))
        assert len(fds) == 4 + self.facts["lanes"]
        both = mmap.PROT_READ | mmap.PROT_WRITE
        self.arena = self._map(fds[0], self.facts["arena_bytes"], mmap.PROT_READ)
        self.index = self._map(fds[1], self.facts["index_bytes"], mmap.PROT_READ)
        self.control = self._map(fds[2], os.fstat(fds[2]).st_size, both)
        self.staging = self._map(fds[3], self.facts["staging_bytes"], both)
        self.bells = fds[4:]

    @staticmethod
    def _map(fd: int, length: int, rights: int) -> mmap.mmap:
        assert os.fstat(fd).st_size == length
        mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, rights)
        os.close(fd)
        return mapped

    def close(self) -> None:
        for fd in self.bells:
            os.close(fd)
        self.sock.close()

    def load(self, memory: mmap.mmap, offset: int) -> int:
        return int(struct.unpack_from("<Q", memory, offset)[0])

    def store(self, offset: int, value: int) -> None:
        """Into the control memory."""
        struct.pack_into("<Q", self.control, offset, value)

    def find(self, number: int, key: bytes) -> Record | None:
        """Reading a block, up to the copy."""
        magic, version, _, _, records, tables, _, salt, root = struct.unpack_from(
            "<8s8Q", self.index
        )
        assert (magic, version) == (b"KPVIDX1\0", 2)
        incarnation = self.load(self.index, INCARNATIONS + 8 * number)
        low, high = struct.unpack("<2Q", key)
        hashed = mix(low ^ mix(high ^ salt) ^ incarnation)
        buckets = 1 << (root & 63)
        for probe in range(64):
            bucket = tables + 64 * (buckets + (hashed + probe) % buckets)
            passed, *hints = struct.unpack_from("<8Q", self.index, bucket)
            for hint in hints:
                if hint & 0xFFFF_FFFF and hint >> 32 == hashed >> 36:
                    found = self.record(records, (hint & 0xFFFF_FFFF) - 1, key, incarnation)
                    if found is not None:
                        return found
            if not passed:
                break
        return None

    def record(self, records: int, number: int, key: bytes, incarnation: int) -> Record | None:
        words = struct.unpack_from("<Q16s2Q16sQ", self.index, records + 64 * number)
        generation, named, both, offset, checksum, tier = words
        if not generation or named != key or both >> 32 != incarnation:
            return None
        return Record(number, generation, offset, both & 0xFFFF_FFFF, checksum, tier)

    def payload(self, record: Record) -> bytes:
        return self.arena[record.offset : record.offset + record.length]

    def pin(self, word: int, record: Record) -> None:
        assert self.load(self.control, IN_USE) == 0
        self.store(IN_USE, 1 << word)
        self.store(HAZARDS + 8 * word, record.offset + 1)

    def unpin(self, word: int) -> None:
        self.store(HAZARDS + 8 * word, 0)
        self.store(IN_USE, 0)

    def touch(self, record: Record) -> None:
        at = self.load(self.control, CLAIMED)
        entry = TOUCHES + 24 * (at % 8192)
        struct.pack_into("<Ixxxxd", self.control, entry + 8, record.number, time.monotonic())
        self.store(entry, record.generation)
        self.store(CLAIMED, at + 1)

    def count(self, row: int, space: int, at: int, more: int) -> None:
        """`at`: offset of a word in the row, which is this namespace's from now on."""
        start = TRAFFIC + 256 * row
        self.store(start, space + 1)
        self.store(ROWS_IN_USE, 1 << row)
        self.store(start + at, self.load(self.control, start + at) + more)


class Lane:
    """One lane with a window of its own, whose ring holds everything."""

    def __init__(self, memory: SharedMemory, number: int, window: int, length: int) -> None:
        self.memory, self.bell = memory, memory.bells[number]
        self.at = LANES + 4096 * number
        self.window, self.length = window, length

    def word(self, field: int) -> int:
        return self.memory.load(self.memory.control, self.at + field)

    def ask(self, op: int, space: int, keys: list[bytes], payloads: list[bytes]) -> int:
        """Asks and waits for the answer; where the ring begins."""
        packed = b"".join(keys)
        ring = self.window + rounded(len(packed))
        self.memory.staging[self.window : self.window + len(packed)] = packed
        for number, payload in enumerate(payloads):
            start = ring + number * rounded(len(payload))
            self.memory.staging[start : start + len(payload)] = payload
        staged = sum(rounded(len(payload)) for payload in payloads)
        asked = self.word(ASKED) + 1
        fields = (op, space, len(keys), 0, 0, 5_000_000, 0, self.window, self.length)
        for number, value in enumerate(fields, 1):
            self.memory.store(self.at + 8 * number, value)
        self.memory.store(self.at + STAGED, staged)
        self.memory.store(self.at + ASKED, asked)
        if not self.word(NODE_POLLS):
            os.write(self.bell, struct.pack("<Q", 1))
        deadline = time.monotonic() + WAIT_S
        while self.word(ANSWERED) != asked:
            assert time.monotonic() < deadline, "no answer"
        assert self.word(REFUSED) == 0
        return ring

    def put(self, space: int, keys: list[bytes], payloads: list[bytes]) -> list[int]:
        self.ask(PUT, space, keys, payloads)
        start = self.at + STATUS
        return list(self.memory.control[start : start + len(keys)])

    def get(self, space: int, keys: list[bytes], block_bytes: int) -> tuple[list[bytes], int]:
        """What was delivered, and why the next block was not."""
        ring = self.ask(GET, space, keys, [])
        starts = [ring + n * rounded(block_bytes) for n in range(self.word(DONE))]
        return [self.memory.staging[at : at + block_bytes] for at in starts], self.word(MISS)


def rounded(count: int) -> int:
    return (count + 63) // 64 * 64


def mix(x: int) -> int:
    for _ in range(2):
        x ^= x >> 32
        x = x * 0xD6E8FEB86659FD93 & MASK
    return x ^ x >> 32
