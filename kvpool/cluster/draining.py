"""A node that is to go: what is warm here and nowhere else is fetched by others, hottest first.

The node serves on meanwhile, and afterwards until it is stopped; to the directory it has left.
Promises:  1. begin() returns at once; a drain that is under way goes on, with its own time;
           2. the others are told first that this node drains, where there is somebody to tell.
Thread rule: from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from kvpool.cluster.joined import Joined
from kvpool.errors import KvpoolError
from kvpool.serve_log import EventLog

NONE, RUNNING, DONE, PARTLY = "none", "running", "done", "partly"


class _Drains(Protocol):
    """What a core has for this."""

    def drain(self, timeout_s: float) -> bool: ...
    def stats(self) -> dict[str, Any]: ...


class Draining:
    """Of one daemon: all of its tenants' cores together."""

    def __init__(self, joined: Joined, log: EventLog) -> None:
        self._cores = {name: cast(_Drains, core) for name, core in joined.cores.items()}
        self._say: Callable[[], None] | None = getattr(joined.members, "drain", None)
        self._log = log
        self._lock = threading.Lock()  # guards what follows
        self._state = NONE
        self._whole: dict[str, bool] = {}  # tenant -> whether all of it has gone to others

    def begin(self, timeout_s: float) -> None:
        """Once: who has drained has left."""
        with self._lock:
            if self._state != NONE:
                return
            self._state = RUNNING
        if self._say is not None:
            self._say()
        until = time.monotonic() + timeout_s
        for name in self._cores:
            threading.Thread(
                target=self._drain, args=(name, until), name="kvpool-drain", daemon=True
            ).start()
        self._log.info("drain begins", timeout_s=timeout_s)

    def progress(self) -> dict[str, Any]:
        """How far it is, over all tenants."""
        stats = [each.stats() for each in self._cores.values()]

        def total(name: str) -> int:
            return sum(int(each[name]) for each in stats)

        with self._lock:
            state = self._state
        return {
            "state": state,
            "blocks": total("drain_blocks"),
            "bytes": total("drain_bytes"),
            "prefixes": total("drain_prefixes"),
            "prefixes_left": total("drain_prefixes_left"),
            "refused_blocks": total("drain_refused_blocks"),
        }

    def _drain(self, name: str, until: float) -> None:
        is_whole = False
        try:
            is_whole = self._cores[name].drain(max(0.0, until - time.monotonic()))
        except KvpoolError as error:  # it closes
            self._log.warning("drain failed", tenant=name, reason=error)
        with self._lock:
            self._whole[name] = is_whole
            if len(self._whole) < len(self._cores):
                return
            self._state = DONE if all(self._whole.values()) else PARTLY
            state = self._state
        told = self.progress()
        self._log.info("drain ends", state=state, blocks=told["blocks"], bytes=told["bytes"])
