"""One connection to another node, from the connect to its answer to our hello.

Promises:  1. dial() ends by its deadline, with a connected socket on which nothing is left to be
              read, or with an exception and no descriptor;
           2. nothing is handed on that has not proved the cluster's token and said of itself what
              the caller expects (docs/protocol.md).
Looking up a host's name is the system's, and keeps its own time: members that are to be found
quickly say addresses of digits.
Thread rule: from any thread.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from kvpool import wire, wire_client
from kvpool.address import TcpAddress, set_up_tcp
from kvpool.wire_proof import PeerExchange, is_same

WEIGHT_MAX = 256


@dataclass(frozen=True, slots=True)
class Own:
    """Who this node is to the others. token: of the cluster; None: the cluster is of this host.
    version: of kvpool."""

    cluster: str
    node: bytes
    incarnation: int
    token: str | None = field(default=None, repr=False)
    weight: int = 1
    version: str = ""


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a node says of itself when it answers a peer."""

    node: bytes
    incarnation: int
    weight: int
    is_draining: bool
    version: str
    ucx: bytes = field(default=b"", repr=False)  # of its memory; empty: none that others may read


def dial(
    address: TcpAddress,
    own: Own,
    tenant: str,
    deadline: float,
    *,
    to: bytes | None = None,
    wants_ucx: bool = False,
) -> tuple[socket.socket, PeerFacts]:
    """A blocking socket that speaks frames from here on, and who is at its other end.

    to: the node that is meant; None: whoever is there. wants_ucx: this node can read out of the
    other's memory. Raises RefusedByPeer, WireError, OSError.
    """
    sock = _connected(address, deadline)
    try:
        facts = _greeted(sock, own, tenant, _Meant(to, wants_ucx), deadline)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock, facts


def _connected(address: TcpAddress, deadline: float) -> socket.socket:
    """At the first of its host's addresses that answers; all of them have one deadline."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failed: OSError = TimeoutError("no address of this host answered in time")
    for family, kind, protocol, _, where in found:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_s)
            sock.connect(where)
            set_up_tcp(sock)
        except OSError as error:
            sock.close()
            failed = error
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise failed


@dataclass(frozen=True, slots=True)
class _Meant:
    to: bytes | None
    wants_ucx: bool


def _greeted(
    sock: socket.socket, own: Own, tenant: str, meant: _Meant, deadline: float
) -> PeerFacts:
    to = meant.to
    said: wire.Map = {
        "kind": "peer",
        "cluster": own.cluster,
        "node": own.node,
        "incarnation": own.incarnation,
        "tenant": tenant,
        "pid": os.getpid(),
    }
    if to is not None:
        said["to"] = to
    if meant.wants_ucx:
        said["ucx"] = True
    if own.token is None:
        return _facts_of(wire_client.ask(sock, said, deadline), to)
    said["nonce"] = secrets.token_bytes(wire.NONCE_BYTES)
    challenge = wire_client.ask(sock, said, deadline).get("challenge")
    if not isinstance(challenge, bytes) or len(challenge) != wire.NONCE_BYTES:
        raise wire.WireError("the node's answer lacks the challenge")
    hello = wire.Hello(
        "peer",
        None,
        name="",
        pid=os.getpid(),
        tenant=tenant,
        nonce=said["nonce"],
        cluster=own.cluster,
        node=own.node,
        incarnation=own.incarnation,
        to=to,
    )
    exchange = PeerExchange(hello, challenge)
    answer = wire_client.ask(sock, {"proof": exchange.peer_proof(own.token)}, deadline)
    facts = _facts_of(answer, to)
    expected = exchange.node_proof(own.token, facts.node, facts.incarnation, facts.ucx)
    proof = answer.get("proof")
    if not is_same(expected, proof if isinstance(proof, bytes) else None):
        raise wire.RefusedByPeer(
            "impostor", "what answers there does not have the token of the cluster itself"
        )
    return facts


def _facts_of(answer: wire.Map, to: bytes | None) -> PeerFacts:
    node, version = answer.get("node"), answer.get("version")
    if not isinstance(node, bytes) or len(node) != wire.NODE_ID_BYTES:
        raise wire.WireError("the node's answer lacks its id: it is no member of a cluster")
    if to is not None and node != to:
        raise wire.RefusedByPeer("node", f"another node answers there: {node.hex()}")
    return PeerFacts(
        node,
        _count(answer, "incarnation", wire.COUNTER_MAX),
        _count(answer, "weight", WEIGHT_MAX),
        answer.get("draining") is True,
        version if isinstance(version, str) else "",
        _ucx(answer),
    )


def _ucx(answer: wire.Map) -> bytes:
    value = answer.get("ucx", b"")
    if not isinstance(value, bytes) or len(value) > wire.UCX_BYTES_MAX:
        raise wire.WireError("what the node says of its memory is none, or too long")
    return value


def _count(answer: wire.Map, name: str, most: int) -> int:
    value = answer.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise wire.WireError(f"the node's answer has no {name} of 1..{most}")
    return value
