"""The namespaces of all ranks of an engine, and of its adapters, opened once.

Thread rule: open() and adapter_of() may take requests and disk reads; the rest takes no time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from kvpool.connectors.attach import Attachment
from kvpool.connectors.facts import with_adapter
from kvpool.connectors.vllm_lookup import GroupShape, Ranks
from kvpool.connectors.weights import adapter_identity
from kvpool.errors import KvpoolError
from kvpool.manifest import Manifest, unpack

_LOCK_S = 1.0

log = logging.getLogger("vllm.kvpool")


class RankSpaces:
    """Empty until set(): an engine whose workers said nothing has no pool."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._manifests: list[list[Manifest]] = []
        self._opened: dict[str, Ranks] = {}
        self._adapters: dict[str, str] = {}  # path -> digest at its first request; "": it changed
        self._owed = 0  # drops that were asked for, and how many of them were made
        self._dropped = 0
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
        is_usable = adapter is not None and self._dropped == self._owed
        return self._opened.get(adapter or "") if is_usable else None

    def open(self, adapter: str) -> Ranks | None:
        """Namespaces by rank, by group; None while there is no node, or it does not drop them."""
        # One thread asks, the others find what it got; of a node that hangs they do not wait long.
        if not self._lock.acquire(timeout=_LOCK_S):
            return None
        try:
            ranks = self._opened.get(adapter) or self._open(adapter)
            return ranks if ranks is not None and self._settle() else None
        finally:
            self._lock.release()

    def _settle(self) -> bool:
        """Drop what is owed, of every adapter that was ever opened. False: no node does it."""
        owed = self._owed  # more may be owed meanwhile
        if self._dropped == owed:
            return True
        try:
            for ranks in self._opened.values():
                for spaces in ranks:
                    for space in spaces:
                        space.drop()
        except KvpoolError as error:
            log.warning("kvpool: blocks are not dropped yet, so none are used: %s", error)
            return False
        self._dropped = owed
        return True

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
        self._owed += 1

    def adapter_of(self, request: Any) -> str | None:
        """The digest of a request's LoRA adapter; empty without one. Raises BadArgument.

        None where its files are not those of its first request: which of them the workers compute
        with, only they know, so nothing of it is kept any more.
        """
        if request is None:
            return ""
        digest = adapter_identity(request.lora_path)
        first = self._adapters.setdefault(request.lora_path, digest)
        if first == digest:
            return digest
        if first:
            self._adapters[request.lora_path] = ""
            log.warning(
                "kvpool: the files of adapter %s changed under it; what it computes is not kept. "
                "Give each version a path of its own.",
                request.lora_path,
            )
        return None

    def bytes_per_token(self, shapes: Sequence[GroupShape]) -> int:
        """Of one rank: ranks load at the same time."""
        if not self._manifests:
            return 0
        pairs = zip(self._manifests[0], shapes, strict=True)
        return sum(int(m.block_bytes or 0) // shape.block_tokens for m, shape in pairs)
