"""Publishes what comes to some nodes and what leaves them, and answers who missed it.

    feeds -> batches -> a PUB socket, and the history
                           ROUTER socket <-> answers

The stream of one life begins with the sequence 0, a batch that clears all, and then tells what is
here. So it does again whenever a node could not name its changes: after a burst that was too much
to note, or when a namespace was dropped. A batch without events goes out every HEARTBEAT_S, so that
whoever missed the last one notices.

Promises:  1. nobody waits for a subscriber: puts do not, and neither does the stream;
           2. memory is bounded: the changes that a node notes, the history, `high_water` batches
              for each subscriber, and answers (events/answers.py);
           3. whoever follows the stream, and asks for what it missed, knows what is here, but for
              what changed within a window; and for a second where changes were lost.
Thread rule: start() and close() one after the other; stats() from any thread; the rest by the
publisher's own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool import _core
from kvpool.events.answers import Answers, Message, Sent
from kvpool.events.encoding import (
    BLOCKS,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Snapshot,
    Source,
    encode,
    pack_sequence,
)
from kvpool.events.history import History
from kvpool.events.plans import EventsPlan
from kvpool.events.runs import ROW_BYTES, Space, by_space, events_of
from kvpool.events.sockets import PublisherSockets

CHANGES_MAX = 1 << 16  # of a node in one window; 6 MiB at most
ROWS_PER_PART = 4096
HEARTBEAT_S = 1.0
ANNOUNCED_PER_S = 250_000  # keys of it
ANEW_PAUSE_S = 1.0  # from one telling of all that is here to the next
REQUESTS_PER_TURN = 4
CLOSE_S = 0.5  # for what waits in the sockets
_FAILED_PAUSE_S = 1.0
_LOOK_S = 0.2  # until it is seen that the publisher is to end
_RETRY_S = 0.01  # answers that do not fit


class Walk(Protocol):
    """_core.ChangeWalk."""

    def step(self) -> tuple[bool, bytes]: ...


class Feed(Protocol):
    """_core.ChangeFeed."""

    def take(self) -> tuple[bool, bytes]: ...
    def walk(self) -> Walk: ...


@dataclass(frozen=True, slots=True)
class Place:
    """One tenant's node. named: name and block_tokens of its namespaces, by their numbers."""

    tenant: str
    feed: Feed
    named: Callable[[], Mapping[int, tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class Life:
    """Whose events these are."""

    node: bytes
    incarnation: int


class Log(Protocol):
    """What is used of a log."""

    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


class Publisher:
    """Publishes from start() to close()."""

    def __init__(self, plan: EventsPlan, life: Life, places: list[Place], log: Log) -> None:
        """Binds. Raises NoResource."""
        self.life = life
        self._plan = plan
        self._places = places
        self._log = log
        self._sockets = PublisherSockets(
            plan.endpoint,
            plan.replay_endpoint,
            high_water=plan.high_water,
            connect=plan.connect,
        )
        self._history = History(plan.buffer)
        self._answers = Answers(
            self._history, plan.topic, self._answer, self._pieces, self._encoded_part
        )
        self._announcing: Iterator[int] | None = None
        self._is_anew_due = True
        self._next_anew = self._next_take = self._next_piece = self._next_heartbeat = 0.0
        self._counts: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)

    @property
    def endpoint(self) -> str:
        return self._sockets.endpoint

    @property
    def replay_endpoint(self) -> str:
        """ "" without one."""
        return self._sockets.replay_endpoint

    def start(self) -> None:
        self._log.info(
            "publishing events", endpoint=self.endpoint, replay_endpoint=self.replay_endpoint
        )
        self._send([AllBlocksCleared()])  # before anybody can ask: the sequence 0
        for place in self._places:
            place.feed.take()  # what is here already is told in a moment
        self._thread.start()

    def close(self) -> None:
        """The last batch clears all: nothing can be had from here any more. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._sockets.close(CLOSE_S)
        self._places = []  # nobody listens to the nodes any more

    def stats(self) -> dict[str, int]:
        """Counted from the start, but for what is said to be now."""
        answers, counts = self._answers.counts, self._counts
        return {
            "batches": counts["batches"],
            "bytes": counts["bytes"],
            "stored": counts["stored"],
            "removed": counts["removed"],
            "announced": counts["announced"],
            "anew": counts["anew"],
            "lost": counts["lost"],
            "failures": counts["failures"],
            "replays": answers["replays"],
            "snapshots": answers["snapshots"],
            "malformed": answers["malformed"],
            "stalled": answers["stalled"],
            "sequence": self._history.next,  # now: of the next batch
            "buffered_batches": len(self._history),  # now
            "buffered_bytes": self._history.bytes,  # now
            "answering": len(self._answers),  # now
        }

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception as error:  # our bug; or a node was closed before its publisher
                self._failed(error)
        self._send([AllBlocksCleared()])

    def _failed(self, error: Exception) -> None:
        self._counts["failures"] += 1
        self._announcing, self._is_anew_due = None, True
        self._log.error("events failed", reason=repr(error))
        self._stopping.wait(_FAILED_PAUSE_S)

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._next_take:
            self._next_take = now + self._plan.window_s
            self._take()
        self._announce(now)
        if now >= self._next_heartbeat:
            self._send([])
        for frames in self._sockets.requests(0 if self._answers.is_full else REQUESTS_PER_TURN):
            self._answers.ask(frames, now)
        is_progress = self._answers.step(now)
        self._wait(is_progress)

    def _wait(self, is_progress: bool) -> None:
        if is_progress:
            return
        due = [self._next_take, self._next_heartbeat]
        if self._announcing is not None:
            due.append(self._next_piece)
        pause = min(_LOOK_S, min(due) - time.monotonic())
        if len(self._answers) > 0:
            self._stopping.wait(min(pause, _RETRY_S))
        elif not self._sockets.has_replay:
            self._stopping.wait(pause)
        elif pause > 0:
            self._sockets.wait(pause)

    def _take(self) -> None:
        for place in self._places:
            is_whole, rows = place.feed.take()
            if not is_whole:
                self._is_anew_due = True
                self._counts["lost"] += 1
            for source, batches in self._batches(place, rows):
                for events in batches:
                    self._send(events, source)

    def _batches(self, place: Place, rows: bytes) -> Iterator[tuple[Source, Iterator[list[Event]]]]:
        if not rows:
            return
        named = place.named()
        # In parts, so that no other thread of Python waits for all of it.
        for begin in range(0, len(rows), ROW_BYTES * ROWS_PER_PART):
            for space, found in by_space(rows[begin : begin + ROW_BYTES * ROWS_PER_PART]).items():
                name, block_tokens = named.get(space.number, ("", 0))
                yield self._source(place, space, name), events_of(found, block_tokens)

    def _source(self, place: Place, space: Space, name: str) -> Source:
        return Source(
            node=self.life.node,
            incarnation=self.life.incarnation,
            tenant=place.tenant,
            namespace=space.id,
            name=name,
        )

    # --- all that is here ------------------------------------------------------------------------

    def _announce(self, now: float) -> None:
        """A piece of it. What changes meanwhile is told as ever, before the piece or behind it: so
        what is told last of a key is what became of it last."""
        if self._is_anew_due and now >= self._next_anew:
            self._is_anew_due = False
            self._next_anew = now + ANEW_PAUSE_S
            self._counts["anew"] += 1
            self._send([AllBlocksCleared()])
            self._announcing = self._announced()
        if self._announcing is None or now < self._next_piece:
            return
        told = next(self._announcing, None)
        if told is None:
            self._announcing = None
        else:
            self._next_piece = now + told / ANNOUNCED_PER_S

    def _announced(self) -> Iterator[int]:
        """How many keys each piece had."""
        for place in self._places:
            for batches in self._walked(place):
                # All of the piece before changes are taken again: those come after it.
                for source, events in batches:
                    self._send(events, source)
                told = sum(_keys_of(events) for _, events in batches)
                self._counts["announced"] += told
                yield told

    def _walked(self, place: Place) -> Iterator[list[tuple[Source, list[Event]]]]:
        """The batches of a piece, and of the next."""
        walk, is_more = place.feed.walk(), True
        while is_more:
            is_more, rows = walk.step()
            yield [
                (source, events)
                for source, batches in self._batches(place, rows)
                for events in batches
            ]

    def _pieces(self, following: int) -> Iterator[tuple[bytes, int] | None]:
        part = Snapshot(state=BLOCKS, next=following)
        for place in self._places:
            for batches in self._walked(place):
                for source, events in batches:
                    yield self._encoded(events, source, part), _keys_of(events)
                yield None

    # --- the wire --------------------------------------------------------------------------------

    def _send(self, events: list[Event], source: Source | None = None) -> None:
        payload = self._encoded(events, source, None)
        sequence = self._history.add(payload)
        self._sockets.publish((self._plan.topic, pack_sequence(sequence), payload))
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        counts = self._counts
        counts["batches"] += 1
        counts["bytes"] += len(payload)
        for each in events:
            if isinstance(each, BlockStored):
                counts["stored"] += len(each.block_hashes)
            elif isinstance(each, BlockRemoved):
                counts["removed"] += len(each.block_hashes)

    def _encoded(self, events: list[Event], source: Source | None, part: Snapshot | None) -> bytes:
        if source is None:
            source = Source(node=self.life.node, incarnation=self.life.incarnation)
        if part is not None:
            source = Source(
                node=source.node,
                incarnation=source.incarnation,
                tenant=source.tenant,
                namespace=source.namespace,
                name=source.name,
                snapshot=part,
            )
        return encode(Batch(ts=time.time(), events=events, data_parallel_rank=None, source=source))

    def _encoded_part(self, events: list[Event], part: Snapshot) -> bytes:
        return self._encoded(events, None, part)

    def _answer(self, client: bytes, message: Message) -> Sent:
        return self._sockets.answer(client, message)


def feed_of(node: _core.Node) -> Feed:
    """Raises NoResource: too many listen already."""
    return _core.ChangeFeed.open(node, CHANGES_MAX)


def _keys_of(events: list[Event]) -> int:
    return sum(
        len(each.block_hashes) for each in events if isinstance(each, (BlockStored, BlockRemoved))
    )
