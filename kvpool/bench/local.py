"""The embedded pool beside memcpy: put, get_into, view, save and load, one block or sixteen.

Floor `memcpy`: one memmove of as many bytes between two numpy buffers, each as large as the pool's
working set, so that both sides are as cold as the pool's. `memcpy_same_pages` is the same out of
the pool's own pages: what is left between it and get_into is index, checks and Python.
Works and floors run in turn; every step takes other blocks, in a random order.

A put here is one into a full pool: it evicts. Every kind of work has its bytes compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.buffers import (
    HEAD_DIM,
    HEADS,
    LAYER_BYTES,
    TOKENS,
    Buffers,
    Layer,
    Memory,
    groups,
)
from kvpool.bench.rows import Row, Value, at_least, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import Timing, Work, interleaved
from kvpool.replay.payload import Keys, Words, keys_of

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
QUICK_BLOCK_BYTES = (64 << 10, 1 << 20)
BATCHES = (1, 16)
WORKING_SET_BYTES = 512 << 20
STEP_BYTES = 512 << 20  # per work and row, as far as the bounds on rounds allow
ROUNDS_MIN, ROUNDS_MAX = 100, 2000
RATIO_MIN = {("get_into", 64 << 10, 16): 0.85, ("get_into", 1 << 20, 16): 0.95}
_FRESH_STEPS = 3 * ROUNDS_MAX  # of two works, with their warm-up
_FRESH_ID = 1 << 32  # times batch: ids that nothing else here uses
_SLACK_BYTES = 64 << 20  # slabs of other sizes than the working set's last one


def local(scale: Scale) -> Iterator[Row]:
    """Rows for every work, block size and batch, with the floor of the same run in each."""
    memory = Memory(scale.of(WORKING_SET_BYTES, quick=64 << 20))
    for block_bytes in QUICK_BLOCK_BYTES if scale.is_quick else BLOCK_BYTES:
        buffers = Buffers(memory, block_bytes)
        with _open(buffers, _SLACK_BYTES) as pool:
            space = _filled(pool, buffers)
            for batch in BATCHES:
                rounds = _rounds(block_bytes * batch, scale)
                timings = interleaved(_reads(space, buffers, batch, scale.seed), rounds)
                _check_reads(space, buffers, batch)
                yield from _rows(buffers, batch, timings)
        with _open(buffers, 0) as pool:
            space = _filled(pool, buffers)
            for batch in BATCHES:
                rounds = _rounds(block_bytes * batch, scale)
                writes = _Writes(space, buffers, batch, scale.seed)
                timings = interleaved(writes.works(), rounds)
                writes.check()
                yield from _rows(buffers, batch, timings)


def _open(buffers: Buffers, slack_bytes: int) -> kvpool.Pool:
    return kvpool.open(dram=buffers.source.nbytes + slack_bytes, prefault="off")


def _filled(pool: kvpool.Pool, buffers: Buffers) -> kvpool.Namespace:
    """A namespace with all of the source in it, but for what a full pool keeps free."""
    space = pool.namespace(
        kvpool.Manifest(
            model="bench",
            dtype="bfloat16",
            layers=buffers.block_bytes // LAYER_BYTES,
            kv_heads=HEADS,
            head_dim=HEAD_DIM,
            block_tokens=TOKENS,
        )
    )
    for start in range(0, buffers.count, 16):
        rows = slice(start, start + 16)
        result = space.put(buffers.keys[rows], buffers.source[rows])
        expect(result.stored == len(result), f"a put into a pool with room: {result}")
    return space


def _rounds(step_bytes: int, scale: Scale) -> int:
    return scale.of(min(max(STEP_BYTES // step_bytes, ROUNDS_MIN), ROUNDS_MAX), quick=4)


# --- reading -------------------------------------------------------------------------------------


def _reads(space: kvpool.Namespace, buffers: Buffers, batch: int, seed: int) -> dict[str, Work]:
    """Works that take blocks out of a pool that holds all of them."""
    of_group = [buffers.keys[at : at + batch] for at in range(0, buffers.count, batch)]
    places = [buffers.target[at : at + batch] for at in range(0, buffers.count, batch)]
    pages = [np.arange(at, at + batch) for at in range(0, buffers.count, batch)]
    layers = space.layers(buffers.target_layers)
    got, to = groups(buffers.count, batch, seed + 2), groups(buffers.count, batch, seed + 3)
    seen = groups(buffers.count, batch, seed + 4)
    loaded, into = groups(buffers.count, batch, seed + 5), groups(buffers.count, batch, seed + 6)

    def get_into() -> None:
        expect(space.get_into(of_group[next(got)], places[next(to)]) == batch, "a block is gone")

    def view() -> None:
        with space.view(of_group[next(seen)]) as blocks:
            expect(len(blocks) == batch, "a block is gone")

    def load() -> None:
        count = space.load(layers, pages[next(into)], of_group[next(loaded)])
        expect(count == batch, "a block is gone")

    return {
        "memcpy": buffers.memcpy(batch, seed),
        "memcpy_same_pages": buffers.memcpy_from(_addresses(space, buffers), batch, seed + 7),
        "get_into": get_into,
        "view": view,
        "load": load,
    }


def _addresses(space: kvpool.Namespace, buffers: Buffers) -> list[int]:
    """Where the pool holds each block. Nothing moves or leaves while this bench reads."""
    with space.view(buffers.keys) as blocks:
        expect(len(blocks) == buffers.count, "a block is gone")
        return [np.frombuffer(block, dtype=np.uint8).ctypes.data for block in blocks]


def _check_reads(space: kvpool.Namespace, buffers: Buffers, batch: int) -> None:
    """Every block of the working set once more, by each work, compared with what was put."""
    layers = space.layers(buffers.target_layers)
    for start in range(0, buffers.count, batch):
        rows = slice(start, start + batch)
        keys, out = buffers.keys[rows], buffers.target[rows]
        out.fill(0)
        expect(space.get_into(keys, out) == batch, "a block is gone")
        expect(not buffers.wrong(keys, out), "get_into gave wrong bytes")
        with space.view(keys) as blocks:
            seen = np.stack([np.frombuffer(block, dtype=np.uint64) for block in blocks])
        expect(not buffers.wrong(keys, seen), "view showed wrong bytes")
        for layer in buffers.target_layers:
            layer[rows].fill(0)
        pages = np.arange(rows.start, rows.stop)
        expect(space.load(layers, pages, keys) == batch, "a block is gone")
        loaded = _blocks_of(buffers.target_layers, rows)
        expect(not buffers.wrong(keys, loaded), "load gave wrong bytes")


# --- writing -------------------------------------------------------------------------------------


class _Writes:
    """Works that put blocks which are not there into a pool that is full."""

    def __init__(self, space: kvpool.Namespace, buffers: Buffers, batch: int, seed: int) -> None:
        self._space, self._buffers, self._batch, self._seed = space, buffers, batch, seed
        self._fresh = keys_of(range(_FRESH_ID * batch, _FRESH_ID * batch + _FRESH_STEPS * batch))
        self._next_key = 0
        self._layers = space.layers(buffers.source_layers)
        self._last: dict[str, tuple[Keys, int]] = {}  # work -> keys and group of its last step

    def works(self) -> dict[str, Work]:
        buffers, batch, seed = self._buffers, self._batch, self._seed
        put_from = groups(buffers.count, batch, seed + 2)
        saved_from = groups(buffers.count, batch, seed + 3)
        return {
            "memcpy": buffers.memcpy(batch, seed),
            "put": lambda: self._put(next(put_from)),
            "save": lambda: self._save(next(saved_from)),
        }

    def _put(self, group: int) -> None:
        keys = self._fresh_keys()
        rows = slice(group * self._batch, (group + 1) * self._batch)
        self._note("put", keys, group, self._space.put(keys, self._buffers.source[rows]))

    def _save(self, group: int) -> None:
        keys = self._fresh_keys()
        pages = np.arange(group * self._batch, (group + 1) * self._batch)
        self._note("save", keys, group, self._space.save(self._layers, pages, keys))

    def _fresh_keys(self) -> Keys:
        self._next_key += self._batch
        return self._fresh[self._next_key - self._batch : self._next_key]

    def _note(self, work: str, keys: Keys, group: int, result: kvpool.PutResult) -> None:
        expect(result.stored == self._batch, f"{work} into a full pool: {result}")
        self._last[work] = (keys, group)

    def check(self) -> None:
        """One more step of each work, and what it wrote is what the pool gives back.

        A full pool goes on evicting in the background, and of blocks put in one moment the deepest
        go first: the leading ones that are still there are compared, and the first one must be.
        """
        steps = self.works()
        for work in ("put", "save"):
            steps[work]()
            keys, group = self._last[work]
            rows = slice(group * self._batch, (group + 1) * self._batch)
            out = np.zeros_like(self._buffers.source[rows])
            got = self._space.get_into(keys, out)
            expect(got > 0, f"what {work} wrote is gone")
            if work == "put":
                wanted = self._buffers.source[rows]
            else:
                wanted = _blocks_of(self._buffers.source_layers, rows)
            expect(np.array_equal(out[:got], wanted[:got]), f"{work} stored wrong bytes")


def _blocks_of(layers: list[Layer], rows: slice) -> Words:
    """The blocks that these pages make, layer by layer, computed apart from the pool."""
    pages = [layer[rows].reshape(rows.stop - rows.start, -1) for layer in layers]
    return np.concatenate(pages, axis=1).view(np.uint64)


def _rows(buffers: Buffers, batch: int, timings: dict[str, Timing]) -> Iterator[Row]:
    floor = timings.pop("memcpy")
    step_bytes = batch * buffers.block_bytes
    for work, timing in timings.items():
        fields: dict[str, Value] = {
            "work": work,
            "block_bytes": buffers.block_bytes,
            "batch": batch,
            "GBps": timing.gb_per_s(step_bytes),
            "p50_us": timing.p50_us,
            "p99_us": timing.p99_us,
            "memcpy_GBps": floor.gb_per_s(step_bytes),
            "ratio": floor.p50_us / timing.p50_us,
        }
        bar = RATIO_MIN.get((work, buffers.block_bytes, batch))
        yield Row(fields) if bar is None else at_least("ratio", bar, fields)
