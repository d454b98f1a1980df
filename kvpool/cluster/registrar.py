"""What to do next so that this node stands in etcd. Touches nothing: it is fed answers and times.

Promises:  1. the lease is taken to run from when its request was *sent*: is_held() is never true of
              one that etcd has given up;
           2. silence proves nothing: it asks on, slower each time, but never slower than a third of
              the ttl;
           3. two processes with one id do not fight: the older one stops, and says so.
Thread rule: none; whoever runs it has a lock.
"""

from __future__ import annotations

import enum
import math

PAUSE_S = 0.05  # after the first answer that did not come


class Command(enum.Enum):
    """What is to be done."""

    GRANT = "grant"
    ENTER = "enter"  # put the own entry, the first time or again
    KEEP = "keep"


class Registrar:
    """The own entry and the lease that it is under."""

    def __init__(self, ttl_s: int) -> None:
        self.wanted_ttl_s = ttl_s
        self.lease: int | None = None
        self.entered_at: int | None = None  # revision of the last put
        self.is_replaced = False
        self._ttl_s = float(ttl_s)  # that etcd gave
        self._good_at = -math.inf
        self._is_stale = False  # what stands there is not what should
        self._keep = _Pace()
        self._enter = _Pace()  # of a grant, too

    def due(self) -> tuple[Command | None, float]:
        """What to do, and when; None: never again."""
        if self.is_replaced:
            return None, math.inf
        if self.lease is None:
            return Command.GRANT, self._enter.at
        needs_entry = self.entered_at is None or self._is_stale
        # An entry that is refused again and again may not cost the lease.
        if needs_entry and self._enter.at <= self._keep.at:
            return Command.ENTER, self._enter.at
        return Command.KEEP, self._keep.at

    def is_held(self, now: float) -> bool:
        """Whether others surely see this node."""
        return self.entered_at is not None and now < self._good_at + self._ttl_s

    # --- answers; `sent`: when their request was -------------------------------------------------

    def granted(self, lease: int, ttl_s: int, sent: float) -> None:
        self.lease, self._ttl_s, self._good_at = lease, float(ttl_s), sent
        self._keep.again(sent + self._ttl_s / 3)
        self._enter.at = sent  # its pause stays: the entry may be what is refused

    def entered(self, revision: int) -> None:
        self.entered_at, self._is_stale = revision, False
        self._enter.again(-math.inf)

    def kept(self, ttl_s: int, sent: float) -> None:
        """ttl_s 0: etcd knows the lease no more."""
        if ttl_s <= 0:
            self.gone(sent)
            return
        self._good_at = sent
        self._keep.again(sent + self._ttl_s / 3)

    def gone(self, now: float) -> None:
        """The lease is: begin again, at once."""
        self.lease = self.entered_at = None
        self._enter.at = now

    def failed(self, command: Command, now: float, jitter: float = 1.0) -> None:
        """No answer, or a refusal. The lease may well live."""
        pace = self._keep if command is Command.KEEP else self._enter
        pace.slower(now, self._ttl_s / 3, jitter)

    # --- what is seen elsewhere ------------------------------------------------------------------

    def missing(self, revision: int) -> None:
        """A read as of that revision has no entry of ours: enter again, under the lease we have."""
        if self.entered_at is not None and revision >= self.entered_at:
            self.entered_at = None

    def forgotten(self) -> None:
        """Another etcd answers, or one without its data: what we entered is not there."""
        self.entered_at = None

    def changed(self) -> None:
        """What this node says of itself did: put it again."""
        self._is_stale = True

    def replaced(self) -> None:
        """A newer process has our id. Its entry is under its lease, so ours may run out."""
        self.is_replaced, self.lease, self.entered_at = True, None, None


class _Pace:
    """When a call is made again, and how long it is let be after it failed."""

    def __init__(self) -> None:
        self.at = -math.inf
        self._pause = 0.0

    def again(self, at: float) -> None:
        self.at, self._pause = at, 0.0

    def slower(self, now: float, most: float, jitter: float) -> None:
        self._pause = min(max(2 * self._pause, PAUSE_S), most)
        self.at = now + self._pause * jitter
