"""Works on a daemon's blocks that the benches of both channels time, and what they cost each side.

Every step takes other blocks, in a random order, and checks how many it got; the bytes of every
kind of work are compared apart from what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import kvpool
from kvpool.bench.buffers import Buffers, groups
from kvpool.bench.rows import Value, expect
from kvpool.bench.served import Served
from kvpool.bench.timing import Timing, Work
from kvpool.replay.payload import Keys, Words, keys_of

_FRESH_ID = 1 << 40  # ids from here on are of blocks that were never put before
_FRESH_CHUNK = 1 << 16  # keys made at a time: making them is not what is timed
_GIB = 1 << 30


def fill(space: kvpool.Namespace, buffers: Buffers) -> None:
    """Puts all of the source, and gets it once: each side has touched every page then."""
    for start in range(0, buffers.count, 16):
        rows = slice(start, start + 16)
        result = space.put(buffers.keys[rows], buffers.source[rows])
        expect(result.stored == len(result), f"a put into a pool with room: {result}")
    check_reads(space, buffers)


def check_reads(space: kvpool.Namespace, buffers: Buffers) -> None:
    """Compares every block of the working set, by get_into and by view."""
    for start in range(0, buffers.count, 16):
        rows = slice(start, start + 16)
        keys, out = buffers.keys[rows], buffers.target[rows]
        out.fill(0)
        expect(space.get_into(keys, out) == len(keys), "a block is gone")
        expect(not buffers.wrong(keys, out), "get_into gave wrong bytes")
        with space.view(keys) as blocks:
            expect(len(blocks) == len(keys), "a block is gone")
            seen = np.stack([np.frombuffer(block, dtype=np.uint64) for block in blocks])
        expect(not buffers.wrong(keys, seen), "view showed wrong bytes")


def reads(space: kvpool.Namespace, buffers: Buffers, batch: int, seed: int) -> dict[str, Work]:
    """get_into and view of blocks that are all there."""
    of_group = [buffers.keys[at : at + batch] for at in range(0, buffers.count, batch)]
    places = [buffers.target[at : at + batch] for at in range(0, buffers.count, batch)]
    got, to = groups(buffers.count, batch, seed + 2), groups(buffers.count, batch, seed + 3)
    seen = groups(buffers.count, batch, seed + 4)

    def get_into() -> None:
        expect(space.get_into(of_group[next(got)], places[next(to)]) == batch, "a block is gone")

    def view() -> None:
        with space.view(of_group[next(seen)]) as blocks:
            expect(len(blocks) == batch, "a block is gone")

    return {"get_into": get_into, "view": view}


class Puts:
    """Puts of fresh blocks into one namespace, out of the source of `buffers`."""

    def __init__(self, space: kvpool.Namespace, buffers: Buffers) -> None:
        self._space, self._buffers = space, buffers
        self._next_id = _FRESH_ID
        self._fresh = keys_of([])

    def make_full(self, pool: kvpool.Pool) -> None:
        """Puts until the pool evicts, so that every later put takes the place of a cold block."""
        while not pool.stats()["evictions"]:
            for _ in range(64):
                self._put(16, 0)

    def cold(self, batch: int, seed: int) -> Work:
        """Out of another place each time."""
        of = groups(self._buffers.count, batch, seed + 5)
        return lambda: self._put(batch, next(of))

    def hot(self) -> Work:
        """One block whose bytes the caller has in its cache."""
        return lambda: self._put(1, 0)

    def staged(self, staged: kvpool.Staging) -> Work:
        """Blocks that lie in staging memory, where their producer wrote them."""
        for number, block in enumerate(staged):
            block[:] = self._buffers.source[number].view(np.uint8).data
        return lambda: self._put_staged(staged)

    def check(self, batch: int) -> None:
        """One more put, and what it wrote is what the pool gives back.

        Of blocks put in one moment a full pool evicts the deepest first: those still there are
        compared, and the first one must be.
        """
        self._compare(self._put(batch, 0), self._buffers.source[:batch], "put")

    def check_staged(self, staged: kvpool.Staging) -> None:
        """The same of a staged put, of other bytes than those that were timed."""
        wanted = self._buffers.source[-len(staged) :]
        for block, row in zip(staged, wanted, strict=True):
            block[:] = row.view(np.uint8).data
        self._compare(self._put_staged(staged), wanted, "put_staged")

    def _put(self, batch: int, group: int) -> Keys:
        keys = self._fresh_keys(batch)
        rows = slice(group * batch, (group + 1) * batch)
        result = self._space.put(keys, self._buffers.source[rows])
        expect(result.stored == batch, f"a put into a full pool: {result}")
        return keys

    def _put_staged(self, staged: kvpool.Staging) -> Keys:
        keys = self._fresh_keys(len(staged))
        result = self._space.put_staged(keys, staged)
        expect(result.stored == len(staged), f"a staged put: {result}")
        return keys

    def _compare(self, keys: Keys, wanted: Words, work: str) -> None:
        out = np.zeros_like(wanted)
        got = self._space.get_into(keys, out)
        expect(got > 0, f"what {work} wrote is gone")
        expect(np.array_equal(out[:got], wanted[:got]), f"{work} stored wrong bytes")

    def _fresh_keys(self, count: int) -> Keys:
        if len(self._fresh) < count:
            self._fresh = keys_of(range(self._next_id, self._next_id + _FRESH_CHUNK))
            self._next_id += _FRESH_CHUNK
        taken, self._fresh = self._fresh[:count], self._fresh[count:]
        return taken


# --- what it costs -------------------------------------------------------------------------------


def cpu_of_both_sides(
    step: Work, step_bytes: int, daemon: Served, seconds: float
) -> dict[str, Value]:
    """CPU seconds per GiB of this process and of the daemon, of one work back to back."""
    own_started, node_started = time.process_time(), daemon.cpu_s()
    steps, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()
        steps += 1
    moved_gib = steps * step_bytes / _GIB
    return {
        "cpu_s_per_GiB": (time.process_time() - own_started) / moved_gib,
        "node_cpu_s_per_GiB": (daemon.cpu_s() - node_started) / moved_gib,
    }


def paced(steps: dict[str, Callable[[], object]], rounds: int, pause_s: float) -> dict[str, Timing]:
    """Every work once per round, `pause_s` of sleep before each: both sides sleep when it begins.

    pause_s = 0: each work back to back, one after the other, both sides awake.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name in [*steps] * rounds if pause_s else [n for n in steps for _ in range(rounds)]:
        if pause_s:
            time.sleep(pause_s)
        started = time.perf_counter_ns()
        steps[name]()
        found[name].append((time.perf_counter_ns() - started) / 1e3)
    return {name: Timing(samples) for name, samples in found.items()}


def idle_share(daemon: Served, seconds: float) -> float:
    """Share of a core that the daemon takes while nobody asks for anything."""
    started, spent = time.perf_counter(), daemon.cpu_s()
    time.sleep(seconds)
    return (daemon.cpu_s() - spent) / (time.perf_counter() - started)
