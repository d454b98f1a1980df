"""Connects to the members that the core wants to talk to.

Promises:  1. at most DIALS_MAX dials at a time, one of them to a member for each tenant, and each
              ends within DIAL_S for every address of the member;
           2. a member that is not reached is left alone for a while, longer each time, up to
              PAUSE_MAX_S; a new life of it is tried at once;
           3. no call here waits for the network, but close(), for as long as it is told.
Thread rule: from any thread. The threads are daemons': looking up a name keeps its own time.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvpool import wire
from kvpool.address import TcpAddress, parse_host_and_port
from kvpool.cluster.core import Core
from kvpool.cluster.peer_link import Own, dial
from kvpool.errors import KvpoolError
from kvpool.serve_log import EventLog

DIALS_MAX = 8
DIAL_S = 2.0  # to one address, with the hello
PAUSE_MIN_S = 0.25
PAUSE_MAX_S = 30.0
STREAMS_MAX = 8  # made for one wish
WAIT_S = 1.0  # of a thread that looks for wishes, until it looks up
_LULL_S = 0.1  # after wishes that are seen to already

Met = Callable[[bytes, int], None]  # node, incarnation
_Key = tuple[str, bytes]  # tenant, node


@dataclass(frozen=True, slots=True)
class Target:
    """Where a member is. is_of_list: nobody but itself knows in which life."""

    incarnation: int
    addresses: tuple[str, ...]
    is_of_list: bool = False


@dataclass(slots=True)
class _Try:
    """How it stands with one member, for one tenant."""

    incarnation: int
    wanted: int = 0  # connections, when `not_before` has come
    is_under_way: bool = False
    failures: int = 0  # one after the other
    not_before: float = 0.0
    trouble: str = ""


@dataclass(slots=True)
class _Table:
    """What the threads share. Guarded by `changed`."""

    targets: dict[bytes, Target] = field(default_factory=dict)
    tries: dict[_Key, _Try] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_closed: bool = False


class Dialer:
    """Of a daemon, for all of its tenants."""

    def __init__(
        self,
        own: Own,
        cores: Mapping[str, Core],
        log: EventLog,
        *,
        dial_s: float = DIAL_S,
        met: Met = lambda node, incarnation: None,
        readers: Collection[str] = (),
    ) -> None:
        """met: told in which life a member of a list is, before the core gets a connection to it;
        from a thread of this. readers: tenants for which this node reads out of others' memory."""
        self._own = own
        self._met = met
        self._readers = frozenset(readers)
        self._cores = cores
        self._log = log
        self._dial_s = dial_s
        self._table = _Table()
        self._jobs: queue.SimpleQueue[_Key | None] = queue.SimpleQueue()  # at most one a _Try
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for name in self._cores:
            self._begin(self._watch, f"kvpool-wanted-{name}"[:15], name)
        for number in range(DIALS_MAX):
            self._begin(self._work, f"kvpool-dial-{number}")

    def set_targets(self, targets: Mapping[bytes, Target]) -> None:
        """Everybody who may be dialled from now on, in place of those before."""
        table = self._table
        with table.changed:
            table.targets = dict(targets)
            for key, each in list(table.tries.items()):
                target = targets.get(key[1])
                if target is None or target.incarnation != each.incarnation:
                    del table.tries[key]  # one that is under way finds that it is not meant
            table.changed.notify_all()

    def trouble(self, node: bytes) -> str:
        """Why a member was not reached the last time; empty: it was, or nobody tried."""
        with self._table.changed:
            tries = [self._table.tries.get((name, node)) for name in self._cores]
            return next((each.trouble for each in tries if each and each.trouble), "")

    def stop(self) -> None:
        """No more dials are begun. The cores are to be closed next: that wakes who waits there."""
        with self._table.changed:
            self._table.is_closed = True
            self._table.changed.notify_all()
        for _ in range(DIALS_MAX):
            self._jobs.put(None)

    def close(self, timeout_s: float) -> bool:
        """Waits for what is under way; False: some of it still is, and harms nobody."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        for each in self._threads:
            each.join(max(0.0, deadline - time.monotonic()))
        return not any(each.is_alive() for each in self._threads)

    def _begin(self, work: object, name: str, *args: str) -> None:
        assert callable(work)  # a method of ours
        thread = threading.Thread(target=work, name=name, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- wishes ----------------------------------------------------------------------------------

    def _watch(self, tenant: str) -> None:
        core = self._cores[tenant]
        while not self._table.is_closed:
            wanted = core.wait_wanted(self._until_due(tenant))
            begun = self._wish(tenant, wanted)
            if wanted and not begun:  # it says so until it has them
                with self._table.changed:
                    if not self._table.is_closed:
                        self._table.changed.wait(min(_LULL_S, self._until_due(tenant)))

    def _until_due(self, tenant: str) -> float:
        now = time.monotonic()
        with self._table.changed:
            due = [
                each.not_before
                for (name, _), each in self._table.tries.items()
                if name == tenant and each.wanted and not each.is_under_way
            ]
        return max(0.0, min(WAIT_S, min(due) - now)) if due else WAIT_S

    def _wish(self, tenant: str, wanted: list[tuple[bytes, int]]) -> int:
        """Hands on what may be dialled now, and says how many members that were."""
        table, now, begun = self._table, time.monotonic(), 0
        with table.changed:
            for node, streams in wanted:
                target = table.targets.get(node)
                if target is None:
                    continue  # it has left, or is about to be told of
                each = table.tries.setdefault((tenant, node), _Try(target.incarnation))
                if not each.is_under_way:
                    each.wanted = min(max(each.wanted, streams), STREAMS_MAX)
            if table.is_closed:
                return 0
            for key, each in table.tries.items():
                is_due = each.wanted and each.not_before <= now
                if key[0] == tenant and is_due and not each.is_under_way:
                    each.is_under_way = True
                    begun += 1
                    self._jobs.put(key)
        return begun

    # --- dials -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (key := self._jobs.get()) is not None:
            table = self._table
            with table.changed:
                target, each = table.targets.get(key[1]), table.tries.get(key)
                count = 0 if each is None or table.is_closed else each.wanted
            if target is None or each is None:
                continue  # it has left meanwhile
            trouble = ""
            for _ in range(count):
                trouble = self._connect(key, target)
                if trouble:
                    break
            self._ended(key, each, target, trouble)

    def _ended(self, key: _Key, each: _Try, target: Target, trouble: str) -> None:
        table, told = self._table, {"node": key[1].hex(), "tenant": key[0]}
        with table.changed:
            failures_before = each.failures
            each.is_under_way = False
            each.trouble = trouble
            if trouble:
                each.failures += 1
                pause_s = min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(each.failures - 1, 10))
                each.not_before = time.monotonic() + pause_s * random.uniform(0.75, 1.0)
            else:
                each.wanted = each.failures = 0
            table.changed.notify_all()
            is_closed = table.is_closed
        if is_closed:
            return
        if trouble:
            with contextlib.suppress(KvpoolError):  # it closes
                self._cores[key[0]].note_failed(key[1], target.incarnation)
            if not failures_before:
                self._log.warning("peer not reached", **told, reason=trouble)
        elif failures_before:
            self._log.info("peer reached again", **told, failures=failures_before)

    def _connect(self, key: _Key, target: Target) -> str:
        """One connection, by the first address that leads there; else why not."""
        trouble = "it has no address"
        for text in target.addresses:
            if self._table.is_closed:
                return "this node is leaving"
            trouble = self._connect_at(text, key, target)
            if not trouble:
                return ""
        return trouble

    def _connect_at(self, text: str, key: _Key, target: Target) -> str:
        tenant, node = key
        deadline = time.monotonic() + self._dial_s
        try:
            address = TcpAddress(*parse_host_and_port("address", text))
            wants_ucx = tenant in self._readers
            sock, facts = dial(address, self._own, tenant, deadline, to=node, wants_ucx=wants_ucx)
        except (wire.RefusedByPeer, wire.WireError, KvpoolError) as error:
            return f"{text}: {error}"
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            return f"{text}: {reason}"
        with sock:
            if facts.incarnation != target.incarnation and not target.is_of_list:
                lives = f"it lives its incarnation {facts.incarnation}"
                return f"{text}: {lives}, and {target.incarnation} was meant"
            try:
                if facts.incarnation != target.incarnation:
                    self._met(node, facts.incarnation)
                core, number = self._cores[tenant], sock.detach()
                core.add_stream(node, facts.incarnation, number, facts.ucx)
            except KvpoolError as error:
                return f"{text}: {error}"
        return ""
