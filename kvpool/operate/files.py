"""Files in a pool: a text key names bytes of any length, kept as blocks of one size.

A file is a head block and a chain of content blocks, all in one opaque namespace:

    name[-1] = H("kvpool file\\0" || namespace id || key)       key: the text, UTF-8
    name[i]  = H(name[i-1] || content of block i)              H: SHA-256, cut to 16 bytes
    head     = at H("kvpool file head\\0" || namespace id || key)
               magic, block bytes, length, count, name[0..count-1], SHA-256 of all that

So the head names its content by hashes of it, and every block that is read is checked against its
name: what comes out is what one put() brought, or a miss. Content of another put under the same
key has other names, so that a reader never sees a mixture. A put of the same bytes moves none.

Promises:  1. a head is stored after all its content, and replaced by removing it first: at every
              moment a get gives the old file, the new one, or a miss;
           2. a short, torn or damaged file is a miss with a reason, never wrong bytes;
           3. memory is bounded by SLICE_BYTES and one head, whatever the file's length.
Two writers of one key at a time: one of them wins; until a later put it may be a miss.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from kvpool.errors import BadArgument, KvpoolError
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace

BLOCK_BYTES = 1 << 20
BLOCK_BYTES_MIN = 4096
SLICE_BYTES = 16 << 20  # that one request brings or takes
KEY_BYTES_MAX = 4096
NAME_BYTES = 16

_MAGIC = b"kvpfile1"
_HEAD = struct.Struct("<8sIQI")  # magic, block bytes, length, blocks
_SUM_BYTES = 32
_TRIES = 3  # to place a head, while another writer of the same key does


class FileMiss(KvpoolError):
    """The pool has no whole file under that key: the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a put."""

    bytes: int
    blocks: int  # of content
    present: int  # of those, were there already
    is_replaced: bool  # another content was under that key


@dataclass(frozen=True, slots=True)
class Head:
    """What a head block says."""

    length: int
    names: list[bytes]


def manifest_of(name: str, block_bytes: int = BLOCK_BYTES) -> Manifest:
    """Of a namespace of files. Raises BadArgument."""
    if block_bytes < BLOCK_BYTES_MIN:
        raise BadArgument(f"block_bytes is {block_bytes}; it must be {BLOCK_BYTES_MIN} or more")
    return Manifest(
        model="kvpool files",
        name=name,
        layout="opaque",
        dtype="uint8",
        block_tokens=1,
        block_bytes=block_bytes,
    )


def put(space: Namespace, key: str, source: BinaryIO) -> Stored:
    """Stores all that the source gives. Raises KvpoolError: the pool did not keep it."""
    _check_key(key)
    names, length, present = _put_content(space, key, source)
    kept = space.lookup(names).blocks if names else 0
    if kept < len(names):
        raise KvpoolError(
            f"the pool kept {kept:,} of {len(names):,} blocks: the file is larger than the room it"
            " has for it; nothing is stored under this key that was not there before"
        )
    head = _pack_head(space, Head(length, names))
    old = _place_head(space, key, head)
    if old is not None:
        _remove(space, [name for name in old.names if name not in set(names)])
    return Stored(length, len(names), present, old is not None and old.names != names)


def get(space: Namespace, key: str) -> Iterator[bytes]:
    """The content, a checked slice at a time. Raises FileMiss, before the first byte or later."""
    head = find(space, key)
    return _content(space, key, head)


def find(space: Namespace, key: str) -> Head:
    """The head of that key. Raises FileMiss."""
    _check_key(key)
    block = _block_of(space, _head_name(space, key))
    if block is None:
        raise FileMiss(f"there is no file {key!r}, or it was evicted: put it again")
    head = _read_head(space, block)
    if head is None:
        raise FileMiss(f"the head of {key!r} is none that this version reads: put it again")
    return head


def remove(space: Namespace, key: str) -> int:
    """Removes head and content; how many blocks there were. Raises FileMiss."""
    head = find(space, key)
    gone = _remove(space, [_head_name(space, key)])
    return gone + _remove(space, head.names)


# --- content -------------------------------------------------------------------------------------


def _put_content(space: Namespace, key: str, source: BinaryIO) -> tuple[list[bytes], int, int]:
    """Names, length, and how many blocks were there already."""
    size = space.block_bytes
    names: list[bytes] = []
    length = present = 0
    last = _root(space, key)
    most = _names_max(space)
    while slice_ := _read_up_to(source, _slice_blocks(space) * size):
        length += len(slice_)
        parent = names[-1] if names else None
        fresh = []
        for start in range(0, len(slice_), size):
            last = _next_name(last, slice_[start : start + size])
            fresh.append(last)
        if len(names) + len(fresh) > most:
            raise BadArgument(
                f"more than {most:,} blocks of {size:,} bytes: use a larger --block-bytes"
            )
        padded = slice_ + bytes(-len(slice_) % size)
        done = space.put(fresh, padded, parent=parent)
        readable = done.stored + done.present + done.not_durable
        if readable < len(fresh):
            raise KvpoolError(
                f"the pool took {len(names) + readable:,} blocks and then no more:"
                f" {done.reason.name.lower()}"
            )
        present += done.present
        names += fresh
    return names, length, present


def _content(space: Namespace, key: str, head: Head) -> Iterator[bytes]:
    size, step = space.block_bytes, _slice_blocks(space)
    out = np.empty(min(step, max(1, len(head.names))) * size, np.uint8)
    last = _root(space, key)
    for start in range(0, len(head.names), step):
        names = head.names[start : start + step]
        got = space.get_into(names, out[: len(names) * size])
        for at in range(got):
            begin = (start + at) * size
            block = out[at * size : at * size + min(size, head.length - begin)].data
            last = _next_name(last, block)
            if last != names[at]:
                raise FileMiss(f"block {start + at + 1} of {key!r} is not what its head names")
        if got < len(names):
            raise FileMiss(
                f"block {start + got + 1:,} of {len(head.names):,} of {key!r} is missing: it was"
                " evicted; put the file again"
            )
        end = min(head.length, (start + got) * size)
        yield out[: end - start * size].tobytes()


# --- heads ---------------------------------------------------------------------------------------


def _place_head(space: Namespace, key: str, block: bytes) -> Head | None:
    """Puts a head in place of whichever is there; the one that was, if it could be read."""
    name, old = _head_name(space, key), None
    for _ in range(_TRIES):
        there = _block_of(space, name)
        if there == block:
            return old or _read_head(space, there)
        if there is not None:
            old = _read_head(space, there) or old
            space.remove([name])
        done = space.put([name], block)
        if done.stored or done.not_durable:
            return old
        if not done.present:
            raise KvpoolError(f"the pool did not take the head: {done.reason.name.lower()}")
    raise KvpoolError(f"another writer replaces {key!r} again and again; put it once more")


def _pack_head(space: Namespace, head: Head) -> bytes:
    said = _HEAD.pack(_MAGIC, space.block_bytes, head.length, len(head.names))
    said += b"".join(head.names)
    whole = said + hashlib.sha256(said).digest()
    return whole + bytes(space.block_bytes - len(whole))


def _read_head(space: Namespace, block: bytes) -> Head | None:
    """None: it is none, of another version, or not whole."""
    magic, block_bytes, length, count = _HEAD.unpack_from(block)
    size = space.block_bytes
    if (magic, block_bytes) != (_MAGIC, size) or count > _names_max(space):
        return None
    if -(-length // size) != count:
        return None
    end = _HEAD.size + count * NAME_BYTES
    if hashlib.sha256(block[:end]).digest() != block[end : end + _SUM_BYTES]:
        return None
    starts = range(_HEAD.size, end, NAME_BYTES)
    return Head(length, [block[start : start + NAME_BYTES] for start in starts])


def _names_max(space: Namespace) -> int:
    return (space.block_bytes - _HEAD.size - _SUM_BYTES) // NAME_BYTES


# --- names and blocks ----------------------------------------------------------------------------


def _check_key(key: str) -> None:
    if not 0 < len(key.encode(errors="surrogateescape")) <= KEY_BYTES_MAX:
        raise BadArgument(f"a key has 1 to {KEY_BYTES_MAX} bytes of text")


def _digest(*parts: bytes | memoryview) -> bytes:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.digest()[:NAME_BYTES]


def _root(space: Namespace, key: str) -> bytes:
    return _digest(b"kvpool file\0", space.id, key.encode(errors="surrogateescape"))


def _head_name(space: Namespace, key: str) -> bytes:
    return _digest(b"kvpool file head\0", space.id, key.encode(errors="surrogateescape"))


def _next_name(last: bytes, content: bytes | memoryview) -> bytes:
    return _digest(last, content)


def _slice_blocks(space: Namespace) -> int:
    return max(1, SLICE_BYTES // space.block_bytes)


def _block_of(space: Namespace, name: bytes) -> bytes | None:
    out = np.empty(space.block_bytes, np.uint8)
    return out.tobytes() if space.get_into([name], out) else None


def _remove(space: Namespace, names: list[bytes]) -> int:
    return space.remove(names) if names else 0


def _read_up_to(source: BinaryIO, count: int) -> bytes:
    """Less only at the end: a pipe gives what it has at the moment."""
    parts, left = [], count
    while left and (part := source.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
