"""What the scheduler's half of the connector knows of its engine, and of each request.

Thread rule: the engine's scheduler thread; a Followed's future is set by another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvpool.connectors.vllm_lookup import GroupShape, Offer

# In kv_transfer_params: what a prefill engine tells the decode engine.
BLOCKS_PARAM = "kvpool_blocks"
NAMESPACE_PARAM = "kvpool_namespace"


@dataclass(frozen=True)
class EngineShape:
    """What the scheduler's half needs to know of its engine."""

    groups: tuple[GroupShape, ...]
    has_eagle: bool = False  # a draft model needs the last block computed, not loaded
    publishes_events: bool = False
    name: str = ""  # unique to it
    may_sleep: bool = True  # nothing else waits for a step in which this engine computes nothing


@dataclass(frozen=True)
class Query:
    """What is asked about a prompt, in tokens."""

    hashes: list[bytes]
    limit: int
    local: int
    awaited: int  # that another engine is about to store


@dataclass
class Followed:
    """A request, from its arrival to its end."""

    request: Any
    saved: int = 0  # blocks of the first group that are in the pool or on their way there
    adapter: str | None = None  # None: not known yet
    asked: Future[Offer] | None = None
    asked_until: float = 0.0
    offer: Offer | None = None
    offered_at: float = 0.0
    local: int = 0  # tokens that the engine had itself when it was offered
    loading: set[int] = field(default_factory=set)  # pages, while a load is under way
    is_done: bool = False  # looked up, loaded or given up: ask no more until it is preempted
    preemptions: int = 0
    is_old: bool = False  # computed before a reset: not to be stored

    def drop_offer(self) -> None:
        """Unpin what was offered."""
        if self.offer is not None:
            self.offer.release()
            self.offer = None

    def forget_lookup(self) -> None:
        """Of a request that leaves or starts anew; what a thread still finds is unpinned there."""
        asked, self.asked = self.asked, None
        if asked is not None and not asked.cancel():
            asked.add_done_callback(_release_found)
        self.drop_offer()


def _release_found(asked: Future[Offer]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        asked.result().release()


def unit_of(shapes: Iterable[GroupShape]) -> int:
    """Tokens after which blocks of all groups end; a prefix ends there, loaded in full."""
    return math.lcm(*(shape.block_tokens for shape in shapes))
