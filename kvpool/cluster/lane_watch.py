"""Says in the log when reads out of another member's memory fail, and when they work again.

The core counts; nobody of it calls Python. Thread rule: one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from kvpool.serve_log import EventLog


class HasPeers(Protocol):
    def peers(self) -> list[dict[str, Any]]: ...


class LaneWatch:
    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._failed: dict[tuple[str, bytes, int], int] = {}  # tenant, node, incarnation
        self._broken: set[tuple[str, bytes, int]] = set()

    def look(self, cores: Mapping[str, HasPeers]) -> None:
        """To be called now and then."""
        failed: dict[tuple[str, bytes, int], int] = {}
        for tenant, core in cores.items():
            for each in core.peers():
                key = tenant, each["id"], int(each["incarnation"])
                failed[key] = int(each.get("ucx_failed", 0))
                self._tell(key, each, failed[key] - self._failed.get(key, 0))
        self._failed = failed
        self._broken &= failed.keys()

    def _tell(self, key: tuple[str, bytes, int], each: Mapping[str, Any], more: int) -> None:
        told = {"node": key[1].hex(), "tenant": key[0]}
        if more > 0:
            self._broken.add(key)
            reason = each.get("ucx_trouble", "")
            self._log.often(logging.WARNING, "ucx failed", **told, times=more, reason=reason)
        elif key in self._broken and each.get("ucx") == "open":
            self._broken.discard(key)
            self._log.often(logging.INFO, "ucx works again", **told)
