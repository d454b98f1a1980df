"""A trace whose every block really goes through an embedded pool, each hit compared byte by byte.

Per request: look up the leading run, get it, compare it, put the rest behind it. The pool's clock
follows the trace. With one thread the hits equal the simulator's for the same policy; with
several, requests still start in order but overlap, as they do in a server.

With an SSD tier, the replay waits after each request until what is worth it is on the SSD: hours
of a trace pass in seconds, in which no disk could follow, and with one thread every run gives the
same hits. Halfway the pool may be closed and opened again on the same directory and clock.

Only the pool's own calls are timed (`Copied`), with a memcpy of the same bytes after every
FLOOR_EVERY-th request. Payload buffers are bounded by BUFFER_BYTES_MAX per thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import kvpool
from kvpool.replay.memcpy import Floor
from kvpool.replay.payload import Keys, Payload, Words, keys_of
from kvpool.replay.score import Copied, OnSsd, Score
from kvpool.replay.ssd import Tally, TierOptions, open_arguments
from kvpool.replay.trace import Request

BUFFER_BYTES_MAX = 64 << 20
FLOOR_EVERY = 4
FLUSH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 60.0
WARM_TIMEOUT_S = 60.0  # for all pages of the pool: first touch is no copy and not to be timed
_SLOT_ALIGN_BYTES = 4096
_DRAM_SLACK_BYTES = 64 << 20  # one slab; max_blocks is the bound, not the bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PoolOptions:
    """What to replay through. tau_s 0: the half-life of heat follows the workload."""

    policy: str
    capacity_blocks: int
    block_bytes: int
    tau_s: float = 0.0
    threads: int = 1
    ssd: TierOptions | None = None


def pool_bytes(options: PoolOptions) -> int:
    """Memory that the pool may come to hold."""
    slot_bytes = -(-options.block_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
    return options.capacity_blocks * slot_bytes + _DRAM_SLACK_BYTES


def through_pool(requests: Iterable[Request], options: PoolOptions) -> Score:
    """Replays `requests` once, in a pool of its own that is closed again.

    Wrong bytes are counted, never raised. Raises KvpoolError when the pool cannot be opened.
    """
    clock = kvpool.ManualClock()
    workers = [_Worker(options) for _ in range(options.threads)]
    evictions, tally = 0, Tally()
    seconds = 0.0
    for part in _lives(requests, options.ssd):
        with _opened(options, clock) as pool:
            for worker in workers:
                worker.use(pool)
            started = time.perf_counter()
            _run_all(workers, _Turns(part, clock))
            seconds += time.perf_counter() - started
            stats = pool.stats()
        evictions += int(stats["evictions"])
        if options.ssd:
            tally.add(stats)
    return _score(options, workers, tally, evictions=evictions, seconds=seconds)


def _lives(requests: Iterable[Request], ssd: TierOptions | None) -> Iterator[Iterable[Request]]:
    """The requests of each life of the pool: two with a restart, else one."""
    left = iter(requests)
    if ssd and ssd.restart_after is not None:
        yield itertools.islice(left, ssd.restart_after)
    yield left


@contextlib.contextmanager
def _opened(options: PoolOptions, clock: kvpool.ManualClock) -> Iterator[kvpool.Pool]:
    with kvpool.open(
        dram=pool_bytes(options),
        max_blocks=options.capacity_blocks,
        policy=options.policy,
        tau_s=options.tau_s or None,
        evict_ahead=0,
        prefault="all",
        clock=clock,
        **(open_arguments(options.ssd, options.block_bytes) if options.ssd else {}),
    ) as pool:
        pool._node.settle(WARM_TIMEOUT_S)
        yield pool
        pool.close(flush_timeout=CLOSE_TIMEOUT_S)


class _Turns:
    """Hands out requests in order; the clock shows the time of the one handed out last."""

    def __init__(self, requests: Iterable[Request], clock: kvpool.ManualClock) -> None:
        self._requests = iter(requests)
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[Request]:
        while True:
            with self._lock:
                request = None if self._stopped else next(self._requests, None)
                if request is None:
                    return
                self._clock.set(request.time_s)
            yield request

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


def _run_all(workers: list[_Worker], turns: _Turns) -> None:
    if len(workers) == 1:
        workers[0].run(turns)
        return
    with ThreadPoolExecutor(len(workers)) as executor:
        try:
            for done in [executor.submit(worker.run, turns) for worker in workers]:
                done.result()
        finally:
            turns.stop()  # an error or Ctrl-C ends the other threads at their next request


class _Worker:
    """One thread's buffers and counts."""

    def __init__(self, options: PoolOptions) -> None:
        self._has_ssd = options.ssd is not None
        self._block_bytes = options.block_bytes
        self._payload = Payload(options.block_bytes)
        self._floor = Floor(options.capacity_blocks * options.block_bytes, floors=options.threads)
        self._rows_max = max(1, BUFFER_BYTES_MAX // options.block_bytes)
        self._buffer = np.zeros((0, options.block_bytes // 8), dtype=np.uint64)
        self.requests = self.blocks = self.hit_blocks = self.hit_tokens = 0
        self.got_blocks = self.put_blocks = 0
        self.ssd_hit_blocks = self.unflushed = 0
        self.get_s = self.put_s = 0.0
        self.mismatches = 0
        self.first_mismatch: str | None = None

    @property
    def floor(self) -> Floor:
        return self._floor

    def use(self, pool: kvpool.Pool) -> None:
        """Work in this pool from now on."""
        self._pool = pool
        self._namespace = pool.namespace(
            kvpool.Manifest(
                model="trace", layout="opaque", block_tokens=512, block_bytes=self._block_bytes
            )
        )

    def run(self, turns: _Turns) -> None:
        for request in turns:
            keys = keys_of(request.block_ids)
            hit_blocks = self._get(request, keys) if len(keys) else 0
            self._put(keys, hit_blocks)
            if self._has_ssd and not self._pool.flush(FLUSH_TIMEOUT_S):
                self.unflushed += 1
            self.requests += 1
            self.blocks += len(keys)
            self.hit_blocks += hit_blocks
            if hit_blocks:
                self.hit_tokens += request.input_tokens * hit_blocks // len(keys)

    def _get(self, request: Request, keys: Keys) -> int:
        """Gets the leading run and compares it; returns its length.

        A run beyond the buffer is got in pieces from its end, so that the pool sees the blocks
        used in the order of one call: the tail first.
        """
        started = time.perf_counter()
        present, tiers, _ = self._namespace.lookup(keys)
        self.get_s += time.perf_counter() - started
        delivered = 0
        for start in reversed(range(0, present, self._rows_max)):
            piece = keys[start : min(start + self._rows_max, present)]
            out = self._rows(len(piece))
            out.fill(0)  # else a get that wrote nothing could pass by what an earlier one left
            started = time.perf_counter()
            count = self._namespace.get_into(piece, out)
            self.get_s += time.perf_counter() - started
            # Short of the piece: another thread's put evicted the rest since the look-up.
            delivered = start + count if count < len(piece) or not delivered else delivered
            self.got_blocks += count
            self._compare(request, start, piece[:count], out[:count])
            if self.requests % FLOOR_EVERY == 0:
                self._floor.copy_out(out[:count])
        self.ssd_hit_blocks += tiers[:delivered].count(kvpool.Tier.SSD)
        return delivered

    def _put(self, keys: Keys, start_block: int) -> None:
        for start in range(start_block, len(keys), self._rows_max):
            piece = keys[start : start + self._rows_max]
            blocks = self._rows(len(piece))
            self._payload.write(piece, blocks)
            parent = keys[start - 1].tobytes() if start else None
            started = time.perf_counter()
            result = self._namespace.put(piece, blocks, parent=parent)
            self.put_s += time.perf_counter() - started
            self.put_blocks += result.stored
            if self.requests % FLOOR_EVERY == 0:
                self._floor.copy_in(blocks)

    def _compare(self, request: Request, start: int, keys: Keys, blocks: Words) -> None:
        wrong = self._payload.wrong(keys, blocks)
        self.mismatches += len(wrong)
        if wrong and self.first_mismatch is None:
            block = start + wrong[0]
            self.first_mismatch = (
                f"block id {request.block_ids[block]}, block {block} of the request at"
                f" {request.time_s:.3f} s"
            )

    def _rows(self, count: int) -> Words:
        """`count` blocks of the buffer, contents undefined."""
        if count > len(self._buffer):
            # zeros + fill: touch the pages now, outside of what is timed.
            self._buffer = np.full((count, self._buffer.shape[1]), 1, dtype=np.uint64)
        return self._buffer[:count]


def _score(
    options: PoolOptions, workers: list[_Worker], tally: Tally, *, evictions: int, seconds: float
) -> Score:
    hit_blocks = sum(worker.hit_blocks for worker in workers)
    copied_bytes = sum(worker.floor.copied_bytes for worker in workers)
    floor_s = sum(worker.floor.seconds for worker in workers)
    copied = Copied(
        got_bytes=sum(worker.got_blocks for worker in workers) * options.block_bytes,
        put_bytes=sum(worker.put_blocks for worker in workers) * options.block_bytes,
        get_s=sum(worker.get_s for worker in workers),
        put_s=sum(worker.put_s for worker in workers),
        memcpy_bytes_per_s=copied_bytes / floor_s if floor_s else 0.0,
        mismatches=sum(worker.mismatches for worker in workers),
        first_mismatch=next((w.first_mismatch for w in workers if w.first_mismatch), None),
    )
    return Score(
        policy=options.policy,
        capacity_blocks=options.capacity_blocks,
        requests=sum(worker.requests for worker in workers),
        blocks=sum(worker.blocks for worker in workers),
        hit_blocks=hit_blocks,
        evictions=evictions,
        seconds=seconds,
        hit_tokens=sum(worker.hit_tokens for worker in workers),
        copied=copied,
        ssd_capacity_blocks=options.ssd.capacity_blocks if options.ssd else 0,
        on_ssd=_on_ssd(workers, tally, hit_blocks) if options.ssd else None,
    )


def _on_ssd(workers: list[_Worker], tally: Tally, hit_blocks: int) -> OnSsd:
    ssd_hit_blocks = sum(worker.ssd_hit_blocks for worker in workers)
    return tally.result(
        dram_hit_blocks=hit_blocks - ssd_hit_blocks,
        ssd_hit_blocks=ssd_hit_blocks,
        unflushed=sum(worker.unflushed for worker in workers),
    )
