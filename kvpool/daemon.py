"""The nodes of all tenants as a service: handshakes, clients and requests, until a clean end.

The event loop, in the main thread, moves no payload: a connection that is to carry blocks is handed
to the server of its tenant when its hello was answered, and is never seen here again.

Promises:  1. a connection that says garbage, or nothing, is closed with a reason and disturbs
              nobody;
           2. a client is all of its connections: when the control one ends, the others do;
           3. run() returns `drain_s` after it was told to stop, plus what the core takes to close;
           4. whoever is told no is counted once, by the reason that was given or a finer one.
Thread rule: the event loop's. Core calls that may block run in a few threads and release the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpool import wire, wire_node
from kvpool.address import host_and_port
from kvpool.cluster.joined import Joined
from kvpool.errors import KvpoolError
from kvpool.events.publisher import Publisher
from kvpool.manifest import BLOCK_BYTES_MAX
from kvpool.serve_clients import Clients, answers_of, serve_control
from kvpool.serve_control import Call, Operation, Refusals, Requests
from kvpool.serve_drain import drain_operations
from kvpool.serve_handshakes import Handshakes
from kvpool.serve_listen import Acceptor, Listeners
from kvpool.serve_log import EventLog
from kvpool.serve_observe import Observer
from kvpool.serve_peers import Peers
from kvpool.serve_plan import Plan
from kvpool.serve_reload import Reload, Replan
from kvpool.tenants.identity import Claim, Identities, Identity
from kvpool.tenants.plans import TenantPlan
from kvpool.tenants.sharing import Sharing
from kvpool.tenants.tenant import Client, Peer, Tenant
from kvpool.wire_proof import Exchange, Verifier

if TYPE_CHECKING:
    from kvpool.serve_http import Web  # loads a web server

QUICK_THREADS = 2
SLOW_THREADS = 4
STREAMS_PER_CLIENT_MAX = 96  # for blocks, and one for each wait() under way
_DRAIN_SHARE = 0.25  # of the time for ending; the rest is for writing what is not on the SSD yet
_LEAVE_SHARE = 0.25  # for telling the cluster
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Daemon:
    """Serves tenants to many clients. Their nodes and servers are closed when run() returns.

    tenants, refused, started (Unix time), log: for whoever watches; from any thread.
    """

    def __init__(
        self,
        plan: Plan,
        tenants: Mapping[str, Tenant],
        listeners: Listeners,
        log: EventLog,
        version: str,
        *,
        replan: Replan | None = None,
        web: Web | None = None,
        joined: Joined | None = None,
        events: Publisher | None = None,
    ) -> None:
        """replan: gives the plan of the configuration as it is now, for reload(). joined: this
        node's part of its cluster, if it is in one. events: what comes and goes, for others. Both
        are begun and closed with the daemon."""
        self.plan = plan
        self.tenants = tenants
        self.log = log
        self.version = version
        self.started = time.time()
        self.refusals = Refusals()
        self._listeners = listeners
        self.identities = self.identities_of(plan.tenants, plan)
        self._boot = secrets.token_bytes(16)  # tells one life of the daemon from the next
        self.clients = Clients(plan.clients_max, plan.server["max_sources"], tenants)
        self._handshakes = Handshakes()
        self.joined = joined
        self.peers = None if joined is None else self._peers(joined)
        self.events = events
        self._controls: dict[asyncio.Task[None], Client] = {}
        self._quick = ThreadPoolExecutor(QUICK_THREADS, "kvpool-quick")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, "kvpool-slow")
        self.sharing = Sharing(plan, tenants, log) if len(tenants) > 1 else None
        resize = None if self.sharing is None else self.sharing.resize
        self._requests = Requests(tenants, log, self.refusals, resize_budget=resize)
        self._reload = Reload(self, replan)
        self.add_operations(
            {"reload": Operation(self._reload.asked, needs_admin=True, is_slow=True)}
        )
        self.web = web
        self.is_ready = False
        self.observer = Observer(self)
        self.add_operations(self.observer.operations())
        self.add_operations(drain_operations(joined, log))

    @property
    def refused(self) -> Counter[str]:
        """Connections and requests that belong to no tenant, by reason; see Tenant.refused."""
        return self.refusals.of_nobody

    def refused_by_reason(self) -> dict[str, int]:
        """Of what belongs to no tenant: connections, requests, and HTTP."""
        http = {} if self.web is None else self.web.refused
        return {**self.refused, **http}

    def identities_of(self, tenants: Mapping[str, TenantPlan], told: Plan) -> Identities:
        """Who is who among `tenants`, by another plan too: one that is safe for the sockets that it
        names may not be for those that are listened on until a restart."""
        has_tenants = bool(self.plan.config.tenants or told.config.tenants)
        needs_token = has_tenants or self._listeners.is_reachable
        return Identities(tenants, told.admin, os.geteuid(), needs_token=needs_token)

    def _peers(self, joined: Joined) -> Peers:
        is_asked = self._listeners.is_reachable or self.plan.has_tokens
        return Peers(
            joined.own,
            self.tenants,
            self.clients,
            self._in_thread,
            self.log,
            is_open=not is_asked and not self.plan.config.tenants,
            met=joined.met,
            lanes=joined.lanes,
        )

    @property
    def budget_bytes(self) -> int:
        """DRAM for all tenants together, as it is now."""
        if self.sharing is not None:
            return self.sharing.budget
        return sum(int(each.node.stats()["bytes_limit"]) for each in self.tenants.values())

    def add_operations(self, operations: Mapping[str, Operation | tuple[Call, bool]]) -> None:
        """What clients can ask beside what there is: name -> (call(request, client), needs_admin).

        Before run(). A call runs in one of a few threads and raises KvpoolError.
        """
        self._requests.add(operations)

    @property
    def requests(self) -> Requests:
        return self._requests

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Listens, calls ready(), and serves until `stop` is set; then ends in order."""
        self._listeners.listen()
        self._reload.loop = asyncio.get_running_loop()
        turned_away = partial(self.refusals.count, "descriptors")
        tasks = [
            asyncio.create_task(Acceptor(each, self._admit, self.log, turned_away).run())
            for each in self._listeners.sockets
        ]
        if self.sharing is not None:
            tasks.append(asyncio.create_task(self.sharing.run(self._in_thread)))
        if self.web is not None:
            tasks.append(asyncio.create_task(self.web.run(self)))
        self.is_ready = True
        ready()
        if self.events is not None:
            await self._in_thread(self.events.start)
        if self.joined is not None:  # now that it listens: others may come as soon as they know it
            await self._in_thread(self.joined.start)
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            end = asyncio.get_running_loop().time() + self.plan.drain_s
            stopped.cancel()
            await self._leave()
            for each in tasks:
                each.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await self._end(end)
        for error in ended:
            if isinstance(error, Exception):
                raise error  # our bug: an acceptor ends by being cancelled, and no other way

    async def reload(self) -> None:
        """Takes over what has changed in the configuration. What is wrong with it is logged."""
        await self._reload.run()

    async def _end(self, end: float) -> None:
        self.is_ready = False
        loop = asyncio.get_running_loop()
        self._listeners.close()
        await self._handshakes.end()
        tenants = self.tenants.values()
        drain_s = self.plan.drain_s * _DRAIN_SHARE
        drained = await self._for_each([partial(each.server.drain, drain_s) for each in tenants])
        self.log.info("drained", all_done=all(drained), clients=len(self.clients))
        for task in self._controls:
            task.cancel()
        await asyncio.gather(*self._controls, return_exceptions=True)
        for each in tenants:
            each.pins.clear()
        await self._for_each([each.server.close for each in tenants])
        if self.joined is not None:
            await self._for_each([partial(self.joined.close, max(0.0, end - loop.time()))])
        if self.events is not None:  # nothing comes any more
            await self._for_each([self.events.close])
        left_s = max(0.0, end - loop.time())
        await self._for_each([partial(each.node.close, left_s) for each in tenants])
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _leave(self) -> None:
        """The cluster, while others are still served, who have not heard of it."""
        if self.joined is None or self.peers is None:
            return
        self.peers.is_draining = True
        (is_told,) = await self._for_each(
            [partial(self.joined.leave, self.plan.drain_s * _LEAVE_SHARE)]
        )
        self.log.info("left the cluster", all_told=is_told)

    async def _for_each(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """All at the same time: each may take as long as there is."""
        with ThreadPoolExecutor(len(calls), "kvpool-end") as pool:
            loop = asyncio.get_running_loop()
            return await asyncio.gather(*(loop.run_in_executor(pool, each) for each in calls))

    async def _in_thread(self, call: Callable[..., Any], *args: Any, slow: bool = False) -> Any:
        pool = self._slow if slow else self._quick
        return await asyncio.get_running_loop().run_in_executor(pool, partial(call, *args))

    # --- a connection ----------------------------------------------------------------------------

    async def _admit(self, sock: socket.socket, is_unix: bool) -> None:
        await self._handshakes.begin(partial(self._handshake, sock, is_unix))

    async def _handshake(self, sock: socket.socket, is_unix: bool) -> None:
        """Ends with the socket refused, or handed on: then this object of it is an empty one."""
        peer = _peer_of(sock, is_unix)
        begin = {
            "control": self._begin_client,
            "stream": self._begin_stream,
            "shm": self._begin_shm,
            "peer": self._begin_peer,
        }
        with sock:
            try:
                hello = await wire_node.receive_hello(sock)
                if hello.kind not in ("control", "peer") or hello.nonce is None:
                    self._handshakes.heard()  # else once it has proved what it says
                await begin[hello.kind](sock, hello, peer)
            except wire.WireError as error:
                self._refused(peer, "malformed", error)
                await wire_node.refuse(sock, "malformed", str(error))
            except wire.RefusedByPeer as error:
                self._refused(peer, error.reason, error, self.tenants.get(error.tenant))
                await wire_node.refuse(sock, error.code, str(error))
            except asyncio.CancelledError:
                self.refusals.count("late")
                self.log.often(logging.INFO, "no hello in time", peer=peer)
                _say_at_once(sock, "late", "the hello did not come in time")
                raise
            except (OSError, KvpoolError) as error:
                self.log.often(logging.WARNING, "handshake failed", peer=peer, reason=error)
                _say_at_once(sock, "failed", f"the node could not: {error}")
            except Exception as error:  # our bug: one connection is lost, the daemon serves on
                self.log.error("handshake failed by a bug", peer=peer, reason=repr(error))
                _say_at_once(sock, "internal", "the node failed at this; its log says at what")

    def _refused(
        self, peer: Peer, reason: str, error: Exception, tenant: Tenant | None = None
    ) -> None:
        self.refusals.count(reason, tenant)
        told = {"peer": peer, "error": reason, "reason": error}
        if tenant is not None:
            told["tenant"] = tenant.name
        self.log.often(logging.INFO, "refused", **told)

    async def _claim(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> Claim:
        """What the peer says who it is, and shows of it."""
        if hello.nonce is None:
            return Claim(peer.uid, hello.tenant)
        challenge = secrets.token_bytes(wire.NONCE_BYTES)
        await wire_node.send(sock, wire.pack_hello({"ok": True, "challenge": challenge}))
        proof = await wire_node.receive_proof(sock)
        self._handshakes.heard()
        return Claim(peer.uid, hello.tenant, Exchange(hello.nonce, challenge, hello.tenant), proof)

    async def _begin_client(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        claim = await self._claim(sock, hello, peer)
        identity = self.identities.of(claim)
        tenant = None if identity.tenant is None else self.tenants[identity.tenant]
        with _about(tenant):
            self.clients.require_place(tenant)
        client = Client(
            0 if tenant is None else tenant.server.add_client(),
            hello.name,
            peer.pid or hello.pid,
            peer,
            tenant,
            identity.is_admin,
            claim,
        )
        self.clients.add(client)
        answer = {**self._facts(client), **_proved(claim, identity, client)}
        try:
            await wire_node.send(sock, wire.pack_hello(answer))
        except BaseException:
            self.clients.remove(client)
            await self._drop(client)
            raise
        control = socket.socket(fileno=sock.detach())
        control.setblocking(False)
        task = asyncio.create_task(self._serve_client(control, client))
        self._controls[task] = client
        task.add_done_callback(self._control_ended)

    def _facts(self, client: Client) -> wire.Map:
        """What a client is told of itself and of its limits."""
        return {
            "ok": True,
            "client": client.id,
            "boot": self._boot,
            "version": self.version,
            "shm": client.peer.is_unix,
            "block_bytes_max": BLOCK_BYTES_MAX,
            "streams_max": STREAMS_PER_CLIENT_MAX,
            "tenant": None if client.tenant is None else client.tenant.name,
            "admin": client.is_admin,
        }

    async def _begin_stream(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        client = self.clients.of(hello, peer)
        assert client.tenant is not None  # looked at by of()
        lanes = 1 + self.plan.server["lanes"] if client.has_shm else 0
        with _about(client.tenant):
            self.clients.require_sources(client, 1, STREAMS_PER_CLIENT_MAX + lanes)
        await wire_node.send(sock, wire.pack_hello({"ok": True}))
        client.tenant.server.add_stream(client.number, sock.detach())

    async def _begin_peer(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        if self.peers is None:
            text = "this node is in no cluster: it has no [cluster] in its configuration"
            raise wire.RefusedByPeer("cluster", text)
        await self.peers.begin(sock, hello, peer, self._handshakes.heard)

    async def _begin_shm(self, sock: socket.socket, hello: wire.Hello, peer: Peer) -> None:
        if not peer.is_unix:
            raise wire.RefusedByPeer(
                "shm", "shared memory goes through the node's unix socket only"
            )
        client = self.clients.of(hello, peer)
        assert client.tenant is not None  # looked at by of()
        if client.has_shm:
            raise wire.RefusedByPeer("shm", "this client has its shared memory already")
        lanes = 1 + self.plan.server["lanes"]
        with _about(client.tenant):
            self.clients.require_sources(client, lanes, STREAMS_PER_CLIENT_MAX + lanes)
        client.has_shm = True
        # The socket is the core's from here on, whatever becomes of this; the answer needs one too.
        with sock.dup() as reply:
            try:
                fds, facts = await self._offer_for(client, client.tenant, sock.detach())
            except KvpoolError as error:
                self.log.often(logging.WARNING, "no shared memory", peer=peer, reason=error)
                await wire_node.refuse(reply, "shm", str(error))
                return
            try:
                answer = wire.pack_hello({"ok": True, **facts})
                await wire_node.send_with_descriptors(reply, answer, fds)
            finally:
                for fd in fds:
                    os.close(fd)
                # Sees the end of a client that is gone too.
                client.tenant.server.start_shm(client.number)

    async def _offer_for(
        self, client: Client, tenant: Tenant, fd: int
    ) -> tuple[list[int], wire.Map]:
        """Descriptors that are to be sent and closed, and what the client must know."""
        making = asyncio.ensure_future(self._in_thread(tenant.server.make_shm, client.number, fd))
        try:
            # Shielded: a call that were taken back before it began would leave `fd` to nobody.
            offer: tuple[list[int], wire.Map] = await asyncio.shield(making)
        except asyncio.CancelledError:  # the handshake's time is up: nobody will send them
            making.add_done_callback(_close_offer)
            raise
        return offer

    async def _serve_client(self, sock: socket.socket, client: Client) -> None:
        self.log.often(logging.INFO, "client connected", **client.described())
        reason = "ended by the daemon"
        try:
            answers = answers_of(self._requests, client, self._in_thread)
            reason = await serve_control(sock, answers)
        finally:
            self.clients.remove(client)
            self.log.often(logging.INFO, "client gone", **client.described(), reason=reason)
            await self._drop(client)

    async def _drop(self, client: Client) -> None:
        if client.tenant is not None:
            await self._in_thread(client.tenant.server.drop_client, client.number)

    def end_clients(self, is_ended: Callable[[Client], bool]) -> int:
        """Ends those that it is true of, as if they had left, and says how many."""
        ended = [task for task, client in self._controls.items() if is_ended(client)]
        for task in ended:
            task.cancel()
        return len(ended)

    def _control_ended(self, task: asyncio.Task[None]) -> None:
        self._controls.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.log.error("a client was lost by a bug", reason=repr(task.exception()))


@contextlib.contextmanager
def _about(tenant: Tenant | None) -> Any:
    """A refusal in here is of this tenant's."""
    try:
        yield
    except wire.RefusedByPeer as error:
        error.tenant = "" if tenant is None else tenant.name
        raise


def _proved(claim: Claim, identity: Identity, client: Client) -> wire.Map:
    """What the node shows of itself to a client that has shown a token; and the client is marked
    as one whose connections are signed."""
    if claim.exchange is None or identity.token is None:
        return {}
    client.verifier = Verifier(claim.exchange.session_key(identity.token))
    return {"proof": claim.exchange.node_proof(identity.token)}


def _close_offer(making: asyncio.Future[Any]) -> None:
    """The rest of it ends with its client."""
    if not making.cancelled() and making.exception() is None:
        for fd in making.result()[0]:
            os.close(fd)


def _peer_of(sock: socket.socket, is_unix: bool) -> Peer:
    if is_unix:
        size = _CREDENTIALS.size
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return Peer(f"uid:{uid}", pid, is_unix=True, uid=uid)
    with contextlib.suppress(OSError):  # gone already
        return Peer(host_and_port(*sock.getpeername()[:2]), 0, is_unix=False)
    return Peer("gone", 0, is_unix=False)


def _say_at_once(sock: socket.socket, code: str, message: str) -> None:
    """Where there is no time to wait, or nobody to wait for. Nothing, for a socket handed on."""
    with contextlib.suppress(OSError):
        sock.send(wire.pack_hello(wire.refusal(code, message)))
