"""KvpoolConnector: vLLM's KV blocks in a kvpool, by one flag.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpoolConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The entry point `vllm.general_plugins` makes the name known; where plug-ins are switched off, add
"kv_connector_module_path": "kvpool.connectors.vllm". Options: connectors/options.py and
docs/engines.md.

Promises:  1. a mistake of the operator (an option, a model whose KV kvpool does not keep, pages
              that do not come back as they were) ends the start, with its reason;
           2. afterwards no hook raises: a fault of the pool is a miss, a fault of ours is logged,
              counted, and a miss.
Written against vLLM 0.32; docs/engines.md names what was run.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.connectors.attach import Attachment
from kvpool.connectors.facts import Shard
from kvpool.connectors.options import read_options
from kvpool.connectors.pages import kind_of
from kvpool.connectors.vllm_lookup import GroupShape
from kvpool.connectors.vllm_messages import Handshake, Report, Step
from kvpool.connectors.vllm_plugin import register
from kvpool.connectors.vllm_prefixes import require_prefixes
from kvpool.connectors.vllm_requests import EngineShape
from kvpool.connectors.vllm_scheduler import SchedulerHalf
from kvpool.connectors.vllm_stats import KvpoolStats, metrics_for
from kvpool.connectors.vllm_worker import WorkerHalf
from kvpool.errors import BadArgument
from kvpool.types import Tier

log = logging.getLogger("vllm.kvpool")

KVConnectorMetadata.register(Step)
KVConnectorWorkerMetadata.register(Report)
KVConnectorHandshakeMetadata.register(Handshake)

STRICT_VARIABLE = "KVPOOL_CONNECTOR_STRICT"  # for tests: faults of ours are raised
_SOURCES = {
    Tier.DRAM: CacheHitSource.HOST,
    Tier.SSD: CacheHitSource.DISK,
    Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,  # vLLM has no name for another host
}

Hook = TypeVar("Hook", bound=Callable[..., Any])


def quiet(fallback: Any) -> Callable[[Hook], Hook]:
    """A hook whose own faults are logged and answered with `fallback` (made anew by a call)."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: KvpoolConnector, *args: Any, **more: Any) -> Any:
            try:
                return hook(self, *args, **more)
            except Exception:
                if os.environ.get(STRICT_VARIABLE):
                    raise
                log.exception("kvpool: a fault of kvpool itself in %s", hook.__name__)
                return fallback()

        return guarded  # type: ignore[return-value]

    return decorate


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """One per process and role: the scheduler's decides, the workers' move (see their files)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = read_options(transfer.kv_connector_extra_config)
        _refuse_unsupported(vllm_config.parallel_config)
        require_prefixes(vllm_config)
        self._options = options
        self._is_prefill_only = transfer.kv_role == "kv_producer"
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._failed_pages: set[int] = set()  # of the loads that were reported last
        name = f"vllm {role.name.lower()} {transfer.engine_id or ''}"[:64]
        if role is KVConnectorRole.SCHEDULER:
            engine = _shape_of(vllm_config, kv_cache_config)  # raises before a node is waited for
            attachment = Attachment(options, name=name, log=log)
            self._scheduler = SchedulerHalf(
                engine, options, attachment, saves=options.saves(transfer.kv_role)
            )
            _say_policy(transfer)
        else:
            attachment = Attachment(options, name=name, log=log)
            self._worker = WorkerHalf(
                vllm_config, kv_cache_config, options, attachment, engine=_name_of(vllm_config)
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that is lost is a miss later."""
        return False

    @property
    def _decides(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _moves(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    # --- workers ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._moves.register(kv_caches, _shard_of(self._vllm_config))

    def get_handshake_metadata(self) -> Handshake:
        return self._moves.handshake()

    @quiet(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._moves.fence()

    @quiet(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, Step):
            self._moves.begin_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps: a layer never waits for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are taken when the step has ended, all layers at once."""

    @quiet(lambda: None)
    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, Step):
            self._moves.begin_saves(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._connector_metadata
        finished = self._moves.finished_loads(isinstance(metadata, Step) and metadata.is_idle)
        self._failed_pages = finished.failed_pages
        return KVConnectorTransferResults(
            finished_recving=finished.requests, failed_recving=finished.failed_requests
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For what still asks this way; failures of several groups cannot be said here."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    @quiet(lambda: None)
    def build_connector_worker_meta(self) -> Report | None:
        return self._moves.take_report()

    # --- scheduler -------------------------------------------------------------------------------

    @quiet(lambda: None)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        told = {
            rank: each.manifests for rank, each in metadata.items() if isinstance(each, Handshake)
        }
        if len(told) < len(metadata):
            log.warning(
                "kvpool: another connector answered for the workers, so the pool is not used; name "
                "KvpoolConnector before it"
            )
            return
        self._decides.set_ranks(told)

    @quiet(lambda: None)
    def on_new_request(self, request: Any) -> None:
        self._decides.add(request)

    @quiet(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._decides.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        try:
            self._decides.allocated(request, blocks, num_external_tokens)
        except Exception:
            if os.environ.get(STRICT_VARIABLE):
                raise
            log.exception("kvpool: a fault of kvpool itself; the prompt is computed")
            if num_external_tokens:
                self._decides.lost(request, blocks)

    @quiet(Step)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._decides.next_step(scheduler_output)

    @quiet(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        self._decides.stepped(connector_output)

    @quiet(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        told = self._decides.finished(request)
        return False, told if self._is_prefill_only else None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """One group is told as several are."""
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished_all_groups(
            request, (block_ids,)
        )
        return answer

    @quiet(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found = self._decides.sources(request, num_external_tokens)
        if not found:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return {_SOURCES[tier]: tokens for tier, tokens in found.items()}

    @quiet(list)
    def take_events(self) -> Iterable[Any]:
        return self._decides.events.take()

    @quiet(lambda: False)
    def reset_cache(self) -> bool:
        self._decides.reset()
        return True

    # --- both ------------------------------------------------------------------------------------

    @quiet(lambda: None)
    def get_kv_connector_stats(self) -> KvpoolStats | None:
        half = self._scheduler or self._worker
        counts = half.counts.take() if half is not None else {}
        return KvpoolStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpoolStats:
        return KvpoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> Any:
        return metrics_for(given)

    @quiet(lambda: None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()


def _refuse_unsupported(parallel: Any) -> None:
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = int(getattr(parallel, field, 1) or 1)
        if size > 1:
            raise BadArgument(
                f"{field} is {size}: its ranks hold parts of a block's tokens, which kvpool does "
                "not keep apart"
            )


def _shape_of(config: Any, caches: Any) -> EngineShape:
    """Raises BadArgument for kinds of KV that are no pages."""
    hashed = int(caches.hash_block_size or config.cache_config.block_size)
    shapes = []
    for at, group in enumerate(caches.kv_cache_groups):
        spec = group.kv_cache_spec
        _, window = kind_of(at, spec)
        if window is not None:
            window += int(getattr(getattr(spec, "first_spec", spec), "extra_retained_tokens", 0))
        tokens = int(spec.block_size)
        if tokens % hashed:
            raise BadArgument(
                f"KV cache group {at} has blocks of {tokens} tokens, and vLLM's hashes cover "
                f"{hashed}: no hash names such a block"
            )
        shapes.append(GroupShape(tokens, tokens // hashed, window))
    events = config.kv_events_config
    return EngineShape(
        tuple(shapes),
        _drops_last_block(config.speculative_config, caches),
        events is not None and bool(events.enable_kv_cache_events),
        _name_of(config),
        # Where batches overlap, or engines step together, an empty step holds up others.
        config.max_concurrent_batches == 1 and config.parallel_config.data_parallel_size == 1,
    )


def _name_of(config: Any) -> str:
    """vLLM gives every engine an id, and each of its ranks of data parallelism another one."""
    return str(config.kv_transfer_config.engine_id)


# By module path alone the name would be unknown to what looks connectors up by it.
register()


def _drops_last_block(speculative: Any, caches: Any) -> bool:
    """Whether the engine computes the last block of a prefix again, for its draft model."""
    if speculative is None:
        return False
    return bool(speculative.use_eagle_block_drop()) or any(
        group.is_eagle_group for group in caches.kv_cache_groups
    )


def _shard_of(config: Any) -> Shard:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor, pipeline = get_tp_group(), get_pp_group()
    return Shard(
        tp=(tensor.rank_in_group, tensor.world_size),
        pp=(pipeline.rank_in_group, pipeline.world_size),
        dcp=(0, 1),
    )


def _say_policy(transfer: Any) -> None:
    if transfer.kv_load_failure_policy == "fail":
        log.warning(
            "kvpool: kv_load_failure_policy is 'fail', vLLM's default: unless a connector around "
            "this one says otherwise, a request whose blocks leave the pool before they are loaded "
            "ends with an error. 'recompute' computes them."
        )
