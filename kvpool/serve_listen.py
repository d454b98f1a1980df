"""The sockets that a daemon listens on: taken, given back, and accepted from.

Promises:  1. a socket file that a dead daemon left is taken over, a living one's is not, however
              two daemons race for it;
           2. the socket file is never there with more rights than it was to have;
           3. without descriptors for one more connection, who connects is told so and the loop goes
              on at the pace of the connections, never faster.
Thread rule: Listeners() before any other thread makes files, as it sets the umask; the rest in the
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from typing import Any

from kvpool import wire
from kvpool.address import (
    UnixAddress,
    host_and_port,
    is_own_folder,
    own_temporary_folder,
    set_up_tcp,
)
from kvpool.errors import NoResource
from kvpool.serve_log import EventLog
from kvpool.serve_plan import Plan

BACKLOG = 1024
PAUSE_S = 0.1  # after an accept that failed for want of something we cannot free
_PROBE_S = 1.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_OUT_OF_MEMORY = (errno.ENOMEM, errno.ENOBUFS)

Admit = Callable[[socket.socket, bool], Awaitable[None]]  # the connection, and whether it is unix


class UnixListener:
    """A bound unix socket, its file, and the lock beside it that says that we live."""

    def __init__(self, path: str, mode: int, *, is_default: bool) -> None:
        """Raises NoResource: somebody else has the socket, or it cannot be made."""
        self.path = path
        folder = os.path.dirname(path)
        with _told(path):
            _make_folder(folder, mode)
        if is_default and folder == own_temporary_folder() and not is_own_folder(folder):
            raise NoResource(f"socket {path}: its folder belongs to somebody else; choose another")
        with _told(path):
            self._lock = _locked(path)
            try:
                _remove_stale(path)
                self.socket = _bound(path, mode)
            except BaseException:
                os.close(self._lock)
                raise
            self._inode = os.lstat(path).st_ino

    def close(self) -> None:
        """Takes the file away, if it is still ours. The lock's stays: others may wait for it."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        self.socket.close()
        os.close(self._lock)


class Listeners:
    """Every socket of a daemon. Nobody can connect before listen()."""

    def __init__(self, plan: Plan) -> None:
        """Raises NoResource."""
        self.tcp: list[socket.socket] = []
        self._is_open = True
        self.unix = UnixListener(
            plan.socket_path, plan.socket_mode, is_default=plan.is_default_socket
        )
        try:
            for family, address in plan.tcp:
                self.tcp.append(_bound_tcp(family, address, self.tcp))
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.unix.socket, *self.tcp]

    @property
    def tcp_addresses(self) -> list[str]:
        return [host_and_port(*each.getsockname()[:2]) for each in self.tcp]

    @property
    def is_reachable(self) -> bool:
        """Whether other machines can connect."""
        hosts = (str(each.getsockname()[0]).partition("%")[0] for each in self.tcp)
        return not all(ipaddress.ip_address(host).is_loopback for host in hosts)

    def listen(self) -> None:
        for each in self.sockets:
            each.setblocking(False)
            each.listen(BACKLOG)

    def close(self) -> None:
        """Idempotent."""
        if self._is_open:
            self._is_open = False
            self.unix.close()
            for each in self.tcp:
                each.close()


class Acceptor:
    """Accepts from one socket for ever and hands each connection on."""

    def __init__(
        self,
        listener: socket.socket,
        admit: Admit,
        log: EventLog,
        turned_away: Callable[[], None] = lambda: None,
    ) -> None:
        """turned_away: called for each connection that there was no descriptor for."""
        self._count_turned_away = turned_away
        self._listener = listener
        self._is_unix = listener.family == socket.AF_UNIX
        self._admit = admit
        self._log = log
        self._spare: int | None = _spare_descriptor()
        self._turned_away = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                # First: without a descriptor to give, accept() fails where nobody is waiting, too.
                await _readable(self._listener)
                try:
                    sock, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    await self._failed(error)
                    continue
                if self._turned_away:
                    self._log.warning("descriptors are back", turned_away=self._turned_away)
                    self._turned_away = 0
                sock.setblocking(False)
                if not self._is_unix:
                    with contextlib.suppress(OSError):  # gone already: what reads it will see
                        set_up_tcp(sock)
                await self._admit(sock, self._is_unix)
        finally:
            if self._spare is not None:
                os.close(self._spare)
                self._spare = None

    async def _failed(self, error: OSError) -> None:
        if error.errno in _OUT_OF_DESCRIPTORS:
            if not self._turned_away:
                self._log.error("out of descriptors: connections are turned away", reason=error)
            self._count_turned_away()
            self._turned_away += 1  # or, where there is no spare one either, made to wait
            if not self._turn_away():
                await asyncio.sleep(PAUSE_S)
        elif error.errno in _OUT_OF_MEMORY:
            self._log.error("cannot accept", reason=error)
            await asyncio.sleep(PAUSE_S)
        else:  # the peer's: it went away before we looked
            self._log.debug("cannot accept", reason=error)

    def _turn_away(self) -> bool:
        """Spends the spare descriptor on an answer. False: there was none to spend."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = _spare_descriptor()
            return self._spare is not None
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with sock:
                sock.setblocking(False)
                text = "the node is out of descriptors (RLIMIT_NOFILE); try later"
                sock.send(wire.pack_hello(wire.refusal("descriptors", text)))
        with contextlib.suppress(OSError):
            self._spare = _spare_descriptor()
        return self._spare is not None


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    loop.add_reader(sock, _set, is_readable)
    try:
        await is_readable
    finally:
        loop.remove_reader(sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _spare_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _told(path: str) -> Any:
    try:
        yield
    except NoResource:
        raise
    except OSError as error:
        raise NoResource(f"socket {path}: cannot be made: {error.strerror}") from None


def _make_folder(folder: str, mode: int) -> None:
    """The last level at most, and as open as the socket in it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o755 if mode & 0o077 else 0o700)


def _locked(path: str) -> int:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 20).decode("ascii", "replace").strip()
        os.close(lock)
        raise NoResource(f"socket {path}: another kvpool serve has it (process {owner})") from None
    except BaseException:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _remove_stale(path: str) -> None:
    """We have the lock; but a socket that somebody answers on is not taken from them even so."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise NoResource(f"socket {path}: there is a file of that name, and it is no socket")
    try:
        UnixAddress(path).open(_PROBE_S).close()
    except ConnectionRefusedError:
        os.unlink(path)
        return
    except FileNotFoundError:
        return
    except (TimeoutError, BlockingIOError):
        pass  # a full backlog: alive, if busy
    raise NoResource(f"socket {path}: another process listens there")


def _bound(path: str, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def _bound_tcp(family: int, address: Any, earlier: list[socket.socket]) -> socket.socket:
    """Port 0 is any; but a host with two addresses has one port."""
    host, port, *more = address
    if not port and earlier:
        port = earlier[0].getsockname()[1]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port, *more))
    except OSError as error:
        sock.close()
        at = host_and_port(host, port)
        raise NoResource(f"cannot listen on {at}: {error.strerror}") from None
    return sock
