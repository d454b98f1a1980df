"""What vLLM's scheduler hands to the connector, as far as its half of the connector looks at it.

The shapes are those of vLLM 0.32; tests/engines holds them against the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvpool
from kvpool.connectors.options import Options, read_options
from kvpool.connectors.vllm_lookup import GroupShape
from kvpool.connectors.vllm_ranks import as_kept, private_salt
from kvpool.connectors.vllm_requests import EngineShape
from kvpool.connectors.vllm_scheduler import SchedulerHalf

BLOCK = 16  # tokens
BLOCK_BYTES = 4096
FULL = GroupShape(BLOCK, 1, None)
NO_ANSWER = SimpleNamespace(
    finished_recving=None,
    failed_recving=None,
    invalid_block_ids=set(),
    kv_connector_worker_meta=None,
)


def answer(**fields: Any) -> SimpleNamespace:
    """A KVConnectorOutput."""
    return SimpleNamespace(**{**vars(NO_ANSWER), **fields})


@dataclass
class FakeAttachment:
    """An attachment to a pool that is there, or is not."""

    pool: Any
    shares_memory: bool = True
    closed: bool = False

    def space(self, manifest: kvpool.Manifest) -> kvpool.Namespace | None:
        return None if self.pool is None else self.pool.namespace(manifest)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def hashes_of(prompt: int, count: int) -> list[bytes]:
    """What an engine would make of the blocks of prompt number `prompt`."""
    return [bytes([prompt, at]) * 16 for at in range(count)]


def a_request(name: str, prompt: int = 1, tokens: int = 100, **fields: Any) -> SimpleNamespace:
    """A vLLM Request with `tokens` tokens, all of them prompt."""
    given: dict[str, Any] = {
        "request_id": name,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "block_hashes": hashes_of(prompt, tokens // BLOCK),
        "all_token_ids": list(range(tokens)),
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**{**given, **fields})


def blocks(*groups: Sequence[int]) -> SimpleNamespace:
    """A KVCacheBlocks."""
    return SimpleNamespace(get_block_ids=lambda: tuple(list(group) for group in groups))


def a_step(scheduled: dict[str, int], tables: dict[str, list[list[int]]]) -> SimpleNamespace:
    """A SchedulerOutput: tokens by request, and the block tables of each."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


def manifest(group: int = 0, rank: int = 0) -> kvpool.Manifest:
    return kvpool.Manifest(
        model=f"group {group}",
        layout="opaque",
        block_tokens=BLOCK,
        block_bytes=BLOCK_BYTES,
        tp=(rank, 4),
    )


@dataclass
class Rig:
    """The scheduler's half on a pool of this process."""

    pool: Any
    groups: tuple[GroupShape, ...] = (FULL,)
    ranks: int = 1
    saves: str = "all"
    extra: dict[str, Any] = field(default_factory=dict)
    shares_memory: bool = True
    has_eagle: bool = False
    publishes_events: bool = False

    def __post_init__(self) -> None:
        self.options: Options = read_options(self.extra)
        self.attachment = FakeAttachment(self.pool, self.shares_memory)
        self.clock = FakeClock()
        self.half = SchedulerHalf(
            EngineShape(self.groups, self.has_eagle, self.publishes_events, "engine"),
            self.options,
            self.attachment,  # type: ignore[arg-type]
            saves=self.saves,
            clock=self.clock,
        )
        self.half.set_ranks(
            {
                (0, rank): [manifest(group, rank).pack() for group in range(len(self.groups))]
                for rank in range(self.ranks)
            }
        )

    def spaces(self) -> list[kvpool.Namespace]:
        """Of all ranks and groups."""
        return [
            self.pool.namespace(manifest(group, rank))
            for rank in range(self.ranks)
            for group in range(len(self.groups))
        ]

    def store(self, hashes: Sequence[bytes]) -> None:
        """Into every namespace."""
        for space in self.spaces():
            data = np.zeros(BLOCK_BYTES * len(hashes), np.uint8)
            assert space.put(space.fold(list(hashes)), data).stored == len(hashes)

    def store_own(self, hashes: Sequence[bytes]) -> None:
        """Into the namespaces that a worker would store in after the resets there were."""
        salt = private_salt("engine", self.half._generation)
        for rank in range(self.ranks):
            for group in range(len(self.groups)):
                space = self.pool.namespace(as_kept(manifest(group, rank), "", salt))
                data = np.zeros(BLOCK_BYTES * len(hashes), np.uint8)
                assert space.put(space.fold(list(hashes)), data).stored == len(hashes)

    def arrive(self, request: Any) -> Any:
        self.half.add(request)
        return request

    def offered(self, request: Any, local: int = 0) -> int:
        """Tokens that can be loaded, once the answer is there."""
        while True:
            tokens, is_async = self.half.matched(request, local)
            if tokens is None:
                continue
            assert is_async == (tokens > 0)
            return tokens

    @property
    def pinned(self) -> int:
        return int(self.pool.stats()["blocks_pinned"])

    def counted(self) -> dict[str, float]:
        return self.half.counts.take()
