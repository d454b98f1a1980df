"""Namespaces of Linux: networks and mounts that only some children of this process see.

A namespace lives as long as a descriptor of it, or a process in it. Nothing here has a name in the
system, so nothing can be left over: the kernel undoes all of it when this process ends, however it
does, for its children are killed then.

Namespaces belong to threads. Who enters one does so in a thread or a child made for it.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import signal
from collections.abc import Callable
from typing import TypeVar

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NETWORK, _OWN_FOLDER = 0x00020000, 0x40000000, 0x00000200  # of unshare(2)
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14  # of mount(2)
_DEATH_SIGNAL = 1  # of prctl(2)

Result = TypeVar("Result")


class LabError(Exception):
    """A cluster cannot be made on this machine, or does not do what it was told, and why."""


def new_network() -> int:
    """A descriptor of a network without anything in it. Raises LabError."""
    return in_thread(lambda: _new("net", _NEW_NETWORK))


def new_mounts(folder: str, size_bytes: int) -> int:
    """A descriptor of the mounts as they are, and on `folder` a disk of its own, in memory and so
    large. Raises LabError."""

    def mount() -> int:
        made = _new("mnt", _NEW_MOUNTS)
        _call("mount", None, b"/", None, _PRIVATE | _RECURSIVE, None)
        _call("mount", b"kvpool", folder.encode(), b"tmpfs", 0, f"size={size_bytes}".encode())
        return made

    return in_thread(mount)


def in_network(network: int, work: Callable[[], Result]) -> Result:
    """What work() gives in that network. Sockets that it makes stay there for good."""

    def there() -> Result:
        _call("setns", network, 0)
        return work()

    return in_thread(there)


def in_mounts(mounts: int, work: Callable[[], Result]) -> Result:
    """What work() gives where those mounts are. The current folder is / then."""

    def there() -> Result:
        _call("unshare", _OWN_FOLDER)  # else this would change every thread's
        _call("setns", mounts, 0)
        return work()

    return in_thread(there)


def in_thread(work: Callable[[], Result]) -> Result:
    """In one that ends with it, and with it whatever it entered."""
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


def before_child(*namespaces: int) -> Callable[[], None]:
    """For preexec_fn: the child runs in these, and is killed when the calling thread ends."""
    parent = os.getpid()

    def prepare() -> None:
        _call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it ended before the kernel was told
        os.setpgid(0, 0)  # a ^C is for this process, which ends its children
        for each in namespaces:
            _call("setns", each, 0)

    return prepare


def _new(kind: str, flag: int) -> int:
    _call("unshare", flag)
    return os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        hint = "; it takes root (CAP_SYS_ADMIN and CAP_NET_ADMIN)" if number == 1 else ""
        raise LabError(f"{name}: {os.strerror(number)}{hint}")
