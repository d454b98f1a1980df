"""How both sides show that they have a token, without ever sending it (docs/protocol.md). Pure.

Promises:  1. a proof is good for one pair of nonces: heard by others, it is worth nothing;
           2. a client's proof is no node's, and neither is a session's key or a peer's: each has a
              label;
           3. a counter is taken once. Connections that are made at the same time may come in any
              order, so what is kept is which of the newest WINDOW were seen, not only the last.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from dataclasses import dataclass, field

from kvpool import wire

WINDOW = 1024  # counters behind the newest that may still come; far more than are on their way
_COUNTER = struct.Struct("<Q")
_LIFE = struct.Struct("<16sQ")  # node id, incarnation
_LENGTH = struct.Struct("<H")
_ANY_NODE = bytes(wire.NODE_ID_BYTES)  # of a hello that names nobody


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was said before the proof: the nonce of either side, and which tenant is meant."""

    nonce: bytes
    challenge: bytes
    tenant: str

    def client_proof(self, token: str) -> bytes:
        return self._mac(token, b"kvpool client 2")

    def node_proof(self, token: str) -> bytes:
        return self._mac(token, b"kvpool node 2")

    def session_key(self, token: str) -> bytes:
        """Signs the hellos of the client's other connections; never sent."""
        return self._mac(token, b"kvpool session 2")

    def _mac(self, token: str, label: bytes) -> bytes:
        said = label + self.nonce + self.challenge + self.tenant.encode()
        return hmac.digest(token.encode(), said, "sha256")


@dataclass(frozen=True, slots=True)
class PeerExchange:
    """What one node said to another before the proof, and the answer's challenge.

    All of the hello that matters is in either proof: who heard one cannot say it as another node,
    of another cluster or tenant, or to another node.
    """

    hello: wire.Hello
    challenge: bytes

    def peer_proof(self, token: str) -> bytes:
        """Of the node that connects."""
        return self._mac(token, b"kvpool peer 2", b"")

    def node_proof(self, token: str, node: bytes, incarnation: int, ucx: bytes = b"") -> bytes:
        """Of the node that answers, and says which one it is. ucx: what it says of its memory, and
        UCX takes apart without looking where it ends."""
        answered = _LIFE.pack(node, incarnation)
        if not ucx:
            return self._mac(token, b"kvpool peer node 2", answered)
        return self._mac(token, b"kvpool peer node ucx 2", answered + hashlib.sha256(ucx).digest())

    def _mac(self, token: str, label: bytes, answered: bytes) -> bytes:
        hello = self.hello
        assert hello.nonce is not None  # else there is nothing to prove
        assert hello.node is not None  # of a peer
        cluster = hello.cluster.encode()
        who = _LIFE.pack(hello.node, hello.incarnation) + (hello.to or _ANY_NODE)
        said = label + hello.nonce + self.challenge + who + _LENGTH.pack(len(cluster)) + cluster
        said += hello.tenant.encode() + answered  # the one part of a length that is not told
        return hmac.digest(token.encode(), said, "sha256")


def hello_mac(key: bytes, kind: str, client: bytes, counter: int) -> bytes:
    return hmac.digest(key, kind.encode() + client + _COUNTER.pack(counter), "sha256")


def is_same(one: bytes, other: bytes | None) -> bool:
    """Compared in constant time."""
    return other is not None and hmac.compare_digest(one, other)


@dataclass(slots=True)
class Signer:
    """A client's side of a session. From any thread: counting is one step of the interpreter."""

    key: bytes = field(repr=False)
    _counters: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def signed(self, kind: wire.Kind, client: bytes) -> wire.Map:
        """The fields that make a hello this client's."""
        counter = next(self._counters)
        return {"counter": counter, "mac": hello_mac(self.key, kind, client, counter)}


@dataclass(slots=True)
class Verifier:
    """The node's side of a session. Not thread-safe."""

    key: bytes = field(repr=False)
    _newest: int = 0
    _seen: int = 0  # bit n: whether the counter `_newest` - n came

    def check(self, hello: wire.Hello) -> str | None:
        """Why this hello is not the client's: no_token, bad_token or replayed; None: it is."""
        if hello.mac is None or hello.client is None:
            return "no_token"
        if not is_same(hello_mac(self.key, hello.kind, hello.client, hello.counter), hello.mac):
            return "bad_token"
        return None if self._is_new(hello.counter) else "replayed"

    def _is_new(self, counter: int) -> bool:
        ahead = counter - self._newest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._newest = counter
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True
