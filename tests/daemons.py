"""A daemon in a thread of the test's process, over a server that only keeps books.

What the core's server does with a connection is tested with the core, and the whole by real
processes; mostly it is enough here to know which descriptors it was given and which clients to
drop. A whole one has the core's server and, in a cluster, the core's part of that.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpool import _core, wire, wire_client, wire_proof
from kvpool.cluster.core import Core, open_core
from kvpool.cluster.joined import Joined
from kvpool.cluster.member import Member
from kvpool.cluster.peer_link import Own
from kvpool.cluster.roster import Board, Roster
from kvpool.daemon import Daemon
from kvpool.errors import NoResource
from kvpool.serve_config import load
from kvpool.serve_listen import Listeners
from kvpool.serve_log import open_log
from kvpool.serve_plan import Plan, plan
from kvpool.tenants.plans import TenantPlan
from kvpool.tenants.tenant import Tenant

WAIT_S = 10.0
LANES = 4


class WatchedNode:
    """A node, of which a test can make one method do something else."""

    def __init__(self, node: _core.Node) -> None:
        self.watched = node
        self.instead: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return self.instead.get(name) or getattr(self.watched, name)


class BookServer:
    """Owns the descriptors that it was given, until their client is dropped."""

    def __init__(self) -> None:
        self.clients: dict[int, list[int]] = {}
        self.lanes: dict[int, int] = {}  # of the clients that have any
        self.started: list[int] = []
        self.dropped: list[int] = []
        self.peers: list[int] = []  # whose connections they are, in the order they came
        self.is_drained = self.is_closed = False
        self.refuses_shm = False
        self._next = 1

    def add_client(self) -> int:
        number, self._next = self._next, self._next + 1
        self.clients[number] = []
        return number

    def drop_client(self, client: int) -> None:
        for fd in self.clients.pop(client):
            os.close(fd)
        self.lanes.pop(client, None)
        self.dropped.append(client)

    def add_stream(
        self, client: int, fd: int, is_peer: bool = False, node: bytes = b"", incarnation: int = 0
    ) -> None:
        self.clients[client].append(fd)
        if is_peer:
            self.peers.append(client)

    def make_shm(self, client: int, fd: int) -> tuple[list[int], dict[str, Any]]:
        self.clients[client].append(fd)
        self.lanes[client] = LANES
        if self.refuses_shm:
            raise NoResource("no memory for a staging ring")
        fds = [os.memfd_create(f"part {n}", os.MFD_CLOEXEC) for n in range(4)]
        fds += [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(LANES)]
        for at, each in enumerate(fds[:4]):
            os.write(each, bytes([at]))
        return fds, {"lanes": LANES, "staging_bytes": 1 << 20}

    def start_shm(self, client: int) -> None:
        self.started.append(client)

    @property
    def sources(self) -> int:
        return sum(self.sources_of(client) for client in list(self.clients))

    def sources_of(self, client: int) -> int:
        return len(self.clients.get(client, ())) + self.lanes.get(client, 0)

    def stats(self) -> dict[str, Any]:
        return {"clients": len(self.clients)}

    def drain(self, timeout_s: float) -> bool:
        self.is_drained = True
        return True

    def close(self) -> None:
        for client in list(self.clients):
            self.drop_client(client)
        self.is_closed = True


class NoOthers:
    """A place without an etcd and without a list: the node is alone among the members, until a
    test puts other rosters on its board."""

    def __init__(self, own: Own) -> None:
        self.calls: list[str] = []
        member = Member(own.node.hex(), own.incarnation, ("127.0.0.1:1",))
        self.board = Board(Roster(0, member.id, (member,), 0))

    @property
    def members(self) -> "NoOthers":
        return self

    @property
    def roster(self) -> Roster:
        return self.board.roster

    def newer(self, version: int, timeout_s: float) -> Roster | None:
        return self.board.newer(version, timeout_s)

    def start(self) -> None:
        self.calls.append("start")

    def status(self) -> dict[str, Any]:
        return {"kind": "none"}

    def close(self) -> None:
        self.calls.append("close")
        self.board.close()


class Running:
    """A daemon that serves; stop() ends it and waits."""

    def __init__(
        self,
        planned: Plan,
        own: Own | None = None,
        *,
        is_whole: bool = False,
        **instead: Callable[..., Any],
    ) -> None:
        """own: who the daemon is in a cluster."""
        self.plan = planned
        self._own = own
        self._is_whole = is_whole
        self.tenants = {name: _opened(each, is_whole) for name, each in planned.tenants.items()}
        only: Any = next(iter(self.tenants.values()))
        self.node, self.server = only.node, only.server  # of the only one, mostly
        self.node.instead.update(instead)
        self.listeners = Listeners(planned)
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daemon under test")
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    @property
    def address(self) -> str:
        return f"unix:{self.plan.socket_path}"

    @property
    def tcp_address(self) -> str:
        return f"tcp://{self.listeners.tcp_addresses[0]}"

    def stop(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def end_handshakes(self) -> None:
        """Cancels those under way, and waits until they have ended."""
        ended = self.daemon._handshakes.end()
        asyncio.run_coroutine_threadsafe(ended, self._loop).result(WAIT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self.listeners.close()
            self._ready.set()

    def _joined(self) -> Joined | None:
        if self._own is None:
            return None
        cores: dict[str, Core] = {}
        for name, tenant in self.tenants.items() if self._is_whole else ():
            watched: Any = tenant.node
            cores[name] = open_core(watched.watched, self._own)
            cores[name].serve(tenant.server)
        return Joined(self._own, cores, NoOthers(self._own), open_log("text", "error"))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        log = open_log(self.plan.log_format, self.plan.log_level)
        self.daemon = Daemon(
            self.plan, self.tenants, self.listeners, log, "9.9.9", joined=self._joined()
        )
        await self.daemon.run(self._stop, self._ready.set)


def _opened(each: TenantPlan, is_whole: bool) -> Tenant:
    node: Any = WatchedNode(_core.Node.open(**{**each.node, "prefault": "off"}))
    server: Any = _core.Server.create(node.watched) if is_whole else BookServer()
    return Tenant(each.name, node, server, each.limits)


@contextlib.contextmanager
def serving(
    folder: Path, own: Own | None = None, *, is_whole: bool = False, **flags: Any
) -> Iterator[Running]:
    """A daemon on folder/node.sock, with the options of `kvpool serve` as flags. own: who it is in
    a cluster."""
    daemon = Running(planned(folder, **flags), own, is_whole=is_whole)
    try:
        yield daemon
    finally:
        daemon.stop()
    for each in daemon.tenants.values():
        server: Any = each.server
        assert each.node.is_closed
        if not is_whole:
            assert server.is_drained
            assert server.is_closed


def planned(folder: Path, environment: Mapping[str, str] | None = None, **flags: Any) -> Plan:
    told = {"socket": str(folder / "node.sock"), "dram": "2MiB", **flags}
    return plan(load(None, environment or {}, told), environment or {})


def connected(daemon: Running, *, tcp: bool = False) -> socket.socket:
    """A connection that has said nothing yet."""
    if not tcp:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(WAIT_S)
        sock.connect(daemon.plan.socket_path)
        return sock
    host, _, port = daemon.listeners.tcp_addresses[0].rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), WAIT_S)


def hello(kind: str = "control", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "name": "test", "pid": os.getpid(), **fields}


def asked(sock: socket.socket, said: Mapping[str, Any]) -> wire.Map:
    """The answer to a hello; raises what wire_client.ask() raises."""
    return wire_client.ask(sock, said, time.monotonic() + WAIT_S)


def proved(
    sock: socket.socket, said: Mapping[str, Any], token: str
) -> tuple[wire.Map, wire_proof.Signer]:
    """The answer to a hello that proves a token, and what signs the next ones."""
    return wire_client.ask_with_proof(sock, said, token, time.monotonic() + WAIT_S)


def answer_to(sock: socket.socket, said: bytes) -> wire.Map:
    """What the daemon answers to any bytes, as the map that it is."""
    sock.settimeout(WAIT_S)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(said)
    everything = b""
    with contextlib.suppress(ConnectionResetError):  # an end like another, after all was read
        while part := sock.recv(1 << 16):
            everything += part
    _, length = wire.read_head(everything[: wire.HEAD_BYTES])
    assert len(everything) == wire.HEAD_BYTES + length
    return wire.read_map(everything[wire.HEAD_BYTES :])


def request(sock: socket.socket, op: str, id: int = 1, **fields: Any) -> wire.Map:
    deadline = time.monotonic() + WAIT_S
    wire_client.send_until(sock, wire.pack_message({"id": id, "op": op, **fields}), deadline)
    return wire_client.Messages(sock).next(deadline)
