"""Who this node is: an id that stays, and an incarnation that grows with every start.

Promises:  1. two processes never have one state directory at the same time;
           2. an incarnation is written, and safe on the disk, before it is used: a later one is
              greater, even if the clock went back;
           3. a file that cannot be understood is an error that says what to do, never a new id.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpool.cluster.names import is_node_id
from kvpool.errors import KvpoolError

FILE = "node.json"
LOCK = "node.lock"
FILE_BYTES_MAX = 4096
INCARNATION_MAX = 2**63 - 1


class StateRefused(KvpoolError, OSError):
    """A state directory is in use, damaged or not to be written: the message says what to do."""


@dataclass(frozen=True, slots=True)
class NodeId:
    """id: 32 hexadecimal digits."""

    id: str
    incarnation: int


class StateDirectory:
    """Open: it is this process's alone. close() gives it back."""

    def __init__(self, path: str, clock_ns: Callable[[], int]) -> None:
        """clock_ns: nanoseconds since 1970. Raises StateRefused."""
        self.path = path
        self._lock: int | None = None
        try:
            self._lock = _locked(path)
            self.node = self._next(clock_ns())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _next(self, now_ns: int) -> NodeId:
        before = _read(os.path.join(self.path, FILE))
        node_id = secrets.token_hex(16) if before is None else before.id
        least = 1 if before is None else before.incarnation + 1
        node = NodeId(node_id, max(least, now_ns))
        if node.incarnation > INCARNATION_MAX:
            raise StateRefused(
                f"{self.path}: the incarnation in {FILE} is the last one that there is; remove the"
                " file, and the node gets another id"
            )
        _write(self.path, node)
        return node


def _locked(path: str) -> int:
    """A descriptor: the directory is ours until it is closed."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        lock = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refusal(path, "cannot be used", error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        holder = _holder(lock)
        os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise _refusal(path, "cannot be locked", error) from None
        raise StateRefused(
            f"{path}: another daemon{holder} uses it; give each daemon a state_dir of its own"
        ) from None
    return lock


def _holder(lock: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f" (pid {int(os.pread(lock, 32, 0))})"
    return ""


def _read(path: str) -> NodeId | None:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(path, "cannot be read", error) from None
    node = _parsed(content)
    if node is None:
        raise StateRefused(
            f"{path}: is damaged, or no file of kvpool's; remove it, and the node gets another id"
            " (its blocks are found again once it has announced them anew)"
        )
    return node


def _parsed(content: bytes) -> NodeId | None:
    try:
        told: Any = json.loads(content)
        node_id, incarnation = told["id"], told["incarnation"]
        is_whole = told["check"] == _check(node_id, incarnation)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not is_whole or type(incarnation) is not int or not isinstance(node_id, str):
        return None
    good = is_node_id(node_id) and 1 <= incarnation <= INCARNATION_MAX
    return NodeId(node_id, incarnation) if good else None


def _check(node_id: object, incarnation: object) -> int:
    return zlib.crc32(f"{node_id} {incarnation}".encode())


def _write(folder: str, node: NodeId) -> None:
    told = {"id": node.id, "incarnation": node.incarnation}
    content = json.dumps({**told, "check": _check(node.id, node.incarnation)}) + "\n"
    fresh = os.path.join(folder, f"{FILE}.new")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, os.path.join(folder, FILE))
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise _refusal(folder, "the id of this node cannot be written", error) from None


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(path: str, what: str, error: OSError) -> StateRefused:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StateRefused(f"{path}: {what}: {reason}; choose another state_dir, or make room")
