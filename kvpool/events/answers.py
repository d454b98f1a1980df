"""What subscribers that missed something ask for: batches from a sequence on, or all that is here.

    request:  one frame with a sequence
    answer:   (topic, sequence, batch)..., then (empty, END, empty)

A sequence that is not kept any more, or never was in this life, is answered with a snapshot: a
batch that clears all, batches of what is here, and one that says it is whole. All of these have the
sequence before the one from which the stream goes on, so whoever goes on counting is right.

A snapshot is exact together with the stream. What changes while it is made is in the stream from
`next` on: of a key that changed the last event counts, and one that did not was walked over as it
is.

Promises:  1. memory is bounded: SESSIONS_MAX answers at a time, of one batch each; who asks
              meanwhile waits in the socket's queue;
           2. who does not take what it asked for is forgotten after STALLED_S;
           3. nothing that is asked disturbs the stream: an answer goes on by one batch at a time.
Thread rule: the publisher's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvpool.events.encoding import (
    BEGIN,
    END,
    SEQUENCE_BYTES,
    WHOLE,
    AllBlocksCleared,
    Event,
    Snapshot,
    pack_sequence,
)
from kvpool.events.history import History

SESSIONS_MAX = 8
STALLED_S = 30.0

Message = tuple[bytes, bytes, bytes]  # topic, sequence, payload


class Sent(Enum):
    OK = "ok"
    FULL = "full"  # the client has enough unread: later
    GONE = "gone"


Send = Callable[[bytes, Message], Sent]  # to a client
# All that is here, each batch encoded as the part of the snapshot that it is given, and how many
# blocks it has. None: a piece without any.
Pieces = Callable[[int], Iterator[tuple[bytes, int] | None]]
Encode = Callable[[list[Event], Snapshot], bytes]


@dataclass(slots=True)
class _Session:
    messages: Iterator[Message | None]
    since: float  # its last progress
    waiting: Message | None = None  # did not fit yet


class Answers:
    """Those under way."""

    def __init__(
        self, history: History, topic: bytes, send: Send, pieces: Pieces, encode: Encode
    ) -> None:
        self._history = history
        self._topic = topic
        self._send = send
        self._pieces = pieces
        self._encode = encode
        self._sessions: dict[bytes, _Session] = {}
        self.counts: Counter[str] = Counter()  # replays, snapshots, malformed, stalled

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_full(self) -> bool:
        return len(self._sessions) >= SESSIONS_MAX

    def ask(self, frames: list[bytes], now: float) -> None:
        """frames: who asks, an empty one, a sequence; as a REQ socket has them. Another request of
        one that is being answered takes its place."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            self.counts["malformed"] += 1
            return
        sequence = int.from_bytes(frames[2], "big", signed=True)
        if self._history.has(sequence):
            self.counts["replays"] += 1
            messages = self._replayed(sequence)
        else:
            messages = self._snapshot()
        self._sessions[frames[0]] = _Session(messages, now)

    def step(self, now: float) -> bool:
        """A batch for each. False: nobody took any."""
        is_progress = False
        for client, session in list(self._sessions.items()):
            sent = self._go_on(client, session)
            if sent is Sent.OK:
                session.since = now
                is_progress = True
            elif sent is Sent.GONE:
                del self._sessions[client]
            elif now - session.since > STALLED_S:
                del self._sessions[client]
                self.counts["stalled"] += 1
        return is_progress

    def _go_on(self, client: bytes, session: _Session) -> Sent:
        """GONE: the client, or all of the answer."""
        if session.waiting is None:
            try:
                session.waiting = next(session.messages)
            except StopIteration:
                return Sent.GONE
        if session.waiting is None:
            return Sent.OK  # an empty piece
        sent = self._send(client, session.waiting)
        if sent is Sent.OK:
            session.waiting = None
        return sent

    def _replayed(self, sequence: int) -> Iterator[Message | None]:
        """Up to what is there now: what is sent meanwhile came by the stream."""
        until = self._history.next
        while sequence < until:
            payload = self._history.get(sequence)
            if payload is None:  # the client was too slow for it
                yield from self._snapshot()
                return
            yield self._topic, pack_sequence(sequence), payload
            sequence += 1
        yield b"", END, b""

    def _snapshot(self) -> Iterator[Message | None]:
        self.counts["snapshots"] += 1
        following = self._history.next
        at = pack_sequence(following - 1)
        yield self._topic, at, self._mark(BEGIN, following, [AllBlocksCleared()])
        blocks = 0
        for piece in self._pieces(following):
            if piece is None:
                yield None
                continue
            payload, count = piece
            blocks += count
            yield self._topic, at, payload
        yield self._topic, at, self._mark(WHOLE, following, [], blocks)
        yield b"", END, b""

    def _mark(self, state: str, following: int, events: list[Any], blocks: int = 0) -> bytes:
        return self._encode(events, Snapshot(state=state, next=following, blocks=blocks))
