"""Staying connected to a node: what outlives a connection, and the thread that makes the next one.

Promises:  1. a node that came back is found within BACKOFF_S_MAX, and every namespace with it;
           2. a namespace that it refuses is lost alone: its blocks are misses, a warning says why;
           3. the keeper keeps neither the pool nor the interpreter alive, and a forked child holds
              none of its parent's connections open.
Thread rule: every method from any thread; abandon() in a forked child only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvpool.address import Address
from kvpool.errors import KvpoolError, PoolClosed, Unreachable
from kvpool.manifest import Manifest
from kvpool.remote_link import Caller, Link, dial
from kvpool.wire import Map

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 2.0
WAITS_MAX = 64  # at a time, each on a connection of its own
_WATCH_S = 1.0  # between two looks at what the channel does not see
_NO_NUMBER = (1 << 32) - 1  # of a namespace that the node has not: it answers with misses

_log = logging.getLogger("kvpool")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_inherited: list[Session] = []  # of the parent of this process


class Channel(Protocol):
    """What is used of the core's channel to a node elsewhere."""

    @property
    def is_broken(self) -> bool: ...
    def attach(
        self, streams: list[int], shm: tuple[int, list[int], Map] | None, spaces: dict[bytes, int]
    ) -> None: ...
    def wait_broken(self, timeout_s: float) -> bool: ...
    @property
    def wait_connections(self) -> int: ...
    def add_stream(self, descriptor: int) -> None: ...
    def add_wait_connection(self, descriptor: int) -> None: ...
    def add_space(self, id: bytes, block_bytes: int, number: int) -> Any: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Session:
    """What outlives the connections: the channel, the open namespaces, and the keeper."""

    def __init__(
        self,
        channel: Channel,
        address: Address,
        caller: Caller,
        timeout_s: float,
        *,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self.channel = channel
        self.address = address
        self.timeout_s = timeout_s
        self.pid = os.getpid()
        self.closed = threading.Event()
        self.reconnects = 0
        self.trouble = ""  # why there is no connection, or what was lost with the last one
        self._caller = caller
        self._dice = dice
        self._lock = threading.Lock()  # guards _spaces, and _link while it changes
        self._spaces: dict[bytes, tuple[Manifest, Any]] = {}
        self._link: Link | None = None
        self._waits = 0  # under way
        self._shares_memory: bool | None = None  # as the channel was made
        self._handed_on: list[
            tuple[int, int, int]
        ] = []  # descriptors of the channel: see abandon()
        self._keeper = threading.Thread(target=self._keep, name="kvpool-keeper", daemon=True)

    def begin(self, link: Link) -> None:
        """Uses the first connections and starts the keeper. Raises KvpoolError, closed then."""
        self._shares_memory = link.shm is not None
        try:
            self._use(link)
        except BaseException:
            self.close()
            raise
        _sessions.add(self)
        self._keeper.start()

    def ask(self, op: str, wait_s: float | None = None, **fields: Any) -> Map:
        """One request. Raises as Control.ask()."""
        link = self._link
        if link is None or link.control.is_broken:
            why = f" ({self.trouble})" if self.trouble else ""
            raise Unreachable(f"{self.address}: not connected{why}")
        wait_s = self.timeout_s if wait_s is None else wait_s
        return link.control.ask(op, time.monotonic() + wait_s, **fields)

    def open_space(self, manifest: Manifest) -> Any:
        """The core's space of a manifest; the same one for the same manifest."""
        assert manifest.block_bytes is not None  # computed by the manifest
        id = manifest.namespace_id
        with self._lock:
            known = self._spaces.get(id)
            if known is not None:
                return known[1]
            answer = self.ask("open_namespace", manifest=manifest.pack())
            space = self.channel.add_space(id, manifest.block_bytes, _number(answer))
            self._spaces[id] = manifest, space
            return space

    def facts(self) -> dict[str, Any]:
        """How this side stands."""
        link = self._link
        return {
            "address": str(self.address),
            "connected": not (self.channel.is_broken or link is None or link.control.is_broken),
            "reconnects": self.reconnects,
            "trouble": self.trouble,
            **self.channel.stats(),
        }

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait: makes one more connection for it, while there are too few.

        Without one (no node, or WAITS_MAX wait already) the wait just looks and answers.
        """
        with self._lock:
            self._waits += 1
            link = self._link
            if link is not None and self.channel.wait_connections < min(self._waits, WAITS_MAX):
                deadline = time.monotonic() + self.timeout_s
                with contextlib.suppress(KvpoolError):
                    self.channel.add_wait_connection(self._another_stream(link, deadline))
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1

    def close(self) -> None:
        """Ends everything, waits for nothing. Idempotent."""
        if self.pid != os.getpid():
            return
        self.closed.set()
        self.channel.close()
        link = self._link
        if link is not None:
            link.close()

    def abandon(self) -> None:
        """In a forked child: closes its descriptors of the connections, which are the parent's.

        Else the node would take the parent for alive as long as the child is. The channel cannot,
        as its locks may be held for ever: what still is what was handed to it is closed here.
        """
        link = self._link
        if link is not None:
            link.control.abandon()
        for fd, *identity in self._handed_on:
            with contextlib.suppress(OSError):
                if _identity(fd) == tuple(identity):
                    os.close(fd)

    # --- the keeper ------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self.closed.is_set():
            link = self._link
            is_lost = self.channel.wait_broken(_WATCH_S)
            if not self.closed.is_set() and not self._is_well(link, is_lost):
                self._connect_again()

    def _is_well(self, link: Link | None, is_lost: bool) -> bool:
        """Whether these connections go on: all of them, or mended, where one of several ended."""
        if link is None or link.control.is_broken or self.channel.is_broken:
            return False
        return not is_lost or self._mend(link)

    def _mend(self, link: Link) -> bool:
        """One more connection in place of one that ended; the others work on meanwhile."""
        try:
            self.channel.add_stream(self._another_stream(link, time.monotonic() + self.timeout_s))
        except KvpoolError as error:
            self.trouble = str(error)
            return False
        return True

    def _another_stream(self, link: Link, deadline: float) -> int:
        stream = link.another_stream(self.address, self._caller, deadline)
        self._handed_on.append((stream, *_identity(stream)))
        return stream

    def _connect_again(self) -> None:
        pause_s = BACKOFF_S_MIN
        while not self.closed.wait(pause_s * (0.5 + self._dice() / 2)):
            try:
                self._use(dial(self.address, self._caller, time.monotonic() + self.timeout_s))
                self.reconnects += 1
                return
            except KvpoolError as error:
                self.trouble = str(error)
            except Exception as error:  # our bug; without a keeper the pool would be lost
                self.trouble = repr(error)
                _log.exception("kvpool: connecting to %s again failed", self.address)
            pause_s = min(2 * pause_s, BACKOFF_S_MAX)

    def _use(self, link: Link) -> None:
        """Opens the namespaces by these connections and hands those to the channel."""
        with self._lock, contextlib.ExitStack() as undo:
            undo.callback(link.close)
            self._match_memory(link)
            trouble = link.why_no_shm
            numbers: dict[bytes, int] = {}
            for id, (manifest, _) in self._spaces.items():
                deadline = time.monotonic() + self.timeout_s
                try:
                    answer = link.control.ask("open_namespace", deadline, manifest=manifest.pack())
                except Unreachable:
                    raise
                except KvpoolError as error:  # of this one only: its blocks are misses
                    trouble = f"namespace {manifest.name or id.hex()}: {error}"
                    numbers[id] = _NO_NUMBER
                    _log.warning("kvpool: %s: lost a %s", self.address, trouble)
                else:
                    numbers[id] = _number(answer)
            if self.closed.is_set():
                raise PoolClosed("the pool is closed")
            streams, shm = link.given()
            fds = [*streams, *((shm[0], *shm[1]) if shm is not None else ())]
            self._handed_on = [(fd, *_identity(fd)) for fd in fds if _is_told_apart(fd)]
            self.channel.attach(streams, shm, numbers)
            before, self._link = self._link, link
            self.trouble = trouble
            undo.pop_all()
        if before is not None:
            before.close()
        if self.closed.is_set():  # close() may have looked at the link before
            link.close()

    def _match_memory(self, link: Link) -> None:
        """A channel was made with shared memory or without, and cannot change that."""
        if self._shares_memory and link.shm is None:
            raise Unreachable(f"{self.address}: no shared memory any more: {link.why_no_shm}")
        if not self._shares_memory:
            link.forgo_shm()


def _identity(fd: int) -> tuple[int, int]:
    """What tells a socket or memfd from another that has its number later."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_told_apart(fd: int) -> bool:
    """Not so an eventfd: all of them are one inode."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _number(answer: Map) -> int:
    number = answer.get("number")
    if not isinstance(number, int):
        raise Unreachable("the node's answer has no number of the namespace")
    return number


def _abandon_all() -> None:
    """In a forked child. What the core's channel holds there must not be torn down: it stays."""
    for session in list(_sessions):
        session.abandon()
        _inherited.append(session)


os.register_at_fork(after_in_child=_abandon_all)
