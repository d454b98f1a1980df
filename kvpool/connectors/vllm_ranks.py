"""The namespaces of all ranks of an engine, and of its adapters, opened once.

Thread rule: open() and adapter_of() may take requests and disk reads; the rest takes no time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvpool.connectors.attach import Attachment
from kvpool.connectors.facts import with_adapter
from kvpool.connectors.vllm_lookup import GroupShape, Ranks
from kvpool.connectors.weights import adapter_identity
from kvpool.manifest import Manifest, unpack


class RankSpaces:
    """Empty until set(): an engine whose workers said nothing has no pool."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._manifests: list[list[Manifest]] = []
        self._opened: dict[str, Ranks] = {}
        self._owes_drop = False
        self._lock = threading.Lock()

    def set(self, manifests: Sequence[Sequence[bytes]]) -> None:
        """Manifests by rank, by group."""
        self._manifests = [[unpack(packed) for packed in rank] for rank in manifests]

    @property
    def count(self) -> int:
        """Ranks."""
        return len(self._manifests)

    @property
    def name(self) -> str:
        """Of the first namespace, for who must know whether theirs is the same; empty if none."""
        return self._manifests[0][0].namespace_id.hex() if self._manifests else ""

    def opened(self, adapter: str | None) -> Ranks | None:
        """What open() gave; None if it was not called yet, or a drop is owed."""
        return None if adapter is None or self._owes_drop else self._opened.get(adapter)

    def open(self, adapter: str) -> Ranks | None:
        """Namespaces by rank, by group; None while there is no node, or it does not drop them."""
        with self._lock:  # one thread asks, the others find what it got
            ranks = self._opened.get(adapter) or self._open(adapter)
            if ranks is not None and self._owes_drop:
                # Every adapter that was ever opened, and this one: nothing of before is found.
                for each in (*self._opened.values(), ranks):
                    _drop(each)
                self._owes_drop = False
            return ranks

    def _open(self, adapter: str) -> Ranks | None:
        ranks: Ranks = []
        for manifests in self._manifests:
            spaces = [
                self._attachment.space(with_adapter(each, adapter) if adapter else each)
                for each in manifests
            ]
            if any(space is None for space in spaces):
                return None
            ranks.append([space for space in spaces if space is not None])
        if ranks:
            self._opened[adapter] = ranks
        return ranks or None

    def owe_drop(self) -> None:
        """Nothing is found until open() has made a miss of every block."""
        self._owes_drop = True

    def adapter_of(self, request: Any) -> str:
        """The digest of a request's LoRA adapter; empty without one. Raises BadArgument."""
        return "" if request is None else adapter_identity(request.lora_path)

    def bytes_per_token(self, shapes: Sequence[GroupShape]) -> int:
        """Of one rank: ranks load at the same time."""
        if not self._manifests:
            return 0
        pairs = zip(self._manifests[0], shapes, strict=True)
        return sum(int(m.block_bytes or 0) // shape.block_tokens for m, shape in pairs)


def _drop(ranks: Ranks) -> None:
    for spaces in ranks:
        for space in spaces:
            space.drop()
