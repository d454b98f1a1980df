"""The worker's half of the connector: it moves what the scheduler decided.

Loads go on threads of ours, from the pool straight into the engine's pages, between steps. Saves
are copied out of the pages when a step has ended, into a bounded buffer, and put from there by a
thread: pages are the engine's again at once, whatever the pool does.

Promises:  1. a load that was begun is reported, delivered or failed, within the pool's deadline;
              what was not delivered is named, so that it is computed;
           2. the engine's thread never waits for the pool while it has anything to compute: a full
              buffer, or a pool that is away, drops saves and counts them;
           3. no page is read after the step that named it, but by copies the engine is ordered
              behind (moving.Mover.fence).
Thread rule: hooks on the engine's thread; threads here share what a lock guards.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvpool.connectors.attach import Attachment
from kvpool.connectors.facts import Shard, manifest_of
from kvpool.connectors.moving import Mover, Ticket, mover_for
from kvpool.connectors.options import Options
from kvpool.connectors.pages import PagedGroup, read_groups
from kvpool.connectors.save_buffer import SaveBuffer
from kvpool.connectors.self_test import check_round_trip
from kvpool.connectors.vllm_counts import Counts
from kvpool.connectors.vllm_messages import Handshake, Load, Part, Report, Step, blocks_of
from kvpool.connectors.vllm_ranks import as_kept, private_salt
from kvpool.errors import PoolClosed
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace
from kvpool.types import Put, Reason

_LOADERS = max(1, min(4, os.cpu_count() or 1))  # one copies some GB/s; more than 4 gain little
_CHUNK_BYTES = 16 << 20  # of a load that one thread copies at a time
_IDLE_WAIT_S = 0.005  # an engine with nothing to compute sleeps, and asks again
_DRAIN_S = 5.0  # that saves under way have when the engine ends

log = logging.getLogger("vllm.kvpool")


@dataclass
class Finished:
    """Loads that ended since the engine last asked."""

    requests: set[str] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)


@dataclass
class _Loading:
    """A load under way, in chunks that threads take."""

    load: Load
    began: float
    left: int  # chunks
    failed: list[int] = field(default_factory=list)  # pages
    size: int = 0


class _Where(NamedTuple):
    """Which of the worker's namespaces."""

    group: int
    adapter: str
    generation: int


@dataclass
class _Gathered:
    """Blocks of one part in the save buffer, on their way to the pool."""

    where: _Where
    number: int
    part: Part
    slots: list[int]
    ticket: Ticket


class WorkerHalf:
    """See the head of this file."""

    def __init__(
        self,
        config: Any,
        caches: Any,
        options: Options,
        attachment: Attachment,
        *,
        engine: str = "",
    ) -> None:
        """engine: a name that no other engine has."""
        self._config = config
        self._engine = engine
        self._caches = caches
        self._options = options
        self._attachment = attachment
        self._groups: list[PagedGroup] = []
        self._manifests: list[Manifest] = []
        self._movers: list[Mover] = []
        self._buffer: SaveBuffer | None = None
        self._loads: queue.SimpleQueue[tuple[_Loading, Part] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_Gathered | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards what follows, and every _Loading
        self._some_loaded = threading.Condition(self._lock)
        self._under_way = 0  # loads
        self._loading_since = 0.0  # of the time that was not reported yet
        self._finished = Finished()
        self._report = Report()
        self._spaces: dict[_Where, Namespace] = {}
        self.counts = Counts()

    # --- start -----------------------------------------------------------------------------------

    def register(self, caches: dict[str, Any], shard: Shard) -> None:
        """The engine's caches. Raises BadArgument or SelfTestFailed where they cannot be used."""
        self._groups = read_groups(caches, self._caches)
        self._manifests = [
            manifest_of(self._config, group.facts, shard, self._options) for group in self._groups
        ]
        pairs = list(zip(self._groups, self._manifests, strict=True))
        self._movers = [mover_for(group, manifest) for group, manifest in pairs]
        if self._options.self_test:
            for (group, manifest), mover in zip(pairs, self._movers, strict=True):
                check_round_trip(group, manifest, mover)
        largest = max(group.facts.block_bytes for group in self._groups)
        capacity = max(self._options.save_buffer, largest)
        self._buffer = SaveBuffer(capacity, largest, self._pinned(capacity))
        self._start()

    def _pinned(self, capacity: int) -> np.ndarray[Any, Any] | None:
        """Memory that a device copies into by itself; None on the host, where any will do."""
        if all(group.on_host for group in self._groups):
            return None
        import torch

        memory: np.ndarray[Any, Any] = torch.empty(
            capacity + 4096, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return memory

    def _start(self) -> None:
        works = [("kvpool-load", self._run_loads)] * _LOADERS + [("kvpool-save", self._run_saves)]
        for name, work in works:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def handshake(self) -> Handshake:
        """What the scheduler's half looks up."""
        return Handshake([manifest.pack() for manifest in self._manifests])

    # --- loads -----------------------------------------------------------------------------------

    def begin_loads(self, step: Step) -> None:
        """Start what the step asks for."""
        for mover in self._movers if step.loads else ():
            mover.order_loads()
        for load in step.loads:
            loading = _Loading(load, time.monotonic(), 0)
            with self._lock:
                if self._under_way == 0:
                    self._loading_since = loading.began
                self._under_way += 1
            try:
                chunks = [chunk for part in load.parts for chunk in self._chunks(part)]
            except Exception:  # the engine waits for it: it must end
                log.exception("kvpool: a load failed; its tokens are computed")
                loading.failed = [page for part in load.parts for page in part.pages]
                chunks = []
            loading.left = len(chunks)
            if not chunks:
                self._end_load(loading)
            for chunk in chunks:
                self._loads.put((loading, chunk))

    def _chunks(self, part: Part) -> list[Part]:
        """Blocks are independent: what is large is copied by several threads."""
        size = self._groups[part.group].facts.block_bytes
        count = max(1, _CHUNK_BYTES // size)
        chunks = []
        while part.pages:
            chunk, part = _cut(part, count)
            chunks.append(chunk)
        return chunks

    def _run_loads(self) -> None:
        while (job := self._loads.get()) is not None:
            loading, chunk = job
            done = 0
            try:
                done = self._deliver(loading.load, chunk)
            except Exception:  # a thread that ended here would leave its request waiting for ever
                log.exception("kvpool: a load failed; its tokens are computed")
            with self._lock:
                loading.failed += chunk.pages[done:]
                loading.size += done * self._groups[chunk.group].facts.block_bytes
                loading.left -= 1
                is_last = loading.left == 0
            if is_last:
                self._end_load(loading)

    def _deliver(self, load: Load, chunk: Part) -> int:
        """How many leading blocks were written into their pages."""
        space = self._space(_Where(chunk.group, load.adapter, load.generation))
        if space is None or len(chunk.hashes) != len(chunk.pages):
            return 0
        keys = space.fold(chunk.hashes)
        return self._movers[chunk.group].load(space, chunk.pages, keys)

    def _end_load(self, loading: _Loading) -> None:
        now = time.monotonic()
        load, failed, seconds = loading.load, loading.failed, now - loading.began
        total = blocks_of(load.parts)
        self.counts.add("loaded_blocks", total - len(failed))
        self.counts.add("loaded_bytes", loading.size)
        self.counts.add("load_seconds", seconds)
        if failed:
            self.counts.add("failed_loads", len(failed))
            log.warning(
                "kvpool: %d of %d blocks of a request could not be loaded; they are computed",
                len(failed),
                total,
            )
        with self._lock:
            self._under_way -= 1
            self._report.load_bytes += loading.size
            # Loads overlap: a rate is of the time in which there were any.
            self._report.load_s += now - self._loading_since
            self._loading_since = now
            self._finished.requests.add(load.request)
            if failed and len(self._groups) > 1:
                self._finished.failed_requests.add(load.request)
            elif failed:
                self._finished.failed_pages.update(failed)
            self._some_loaded.notify()

    def finished_loads(self, is_idle: bool) -> Finished:
        """Loads that ended since the last call. is_idle: the engine has nothing but to wait.

        It would ask again and again, and keep the interpreter from the threads that load.
        """
        with self._lock:
            if is_idle and self._under_way and not self._finished.requests:
                self._some_loaded.wait(_IDLE_WAIT_S)
            finished, self._finished = self._finished, Finished()
        return finished

    # --- saves -----------------------------------------------------------------------------------

    def begin_saves(self, step: Step) -> None:
        """Copy out what this step has computed. The step must have run."""
        for save in step.saves:
            for part in save.parts:
                self._gather(_Where(part.group, save.adapter, step.generation), save.number, part)

    def _gather(self, where: _Where, number: int, part: Part) -> None:
        buffer = self._buffer
        assert buffer is not None
        part = self._without_present(self._spaces.get(where), part)
        while part.pages:
            slots = buffer.take(len(part.pages))
            if not slots:
                self.counts.add("unsaved_blocks", len(part.pages), reason="backlog")
                return
            now, part = _cut(part, len(slots))
            # Who waits to hear of a save hears of its last blocks: a put stops at the first that
            # has no room, and the blocks of a part are put in their order.
            told = number if not part.pages and now.group == 0 else 0
            self._gather_into(slots, where, told, now)

    def _gather_into(self, slots: list[int], where: _Where, number: int, part: Part) -> None:
        buffer = self._buffer
        assert buffer is not None
        size = self._groups[part.group].facts.block_bytes
        try:
            blocks = [buffer.block(slot, size) for slot in slots]
            ticket = self._movers[part.group].gather(part.pages, blocks)
        except BaseException:
            buffer.give(slots)
            raise
        self._saves.put(_Gathered(where, number, part, slots, ticket))

    def _without_present(self, space: Namespace | None, part: Part) -> Part:
        """What the pool has already is not copied: 10 us of looking, where memory is shared."""
        if space is None or not part.pages or not self._attachment.shares_memory:
            return part
        there = space.lookup(space.fold(part.hashes)).blocks
        if there:
            self.counts.add("present_blocks", there)
            _, part = _cut(part, there)
        return part

    def fence(self) -> None:
        """Before the engine may write pages that a copy still reads."""
        for mover in self._movers:
            mover.fence()

    def _run_saves(self) -> None:
        while (gathered := self._saves.get()) is not None:
            try:
                self._put(gathered)
            except PoolClosed:  # the engine ends
                self.counts.add("unsaved_blocks", len(gathered.slots), reason="closed")
            except Exception:  # a thread that ended here would leave the buffer full for ever
                log.exception("kvpool: a save failed; its blocks are not stored")
                self.counts.add("unsaved_blocks", len(gathered.slots), reason="failed")
            finally:
                assert self._buffer is not None
                self._buffer.give(gathered.slots)

    def _put(self, gathered: _Gathered) -> None:
        part = gathered.part
        gathered.ticket.wait()
        space = self._space(gathered.where)
        if space is None:
            self.counts.add("unsaved_blocks", len(gathered.slots), reason="no_node")
            return
        assert self._buffer is not None
        size = self._groups[part.group].facts.block_bytes
        blocks = [self._buffer.block(slot, size) for slot in gathered.slots]
        parent = None if part.parent is None else bytes(space.fold([part.parent])[0].tobytes())
        result = space.put(
            space.fold(part.hashes), blocks, parent=parent, timeout=self._options.load_timeout_s
        )
        self.counts.add("saved_blocks", result.stored)
        self.counts.add("saved_bytes", result.stored * size)
        if result.present:
            self.counts.add("present_blocks", result.present)
        for put, reason in zip(result, result.reasons, strict=True):
            if put is Put.NO_ROOM and reason is not Reason.NOT_DURABLE:
                self.counts.add("unsaved_blocks", reason=reason.name.lower())
        if gathered.number and result.no_room == result.not_durable:
            with self._lock:
                self._report.stored[gathered.number] = 1

    def _space(self, where: _Where) -> Namespace | None:
        """On our threads: may take a request, once."""
        space = self._spaces.get(where)
        if space is None:
            salt = private_salt(self._engine, where.generation)
            space = self._attachment.space(
                as_kept(self._manifests[where.group], where.adapter, salt)
            )
            if space is not None:
                self._spaces[where] = space
        return space

    def take_report(self) -> Report | None:
        """For the scheduler's half; None when there is nothing to tell."""
        with self._lock:
            report, self._report = self._report, Report()
        return None if report.is_empty else report

    # --- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the threads; saves under way have some seconds. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in range(_LOADERS if threads else 0):
            self._loads.put(None)
        if threads:
            self._saves.put(None)
        until = time.monotonic() + _DRAIN_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._attachment.close()


def _cut(part: Part, count: int) -> tuple[Part, Part]:
    """The first `count` blocks, and the rest, which follows them."""
    first = Part(part.group, part.pages[:count], part.hashes[:count], part.parent)
    parent = part.hashes[count - 1] if 0 < count <= len(part.hashes) else part.parent
    return first, Part(part.group, part.pages[count:], part.hashes[count:], parent)
