"""A node of one's own: `kvpool serve` on a unix socket, started by the first engine that needs it.

Promises:  1. of engines that start together one starts a node and the others find it;
           2. the node outlives the engine: it is no child of it, has a session of its own and what
              it says goes to a file beside its socket;
           3. nothing that a dead process left (a lock, a socket) is waited for, and nothing longer
              than START_S_MAX;
           4. the folder is this user's, and nobody else can put a socket or a lock into it.
Thread rule: any thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from kvpool.address import ADDRESS_VARIABLE, UnixAddress, default_socket
from kvpool.connectors.options import Options
from kvpool.errors import BadArgument, Unreachable
from kvpool.remote import candidates

START_S_MAX = 60.0  # with an SSD tier a second per million blocks
PROBE_S = 1.0
PAUSE_S = 0.05
# Nobody, or a node of somebody else that is not for us.
_NOBODY = (errno.EACCES, errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.ENOTDIR)
_LOG_TAIL_BYTES = 64 << 10
# The shell ends at once, so that the node belongs to init: who kills an engine with its children
# does not kill it. The engine reads its number from the shell's stdout; its own goes to the log.
_DETACHED = '"$@" >&2 & echo $!'


def ensure_node(
    options: Options, environment: Mapping[str, str], timeout_s: float = START_S_MAX
) -> str:
    """The address of a node that listens: one that there was, or one that this call started.

    Raises BadArgument: the address is not of this host, or its folder not private; Unreachable: a
    node did not get ready in time, or ended, and its last words.
    """
    deadline = time.monotonic() + timeout_s
    wanted = _addresses(options.address, environment)
    for each in wanted:
        if answers(each.path):
            return str(each)
    is_given = options.address is not None or environment.get(ADDRESS_VARIABLE)
    target = wanted[0] if is_given else UnixAddress(default_socket(environment))
    _make_private(os.path.dirname(target.path))
    with _locked(target.path, deadline) as is_ours:
        if is_ours and not answers(target.path):
            _start(target.path, options, environment, deadline)
    return str(target)


def answers(path: str) -> bool:
    """Whether somebody listens on a unix socket. One that is too busy to answer does."""
    try:
        UnixAddress(path).open(PROBE_S).close()
    except OSError as error:
        return error.errno not in _NOBODY
    return True


def log_path(path: str) -> str:
    """Where a node that is started on this socket writes its log."""
    return path.removesuffix(".sock") + ".log"


def _addresses(address: str | None, environment: Mapping[str, str]) -> list[UnixAddress]:
    found = candidates(address, environment)
    unix = [each for each in found if isinstance(each, UnixAddress)]
    if len(unix) < len(found):
        raise BadArgument(f"address is {found[0]}, but a node is started on a unix socket only")
    return unix


def _make_private(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
    except OSError as error:
        raise BadArgument(f"a node cannot be started in {folder}: {error.strerror}") from None
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BadArgument(
            f"a node cannot be started in {folder}: other users may write to it; use a folder of"
            " your own (chmod 700)"
        )


@contextlib.contextmanager
def _locked(path: str, deadline: float) -> Iterator[bool]:
    """The right to start a node here; False where somebody else started one meanwhile.

    The kernel takes the lock from a process that dies, and no child inherits it.
    """
    try:
        lock = os.open(path + ".spawn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BadArgument(f"{path}.spawn cannot be made: {error.strerror}") from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if answers(path):
                    yield False
                    return
            else:
                yield True
                return
            if time.monotonic() > deadline:
                raise Unreachable(f"another process is starting a node on {path}, and takes long")
            time.sleep(PAUSE_S)
    finally:
        os.close(lock)


def _start(path: str, options: Options, environment: Mapping[str, str], deadline: float) -> None:
    """Returns when the node listens."""
    log_file = log_path(path)
    try:
        begin, pid = _launched(_command(path, options), log_file, environment)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unreachable(f"kvpool serve cannot be started: {error}") from None
    with _watching(pid) as has_ended:
        while not answers(path):
            if has_ended(PAUSE_S):
                if answers(path):  # it lost the socket to one that somebody started by hand
                    return
                raise Unreachable(f"kvpool serve ended: {_last_words(log_file, begin)}")
            if time.monotonic() > deadline:
                raise Unreachable(f"kvpool serve is not ready in time; its log is {log_file}")


def _launched(command: list[str], log_file: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Where its part of the log begins, and the number of the process."""
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        begin = os.fstat(log).st_size
        done = subprocess.run(
            ["/bin/sh", "-c", _DETACHED, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=_environment(environment),
            start_new_session=True,
            check=True,
        )
    finally:
        os.close(log)
    return begin, int(done.stdout)


def _command(path: str, options: Options) -> list[str]:
    if not sys.executable:
        raise Unreachable("this interpreter does not know its own path; start `kvpool serve`")
    command = [sys.executable, "-P", "-m", "kvpool", "serve", "--socket", path]
    command += ["--dram", str(options.spawn_dram)]
    if options.spawn_ssd is not None:
        command += ["--ssd", options.spawn_ssd]
    if options.spawn_ssd_capacity is not None:
        command += ["--ssd-capacity", str(options.spawn_ssd_capacity)]
    return command


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What counts for an engine and not for its node is left out; folders stay where they are."""
    kept = {name: value for name, value in environment.items() if name != "NOTIFY_SOCKET"}
    if folders := kept.get("PYTHONPATH"):
        absolute = [os.path.abspath(each) for each in folders.split(os.pathsep)]
        kept["PYTHONPATH"] = os.pathsep.join(absolute)
    return kept


@contextlib.contextmanager
def _watching(pid: int) -> Iterator[Callable[[float], bool]]:
    """A call that waits some seconds for the end of a process that is nobody's child here."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda _: True
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        yield lambda seconds: bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def _last_words(path: str, begin: int) -> str:
    """The error in what was written since."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(begin, size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if "error" in line]
    return (errors or lines or ["it said nothing"])[-1]
