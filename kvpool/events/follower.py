"""Follows a publisher: every batch once and in its order, whatever is lost on the way.

    SUB  -> the stream    a gap, or another life: what is missing is asked for, or all there is
    DEALER <-> answers    meanwhile the stream waits in its socket

Promises:  1. a batch that a Follower gives follows the one that it gave before, or clears all
              first: whoever applies them in turn knows what the publisher has;
           2. what a stranger sends in a publisher's place is counted and left out, or is a batch.
Relies on: a replay endpoint. Without one batches are given as they come, and `gaps` counts what is
missing. For one thread at a time.
"""

from __future__ import annotations

import time
from collections import Counter

from kvpool.events.encoding import (
    BEGIN,
    END,
    SNAPSHOT,
    WHOLE,
    AllBlocksCleared,
    BadBatch,
    Batch,
    BlockRemoved,
    BlockStored,
    decode,
    pack_sequence,
    unpack_sequence,
)
from kvpool.events.sockets import SubscriberSockets

HIGH_WATER = 10_000  # batches that wait here
ANSWER_S, ANSWER_S_MAX = 5.0, 60.0  # of silence, until it is asked again; doubling


class Follower:
    """counts: asked, gaps, malformed, repeated."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        high_water: int = HIGH_WATER,
    ) -> None:
        """Raises NoResource: no pyzmq, or no such endpoint."""
        self._replay = replay_endpoint
        self._sockets = SubscriberSockets(endpoint, topic.encode(), high_water=high_water)
        self._life: tuple[bytes, int] | None = None
        self._next: int | None = None  # the sequence that is to come; None: any
        self._is_asking = self._is_whole = False
        self._asked_at = 0.0
        self._patience_s = ANSWER_S
        self.counts: Counter[str] = Counter()
        if replay_endpoint is not None:
            self._ask(SNAPSHOT)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._sockets.close()

    @property
    def sequence(self) -> int:
        """Of the batch that was given last; -1 before the first."""
        return -1 if self._next is None else self._next - 1

    @property
    def is_whole(self) -> bool:
        """What was given up to now is all that there is, as of that sequence."""
        return self._is_whole and not self._is_asking

    def next(self, timeout_s: float) -> Batch | None:
        """None at the timeout. A batch without events only says that the publisher is there."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                batch = self._answered(left_s) if self._is_asking else self._streamed(left_s)
            except BadBatch:
                self.counts["malformed"] += 1
                batch = None
            if batch is not None or time.monotonic() >= deadline:
                return batch

    # --- what was missed -------------------------------------------------------------------------

    def _ask(self, sequence: int) -> None:
        assert self._replay is not None  # looked at by whoever calls
        self._is_asking = True
        self._is_whole = self._is_whole and sequence != SNAPSHOT
        self._asked_at = time.monotonic()
        self.counts["asked"] += 1
        self._sockets.ask(self._replay, pack_sequence(sequence))

    def _answered(self, left_s: float) -> Batch | None:
        quiet_s = self._asked_at + self._patience_s - time.monotonic()
        frames = self._sockets.answer(max(0.0, min(left_s, quiet_s)))
        if frames is None:
            if time.monotonic() - self._asked_at >= self._patience_s:
                self._patience_s = min(2 * self._patience_s, ANSWER_S_MAX)
                self._ask(SNAPSHOT if self._next is None or not self._is_whole else self._next)
            return None
        self._asked_at = time.monotonic()
        if len(frames) != 3:
            raise BadBatch(f"an answer of {len(frames)} frames")
        if frames[1] == END:
            self._is_asking = False
            self._patience_s = ANSWER_S
            if not self._is_whole:  # it was cut short
                self._ask(SNAPSHOT)
            return None
        return self._taken(unpack_sequence(frames[1]), decode(frames[2]))

    def _taken(self, sequence: int, batch: Batch) -> Batch | None:
        part = batch.source.snapshot
        if part is None:
            return self._in_turn(sequence, batch)
        if part.state == BEGIN:
            self._is_whole = False
            self._life = (batch.source.node, batch.source.incarnation)
            self._next = part.next
        elif part.state == WHOLE:
            self._is_whole = True
        return batch

    # --- the stream ------------------------------------------------------------------------------

    def _streamed(self, left_s: float) -> Batch | None:
        frames = self._sockets.event(max(0.0, left_s))
        if frames is None:
            return None
        if len(frames) != 3:
            raise BadBatch(f"a message of {len(frames)} frames")
        return self._in_turn(unpack_sequence(frames[1]), decode(frames[2]))

    def _in_turn(self, sequence: int, batch: Batch) -> Batch | None:
        """The batch, if it is the next; asks for what is missing."""
        life = (batch.source.node, batch.source.incarnation)
        if self._replay is None:
            is_next = self._next in (None, sequence) and self._life in (None, life)
            self.counts["gaps"] += not is_next
            self._life, self._next = life, sequence + 1
            return batch
        if self._life != life:
            self._ask(SNAPSHOT)
            return None
        assert self._next is not None  # a life is known
        if sequence < self._next:
            self.counts["repeated"] += 1
            return None
        if sequence > self._next:
            self.counts["gaps"] += 1
            self._ask(self._next)
            return None
        self._next += 1
        return batch


class Residents:
    """What a publisher has, from its batches: medium by medium, the keys of each namespace."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, bytes, str], set[bytes]] = {}  # tenant, namespace, medium

    def apply(self, batch: Batch) -> None:
        tenant, space = batch.source.tenant, batch.source.namespace
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.keys.clear()
            elif isinstance(event, BlockStored):
                held = self.keys.setdefault((tenant, space, event.medium or ""), set())
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held = self.keys.get((tenant, space, event.medium or ""), set())
                held.difference_update(event.block_hashes)

    def of(self, medium: str) -> set[bytes]:
        """In any namespace."""
        return {key for (_, _, where), keys in self.keys.items() if where == medium for key in keys}

    def __len__(self) -> int:
        """Blocks, once for each medium."""
        return sum(len(keys) for keys in self.keys.values())
