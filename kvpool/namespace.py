"""What an engine does with the blocks of one namespace. The same whatever the pool is: embedded, on
this host, or elsewhere.

All methods are thread-safe and release the GIL while they copy or wait; none can be used after
fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from kvpool import _core
from kvpool.config import check_count, check_number, check_type
from kvpool.errors import BadArgument, BadType, NoResource
from kvpool.keys import fold_keys, prefix_keys
from kvpool.layers import plan_layers
from kvpool.manifest import Manifest
from kvpool.types import Hit, Keys, Miss, Put, PutResult, Reason

if TYPE_CHECKING:
    from kvpool.pool import Pool

AnyKey = Any  # 16 bytes: bytes, an element or a slice of keys()
AnyKeys = Any  # packed keys (a buffer of n * 16 bytes) or a sequence of 16-byte keys
AnyData = Any  # a buffer, a list of buffers, a torch CPU tensor, or a Region

PUT_TIMEOUT_S = 5.0
WAIT_TIMEOUT_S = 30.0
STAGING_MAX = 1024  # blocks at once
TIMEOUT_S_MAX = 86_400.0


class Namespace(_core.Space):
    """One kind of KV in a pool. `keys` arguments are in chain order: each block after its parent.

    Keys are what keys() gives (packed, dtype V16), any buffer of n * 16 bytes, or a list of n
    16-byte keys. Every block has manifest.block_bytes bytes.
    """

    def __init__(self, pool: Pool, manifest: Manifest) -> None:
        """For Pool.namespace()."""
        super().__init__(pool._backend.open_space(manifest))
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
        """How many leading blocks are present, the tier of each, and why the next one is missing.

        No side effect: pins nothing, heats nothing and reads no disk. A block may be evicted before
        a get, which then reports a miss. Embedded and on this host it takes no lock and no request:
        256 keys among a million take some 10 us. Elsewhere it is one round trip. In a cluster, what
        is not on this node is asked for among the members, and has Tier.REMOTE where one says that
        it has it.
        """
        blocks, tiers, miss = self.count_present(keys)
        return Hit(blocks, tiers, Miss(miss))

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

    def staging(self, count: int) -> Staging:
        """Memory for `count` blocks in which a producer writes their payload, to be put as it is.

        `with ns.staging(n) as staged:` gives a Staging: n writable memoryviews of block_bytes each;
        fill them, then put_staged(keys, staged), as often as wanted. Connected on the same host the
        node takes the blocks from there, so that the caller's copy is saved; elsewhere it is
        ordinary memory. count: 1 to 1024. Raises NoResource where the client's staging memory has
        no room for them (`staging` of kvpool serve), BadArgument.
        """
        status, memory = _core.stage(self, check_count("count", count, 1, STAGING_MAX))
        if memory is None:
            raise NoResource(
                f"no staging memory for {count} blocks of {self.block_bytes} bytes"
                f" ({Reason(status).name}): release some, stage fewer, or give `kvpool serve` more"
            )
        return Staging(memory, self.block_bytes)

    def put_staged(
        self,
        keys: AnyKeys,
        staged: Staging,
        *,
        parent: AnyKey | None = None,
        timeout: float = PUT_TIMEOUT_S,
    ) -> PutResult:
        """put() of the first blocks of a Staging, one per key, from where they are.

        The memory may be filled again afterwards, whatever the result; leave it alone meanwhile.
        After TIMED_OUT the node may not be done with it: until it is, puts from it are TIMED_OUT.
        """
        check_type("staged", staged, Staging)
        return PutResult(_core.put_staged(self, keys, staged.memory, parent, timeout))

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

    def load(
        self,
        kv_layers: Sequence[Any] | _core.Layers,
        block_table: Any,
        keys: AnyKeys,
        *,
        misses: Any = None,
    ) -> int:
        """Deliver the leading blocks that are present into an engine's pages; returns how many.

        The pages of the others hold nothing of value afterwards. misses: as for get_into().
        """
        return self.load_pages(self._as_layers(kv_layers), block_table, keys, misses)

    def wait(self, keys: AnyKeys, timeout: float = WAIT_TIMEOUT_S) -> int:
        """Sleep until all these blocks are present; returns how many leading ones are.

        For who takes over a prefix that another engine computes. Woken by the commit that completes
        it; ends early, with fewer, at the timeout (seconds, 0 = just look), when the pool closes or
        its node goes away, or where too many wait already. A node that does not answer at all can
        take half a second more. Pins nothing: get or view them then.
        """
        timeout_s = check_number("timeout", timeout, 0, TIMEOUT_S_MAX)
        return self.pool._backend.wait(self, keys, timeout_s)

    def drop(self) -> int:
        """Make every block of this namespace a miss, at once; returns how many there were.

        For everybody who uses it. Their memory comes back in the background. The namespace stays
        usable, empty. With an SSD, returns once its index has been told (about a millisecond), so
        that a restart brings nothing back; raises NoResource where that fails. O(1).
        """
        return self.pool._backend.drop(self)

    def temperature(self, key: AnyKey) -> float | None:
        """How warm one block is, on the scale by which blocks are evicted; None if absent.

        For inspection: only comparisons within one pool mean anything. Takes the node's lock.
        """
        return self.pool._backend.temperature(self, key)

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
        return blocks.copy()

    def __exit__(self, *_: object) -> None:
        # One that an array was made from stays: the pins end with that array.
        _core.release_blocks(self._entered.pop())


class Staging(Sequence[memoryview]):
    """What Namespace.staging() gives: the memory of n blocks. A context manager."""

    def __init__(self, memory: _core.Staged, block_bytes: int) -> None:
        """For Namespace.staging()."""
        self.memory = memory
        whole = memoryview(memory)  # type: ignore[arg-type]  # it has the buffer protocol
        starts = range(0, memory.count * memory.stride, memory.stride)
        self._blocks = [whole[start : start + block_bytes] for start in starts]

    def __len__(self) -> int:
        return self.memory.count

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        return self._blocks[index]

    def release(self) -> None:
        """Give the memory back, once no array made from it is left."""
        _core.release_blocks(self._blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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


def _one_key(name: str, key: Any) -> bytes:
    try:
        packed = memoryview(key).tobytes()
    except (TypeError, ValueError, BufferError):
        raise BadType(f"{name} is {type(key).__name__}; it must be a key of 16 bytes") from None
    if len(packed) != 16:
        raise BadArgument(f"{name} is a key of 16 bytes, not {len(packed)}")
    return packed
