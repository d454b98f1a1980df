"""What a daemon tells of the events that it publishes (docs/events.md)."""

from __future__ import annotations

import msgspec


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """Of its publisher. Counts grow from the daemon's start."""

    endpoint: str
    replay_endpoint: str  # "" without one
    node: str  # hexadecimal
    incarnation: int
    sequence: int  # of the next batch
    batches: int
    bytes: int
    stored: int  # keys
    removed: int  # keys
    announced: int  # keys, told as all that was here was told anew
    anew: int  # times of that
    lost: int  # times that changes could not be named one by one
    failures: int
    replays: int  # requests
    snapshots: int
    malformed: int
    stalled: int
    buffered_batches: int
    buffered_bytes: int
    answering: int
