"""What hostile client processes do: everything that they can do with what a node gave them.

Each attempt gives "ok" or the name of the error, so that a test can say which must fail and how.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import struct
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvpool
from tests.frames import RawClient
from tests.pools import opaque
from tests.served import Blocks

NOBODY = 65534
ARENA, INDEX, CONTROL, STAGING, BELLS = range(5)
F_ADD_SEALS, F_SEAL_WRITE, F_SEAL_SHRINK = 1033, 0x8, 0x2
FALLOC_PUNCH_HOLE = 0x1 | 0x2  # PUNCH_HOLE | KEEP_SIZE
MADV_REMOVE = 9
PAGE = 4096
HAZARDS_OFFSET = PAGE  # of the client's page in its control memory
HAZARDS = 256
# Words of a lane, 64 bytes a line.
ASKED, OP, SPACE, COUNT, SKIP, HAS_PARENT, DEADLINE_US = range(7)
WINDOW_OFFSET, WINDOW_BYTES, STAGED, ANSWERED = 8, 9, 16, 32
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p


def outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except ValueError as error:  # of mmap
        return str(error)
    return "ok"


def become(uid: int | None) -> None:
    if uid is None:
        return
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def map_for_writing(fd: int) -> None:
    """Maps it, and never touches it."""
    mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()


def reopen_and(attempt: Callable[[int], Any], path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        attempt(fd)
    finally:
        os.close(fd)


def fallocate(fd: int) -> None:
    if LIBC.fallocate(fd, FALLOC_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(PAGE)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def write_after_reading(fd: int) -> None:
    """Maps it read-only and asks for more."""
    at = LIBC.mmap(
        None, ctypes.c_size_t(PAGE), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0)
    )
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    if LIBC.mprotect(ctypes.c_void_p(at), PAGE, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def remove_after_reading(fd: int) -> None:
    with mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        mapped.madvise(MADV_REMOVE)


@contextlib.contextmanager
def attached(address: str) -> Iterator[tuple[RawClient, list[int], dict[str, Any]]]:
    client = RawClient(address)
    sock, fds, facts = client.shm()
    with sock:
        yield client, fds, facts
    client.close()


def try_all(pipe: Connection, address: str, uid: int | None, may_reopen: bool) -> None:
    """Says what became of each attempt to change the memory that all clients read.

    may_reopen: by /proc as well, which is more than a descriptor that was given.
    """
    become(uid)
    with attached(address) as (_, fds, _):
        found: dict[str, str] = {}
        for name, fd in (("arena", fds[ARENA]), ("index", fds[INDEX])):
            attempts = with_descriptor(fd)
            if may_reopen:
                attempts |= by_path(f"/proc/self/fd/{fd}")
            found |= {f"{name}: {what}": outcome(attempt) for what, attempt in attempts.items()}
        for name, fd in (("control", fds[CONTROL]), ("staging", fds[STAGING])):
            found[f"{name}: truncate"] = outcome(lambda fd=fd: os.ftruncate(fd, 0))
            found[f"{name}: grow"] = outcome(lambda fd=fd: os.ftruncate(fd, 1 << 30))
            found[f"{name}: seal"] = outcome(
                lambda fd=fd: fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE)
            )
        pipe.send(found)


def with_descriptor(fd: int) -> dict[str, Callable[[], Any]]:
    return {
        "map": lambda: map_for_writing(fd),
        "protect": lambda: write_after_reading(fd),
        "remove": lambda: remove_after_reading(fd),
        "write": lambda: os.pwrite(fd, b"\xff", 0),
        "punch": lambda: fallocate(fd),
        "truncate": lambda: os.ftruncate(fd, 0),
        "seal": lambda: fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE),
    }


def by_path(path: str) -> dict[str, Callable[[], Any]]:
    return {
        "reopen and map": lambda: reopen_and(map_for_writing, path),
        "reopen and write": lambda: reopen_and(lambda fd: os.pwrite(fd, b"\xff" * PAGE, 0), path),
        "reopen and punch": lambda: reopen_and(fallocate, path),
    }


def look_into(pipe: Connection, uid: int, pid: int) -> None:
    """Says what became of each attempt to get at a process of another user."""
    become(uid)
    attempts: dict[str, Callable[[], Any]] = {
        "descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "memory": lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)),
        "signal": lambda: os.kill(pid, 0),
    }
    pipe.send({what: outcome(attempt) for what, attempt in attempts.items()})


def write_into(pipe: Connection, address: str, which: int, from_whole_api: bool) -> None:
    """Dies of it: stores into memory that is mapped as a client of ours maps it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if from_whole_api:
        with kvpool.connect(address) as pool:
            blocks = Blocks(pool)
            with blocks.space.view(blocks.keys([0])) as viewed:
                at = np.frombuffer(viewed[0], np.uint8).ctypes.data
                pipe.send("ready")
                ctypes.memset(at, 0xFF, 8)
    with attached(address) as (_, fds, _):
        mapped = mmap.mmap(fds[which], 0, mmap.MAP_SHARED, mmap.PROT_READ)
        at = np.frombuffer(mapped, np.uint8).ctypes.data
        pipe.send("ready")
        ctypes.memset(at, 0xFF, 8)
    pipe.send("was not stopped")


def scribble(pipe: Connection, address: str, seed: int, seconds: float) -> None:
    """Writes anything anywhere into its control and staging memory, and rings its bells."""
    random = np.random.default_rng(seed)
    with attached(address) as (_, fds, _):
        parts = [np.frombuffer(mmap.mmap(fds[each], 0), np.uint64) for each in (CONTROL, STAGING)]
        pipe.send("ready")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for part in parts:
                scribble_once(part, random)
            for bell in fds[BELLS:]:
                with contextlib.suppress(OSError):
                    os.write(bell, struct.pack("<Q", int(random.integers(1, 1 << 32))))
        pipe.send("done")


def scribble_once(words: Any, random: np.random.Generator) -> None:
    """Some words become anything, small numbers (which may be believed), or their neighbours."""
    at = random.integers(0, min(len(words), 1 << 16), 64)
    kind = random.integers(3)
    if kind == 0:
        words[at] = random.integers(0, 1 << 63, 64, dtype=np.uint64)
    elif kind == 1:
        words[at] = random.integers(0, 8, 64, dtype=np.uint64)
    else:
        words[at] += np.uint64(1)


def ask_nonsense(pipe: Connection, address: str, seed: int, seconds: float) -> None:
    """Requests whose fields may each be believed, with payload counts and keys that may not.

    When it is dropped for one it connects again. Says how many requests it asked, and how many were
    answered.
    """
    random = np.random.default_rng(seed)
    asked = answered = 0
    pipe.send("ready")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with attached(address) as (client, fds, _):
            number = client.space(opaque("nonsense", block_bytes=PAGE))
            control = np.frombuffer(mmap.mmap(fds[CONTROL], 0), np.uint64)
            staging = np.frombuffer(mmap.mmap(fds[STAGING], 0), np.uint8)
            lanes, lanes_at, lane_bytes = (int(control[word]) for word in (2, 5, 6))
            for _ in range(1000):
                which = int(random.integers(lanes))
                first = (lanes_at + which * lane_bytes) // 8
                lane = control[first : first + lane_bytes // 8]
                fill_in(lane, staging, number, random)
                asked += 1
                lane[ASKED] += np.uint64(1)
                os.write(fds[BELLS + which], struct.pack("<Q", 1))
                if not is_answered(lane, random):
                    break
                answered += 1
    pipe.send((asked, answered))


def fill_in(lane: Any, staging: Any, number: int, random: np.random.Generator) -> None:
    """The fields of one request: mostly right, one in eight anything."""
    count = int(random.integers(1, 5))
    key_bytes = (count * 16 + 63) // 64 * 64
    offset = int(random.integers(0, 64)) * PAGE
    fields = {
        OP: int(random.integers(1, 3)),
        SPACE: number,
        COUNT: count,
        SKIP: int(random.integers(0, 2)),
        HAS_PARENT: int(random.integers(0, 2)),
        DEADLINE_US: 20_000,
        WINDOW_OFFSET: offset,
        WINDOW_BYTES: key_bytes + 64 + int(random.integers(0, 8)) * PAGE,
        STAGED: int(random.integers(0, 6)) * PAGE,
    }
    if random.integers(8) == 0:
        fields[int(random.choice(list(fields)))] = int(random.integers(1 << 63))
    for at, value in fields.items():
        lane[at] = np.uint64(value)
    keys = random.integers(0, 4, count)  # of few blocks, so that they leave room for others'
    staging[offset : offset + count * 16] = np.repeat(keys, 16).astype(np.uint8)


def is_answered(lane: Any, random: np.random.Generator) -> bool:
    """Until then it counts payload to and fro. False: it was dropped, or has no patience left."""
    end = time.monotonic() + 0.1
    while lane[ANSWERED] != lane[ASKED]:
        if time.monotonic() > end:
            return False
        lane[STAGED] = np.uint64(random.integers(0, 1 << 16))
    return True


def name_all_slots(pipe: Connection, address: str, slot_bytes: int) -> None:
    """Claims to read every slot of that size in place, and holds on until it is told to end."""
    with attached(address) as (_, fds, _):
        words = np.frombuffer(mmap.mmap(fds[CONTROL], 0), np.uint64)
        first = HAZARDS_OFFSET // 8
        in_use = words[first : first + HAZARDS // 64]
        named = words[first + 8 : first + 8 + HAZARDS]
        named[:] = np.arange(HAZARDS, dtype=np.uint64) * np.uint64(slot_bytes) + np.uint64(1)
        in_use[:] = np.uint64((1 << 64) - 1)
        pipe.send("ready")
        pipe.recv()
