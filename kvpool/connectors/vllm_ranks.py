"""The namespaces of all ranks of an engine, and of its adapters, opened once.

Thread rule: opened() and bytes_per_token() on any thread, at once; open(), drop() and adapter_of()
may take requests and disk reads.
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
        """What open() gave; None if it was not called yet."""
        return None if adapter is None else self._opened.get(adapter)

    def open(self, adapter: str) -> Ranks | None:
        """Namespaces by rank, by group; None while there is no node."""
        with self._lock:  # one thread asks, the others find what it got
            if adapter in self._opened or not self._manifests:
                return self._opened.get(adapter)
            ranks: Ranks = []
            for manifests in self._manifests:
                spaces = [
                    self._attachment.space(with_adapter(each, adapter) if adapter else each)
                    for each in manifests
                ]
                if any(space is None for space in spaces):
                    return None
                ranks.append([space for space in spaces if space is not None])
            self._opened[adapter] = ranks
            return ranks

    def adapter_of(self, request: Any) -> str:
        """The digest of a request's LoRA adapter; empty without one. Raises BadArgument."""
        return "" if request is None else adapter_identity(request.lora_path)

    def drop(self) -> int:
        """Make every block of the engine a miss, for all who use these namespaces."""
        ranks = self.open("")
        if ranks is None:
            raise RuntimeError("no node")
        everything = [*self._opened.values()]
        return sum(space.drop() for ranks in everything for spaces in ranks for space in spaces)

    def bytes_per_token(self, shapes: Sequence[GroupShape]) -> int:
        """Of one rank: ranks load at the same time."""
        if not self._manifests:
            return 0
        pairs = zip(self._manifests[0], shapes, strict=True)
        return sum(int(m.block_bytes or 0) // shape.block_tokens for m, shape in pairs)
