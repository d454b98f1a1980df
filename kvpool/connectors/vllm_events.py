"""vLLM's KV cache events of what this engine stored in the pool, for routers that follow them.

BlockStored with medium "KVPOOL", once every rank has stored it; nothing is told of evictions, which
are the pool's and concern all its engines: a router asks the pool, or takes a stale entry for a
miss. Blocks of the first KV cache group stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpool.connectors.vllm_lookup import GroupShape
from kvpool.connectors.vllm_messages import Report, Save

MEDIUM = "KVPOOL"
_EXPECTED_MAX = 4096  # saves that ranks still work at; older ones are forgotten


@dataclass
class _Expected:
    save: Save
    tokens: list[int]
    block_tokens: int
    lora: Any
    ranks: int = 0


class StoredEvents:
    """Does nothing, and costs nothing, unless the engine publishes events."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._expected: dict[int, _Expected] = {}
        self._ready: list[_Expected] = []
        self._last = 0

    def expect(self, save: Save, request: Any, shape: GroupShape) -> None:
        """Number a save, and keep what its event will say. shape: of the first group."""
        if not self._is_on or not save.parts or save.parts[0].group != 0:
            return
        self._last += 1
        save.number = self._last
        hashes, size = save.parts[0].hashes, shape.block_tokens
        hash_tokens = size // shape.hashes_per_block
        start = (list(request.block_hashes).index(hashes[0]) + 1) * hash_tokens - size
        tokens = list(request.all_token_ids[start : start + len(hashes) * size])
        self._expected[save.number] = _Expected(save, tokens, size, request.lora_request)
        while len(self._expected) > _EXPECTED_MAX:
            del self._expected[next(iter(self._expected))]

    def stored(self, report: Report, ranks: int) -> None:
        """Ranks stored these saves."""
        for number, by in report.stored.items():
            expected = self._expected.get(number)
            if expected is None:
                continue
            expected.ranks += by
            if expected.ranks >= ranks:
                self._ready.append(self._expected.pop(number))

    def take(self) -> list[Any]:
        """Events since the last call."""
        ready, self._ready = self._ready, []
        return [_event(each) for each in ready]


def _event(expected: _Expected) -> Any:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    part, lora = expected.save.parts[0], expected.lora
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each) for each in part.hashes],
        parent_block_hash=None if part.parent is None else maybe_convert_block_hash(part.parent),
        token_ids=expected.tokens,
        block_size=expected.block_tokens,
        lora_id=None if lora is None else lora.adapter_id,
        medium=MEDIUM,
        lora_name=None if lora is None else lora.name,
        group_idx=0,
    )
