"""The pool behind vLLM's own CPU offloading: a secondary tier of its TieringOffloadingSpec.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
        "secondary_tiers": [{"type": "KvpoolTier", "module_path": "kvpool.connectors.vllm_tier"}]}}'

What vLLM writes to its CPU tier goes on to the pool, and what a prompt needs and the CPU tier has
not comes from there: of this engine before a restart, or of another one. A row of the CPU tier is
one block: a chunk of all layers and workers.

Promises:  1. the scheduler never waits: lookups are inline only where the pool shares its memory,
              and transfers have two threads;
           2. after the start nothing raises into the engine: a chunk that cannot be moved is a
              failed one, counted by reason, and computed anew;
           3. a chunk that could not be loaded is not tried again for the same request.
Thread rule: vLLM's scheduler thread; see vllm_tier_jobs for the others.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpool.address import ADDRESS_VARIABLE, UnixAddress, parse_address
from kvpool.connectors.attach import Attachment
from kvpool.connectors.options import Options, read_options
from kvpool.connectors.vllm_tier_facts import engine_config, tier_manifest
from kvpool.connectors.vllm_tier_jobs import Job, Line
from kvpool.connectors.vllm_tier_lookups import Lookups
from kvpool.connectors.vllm_tier_rows import Moved, Rows
from kvpool.errors import BadArgument

WHERE = "secondary_tiers of kv_connector_extra_config"
# Of the connector's options those that mean something here.
OPTIONS = (
    "address",
    "token",
    "token_file",
    "tenant",
    "load_timeout_s",
    "connect_timeout_s",
    "spawn",
    "spawn_dram",
    "spawn_ssd",
    "spawn_ssd_capacity",
    "salt",
    "weights",
)
STORE_WAIT_S_MAX = 60.0  # vLLM pins the rows of a waiting store, and runs out of rows

LOADED, STORED = "vllm:kvpool_tier_loaded_chunks", "vllm:kvpool_tier_stored_chunks"
NOT_LOADED, NOT_STORED = (
    "vllm:kvpool_tier_not_loaded_chunks",
    "vllm:kvpool_tier_not_stored_chunks",
)
ATTACHED = "vllm:kvpool_tier_attached"

_log = logging.getLogger("vllm.kvpool")


class KvpoolTier(SecondaryTierManager):
    """See the module. Made by vLLM, by `type` and `module_path`."""

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """options: OPTIONS, as for KvpoolConnector (docs/engines.md).

        Raises BadArgument: an option that cannot be meant, or an engine whose bytes depend on what
        cannot be known. A node that is missing is looked for in the background.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        read = tier_options(options)
        self.locality = Locality(locality) if locality is not None else _locality(read)
        manifest = tier_manifest(offloading_spec, self.block_size_bytes, engine_config(), read)
        self._attachment = Attachment(read, name="vllm tier", log=_log)
        self._attachment.space(manifest)  # its request now, not in the first lookup
        self._rows = Rows(primary_kv_view, self._attachment, manifest)
        self._timeout_s = read.load_timeout_s
        self._lookups = Lookups(self._rows, tier_type)
        self._loads = Line("kvpool-tier-load", self._load, read.load_timeout_s)
        self._stores = Line("kvpool-tier-store", self._store, STORE_WAIT_S_MAX)
        self._open_jobs = 0
        self._parents: dict[str, dict[int, bytes]] = {}  # by request and group: stored last
        self._counts: Counter[tuple[str, str]] = Counter()  # by metric and reason
        _log.info("kvpool: tier of %s, %d bytes a chunk", manifest.model, self._rows.row_bytes)

    # --- lookups ---------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT, MISS, or RETRY while a thread asks."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Only chunks that are new to the CPU tier are stored."""
        self._lookups.begin(req_context.req_id)
        self._parents.setdefault(req_context.req_id, {})
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what was kept for it; its jobs go on."""
        self._lookups.end(req_context.req_id)
        self._parents.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:
        """Let the thread ask for what this step wants to know."""
        self._lookups.flush()

    # --- transfers -------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """From the pool into rows of the CPU tier."""
        self._open_jobs += 1
        self._loads.submit(_job(job_metadata, list(range(len(job_metadata.keys)))))

    def submit_store(self, job_metadata: Any) -> None:
        """From rows of the CPU tier into the pool, each group of layers in the order of tokens."""
        context = job_metadata.req_context
        keys = list(job_metadata.keys)
        order = sorted(
            range(len(keys)),
            key=lambda at: (
                get_offload_group_idx(keys[at]),
                context.get_offload_key_position(keys[at]) or 0,
            ),
        )
        job = _job(job_metadata, order)
        known = self._parents.get(context.req_id)
        job.parents = dict(known or {})
        if known is not None:
            known.update({get_offload_group_idx(key): key for key in job.keys})
        self._open_jobs += 1
        self._stores.submit(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Every job once."""
        done = [*self._loads.finished(), *self._stores.finished()]
        self._open_jobs -= len(done)
        return [self._result(job) for job in done]

    def has_pending_work(self) -> bool:
        """While a job is open, so that its rows are given back even if nothing is scheduled."""
        return self._open_jobs > 0

    def drain_jobs(self) -> None:
        """Waits for all jobs, each for the pool's timeout at most."""
        self._loads.drain()
        self._stores.drain()

    def shutdown(self) -> None:
        """Ends the threads; waits for what is moved just now. The pool's blocks stay."""
        for line in (self._loads, self._stores):
            line.close()
        self._lookups.shutdown()
        self._rows.close()
        self._attachment.close()

    def _load(self, job: Job) -> Moved:
        return self._rows.load(job.keys, job.chunks)

    def _store(self, job: Job) -> Moved:
        done: list[int] = []
        reasons: Counter[str] = Counter()
        begin = 0
        for group, keys in itertools.groupby(job.keys, get_offload_group_idx):
            count = len(list(keys))
            end = begin + count
            moved = self._rows.store(
                job.keys[begin:end],
                job.chunks[begin:end],
                job.parents.get(group),
                self._timeout_s,
            )
            done += [begin + place for place in moved.done]
            reasons.update(moved.reasons)
            begin = end
        return Moved(done, dict(reasons))

    def _result(self, job: Job) -> JobResult:
        moved, missed = (LOADED, NOT_LOADED) if job.is_load else (STORED, NOT_STORED)
        self._counts[moved, ""] += len(job.moved.done)
        for reason, chunks in job.moved.reasons.items():
            self._counts[missed, reason] += chunks
        arrived = {job.keys[place] for place in job.moved.done}
        is_whole = len(arrived) == len(job.keys)
        if job.is_load and not is_whole:
            self._lookups.mark_missing(job.request, set(job.keys) - arrived)
        return JobResult(
            job_id=job.number,
            success=is_whole,
            successful_keys=None if is_whole or not arrived else tuple(arrived),
            transfer_time=job.seconds,
            transfer_bytes=len(job.moved.done) * self._rows.row_bytes,
        )

    # --- what is counted -------------------------------------------------------------------------

    def get_stats(self) -> Any:
        """Since the last call, by metric and reason."""
        stats = OffloadingConnectorStats()
        for (metric, reason), chunks in self._counts.items():
            if chunks:
                stats.increase_counter(metric, chunks, (reason,) if reason else ())
        self._counts.clear()
        stats.set_gauge(ATTACHED, int(self._attachment.pool is not None))
        return stats

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """What get_stats() has, for vLLM's metrics page."""
        counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
        return {
            LOADED: counter("Chunks that the pool delivered into the CPU tier."),
            STORED: counter("Chunks of the CPU tier that the pool has now."),
            NOT_LOADED: counter("Chunks that the pool did not deliver.", ("reason",)),
            NOT_STORED: counter("Chunks that the pool did not take.", ("reason",)),
            ATTACHED: gauge("Whether there was a pool to attach to (1) or not yet (0)."),
        }


def tier_options(given: Mapping[str, Any]) -> Options:
    """Those of OPTIONS. Raises BadArgument for others: they would have no effect here."""
    useless = [name for name in given if name not in OPTIONS and name in Options.__struct_fields__]
    if useless:
        raise BadArgument(f"{WHERE}: {useless[0]!r} means nothing to a tier")
    return read_options(given, WHERE)


def _locality(options: Options) -> Locality:
    address = options.address or os.environ.get(ADDRESS_VARIABLE)
    if not address or isinstance(parse_address(address), UnixAddress):
        return Locality.LOCAL
    return Locality.REMOTE


def _job(told: Any, order: list[int]) -> Job:
    keys = list(told.keys)
    return Job(
        number=told.job_id,
        request=told.req_context.req_id,
        is_load=told.is_promotion,
        keys=[keys[place] for place in order],
        chunks=[int(told.chunk_ids[place]) for place in order],
    )
