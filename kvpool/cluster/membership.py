"""A node among the members that etcd knows: it enters, stays, follows the others, and leaves.

Two threads: one keeps the own entry, one follows the others. What they do is decided by Registrar
and View.

Promises:  1. whatever etcd does, or does not, the roster stays readable and nobody waits for it;
           2. every reconnect reads all and watches from there: nothing is missed in between;
           3. the two look after each other: where calls fail the watch is cut, for it may sit on
              the endpoint that went silent; and each CHECK_S a full read checks what it brought;
           4. close() leaves at once, if etcd answers, and leaves no thread and no descriptor.
Thread rule: any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvpool.cluster.answers import Closed, EtcdError, Found, LeaseGone
from kvpool.cluster.gateway import Gateway, Watch
from kvpool.cluster.member import DRAINING, Member, incarnation_of
from kvpool.cluster.names import Names
from kvpool.cluster.registrar import Command, Registrar
from kvpool.cluster.roster import Board, Roster
from kvpool.cluster.told import Told
from kvpool.cluster.view import Change, View

CHECK_S = 30.0
TICK_S = 0.25
REVOKE_S = 1.0
_PAUSE_S = (0.05, 1.0)  # from one try to follow to the next: the least, the most


class Membership:
    """This node's place in a cluster."""

    def __init__(
        self,
        gateway: Gateway,
        names: Names,
        me: Member,
        told: Told,
        *,
        ttl_s: int = 10,
        check_s: float = CHECK_S,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),
    ) -> None:
        self._gateway = gateway
        self._names = names
        self._told = told
        self._clock = clock
        self._jitter = jitter
        self._ttl_s = ttl_s
        self._check_s = check_s
        self._guard = threading.Lock()  # of all that follows; nobody speaks to etcd holding it
        self._me = me
        self._modified = 0  # revision of the own entry that the next put expects
        self._registrar = Registrar(ttl_s)
        self._view = View(names, me.id, ttl_s)
        self._watch: Watch | None = None
        self._checked_at = clock()
        self._counts: Counter[str] = Counter()
        self._bad_told: set[tuple[str, str]] = set()
        self._board = Board(Roster(0, me.id, (), self._view.fingerprint(), is_frozen=True))
        self._stopping = threading.Event()
        self._nudge = threading.Event()
        self._threads = [
            threading.Thread(target=self._stay, name="kvpool-lease", daemon=True),
            threading.Thread(target=self._follow, name="kvpool-members", daemon=True),
        ]

    # --- for the rest of the node ----------------------------------------------------------------

    def start(self) -> None:
        """Once the node's ports are bound: from now on others may come."""
        for each in self._threads:
            each.start()

    @property
    def roster(self) -> Roster:
        return self._board.roster

    def newer(self, version: int, timeout_s: float) -> Roster | None:
        """The first roster after that version; None: there was none in time."""
        return self._board.newer(version, timeout_s)

    def drain(self) -> None:
        """Tells the others to expect nothing new here. The node stays a member until close()."""
        self._say(state=DRAINING)

    def set_weight(self, weight: int) -> None:
        self._say(weight=weight)

    def status(self) -> dict[str, Any]:
        """How it stands, for people."""
        now = self._clock()
        with self._guard:
            view, registrar = self._view, self._registrar
            return {
                "kind": "etcd",
                "etcd": str(self._gateway.endpoint),
                "etcds": [str(each) for each in self._gateway.endpoints],
                "pool": view.pool,
                "generation": view.generation,
                "revision": view.revision,
                "fingerprint": f"{view.fingerprint():016x}",
                "members": len(view.members),
                "frozen": view.is_frozen(now),
                "entered": registrar.is_held(now),
                "replaced": registrar.is_replaced,
                "bad": dict(view.bad),
                "bad_seen": view.bad_seen,
                "last_error": self._told.last_error,
                "counts": dict(self._counts),
            }

    def close(self) -> None:
        """Leaves. Within about two seconds, whatever etcd does."""
        self._stopping.set()
        self._nudge.set()
        self._cut_watch()
        started = [each for each in self._threads if each.ident is not None]
        for each in started:
            each.join(self._gateway.timeout_s)
        with self._guard:
            lease = self._registrar.lease
            self._registrar.lease = None
        if lease is not None:
            with contextlib.suppress(EtcdError):  # then it runs out by itself
                self._gateway.revoke(lease, REVOKE_S)
        self._gateway.close()
        for each in started:
            each.join()
        self._board.close()

    def _say(self, **fields: Any) -> None:
        with self._guard:
            self._me = dataclasses.replace(self._me, **fields)
            self._registrar.changed()
        self._nudge.set()

    # --- the own entry ---------------------------------------------------------------------------

    def _stay(self) -> None:
        while not self._stopping.is_set():
            now = self._clock()
            with self._guard:
                command, at = self._registrar.due()
                changes = self._view.tick(now)
            self._show(changes)
            if command is None or now < at:
                if now >= self._checked_at + self._check_every():
                    self._part("check", self._check)
                    continue
                self._nudge.wait(min(at - now, TICK_S))
                self._nudge.clear()
                continue
            moves = self._gateway.moves
            self._part("lease", partial(self._do, command))
            if self._gateway.moves != moves:
                self._cut_watch()

    def _check_every(self) -> float:
        """Who was replaced keeps no lease, whose answers are the sign that etcd is there."""
        return self._ttl_s / 3 if self._registrar.is_replaced else self._check_s

    def _do(self, command: Command) -> None:
        sent = self._clock()
        registrar = self._registrar
        try:
            if command is Command.GRANT:
                lease, ttl_s = self._gateway.grant(registrar.wanted_ttl_s)
                with self._guard:
                    registrar.granted(lease, ttl_s, sent)
            elif command is Command.ENTER:
                self._enter()
            else:
                self._keep(sent)
        except EtcdError as error:
            with self._guard:
                self._counts["calls_failed"] += 1
                if isinstance(error, LeaseGone):
                    registrar.gone(self._clock())
                registrar.failed(command, self._clock(), self._jitter())
            raise
        with self._guard:
            self._view.heard(self._clock())
            is_well = registrar.is_held(self._clock())
        if is_well:  # a lease is given to anybody: that alone proves little
            self._told.went_well("lease")

    def _keep(self, sent: float) -> None:
        with self._guard:
            lease = self._registrar.lease
        if lease is None:
            return
        ttl_s = self._gateway.keep(lease)
        with self._guard:
            if self._registrar.lease == lease:
                self._registrar.kept(ttl_s, sent)
                self._counts["leases_lost"] += ttl_s == 0
        if ttl_s == 0:
            self._told.lease_lost()

    def _enter(self) -> None:
        with self._guard:
            me, lease, modified = self._me, self._registrar.lease, self._modified
        if lease is None:
            return
        key, value = self._names.member(me.id), me.entry()
        put = self._gateway.put_if(key, value, lease, modified)
        if not put.done:
            # Our former life, our former lease, or this very put, whose answer was lost: take it
            # over, unless it moved meanwhile. A newer process of our id is not ours to replace.
            if put.other is not None and incarnation_of(put.other.value) > me.incarnation:
                self._be_replaced()
                return
            modified = 0 if put.other is None else put.other.modified
            put = self._gateway.put_if(key, value, lease, modified)
        if not put.done:
            raise EtcdError(f"{key} changed while it was put")
        with self._guard:
            is_first = self._registrar.entered_at is None
            self._modified = put.revision
            self._registrar.entered(put.revision)
            if self._me != me:
                self._registrar.changed()
        if is_first:
            self._told.entered(me, str(self._gateway.endpoint))
        self._show([])

    def _be_replaced(self) -> None:
        with self._guard:
            is_news = not self._registrar.is_replaced
            self._registrar.replaced()
        if is_news:
            self._told.replaced(self._me)
        self._show([])

    def _check(self) -> None:
        """A read that finds what a watch may have kept from us."""
        self._checked_at = self._clock()
        found = self._gateway.read(self._names.root)
        with self._guard:
            is_behind = not self._view.is_following or found.revision < self._view.revision
            if is_behind or found.cluster != self._view.cluster:
                return  # whoever follows is about to find that out
        self._take(found)
        self._told.went_well("check")

    # --- the others ------------------------------------------------------------------------------

    def _follow(self) -> None:
        least, most = _PAUSE_S
        pause = 0.0
        while not self._stopping.is_set():
            followed_at = self._clock()
            self._part("members", self._follow_once)
            with self._guard:
                self._view.lost()
            self._show([])
            is_new = self._clock() - followed_at > most
            pause = least if is_new else min(max(2 * pause, least), most)
            self._stopping.wait(pause * self._jitter())

    def _follow_once(self) -> None:
        """Until the watch ends, by an EtcdError."""
        found = self._gateway.read(self._names.root)
        self._take(found)
        if self._names.pool not in found.entries:
            self._gateway.put_if(self._names.pool, secrets.token_hex(16).encode(), 0, 0)
        watch = self._gateway.watch(self._names.root, found.revision + 1)
        try:
            with self._guard:
                self._watch = watch
            if self._stopping.is_set():
                raise Closed("closed from here")
            if watch.cluster != found.cluster:
                raise Closed("another etcd answers the watch")
            self._told.went_well("members")
            for batch in watch:
                with self._guard:
                    changes = self._view.change(batch, self._clock())
                    for event in batch.events:
                        if event.key == self._names.member(self._me.id) and event.entry is None:
                            self._registrar.missing(batch.revision)
                            self._nudge.set()
                entries = {each.key: each.entry for each in batch.events}
                self._look_at_own(entries.get(self._names.member(self._me.id)))
                self._show(changes)
        finally:
            with self._guard:
                self._watch = None
            watch.release()

    def _take(self, found: Found) -> None:
        own = found.entries.get(self._names.member(self._me.id))
        with self._guard:
            generation = self._view.generation
            changes = self._view.snapshot(found, self._clock())
            if own is None:
                if self._view.generation != generation:
                    self._registrar.forgotten()
                self._registrar.missing(found.revision)
                self._nudge.set()
        self._look_at_own(own)
        self._show(changes)

    def _look_at_own(self, entry: Any) -> None:
        if entry is not None and incarnation_of(entry.value) > self._me.incarnation:
            self._be_replaced()

    def _cut_watch(self) -> None:
        with self._guard:
            watch = self._watch
        if watch is not None:
            watch.close()

    # --- what both do ----------------------------------------------------------------------------

    def _part(self, name: str, step: Callable[[], None]) -> None:
        """One step of a thread, which nothing may end but close()."""
        try:
            step()
        except EtcdError as error:
            if not self._stopping.is_set():
                self._told.trouble(name, error)
        except Exception:
            self._told.bug(name)
            self._stopping.wait(1.0)

    def _show(self, changes: list[Change]) -> None:
        """Hangs up a new roster if there is anything new in it, and tells of it."""
        with self._guard:
            old = self._board.roster
            new = self._roster(old, has_changes=bool(changes))
            if new is not old:
                self._board.put(new)
            bad = [each for each in self._view.bad.items() if each not in self._bad_told]
            self._bad_told = set(self._view.bad.items())
            for each in changes:
                self._counts[each.kind.value] += 1
            self._counts["frozen"] += new.is_frozen and not old.is_frozen
        self._told.changed(changes)
        for name, reason in bad:
            self._told.bad(name, reason)
        if new.is_frozen != old.is_frozen:
            self._told.frozen(new.is_frozen)

    def _roster(self, old: Roster, *, has_changes: bool) -> Roster:
        view, now = self._view, self._clock()
        new = dataclasses.replace(
            old,
            pool=view.pool,
            generation=view.generation,
            is_frozen=view.is_frozen(now),
            is_entered=self._registrar.is_held(now),
            is_replaced=self._registrar.is_replaced,
        )
        if has_changes:
            members = tuple(view.members[name] for name in sorted(view.members))
            new = dataclasses.replace(new, members=members, fingerprint=view.fingerprint())
        if new == old:
            return old
        return dataclasses.replace(new, version=old.version + 1, revision=view.revision)
