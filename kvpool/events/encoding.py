"""Batches of events as they are on the wire: what vLLM 0.32 sends, and where it comes from beside.

A batch is an array [ts, events, data_parallel_rank, source]; an event is a map with its name under
"type". A reader of vLLM's three elements leaves the fourth out.

Promises:  1. what vLLM's own decoder reads it reads here;
           2. decode() of what a stranger sent raises BadBatch, whatever it is.
"""

from __future__ import annotations

import msgspec

from kvpool.errors import KvpoolError

MEDIUM_DRAM = "CPU"
MEDIUM_SSD = "STORAGE"
SEQUENCE_BYTES = 8
SEQUENCE_MAX = (1 << 63) - 1
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # instead of a sequence: no more follows
SNAPSHOT = -1  # asked for instead of a sequence: all that is here

# What a snapshot's batches are.
BEGIN, BLOCKS, WHOLE = "begin", "blocks", "whole"


class BadBatch(KvpoolError):
    """Bytes that are no batch of events."""


class BlockStored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Blocks that follow each other in one chain are in one tier from now on."""

    block_hashes: list[bytes]  # keys
    parent_block_hash: bytes | None  # before the first of them; None: not known, or a chain's first
    block_size: int  # tokens; 0: not known
    medium: str | None
    token_ids: list[int] = []  # a pool has none
    lora_id: int | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Blocks are in that tier no more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """All that this publisher said is void; what is here is said anew."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which part of a snapshot a batch is. next: the sequence from which the stream goes on."""

    state: str  # BEGIN, BLOCKS or WHOLE
    next: int
    blocks: int = 0  # with WHOLE: how many there were, once for each medium


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose events these are."""

    node: bytes  # 16 bytes; stays the same when the node comes back
    incarnation: int  # one life of it: grows with each
    tenant: str = ""
    namespace: bytes = b""  # 16 bytes
    name: str = ""  # of the namespace, as far as it is known
    snapshot: Snapshot | None = None


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """One message. At most one namespace's events."""

    ts: float  # Unix time
    events: list[Event]
    data_parallel_rank: int | None
    source: Source


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode(batch: Batch) -> bytes:
    return _encoder.encode(batch)


def decode(payload: bytes) -> Batch:
    """Raises BadBatch."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadBatch(f"no batch of events: {error}") from None


def pack_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def unpack_sequence(frame: bytes) -> int:
    """Raises BadBatch."""
    if len(frame) != SEQUENCE_BYTES:
        raise BadBatch(f"a sequence of {len(frame)} bytes; it has {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big", signed=True)
