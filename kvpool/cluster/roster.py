"""The list of members as the rest of the node reads it: made once, never changed.

Promises:  1. whoever has a Roster has one moment's members, whatever happens meanwhile;
           2. reading it waits for nobody.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from kvpool.cluster.member import Member


@dataclass(frozen=True, slots=True)
class Roster:
    """version: grows with each; own: the id of this node, which stands among `members` once it has
    entered; members: in the order of their ids."""

    version: int
    own: str
    members: tuple[Member, ...]
    fingerprint: int
    pool: str | None = None
    generation: int = 0
    revision: int = 0
    is_frozen: bool = False
    is_entered: bool = False
    is_replaced: bool = False

    def member(self, node_id: str) -> Member | None:
        return next((each for each in self.members if each.id == node_id), None)


class Board:
    """Where the newest Roster hangs. Thread-safe."""

    def __init__(self, first: Roster) -> None:
        self._turn = threading.Condition()
        self._roster = first
        self._is_closed = False

    @property
    def roster(self) -> Roster:
        return self._roster

    def put(self, roster: Roster) -> None:
        with self._turn:
            self._roster = roster
            self._turn.notify_all()

    def newer(self, version: int, timeout_s: float) -> Roster | None:
        """The first one after that version; None: there was none in time, or it is closed."""
        deadline = time.monotonic() + timeout_s
        with self._turn:
            while self._roster.version <= version and not self._is_closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._turn.wait(left)
            return self._roster if self._roster.version > version else None

    def close(self) -> None:
        """Whoever waits is let go."""
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
