"""Staying connected to a node: what outlives a connection, and the thread that makes the next one.

Promises:  1. a node that came back is found within BACKOFF_S_MAX, and every namespace with it;
           2. a namespace that it refuses is lost alone: its blocks are misses, a warning says why;
           3. the keeper keeps neither the pool nor the interpreter alive, and a forked child holds
              none of its parent's connections open;
           4. what still works goes on: only the end of the control connection, of shared memory or
              of the last stream ends the others;
           5. a wait takes WAIT_GRACE_S more than its own time at most, whatever the node does.
Thread rule: every method from any thread; abandon() in a forked child only. _lock may be held over
a request and is taken before _link_lock, which is not.
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
from kvpool.errors import KvpoolError, PoolClosed, Refused, Unreachable
from kvpool.manifest import Manifest
from kvpool.remote_link import Caller, Link, dial
from kvpool.wire import Map

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 2.0
WAITS_MAX = 64  # at a time, each on a connection of its own
WAIT_GRACE_S = 0.5  # for a connection, where a wait is shorter than it takes to make one
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
        self._lock = threading.Lock()  # guards _spaces: their numbers are those of _link
        self._spaces: dict[bytes, tuple[Manifest, Any]] = {}
        self._link_lock = threading.Lock()  # guards changes of what follows
        self._link: Link | None = None
        self._waits = 0  # under way
        self._dialling = 0  # connections for them
        self._handed_on: list[tuple[int, int, int]] = []  # the channel's: see abandon()
        self._standing_trouble = ""  # of the connections that there are
        self.shares_memory: bool | None = None  # as the channel was made
        self._keeper = threading.Thread(target=self._keep, name="kvpool-keeper", daemon=True)

    def begin(self, link: Link) -> None:
        """Uses the first connections and starts the keeper. Raises KvpoolError, closed then."""
        self.shares_memory = link.shm is not None
        try:
            self._use(link)
        except BaseException:
            self.close()
            raise
        _sessions.add(self)
        self._keeper.start()

    def ask(self, op: str, wait_s: float | None = None, **fields: Any) -> Map:
        """One request. Raises as Control.ask()."""
        wait_s = self.timeout_s if wait_s is None else wait_s
        return self._live_link().control.ask(op, time.monotonic() + wait_s, **fields)

    def ask_about(self, space: Any, op: str, wait_s: float | None = None, **fields: Any) -> Map:
        """One request about a namespace. Raises as ask()."""
        # The link first: the numbers of a new life of the node are there before its link is, so
        # that this number is of the link's life or the link is dead. The other way round, a new
        # connection could be told an old number, which is another namespace's there.
        link = self._live_link()
        number = space.number
        if number == _NO_NUMBER:
            raise Unreachable(f"{self.address}: the node refused this namespace ({self.trouble})")
        wait_s = self.timeout_s if wait_s is None else wait_s
        return link.control.ask(op, time.monotonic() + wait_s, number=number, **fields)

    def _live_link(self) -> Link:
        link = self._link
        if link is None or link.control.is_broken:
            why = f" ({self.trouble})" if self.trouble else ""
            raise Unreachable(f"{self.address}: not connected{why}")
        return link

    def open_space(self, manifest: Manifest) -> Any:
        """The core's space of a manifest; the same one for the same manifest."""
        assert manifest.block_bytes is not None  # computed by the manifest
        id = manifest.namespace_id
        deadline = time.monotonic() + self.timeout_s
        if (known := self._spaces.get(id)) is not None:
            return known[1]
        if not self._lock.acquire(timeout=self.timeout_s):
            raise Unreachable(f"{self.address}: busy with other namespaces")
        try:  # the lock over the request: no new life of the node begins between it and its number
            if (known := self._spaces.get(id)) is not None:
                return known[1]
            wait_s = max(0.0, deadline - time.monotonic())
            answer = self.ask("open_namespace", wait_s, manifest=manifest.pack())
            space = self.channel.add_space(id, manifest.block_bytes, _number(answer))
            self._spaces[id] = manifest, space
            return space
        finally:
            self._lock.release()

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
    def waiting(self, timeout_s: float) -> Iterator[float | None]:
        """Around a wait: makes one more connection for it, while there are too few.

        Gives the seconds that are left for the wait; None if the node did not answer in that time.
        Without a connection (no node, or WAITS_MAX wait already) the wait just looks and answers;
        so it does with a timeout of 0.
        """
        begin = time.monotonic()
        with self._link_lock:
            self._waits += 1
            link = self._link
            most = min(self._waits, WAITS_MAX) if timeout_s > 0 else 0
            is_short = self.channel.wait_connections + self._dialling < most
            if link is not None and is_short:
                self._dialling += 1
        try:
            if link is None or not is_short:
                yield timeout_s
            elif self._add_wait_connection(link, begin + timeout_s + WAIT_GRACE_S):
                yield max(0.0, begin + timeout_s - time.monotonic())
            else:
                yield None
        finally:
            with self._link_lock:
                self._waits -= 1

    def _add_wait_connection(self, link: Link, deadline: float) -> bool:
        """False: nobody answered by the deadline. Refused is answered."""
        # Not under the lock: a node that does not answer would make waits wait for each other.
        deadline = min(deadline, time.monotonic() + self.timeout_s)
        try:
            stream = link.another_stream(self.address, self._caller, deadline)
        except KvpoolError:
            return time.monotonic() < deadline
        finally:
            with self._link_lock:
                self._dialling -= 1
        with self._link_lock, contextlib.suppress(KvpoolError):
            if self._link is link:
                self._note_handed_on([stream])
                self.channel.add_wait_connection(stream)
            else:  # it is of a life that is over
                os.close(stream)
        return True

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
            if _is_still(fd, *identity):
                with contextlib.suppress(OSError):
                    os.close(fd)

    # --- the keeper ------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause_s = BACKOFF_S_MIN
        while not self.closed.is_set():
            link = self._link
            is_lost = self.channel.wait_broken(_WATCH_S)
            if self.closed.is_set():
                return
            if link is None or link.control.is_broken or self.channel.is_broken:
                self._connect_again()
            elif is_lost and not self._mend(link):
                # The others work on: to end them too would make the trouble of one that of all.
                self.closed.wait(pause_s)
                pause_s = min(2 * pause_s, _WATCH_S)
                continue
            pause_s = BACKOFF_S_MIN

    def _mend(self, link: Link) -> bool:
        """One more connection in place of one that ended; the others work on meanwhile."""
        deadline = time.monotonic() + self.timeout_s
        try:
            stream = link.another_stream(self.address, self._caller, deadline)
            with self._link_lock:
                self._note_handed_on([stream])
            self.channel.add_stream(stream)
        except KvpoolError as error:
            self.trouble = str(error)
            if isinstance(error, Refused) and error.code == "client":
                link.control.close()  # the node has forgotten this client: all is to be made anew
            return False
        self.trouble = self._standing_trouble
        return True

    def _note_handed_on(self, fds: list[int]) -> None:
        """Under _link_lock. Forgets those that the channel has closed."""
        still = [each for each in self._handed_on if _is_still(*each)]
        self._handed_on = still + [(fd, *_identity(fd)) for fd in fds if _is_told_apart(fd)]

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
            with self._link_lock:
                self._note_handed_on(fds)
                self.channel.attach(streams, shm, numbers)
                before, self._link = self._link, link
            self.trouble = self._standing_trouble = trouble
            undo.pop_all()
        if before is not None:
            before.close()
        if self.closed.is_set():  # close() may have looked at the link before
            link.close()

    def _match_memory(self, link: Link) -> None:
        """A channel was made with shared memory or without, and cannot change that."""
        if self.shares_memory and link.shm is None:
            raise Unreachable(f"{self.address}: no shared memory any more: {link.why_no_shm}")
        if not self.shares_memory:
            link.forgo_shm()


def _identity(fd: int) -> tuple[int, int]:
    """What tells a socket or memfd from another that has its number later."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_still(fd: int, *identity: int) -> bool:
    with contextlib.suppress(OSError):
        return _identity(fd) == identity
    return False


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
