"""What both sides say before a connection carries blocks, and on control connections.

A hello and its answer are [b"kvpool", u16 version, u32 length, msgpack map]; a control message is
[u32 length, msgpack map]; integers are little-endian (docs/protocol.md). Pure: wire_node moves the
bytes for a node (asyncio), wire_client for a client (until a deadline).

Promises:  1. bytes from the other side give a map within the bounds below, or a WireError that says
              what is wrong with them; never another exception, never more memory than the bounds;
           2. the twelve bytes of a head and the form of a refusal are the same in every version, so
              two versions can tell each other which they speak.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

VERSION = 2  # the newest protocol that is spoken here
VERSION_MIN = 2
HELLO_BYTES_MAX = 64 << 10
MESSAGE_BYTES_MAX = 1 << 20
HEAD_BYTES = 12
LENGTH_BYTES = 4
HANDSHAKE_S = 5.0  # from the connection to the answer, for both sides
CLIENT_ID_BYTES = 16
NAME_BYTES_MAX = 256
TENANT_BYTES_MAX = 64
CLUSTER_BYTES_MAX = 64
NODE_ID_BYTES = 16
NONCE_BYTES = 32  # what each side adds to a proof, so that none is good for a second time
PROOF_BYTES = 32
UCX_BYTES_MAX = 24 << 10  # what a node says of memory that peers may read
COUNTER_MAX = (1 << 63) - 1
DESCRIPTORS_MAX = 32  # of one answer
DEPTH_MAX = 8
_ITEMS_MAX = 4096  # of one list or map

_MAGIC = b"kvpool"
_HEAD = struct.Struct("<6sHI")
_LENGTH = struct.Struct("<I")

Map = dict[str, Any]
Kind = Literal["control", "stream", "shm", "peer"]
KINDS: tuple[Kind, ...] = ("control", "stream", "shm", "peer")


class WireError(Exception):
    """The other side does not speak the protocol, or went away in the midst of a message."""


class RefusedByPeer(Exception):
    """A whole answer that says no. `code` is for programs, the message for people.

    `reason` is what the node counts, and finer than what the peer is told.
    """

    def __init__(self, code: str, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = code if reason is None else reason
        self.tenant = ""  # whose limit it was, for the node's books


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects, and what for. `client` names a control connection that is already there.

    nonce: of a control connection or a peer that will prove that it has a token. counter, mac: of
    another connection of a client that has proved it. cluster, node, incarnation: of a peer, which
    is another node; to: the node that it means, where it knows; wants_ucx: whether it reads by
    itself out of memory that the other one tells of.
    """

    kind: Kind
    client: bytes | None
    name: str
    pid: int
    tenant: str = ""
    nonce: bytes | None = None
    counter: int = 0
    mac: bytes | None = None
    cluster: str = ""
    node: bytes | None = None
    incarnation: int = 0
    to: bytes | None = None
    wants_ucx: bool = False


def pack_hello(fields: Mapping[str, Any], version: int = VERSION) -> bytes:
    """A hello, or the answer to one."""
    body = _packed(fields)
    assert len(body) <= HELLO_BYTES_MAX  # what this side says is bounded by what it checks
    return _HEAD.pack(_MAGIC, version, len(body)) + body


def pack_message(fields: Mapping[str, Any]) -> bytes:
    """A request or an answer of a control connection. Raises WireError if it is too large."""
    body = _packed(fields)
    if len(body) > MESSAGE_BYTES_MAX:
        raise WireError(f"a message of {len(body)} bytes; at most {MESSAGE_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def refusal(code: str, message: str) -> Map:
    """The fields of an answer that says no; they are the same in every version."""
    return {"ok": False, "error": code, "message": message, "versions": [VERSION_MIN, VERSION]}


def read_head(head: bytes) -> tuple[int, int]:
    """Version of the protocol and length of the map that follows."""
    magic, version, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise WireError(f"begins with {magic!r}; a hello of kvpool begins with {_MAGIC!r}")
    if length > HELLO_BYTES_MAX:
        raise WireError(f"a hello of {length} bytes; at most {HELLO_BYTES_MAX}")
    return int(version), int(length)


def read_length(head: bytes) -> int:
    """Length of the control message that follows."""
    (length,) = _LENGTH.unpack(head)
    if length > MESSAGE_BYTES_MAX:
        raise WireError(f"a message of {length} bytes; at most {MESSAGE_BYTES_MAX}")
    return int(length)


def read_map(body: bytes) -> Map:
    """The map that the bytes hold: keys of text, no extension types, no key twice."""
    try:
        content = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_map_of,
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            max_ext_len=0,
        )
    except Exception as error:  # a dozen kinds, all of them "not msgpack as we speak it"
        raise WireError(
            f"not a msgpack map within bounds: {error or type(error).__name__}"
        ) from None
    if not isinstance(content, dict):
        raise WireError(f"a message is a map, not {type(content).__name__}")
    _check_depth(content)
    return content


def read_hello(version: int, body: bytes) -> Hello:
    """A hello of this version; fields that are not known here are left alone."""
    if not VERSION_MIN <= version <= VERSION:
        raise RefusedByPeer("version", other_version(version))
    fields = read_map(body)
    kind = fields.get("kind")
    if kind not in KINDS:
        raise WireError(f"kind is {_shown(kind)}; it can be {', '.join(KINDS)}")
    client = fields.get("client")
    _check_client(kind, client)
    if kind == "peer":
        return _peer_hello(fields)
    return Hello(
        kind,
        client,
        name=_text(fields, "name", NAME_BYTES_MAX),
        pid=_number(fields, "pid", (1 << 32) - 1),
        tenant=_text(fields, "tenant", TENANT_BYTES_MAX),
        nonce=_bytes(fields, "nonce", NONCE_BYTES),
        counter=_number(fields, "counter", COUNTER_MAX),
        mac=_bytes(fields, "mac", PROOF_BYTES),
    )


def _check_client(kind: Kind, client: object) -> None:
    if kind == "control":
        if client is not None:
            raise WireError("a control connection gets its client id, it does not bring one")
    elif kind == "peer":
        if client is not None:
            raise WireError("a peer is a node and no client's connection: it brings no client id")
    elif not isinstance(client, bytes) or len(client) != CLIENT_ID_BYTES:
        raise WireError(f"client is {_shown(client)}; it must be {CLIENT_ID_BYTES} bytes")


def _peer_hello(fields: Map) -> Hello:
    """Who it is and of which cluster has to be there; what only others bring is not looked at."""
    cluster = _text(fields, "cluster", CLUSTER_BYTES_MAX)
    node = _bytes(fields, "node", NODE_ID_BYTES)
    incarnation = _number(fields, "incarnation", COUNTER_MAX)
    if not cluster or node is None or not incarnation:
        missing = "cluster" if not cluster else "node" if node is None else "incarnation"
        raise WireError(f"{missing} is missing: a peer says its cluster, node and incarnation")
    return Hello(
        "peer",
        None,
        name=_text(fields, "name", NAME_BYTES_MAX),
        pid=_number(fields, "pid", (1 << 32) - 1),
        tenant=_text(fields, "tenant", TENANT_BYTES_MAX),
        nonce=_bytes(fields, "nonce", NONCE_BYTES),
        cluster=cluster,
        node=node,
        incarnation=incarnation,
        to=_bytes(fields, "to", NODE_ID_BYTES),
        wants_ucx=fields.get("ucx") is True,
    )


def read_proof(version: int, body: bytes) -> bytes:
    """What follows a challenge."""
    if version != VERSION:
        raise WireError(f"a proof in protocol {version} behind a hello in {VERSION}")
    proof = _bytes(read_map(body), "proof", PROOF_BYTES)
    if proof is None:
        raise WireError("proof is missing")
    return proof


def read_answer(version: int, body: bytes) -> Map:
    """The fields of an answer that says yes. Raises RefusedByPeer for one that says no."""
    fields = read_map(body)
    if fields.get("ok") is True:
        if version != VERSION:
            raise WireError(f"the node answers in protocol {version}; this client speaks {VERSION}")
        return fields
    code, message = fields.get("error"), fields.get("message")
    if fields.get("ok") is not False or not isinstance(code, str) or not isinstance(message, str):
        raise WireError("the answer says neither yes nor no")
    raise RefusedByPeer(code, message)


def other_version(version: int) -> str:
    """What a node says to a client of a protocol that it does not speak."""
    spoken = str(VERSION) if VERSION == VERSION_MIN else f"{VERSION_MIN}..{VERSION}"
    older = "node" if version > VERSION else "client"
    return (
        f"the client speaks protocol {version}; this node speaks {spoken}: "
        f"upgrade kvpool on the {older}'s side"
    )


def _packed(fields: Mapping[str, Any]) -> bytes:
    return bytes(msgpack.packb(dict(fields), use_bin_type=True))


def _map_of(pairs: list[tuple[Any, Any]]) -> Map:
    """msgpack makes a dict of the pairs by itself, but would let the last of two equal keys win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    if not all(isinstance(key, str) for key in found):
        raise ValueError("a key is not text")
    return found


def _check_depth(content: Map) -> None:
    level: list[Any] = [content]
    for _ in range(DEPTH_MAX):
        inside: list[Any] = []
        for each in level:
            inside.extend(each.values() if isinstance(each, dict) else each)
        level = [each for each in inside if isinstance(each, dict | list)]
        if not level:
            return
    raise WireError(f"maps and lists inside each other; at most {DEPTH_MAX} deep")


def _text(fields: Map, name: str, bytes_max: int) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value.encode()) > bytes_max:
        raise WireError(f"{name} is {_shown(value)}; it must be text of {bytes_max} bytes at most")
    return value


def _number(fields: Map, name: str, most: int) -> int:
    value = fields.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise WireError(f"{name} is {_shown(value)}; it must be a number of 0..{most}")
    return value


def _bytes(fields: Map, name: str, count: int) -> bytes | None:
    value = fields.get(name)
    if value is not None and (not isinstance(value, bytes) or len(value) != count):
        raise WireError(f"{name} must be {count} bytes")
    return value


def _shown(value: object) -> str:
    """Short: what a stranger sends goes into an answer and a log line."""
    text = repr(value)
    return text if len(text) <= 64 else f"{type(value).__name__} of {len(text)} characters"
