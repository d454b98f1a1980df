"""The other nodes of the cluster, as they connect to this one.

A peer is a node; its connections to one tenant have one number in that tenant's server, as those of
a client have. It has no control connection: it is there as long as any of its connections.

Promises:  1. nobody becomes a peer who has not proved the cluster's token; where there is none,
              nobody from another host, and nobody where this node asks anybody else for a token;
           2. a peer has STREAMS_PER_PEER_MAX connections to a tenant at most, and all peers take
              from the same limit of the node as clients do;
           3. a node that has begun again takes the place of its former life, never the other way
              round.
Thread rule: the event loop's.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool import wire, wire_node
from kvpool.cluster.peer_link import Own
from kvpool.serve_clients import Clients, InThread
from kvpool.serve_log import EventLog
from kvpool.tenants.identity import Claim
from kvpool.tenants.plans import DEFAULT_TENANT
from kvpool.tenants.tenant import Client, Peer, Tenant
from kvpool.wire_proof import PeerExchange, is_same

PEERS_MAX = 4096  # with a number, of all tenants together
STREAMS_PER_PEER_MAX = 16  # a node keeps 4; a few of before may still be on their way out
_SWEPT_FROM = 64  # peers: below it nobody looks who has gone

_Key = tuple[str, bytes]  # tenant, node


@dataclass(slots=True)
class _Known:
    """A peer of a tenant. making: connections that are being handed on."""

    client: Client
    incarnation: int
    making: int = 0


class Peers:
    """Who of the cluster is connected. is_draining: told to those who connect."""

    def __init__(
        self,
        own: Own,
        tenants: Mapping[str, Tenant],
        clients: Clients,
        in_thread: InThread,
        log: EventLog,
        *,
        is_open: bool,
        met: Callable[[bytes, int], None] = lambda node, incarnation: None,
        lanes: Mapping[str, bytes] | None = None,
    ) -> None:
        """is_open: a cluster without a token may be joined by whoever reaches this node. met: told
        in which life a node is, in a thread. lanes: what is told of the memory of each tenant, to
        nodes that read there."""
        self.own = own
        self.is_draining = False
        self._tenants = tenants
        self._clients = clients
        self._in_thread = in_thread
        self._log = log
        self._is_open = is_open
        self._met = met
        self._lanes = lanes or {}
        self._known: dict[_Key, _Known] = {}
        self._sweep_at = _SWEPT_FROM

    def __len__(self) -> int:
        return len(self._known)

    def numbers(self) -> dict[tuple[str, bytes], int]:
        """(tenant, node) -> number in the tenant's server. From any thread."""
        return {key: each.client.number for key, each in list(self._known.items())}

    async def begin(
        self, sock: socket.socket, hello: wire.Hello, peer: Peer, heard: Callable[[], None]
    ) -> None:
        """Hands the connection on. heard: called once the peer has proved who it is.

        Raises RefusedByPeer, WireError, OSError, KvpoolError.
        """
        ucx = self._lanes.get(hello.tenant or DEFAULT_TENANT, b"") if hello.wants_ucx else b""
        proof = await self._proved(sock, hello, ucx)
        heard()
        tenant = self._meant(hello)
        await self._sweep()
        known, former, is_new = self._known_as(hello, peer, tenant)
        known.making += 1
        try:
            if is_new:
                await self._in_thread(self._met, hello.node, hello.incarnation)
            if former is not None:
                await self._drop(former)
            self._clients.require_sources(known.client, 1, STREAMS_PER_PEER_MAX)
            told = {"ucx": ucx} if ucx else {}
            await wire_node.send(sock, wire.pack_hello({**self._facts(), **proof, **told}))
            assert hello.node is not None  # of a peer
            tenant.server.add_stream(
                known.client.number,
                sock.detach(),
                is_peer=True,
                node=hello.node,
                incarnation=hello.incarnation,
            )
        finally:
            known.making -= 1

    def _facts(self) -> wire.Map:
        return {
            "ok": True,
            "node": self.own.node,
            "incarnation": self.own.incarnation,
            "weight": self.own.weight,
            "draining": self.is_draining,
            "version": self.own.version,
        }

    async def _proved(self, sock: socket.socket, hello: wire.Hello, ucx: bytes) -> wire.Map:
        """This node's own proof, once the peer has given the right one."""
        own = self.own
        if hello.cluster != own.cluster:
            text = "this node is in another cluster than the one that was named"
            raise wire.RefusedByPeer("cluster", text)
        if own.token is None:
            self._require_open(hello)
            return {}
        if hello.nonce is None:
            text = "this cluster has a token: set [cluster] token_file to a file that holds it"
            raise wire.RefusedByPeer("token", text, "no_token")
        challenge = secrets.token_bytes(wire.NONCE_BYTES)
        await wire_node.send(sock, wire.pack_hello({"ok": True, "challenge": challenge}))
        proof = await wire_node.receive_proof(sock)
        exchange = PeerExchange(hello, challenge)
        if not is_same(exchange.peer_proof(own.token), proof):
            text = "this is not the token of the cluster: every member needs the same one"
            raise wire.RefusedByPeer("token", text, "bad_token")
        return {"proof": exchange.node_proof(own.token, own.node, own.incarnation, ucx)}

    def _require_open(self, hello: wire.Hello) -> None:
        if not self._is_open:
            text = "this node lets nobody in without a token, and has none for the cluster"
            raise wire.RefusedByPeer("token", f"{text}: set its [cluster] token_file", "no_token")
        if hello.nonce is not None:
            text = "this node has no token for the cluster: set its [cluster] token_file, or none"
            raise wire.RefusedByPeer("token", text)

    def _meant(self, hello: wire.Hello) -> Tenant:
        """Whose blocks the peer is about. It has proved the token: it may know what there is."""
        own = self.own
        if hello.node == own.node:
            text = (
                f"this node itself has the id {own.node.hex()}: an address of it stands where one"
                " of another should, or a state directory was copied"
            )
            raise wire.RefusedByPeer("node", text)
        if hello.to is not None and hello.to != own.node:
            text = f"another node is here now: {own.node.hex()}, not {hello.to.hex()}"
            raise wire.RefusedByPeer("node", text)
        tenant = self._tenants.get(hello.tenant or DEFAULT_TENANT)
        if tenant is None:
            named = hello.tenant or DEFAULT_TENANT
            there = ", ".join(list(self._tenants)[:8])
            text = f"there is no tenant {named!r} on this node; there are: {there}"
            raise wire.RefusedByPeer("tenant", text, "unknown_tenant")
        return tenant

    def _known_as(
        self, hello: wire.Hello, peer: Peer, tenant: Tenant
    ) -> tuple[_Known, _Known | None, bool]:
        """The peer, its former life, which is to be dropped, and whether it was not here before."""
        assert hello.node is not None  # of a peer
        key = tenant.name, hello.node
        former = self._known.get(key)
        if former is not None and former.incarnation > hello.incarnation:
            text = "a later life of this node was here already: this one's state directory is old"
            raise wire.RefusedByPeer("node", text)
        if former is not None and former.incarnation == hello.incarnation:
            return former, None, False
        if former is None and len(self._known) >= PEERS_MAX:
            raise wire.RefusedByPeer("full", f"{PEERS_MAX} nodes are connected, the limit")
        number = tenant.server.add_client()
        name = f"peer {hello.node.hex()[:8]}"
        client = Client(number, name, hello.pid, peer, tenant, is_admin=False, claim=Claim(None))
        made = self._known[key] = _Known(client, hello.incarnation)
        self._log.often(
            logging.INFO,
            "peer connected",
            node=hello.node.hex(),
            incarnation=hello.incarnation,
            peer=peer,
            tenant=tenant.name,
        )
        return made, former, True

    async def _sweep(self) -> None:
        """Drops those without a connection; now and then."""
        if len(self._known) < self._sweep_at:
            return
        gone = [key for key, each in self._known.items() if _is_gone(each)]
        swept = [self._known.pop(key) for key in gone]
        self._sweep_at = max(_SWEPT_FROM, min(2 * len(self._known), PEERS_MAX))
        for each in swept:
            await self._drop(each)

    async def _drop(self, known: _Known) -> None:
        tenant = known.client.tenant
        assert tenant is not None  # of every peer
        await self._in_thread(tenant.server.drop_client, known.client.number)


def _is_gone(known: _Known) -> bool:
    client = known.client
    assert client.tenant is not None  # of every peer
    return not known.making and not client.tenant.server.sources_of(client.number)
