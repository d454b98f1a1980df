"""The embedded pool: tiers, index and policy in this process."""

from __future__ import annotations

import os
import secrets
import warnings
from typing import TYPE_CHECKING, Any

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
from kvpool.errors import BadArgument, TierBuffered
from kvpool.pool import Pool

if TYPE_CHECKING:
    from kvpool.manifest import Manifest
    from kvpool.namespace import Namespace

PREFAULTS = ("off", "ahead", "all")
POLICIES = ("temperature", "lru", "lfu", "fifo", "s3fifo")
ARENAS = ("elastic", "sealed")
DRAM_BYTES_MIN = 2 << 20
DRAM_BYTES_MAX = 1 << 44
BLOCKS_MAX = 1 << 30


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
    arena: str = "elastic",
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
    arena: `elastic` gives memory back when it shrinks; `sealed` has one size (dram_max = dram) that
    no other process can map for writing, not even one of the same user.
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
    memory = memory_options(
        dram,
        dram_max=dram_max,
        policy=policy,
        tau_s=tau_s,
        max_blocks=max_blocks,
        prefault=prefault,
        evict_ahead=evict_ahead,
        huge_pages=huge_pages,
        arena=arena,
    )
    _check_clock(clock)
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
    node = _core.Node.open(salt=secrets.randbits(64), clock=clock, **memory, **tier)
    return _warn_if_buffered(Pool(LocalBackend(node)), tier)


def memory_options(
    dram: Any,
    *,
    dram_max: Any = None,
    policy: Any = "temperature",
    tau_s: Any = None,
    max_blocks: Any = None,
    prefault: Any = "ahead",
    evict_ahead: Any = 1 / 128,
    huge_pages: Any = True,
    arena: Any = "elastic",
) -> dict[str, Any]:
    """The options of DRAM and policy as the core takes them, from those of open().

    Raises BadArgument, BadType.
    """
    dram_bytes = _size("dram", dram)
    check_choice("policy", policy, POLICIES)
    check_choice("prefault", prefault, PREFAULTS)
    check_choice("arena", arena, ARENAS)
    check_type("huge_pages", huge_pages, bool)
    is_sealed = arena == "sealed"
    return {
        "dram": dram_bytes,
        "dram_max": _dram_max(dram_bytes, dram_max, is_sealed),
        "max_blocks": _max_blocks(max_blocks),
        "policy": policy,
        "tau_s": 0.0 if tau_s is None else check_number("tau_s", tau_s, 0.001, 1e9),
        "prefault": prefault,
        "evict_ahead": check_number("evict_ahead", evict_ahead, 0, 0.5),
        "huge_pages": huge_pages,
        "sealed": is_sealed,
    }


class LocalBackend:
    """What a Pool asks of a node in this process."""

    def __init__(self, node: _core.Node) -> None:
        """Owns the node."""
        self.node = node

    def open_space(self, manifest: Manifest) -> _core.OpenedSpace:
        """The namespace of that id, made at its first use."""
        assert manifest.block_bytes is not None  # computed by the manifest
        return self.node.open_space(manifest.namespace_id, manifest.block_bytes)

    def drop(self, space: Namespace) -> int:
        """See Namespace.drop()."""
        return self.node.drop(space.number)

    def temperature(self, space: Namespace, key: Any) -> float | None:
        """See Namespace.temperature()."""
        return self.node.temperature(space.number, key)

    def wait(self, space: Namespace, keys: Any, timeout_s: float) -> int:
        """See Namespace.wait()."""
        return space.wait_present(keys, timeout_s)

    def resize(
        self,
        dram: str | int | None,
        max_blocks: int | None,
        ssd_capacity: str | int | None,
        timeout: float,
    ) -> int:
        """See Pool.resize()."""
        dram_bytes = None if dram is None else _size("dram", dram)
        blocks = None if max_blocks is None else _max_blocks(max_blocks)
        if ssd_capacity is not None:  # first: it can be refused, and then nothing has changed
            self.node.resize_ssd(check_ssd_capacity(ssd_capacity), timeout)
        return self.node.resize(dram_bytes, blocks, timeout)

    def flush(self, timeout: float) -> bool:
        """See Pool.flush()."""
        return self.node.flush(timeout)

    def trim(self) -> None:
        """See Pool.trim()."""
        self.node.trim()

    def stats(self) -> dict[str, Any]:
        """See Pool.stats()."""
        return self.node.stats()

    def check(self) -> None:
        """See Pool.check()."""
        self.node.check()

    def close(self, flush_timeout_s: float) -> None:
        """See Pool.close()."""
        self.node.close(flush_timeout_s)

    def require_usable(self) -> None:
        """Raise PoolClosed or ForkedProcess where no call can be made."""
        self.node.require_usable()

    @property
    def is_closed(self) -> bool:
        """After close()."""
        return self.node.is_closed

    @property
    def is_forked(self) -> bool:
        """In a forked child of the process that opened it."""
        return self.node.is_forked

    @property
    def shares_memory(self) -> bool:
        """The arena is this process's own."""
        return True


def _check_clock(clock: object) -> None:
    if clock is not None:
        check_type("clock", clock, _core.ManualClock)


def _size(name: str, value: str | int) -> int:
    return check_size(name, value, DRAM_BYTES_MIN, DRAM_BYTES_MAX)


def _dram_max(dram_bytes: int, value: str | int | None, is_sealed: bool) -> int:
    factor = 1 if is_sealed else 4
    most = min(factor * dram_bytes, DRAM_BYTES_MAX) if value is None else _size("dram_max", value)
    if is_sealed and most != dram_bytes:
        raise BadArgument(
            f"dram_max is {most} bytes, but a sealed arena has one size, {dram_bytes}"
        )
    if most < dram_bytes:
        raise BadArgument(f"dram_max is {most} bytes, less than dram ({dram_bytes})")
    return most


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
