"""The embedded pool: open, namespaces, and what an engine does with blocks.

A Pool owns memory, index and policy in this process; a Namespace is one kind of KV in it. All
methods are thread-safe and release the GIL while they copy; none can be used after fork.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from kvpool import _core
from kvpool.config import (
    check_choice,
    check_count,
    check_number,
    check_size,
    check_ssd_capacity,
    check_type,
    ssd_options,
)
from kvpool.errors import BadArgument, BadType, ManifestMismatch, TierBuffered
from kvpool.keys import fold_keys, prefix_keys
from kvpool.layers import plan_layers
from kvpool.manifest import Manifest
from kvpool.types import Hit, Keys, Put, PutResult, Reason

Result = TypeVar("Result")
AnyKey = Any  # 16 bytes: bytes, an element or a slice of keys()
AnyKeys = Any  # packed keys (a buffer of n * 16 bytes) or a sequence of 16-byte keys
AnyData = Any  # a buffer, a list of buffers, a torch CPU tensor, or a Region

PREFAULTS = ("off", "ahead", "all")
POLICIES = ("temperature", "lru", "lfu", "fifo", "s3fifo")
DRAM_BYTES_MIN = 2 << 20
DRAM_BYTES_MAX = 1 << 44
BLOCKS_MAX = 1 << 30
PUT_TIMEOUT_S = 5.0
RESIZE_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 30.0
CLOSE_FLUSH_TIMEOUT_S = 10.0
TIMEOUT_S_MAX = 86_400.0
ASYNC_THREADS = 2

_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def open(
    dram: str | int,
    *,
    dram_max: str | int | None = None,
    policy: str = "temperature",
    tau_s: float | None = None,
    max_blocks: int | None = None,
    prefault: str = "ahead",
    evict_ahead: float = 1 / 128,
    huge_pages: bool = True,
    ssd: str | os.PathLike[str] | None = None,
    ssd_capacity: str | int | None = None,
    durability: str = "async",
    ssd_admit: str | None = None,
    ssd_free_floor: str | int | None = None,
    ssd_io_threads: int | None = None,
    ssd_direct: bool | None = None,
    ssd_timeout: float | None = None,
    clock: _core.ManualClock | None = None,
) -> Pool:
    """Open a pool in this process.

    dram: payload memory, such as "4GiB" (rounded up to 2 MiB); addresses are reserved, pages come
    on demand. dram_max: the most that resize() may ask for (default: four times dram).
    policy: who is evicted; `temperature`, or lru, lfu, fifo, s3fifo for comparison.
    tau_s: half-life of heat in seconds; by default it follows the workload.
    max_blocks: limit of blocks in DRAM; by default as many as fit.
    prefault: `ahead` keeps 32 MiB of free memory ready, `all` makes all of it ready in the
    background, `off` none. huge_pages: use them where the kernel gives them quickly.
    evict_ahead: share of the slots that a background thread keeps free when the pool is full.
    clock: a ManualClock, for replay and tests.

    ssd: directory of an SSD tier, made if it is not there; what an earlier pool left in it is
    found again. One pool at a time. ssd_capacity: bytes of all its files together, allocated at
    once; needed the first time, later by default as it was. durability: `async` (the default: put
    does not wait, a crash loses what was still queued), `durable` (put returns after the commit),
    `relaxed` (as async, a crash may lose the newest commit too). ssd_admit: blocks worth writing,
    `second_use` (the default) or `all` (always so when durable). ssd_free_floor: left free on the
    filesystem (default 1 GiB). ssd_io_threads: reads and writes in flight (8). ssd_direct: False to
    go through the page cache. ssd_timeout: a read that takes longer is a miss (5 s).

    Raises BadArgument, NoResource, TierRefused (the directory is in use, foreign or damaged).
    Warns with TierBuffered (no O_DIRECT). Cost with an SSD: about a second per million blocks.
    """
    dram_bytes = _size("dram", dram)
    _check_kinds(policy, prefault, huge_pages, clock)
    tier = ssd_options(
        ssd,
        ssd_capacity=ssd_capacity,
        durability=durability,
        ssd_admit=ssd_admit,
        ssd_free_floor=ssd_free_floor,
        ssd_io_threads=ssd_io_threads,
        ssd_direct=ssd_direct,
        ssd_timeout=ssd_timeout,
    )
    node = _core.Node.open(
        dram=dram_bytes,
        dram_max=_dram_max(dram_bytes, dram_max),
        max_blocks=_max_blocks(max_blocks),
        policy=policy,
        tau_s=0.0 if tau_s is None else check_number("tau_s", tau_s, 0.001, 1e9),
        prefault=prefault,
        evict_ahead=check_number("evict_ahead", evict_ahead, 0, 0.5),
        huge_pages=huge_pages,
        salt=secrets.randbits(64),
        clock=clock,
        **tier,
    )
    return _warn_if_buffered(Pool(node), tier)


class Pool:
    """A pool in this process. Use it as a context manager, or call close().

    Blocks that somebody views stay readable after close(); every call that needs the pool raises
    PoolClosed.
    """

    def __init__(self, node: _core.Node) -> None:
        """For kvpool.open()."""
        self._node = node
        self._lock = threading.Lock()  # guards _named and _executor
        self._named: dict[str, Manifest] = {}
        self._executor: ThreadPoolExecutor | None = None
        _open_pools.add(self)

    def namespace(self, manifest: Manifest) -> Namespace:
        """The namespace that this manifest defines, made at its first use.

        Raises ManifestMismatch when a namespace of the same (non-empty) name exists with another
        manifest, naming the fields. O(1).
        """
        check_type("manifest", manifest, Manifest)
        self._node.require_usable()  # in a forked child, the lock may be held for ever
        with self._lock:
            known = self._named.get(manifest.name) if manifest.name else None
            if known is not None and known != manifest:
                raise ManifestMismatch(manifest.name, known.differing(manifest))
            space = Namespace(self, manifest)
            if manifest.name:
                self._named[manifest.name] = manifest
        return space

    def register(self, memory: AnyData) -> _core.Region:
        """Register one tensor or buffer; later calls name places in it by byte offset.

        Saves the cost of looking at the object in every call. The region keeps it alive; do not
        resize a torch tensor, or give it other storage, while it is registered or in use here.
        """
        self._node.require_usable()
        return _core.Region(memory)

    def resize(
        self,
        dram: str | int | None = None,
        *,
        max_blocks: int | None = None,
        ssd_capacity: str | int | None = None,
        timeout: float = RESIZE_TIMEOUT_S,
    ) -> int:
        """Change the limits while the pool is in use; returns the memory committed now, in bytes.

        Growing is at once. Shrinking evicts the coldest blocks, gathers the others and gives the
        memory back to the system; what is pinned stays, and the pool goes on in the background
        after `timeout` seconds. The arena's base address never changes. None leaves a limit as it
        is; max_blocks=0 lifts that limit. ssd_capacity: as in open(); growing takes the room on
        the disk first and raises NoResource where there is none.
        """
        dram_bytes = None if dram is None else _size("dram", dram)
        blocks = None if max_blocks is None else _max_blocks(max_blocks)
        if ssd_capacity is not None:  # first: it can be refused, and then nothing has changed
            self._node.resize_ssd(check_ssd_capacity(ssd_capacity), timeout)
        return self._node.resize(dram_bytes, blocks, timeout)

    def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until every block admitted to the SSD so far is committed there.

        True: what was put before, is worth keeping (ssd_admit) and has not been evicted
        (stats()["evicted_unwritten"]) survives a crash of the process and loss of power, under
        `relaxed` too. False: the time ran out, or the tier takes nothing more
        (stats()["ssd_read_only_reason"]). True at once without an SSD tier. Releases the GIL.
        """
        return self._node.flush(check_number("timeout", timeout, 0, TIMEOUT_S_MAX))

    def trim(self) -> None:
        """Give memory that holds no block back to the system now."""
        self._node.trim()

    def stats(self) -> dict[str, Any]:
        """Counters since open() and levels now, by name (docs/architecture.md). Takes the lock."""
        return self._node.stats()

    def check(self) -> None:
        """Abort the process if the pool's books do not add up (free + held = total). For tests."""
        self._node.check()

    @property
    def closed(self) -> bool:
        """True after close(), and in a forked child."""
        return self._node.is_forked or self._node.is_closed

    def close(self, flush_timeout: float = CLOSE_FLUSH_TIMEOUT_S) -> None:
        """End the pool. Idempotent; does nothing in a forked child.

        Waits inside the pool end at once, and what was not stored yet is reported as FAILED. Calls
        that copy in other threads end their copy; asynchronous ones are waited for. With an SSD
        tier, blocks that are worth keeping and not written yet are, for `flush_timeout` seconds at
        most; 0 leaves them out.
        """
        if self._node.is_forked:  # the lock may be held for ever in a child
            return
        flush_timeout_s = check_number("flush_timeout", flush_timeout, 0, TIMEOUT_S_MAX)
        with self._lock:
            executor, self._executor = self._executor, None
        self._node.close(flush_timeout_s)
        if executor is not None:
            executor.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        self._node.require_usable()
        with self._lock:
            self._node.require_usable()  # close() takes the executor away under the lock
            if self._executor is None:
                self._executor = ThreadPoolExecutor(ASYNC_THREADS, "kvpool")
            answer = asyncio.get_running_loop().run_in_executor(self._executor, call)
        return await answer


class Namespace(_core.Space):
    """One kind of KV in a pool. `keys` arguments are in chain order: each block after its parent.

    Keys are what keys() gives (packed, dtype V16), any buffer of n * 16 bytes, or a list of n
    16-byte keys. Every block has manifest.block_bytes bytes.
    """

    def __init__(self, pool: Pool, manifest: Manifest) -> None:
        """For Pool.namespace()."""
        assert manifest.block_bytes is not None  # computed by the manifest
        super().__init__(pool._node, manifest.namespace_id, manifest.block_bytes)
        self.pool = pool
        self.manifest = manifest
        self.id = manifest.namespace_id

    def keys(
        self,
        token_ids: Sequence[int] | np.ndarray[Any, Any],
        *,
        extra: bytes = b"",
        after: AnyKey | None = None,
    ) -> Keys:
        """Keys of the whole blocks of `token_ids`; see kvpool.keys.prefix_keys.

        after: the last key of the chain that these tokens continue.
        """
        manifest = self.manifest
        return prefix_keys(
            self.id if after is None else _one_key("after", after),
            token_ids,
            manifest.block_tokens,
            extra=extra,
            algorithm=manifest.hash,
        )

    def fold(self, hashes: Sequence[bytes] | Any, hash_bytes: int | None = None) -> Keys:
        """Keys from an engine's own chained block hashes; see kvpool.keys.fold_keys."""
        return fold_keys(self.id, hashes, hash_bytes)

    def lookup(self, keys: AnyKeys) -> Hit:
        """How many leading blocks are present, and the tier of each: DRAM, or SSD only.

        No side effect: pins nothing, heats nothing and reads no disk. A block may be evicted before
        a get, which then reports a miss. Takes no lock; 256 keys among a million take some 10 us.
        """
        return Hit(*self.count_present(keys))

    def put(
        self,
        keys: AnyKeys,
        data: AnyData,
        stride: int | None = None,
        *,
        offsets: Any = None,
        parent: AnyKey | None = None,
        timeout: float = PUT_TIMEOUT_S,
    ) -> PutResult:
        """Store blocks; when this returns, every stored block is readable by everyone.

        data: one buffer with block i at i * stride bytes (stride: block_bytes unless given), a
        list of n buffers of block_bytes each, or a Region with one byte offset per key.
        parent: key of the block before keys[0], when the chain does not start here.
        With durability="durable" it returns after their commit on the SSD; blocks that the SSD did
        not take are readable all the same and have reason NOT_DURABLE.
        A present key costs no copy. Another writer of the same key is waited for, `timeout`
        seconds at most. The first block without room ends the call: the rest would be unreachable.
        Raises BadArgument for wrong sizes, PoolClosed. Cost: one copy and a checksum per block.
        """
        return PutResult(self.put_codes(keys, data, stride, offsets, parent, timeout))

    def view(self, keys: AnyKeys) -> View:
        """The leading blocks that are present, in place: read-only memoryviews, pinned meanwhile.

        `with ns.view(keys) as blocks:` gives a list, shorter than keys where blocks are missing.
        The blocks stay pinned, all of them, until the with ends, or until the last numpy array
        (or slice, or other buffer) made from one of them is gone, if that is later. No copy.
        """
        return View(self, keys)

    def reserve(
        self, key: AnyKey, *, parent: AnyKey | None = None, timeout: float = PUT_TIMEOUT_S
    ) -> Slot:
        """A slot of the pool to be filled in place: a put without a copy.

        `with ns.reserve(key) as slot:` gives a Slot; write block_bytes into slot.buffer. Leaving
        the with commits, an exception aborts. slot.buffer is None when the key is present or
        there is no room (slot.status, slot.reason); nothing is to be done then.
        """
        code, reservation = self.reserve_slot(key, parent, timeout)
        return Slot(code, reservation)

    def layers(self, kv_layers: Sequence[Any], dims: str | None = None) -> _core.Layers:
        """Register an engine's paged KV tensors, to be given to save() and load() many times.

        kv_layers: one tensor per layer, or one (K, V) pair of tensors per layer, numpy or torch
        on the CPU, any strides. dims: the order of their dimensions, words of page, kv, token,
        head, element; by default that of the manifest's layout: "page kv token head element" for
        nhd, "page kv head token element" for hnd, "page token element" for mla; without kv for
        pairs; opaque: pages first. Raises BadArgument for shapes that are not the manifest's.
        """
        return plan_layers(self.manifest, kv_layers, dims)

    def save(
        self,
        kv_layers: Sequence[Any] | _core.Layers,
        block_table: Any,
        keys: AnyKeys,
        *,
        parent: AnyKey | None = None,
        timeout: float = PUT_TIMEOUT_S,
    ) -> PutResult:
        """Store blocks straight from an engine's pages: put, gathered on the way.

        block_table: page numbers in token order, (block_tokens / page_tokens) per key. Blocks
        have one canonical order of bytes, whatever the strides and page size (docs/formats.md).
        """
        layers = self._as_layers(kv_layers)
        return PutResult(self.save_codes(layers, block_table, keys, parent, timeout))

    def load(self, kv_layers: Sequence[Any] | _core.Layers, block_table: Any, keys: AnyKeys) -> int:
        """Deliver the leading blocks that are present into an engine's pages; returns how many.

        The pages of the others hold nothing of value afterwards.
        """
        return self.load_pages(self._as_layers(kv_layers), block_table, keys)

    async def aget_into(
        self, keys: AnyKeys, out: AnyData, stride: int | None = None, *, offsets: Any = None
    ) -> int:
        """get_into() on a thread of the pool's own: never blocks the event loop.

        A cancelled call still finishes in its thread: leave `out` alone until the pool is closed.
        """
        return await self.pool._in_thread(
            partial(self.get_into, keys, out, stride, offsets=offsets)
        )

    async def aput(
        self,
        keys: AnyKeys,
        data: AnyData,
        stride: int | None = None,
        *,
        offsets: Any = None,
        parent: AnyKey | None = None,
        timeout: float = PUT_TIMEOUT_S,
    ) -> PutResult:
        """put() on a thread of the pool's own: never blocks the event loop."""
        return await self.pool._in_thread(
            partial(self.put, keys, data, stride, offsets=offsets, parent=parent, timeout=timeout)
        )

    async def aload(
        self, kv_layers: Sequence[Any] | _core.Layers, block_table: Any, keys: AnyKeys
    ) -> int:
        """load() on a thread of the pool's own: never blocks the event loop."""
        return await self.pool._in_thread(partial(self.load, kv_layers, block_table, keys))

    async def asave(
        self,
        kv_layers: Sequence[Any] | _core.Layers,
        block_table: Any,
        keys: AnyKeys,
        *,
        parent: AnyKey | None = None,
        timeout: float = PUT_TIMEOUT_S,
    ) -> PutResult:
        """save() on a thread of the pool's own: never blocks the event loop."""
        return await self.pool._in_thread(
            partial(self.save, kv_layers, block_table, keys, parent=parent, timeout=timeout)
        )

    def _as_layers(self, kv_layers: Sequence[Any] | _core.Layers) -> _core.Layers:
        if not isinstance(kv_layers, _core.Layers):
            return self.layers(kv_layers)
        if kv_layers.layout != self.manifest.layout:
            raise BadArgument(
                f"these layers were registered as {kv_layers.layout}; this namespace has layout "
                f"{self.manifest.layout}"
            )
        return kv_layers


class View:
    """Context manager of Namespace.view(): pins at enter, releases at exit."""

    __slots__ = ("_entered", "_keys", "_space")

    def __init__(self, space: Namespace, keys: AnyKeys) -> None:
        """For Namespace.view()."""
        self._space = space
        self._keys = keys
        self._entered: list[list[memoryview]] = []  # a view may be entered again inside itself

    def __enter__(self) -> list[memoryview]:
        blocks: list[memoryview] = self._space.view_blocks(self._keys)
        self._entered.append(blocks)
        return list(blocks)

    def __exit__(self, *_: object) -> None:
        for block in self._entered.pop():
            try:
                block.release()
            except BufferError:  # an array was made from it: the pin ends with that array
                continue


class Slot:
    """Context manager of Namespace.reserve()."""

    __slots__ = ("_code", "_reservation", "buffer")

    def __init__(self, code: int, reservation: Any) -> None:
        """For Namespace.reserve()."""
        self._code = code
        self._reservation = reservation
        self.buffer = None if reservation is None else memoryview(reservation)

    @property
    def status(self) -> Put:
        """STORED while there is a slot to fill and when it was committed; NO_ROOM after abort()."""
        return Put(min(self._code, Put.NO_ROOM))

    @property
    def reason(self) -> Reason:
        """Why there is no slot; NONE if there is one, or if the key is present."""
        return Reason(self._code) if self._code > Put.PRESENT else Reason.NONE

    def commit(self) -> Put:
        """Make the block readable. Every array made from `buffer` must be gone by then."""
        if self._reservation is not None:
            self._release()
            self._code = self._reservation.commit()
            self._reservation = None
        return self.status

    def abort(self) -> None:
        """Give the slot back, once no array made from `buffer` is left; the key stays absent."""
        if self._reservation is not None:
            self._release()
            self._reservation = None  # it aborts itself when nothing holds its memory any more
            self._code = Reason.FAILED

    def _release(self) -> None:
        if self.buffer is not None:
            with contextlib.suppress(BufferError):  # something made from it: commit will refuse
                self.buffer.release()
                self.buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()  # nothing to do after a commit


def _size(name: str, value: str | int) -> int:
    return check_size(name, value, DRAM_BYTES_MIN, DRAM_BYTES_MAX)


def _dram_max(dram_bytes: int, value: str | int | None) -> int:
    most = min(4 * dram_bytes, DRAM_BYTES_MAX) if value is None else _size("dram_max", value)
    if most < dram_bytes:
        raise BadArgument(f"dram_max is {most} bytes, less than dram ({dram_bytes})")
    return most


def _check_kinds(policy: object, prefault: object, huge_pages: object, clock: object) -> None:
    check_choice("policy", policy, POLICIES)
    check_choice("prefault", prefault, PREFAULTS)
    check_type("huge_pages", huge_pages, bool)
    if clock is not None:
        check_type("clock", clock, _core.ManualClock)


def _warn_if_buffered(pool: Pool, tier: dict[str, Any]) -> Pool:
    stats = pool.stats()
    if not tier["ssd"] or not tier["ssd_direct"] or stats["ssd_direct"]:
        return pool
    why = stats["ssd_buffered_reason"]
    text = f"SSD tier in {tier['ssd']}: goes through the page cache: {why}"
    try:
        warnings.warn(text, TierBuffered, stacklevel=3)
    except TierBuffered:  # a filter makes it an error, and nobody gets the pool
        pool.close(flush_timeout=0)
        raise
    return pool


def _max_blocks(value: int | None) -> int:
    if value is None:
        return 0
    try:
        return check_count("max_blocks", value, 0, BLOCKS_MAX)
    except BadArgument as error:
        raise type(error)(f"{error} (0: no limit)") from None


def _one_key(name: str, key: Any) -> bytes:
    try:
        packed = memoryview(key).tobytes()
    except (TypeError, ValueError, BufferError):
        raise BadType(f"{name} is {type(key).__name__}; it must be a key of 16 bytes") from None
    if len(packed) != 16:
        raise BadArgument(f"{name} is a key of 16 bytes, not {len(packed)}")
    return packed


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
    _core.end_gil_sections()  # daemon threads must be out of the core before the interpreter ends
