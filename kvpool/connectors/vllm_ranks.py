"""The namespaces of all ranks of an engine, and of its adapters, opened once.

Thread rule: open() and adapter_of() may take requests and disk reads; the rest takes no time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpool.connectors.attach import Attachment
from kvpool.connectors.facts import with_adapter
from kvpool.connectors.vllm_lookup import GroupShape, Ranks
from kvpool.connectors.weights import adapter_identity
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
        self._salt = ""
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
        if not self._manifests:
            return ""
        return as_kept(self._manifests[0][0], "", self._salt).namespace_id.hex()

    def set_private(self, salt: str) -> None:
        """From now on other namespaces, with this salt: what is in the old ones is not ours."""
        with self._lock:
            self._salt = salt
            self._opened = {}

    def opened(self, adapter: str | None) -> Ranks | None:
        """What open() gave; None if it was not called yet."""
        return None if adapter is None else self._opened.get(adapter)

    def open(self, adapter: str) -> Ranks | None:
        """Namespaces by rank, by group; None while there is no node."""
        # One thread asks, the others find what it got; of a node that hangs they do not wait long.
        if not self._lock.acquire(timeout=_LOCK_S):
            return None
        try:
            return self._opened.get(adapter) or self._open(adapter)
        finally:
            self._lock.release()

    def _open(self, adapter: str) -> Ranks | None:
        ranks: Ranks = []
        for manifests in self._manifests:
            spaces = [
                self._attachment.space(as_kept(each, adapter, self._salt)) for each in manifests
            ]
            if any(space is None for space in spaces):
                return None
            ranks.append([space for space in spaces if space is not None])
        if ranks:
            self._opened[adapter] = ranks
        return ranks or None

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


def as_kept(manifest: Manifest, adapter: str, salt: str) -> Manifest:
    """The namespace of a request's blocks: its adapter's, and the engine's own after a reset."""
    kept = with_adapter(manifest, adapter) if adapter else manifest
    return replace(kept, salt=f"{kept.salt}{salt}") if salt else kept


def private_salt(engine: str, generation: int) -> str:
    """What sets an engine's blocks apart from all others once its weights may have changed."""
    return f" reset {generation} of {engine}" if generation else ""
