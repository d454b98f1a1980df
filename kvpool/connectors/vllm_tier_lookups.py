"""Whether the pool has a chunk, asked for one by one by vLLM's scheduler, which must not wait.

Where the pool shares its memory the question is answered at once (some 10 us, no request); else by
a thread, in batches of one step, and the scheduler asks again. A chunk that could not be loaded is
missing for the request that tried, whatever the pool says: the scheduler would try for ever.

Thread rule: the scheduler's thread, but for batch_lookup(), which has a thread of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from kvpool.connectors.vllm_tier_rows import Rows

GAPS_MAX = 8  # of one batch: behind more of them nothing is looked at


class Lookups(AsyncLookupManager):
    """vLLM's own asker in a thread, with a short way where none is needed."""

    def __init__(self, rows: Rows, tier_type: str) -> None:
        self._rows = rows
        self._missing: dict[str, set[bytes]] = {}  # by live request
        super().__init__(tier_type)

    def lookup(self, key: Any, req_context: Any) -> bool | None:
        """None: ask again in a later step."""
        if key in self._missing.get(req_context.req_id, ()):
            return False
        if self._rows.are_near:
            return self._rows.present([key]) == 1
        found: bool | None = super().lookup(key, req_context)
        return found

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Blocks. A miss in a chain makes the rest of it useless, so few gaps are looked behind."""
        groups: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            groups.setdefault(get_offload_group_idx(key), []).append(place)
        found = [False] * len(keys)
        for places in groups.values():
            begin = gaps = 0
            while begin < len(places) and gaps <= GAPS_MAX:
                count = self._rows.present([keys[place] for place in places[begin:]])
                for place in places[begin : begin + count]:
                    found[place] = True
                begin += count + 1
                gaps += 1
        return found

    def begin(self, request: str) -> None:
        """A request that may ask."""
        self._missing.setdefault(request, set())

    def end(self, request: str) -> None:
        """One that will not ask again."""
        self._missing.pop(request, None)
        self.cleanup(request)

    def mark_missing(self, request: str, keys: Collection[bytes]) -> None:
        """They could not be loaded for this request. One that has ended is left alone."""
        if request in self._missing:
            self._missing[request].update(keys)
