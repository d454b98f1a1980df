"""Small pools and recognisable payloads, for every test that needs a pool.

A payload is a function of its key alone, so that a test can say what a block must hold without
remembering what was put: right bytes or a miss.
"""

import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvpool

ROOT = Path(__file__).resolve().parents[1]
BLOCK_BYTES = 4096


@contextmanager
def opened(dram: str | int = "8MiB", **options: Any) -> Iterator[kvpool.Pool]:
    """A pool without background work of its own; its books are checked before it is closed."""
    options = {"prefault": "off", "evict_ahead": 0.0, **options}
    with kvpool.open(dram, **options) as pool:
        yield pool
        if not pool.closed:
            pool.check()


def opaque(model: str = "m", *, block_bytes: int = BLOCK_BYTES, **fields: Any) -> kvpool.Manifest:
    """A manifest of blocks that are just bytes, one token each unless said otherwise."""
    given = {"layout": "opaque", "block_tokens": 1, **fields}
    return kvpool.Manifest(model=model, block_bytes=block_bytes, **given)


def key(number: int) -> bytes:
    """The key of that number: 16 bytes that look like a hash."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


@functools.cache
def payload(of: bytes, size: int = BLOCK_BYTES) -> bytes:
    """What the block of that key holds in these tests."""
    return hashlib.shake_128(of).digest(size)


def payloads(of: Iterable[bytes], size: int = BLOCK_BYTES) -> bytes:
    return b"".join(payload(bytes(each), size) for each in of)


def got(space: kvpool.Namespace, wanted: list[bytes]) -> int:
    """How many leading blocks a get delivers, after a look at every byte of them."""
    size = space.manifest.block_bytes
    assert size is not None
    out = np.full(len(wanted) * size, 0xA5, np.uint8)
    count = space.get_into(wanted, out)
    assert out[: count * size].tobytes() == payloads(wanted[:count], size)
    return count


def is_there(space: kvpool.Namespace, wanted: bytes) -> bool:
    return space.lookup([wanted]).blocks == 1


def shown(value: object) -> str:
    """repr() that is the same in every process, for names of cases: no addresses, sets in order."""
    if isinstance(value, set):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@contextmanager
def alone_with(folder: Path) -> Iterator[None]:
    """One process of all that run tests at a time: the others wait for it here."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def wait_until(true: Callable[[], bool], timeout_s: float = 30) -> None:
    """Looks again and again, for what another thread is about to do. Fails at the time-out."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not true within {timeout_s} s"
        time.sleep(0.0005)


def run_python(code: str, *arguments: str, timeout_s: float = 60) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python of its own, which finds this kvpool."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout, done.stderr
