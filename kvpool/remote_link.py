"""One life of a client's connections to a node: made as a whole, or not at all.

Promises:  1. dial() gives all the connections that were asked for, or raises and leaves none open;
           2. every wait ends by its deadline; an answer that comes after its time is not taken for
              the answer to a later request;
           3. what the node says no to becomes the exception that a pool of this process raises.
Thread rule: a Control from any thread, one request at a time; dial() from any.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpool import wire, wire_client
from kvpool.address import Address, UnixAddress, read_token
from kvpool.errors import (
    BadArgument,
    KvpoolError,
    ManifestMismatch,
    NoResource,
    NotAllowed,
    Refused,
    Unreachable,
)
from kvpool.wire_proof import Signer

_LEAVE_S = 1.0  # until a thread has left a socket that was shut down
_BELOW_BELLS = 4  # descriptors of an shm answer that are no lane's: arena, index, control, staging


@dataclass(frozen=True, slots=True)
class Caller:
    """Who connects, and with how many connections for blocks."""

    name: str
    token: str | None = field(repr=False)
    connections: int
    tenant: str = ""
    wants_shm: bool = True  # where it can be had
    token_file: str | None = None

    def hello(self, kind: wire.Kind, client: bytes | None = None) -> wire.Map:
        said: wire.Map = {"kind": kind, "name": self.name, "pid": os.getpid()}
        if self.tenant and client is None:
            said["tenant"] = self.tenant
        return said if client is None else {**said, "client": client}

    def current_token(self) -> str | None:
        """What the file holds now: a token may be changed while a client looks for its node."""
        return self.token if self.token_file is None else read_token("token_file", self.token_file)


class Control:
    """Requests to a node and their answers."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self._sock = sock
        self._where = where
        self._messages = wire_client.Messages(sock)
        self._lock = threading.Lock()  # guards a request from its first byte to its answer
        self._last = 0
        self.is_broken = False

    def ask(self, op: str, deadline: float, **fields: Any) -> wire.Map:
        """Raises Unreachable, or what the node raised: BadArgument, NoResource, ..."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unreachable(f"{self._where}: busy with another request")
        try:
            return _accepted(self._exchange(op, deadline, fields), self._where)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends a request that waits in another thread, too.

        The descriptor goes when that thread has left the socket: its number may be another file's
        a moment later.
        """
        self.is_broken = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=_LEAVE_S):
            self._sock.close()
            self._lock.release()

    def abandon(self) -> None:
        """In a forked child: closes this process's descriptor, and leaves the connection alone."""
        self.is_broken = True
        self._sock.close()

    def _exchange(self, op: str, deadline: float, fields: wire.Map) -> wire.Map:
        if self.is_broken:
            raise Unreachable(f"{self._where}: not connected")
        self._last += 1
        request = wire.pack_message({"id": self._last, "op": op, **fields})
        try:
            wire_client.send_until(self._sock, request, deadline)
        except OSError as error:  # a part of it may be on its way: nothing can follow
            self.is_broken = True
            raise Unreachable(f"{self._where}: {error}") from None
        try:
            while (answer := self._messages.next(deadline)).get("id") != self._last:
                pass  # of a request that nobody waits for any more
            return answer
        except TimeoutError:
            raise Unreachable(f"{self._where}: no answer to {op} in time") from None
        except (OSError, wire.WireError) as error:
            self.is_broken = True
            raise Unreachable(f"{self._where}: {error}") from None


class Link:
    """The connections of one dial(). Whoever hands the descriptors on calls given() first."""

    def __init__(self, control: Control, facts: wire.Map, signer: Signer | None = None) -> None:
        self.control = control
        self.signer = signer  # where the node asked for a token
        self.boot: bytes = facts.get("boot", b"")
        self.client: bytes = facts["client"]  # checked by who made the facts
        self.version = str(facts.get("version", ""))
        self.streams: list[int] = []
        self.shm: tuple[int, list[int], wire.Map] | None = None  # socket, what came by it, facts
        self.why_no_shm = ""

    def another_stream(self, address: Address, caller: Caller, deadline: float) -> int:
        """The descriptor of one more. Raises as dial()."""
        with _told(address):
            return _stream(address, self.hello(caller, "stream"), deadline)

    def hello(self, caller: Caller, kind: wire.Kind) -> wire.Map:
        """Of one more connection of this client."""
        signed = {} if self.signer is None else self.signer.signed(kind, self.client)
        return {**caller.hello(kind, self.client), **signed}

    def given(self) -> tuple[list[int], tuple[int, list[int], wire.Map] | None]:
        """The descriptors, which are the caller's from now on."""
        streams, shm = self.streams, self.shm
        self.streams, self.shm = [], None
        return streams, shm

    def forgo_shm(self) -> None:
        """Gives back what came for shared memory."""
        shm, self.shm = self.shm, None
        if shm is not None:
            wire_client.close_all([shm[0], *shm[1]])

    def close(self) -> None:
        """Ends what is still here. Idempotent."""
        streams, shm = self.given()
        wire_client.close_all(streams)
        if shm is not None:
            wire_client.close_all([shm[0], *shm[1]])
        self.control.close()


def dial(address: Address, caller: Caller, deadline: float) -> Link:
    """The whole handshake. Raises Unreachable, Refused."""
    with _told(address):
        return _dial(address, caller, deadline)


@contextlib.contextmanager
def _told(address: Address) -> Iterator[None]:
    try:
        yield
    except wire.RefusedByPeer as error:
        raise Refused(f"{address}: {error}", error.code) from None
    except (OSError, wire.WireError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise Unreachable(f"{address}: {reason}") from None


def _dial(address: Address, caller: Caller, deadline: float) -> Link:
    token = caller.current_token()
    sock = _opened(address, deadline)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        signer = None
        if token is None:
            facts = wire_client.ask(sock, caller.hello("control"), deadline)
        else:
            hello = caller.hello("control")
            facts, signer = wire_client.ask_with_proof(sock, hello, token, deadline)
        client, streams_max = facts.get("client"), facts.get("streams_max")
        if not isinstance(client, bytes) or not isinstance(streams_max, int):
            raise wire.WireError("the node's answer lacks the client's id or limits")
        link = Link(Control(sock, str(address)), facts, signer)
        undo.callback(link.close)
        for _ in range(min(caller.connections, streams_max)):
            link.streams.append(_stream(address, link.hello(caller, "stream"), deadline))
        is_local = facts.get("shm") is True and isinstance(address, UnixAddress)
        if is_local and caller.wants_shm:
            try:
                link.shm = _shm(address, link.hello(caller, "shm"), deadline)
            except wire.RefusedByPeer as error:
                if error.code != "shm":
                    raise
                link.why_no_shm = str(error)  # slower, and not a reason to go without the pool
        undo.pop_all()
        return link


def _stream(address: Address, hello: wire.Map, deadline: float) -> int:
    with _opened(address, deadline) as sock:
        wire_client.ask(sock, hello, deadline)
        return sock.detach()


def _shm(address: Address, hello: wire.Map, deadline: float) -> tuple[int, list[int], wire.Map]:
    with _opened(address, deadline) as sock:
        facts, fds = wire_client.ask_with_descriptors(sock, hello, deadline)
        lanes = facts.get("lanes")
        if not isinstance(lanes, int) or len(fds) != _BELOW_BELLS + lanes:
            wire_client.close_all(fds)
            raise wire.WireError(f"shared memory came with {len(fds)} descriptors")
        del facts["ok"]
        return sock.detach(), fds, facts


def _opened(address: Address, deadline: float) -> socket.socket:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return address.open(left_s)


def _accepted(answer: wire.Map, where: str) -> wire.Map:
    if answer.get("ok") is True:
        return answer
    code, message = str(answer.get("error")), str(answer.get("message"))
    if code == "manifest_mismatch":
        differing = answer.get("differing")
        if isinstance(differing, dict):
            raise ManifestMismatch(str(answer.get("name")), _pairs(differing))
    if code in ("bad_argument", "manifest_mismatch"):
        raise BadArgument(message)
    if code == "not_allowed":
        raise NotAllowed(message)
    if code == "no_resource":
        raise NoResource(message)
    if code == "closing":
        raise Unreachable(f"{where}: {message}")
    raise KvpoolError(f"{where}: {message}")


def _pairs(differing: dict[str, Any]) -> dict[str, tuple[object, object]]:
    """(stored, given) of each field; what was a tuple in a manifest travels as a list."""
    plain = {
        field: [tuple(each) if isinstance(each, list) else each for each in pair]
        for field, pair in differing.items()
        if isinstance(pair, list) and len(pair) == 2
    }
    return {field: (stored, given) for field, (stored, given) in plain.items()}
