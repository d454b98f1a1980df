"""The directory: what it costs to find a long prefix that other nodes have, and to tell a new
member of all that is here.

`lookup`: of a prefix that one node put, by a client of another, by one round to all owners of its
keys. A chain is asked for again only after what was answered is forgotten; `remembered` is the time
of a second question at once.
`published`: a node full of blocks is met by a second, empty one, which then keeps half of the
directory: from when it is ready until all is told. bytes_per_key is the memory of both shards.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvpool.bench.fill import BLOCK_BYTES, filled, small_blocks_bytes
from kvpool.bench.rows import Row, Value, expect
from kvpool.bench.scale import Scale
from kvpool.bench.served import MEMORY_LEFT_BYTES, memory_available_bytes
from kvpool.bench.ssd import namespace
from kvpool.bench.timing import percentile
from kvpool.lab.child import until
from kvpool.lab.cluster import Lab
from kvpool.lab.node import Node
from kvpool.observe.cluster import Directory
from kvpool.replay.payload import keys_of

PREFIX_BLOCKS = 4096
CHAINS = 12
ROUNDS = 60
KEYS = 1_000_000
KEYS_MIN = 10_000
_FORGOTTEN_S = 2.5  # a node remembers for 2 s who has a block
_OWN_SHARE_MIN = 0.45  # of the directory, that each of two members keeps at least
_LATE_S = 600.0


def dram_bytes(scale: Scale) -> int:
    """Of each node that is asked for long prefixes."""
    return small_blocks_bytes(PREFIX_BLOCKS * scale.of(CHAINS, quick=1))


def lookups(scale: Scale, lab: Lab) -> Iterator[Row]:
    """One row."""
    chains = scale.of(CHAINS, quick=1)
    keys = keys_of(range(PREFIX_BLOCKS * chains))
    first_us: list[float] = []
    again_us: list[float] = []
    with lab.nodes[0].connect() as here, lab.nodes[1].connect() as there:
        filled(here, PREFIX_BLOCKS * chains)
        space = namespace(there, BLOCK_BYTES)
        until(lambda: space.lookup(keys).blocks == len(keys), "all are known", _LATE_S)
        pause_s = _FORGOTTEN_S / chains
        time.sleep(_FORGOTTEN_S)
        for turn in range(scale.of(ROUNDS, quick=2)):
            at = turn % chains * PREFIX_BLOCKS
            prefix = keys[at : at + PREFIX_BLOCKS]
            for times in (first_us, again_us):
                started = time.perf_counter_ns()
                found = space.lookup(prefix).blocks
                times.append((time.perf_counter_ns() - started) / 1e3)
                expect(found == PREFIX_BLOCKS, f"{found} blocks of a prefix were found")
            time.sleep(pause_s)
    fields: dict[str, Value] = {
        "work": "lookup",
        "blocks": PREFIX_BLOCKS,
        "nodes": len(lab.nodes),
        "p50_us": percentile(first_us, 0.5),
        "p99_us": percentile(first_us, 0.99),
        "remembered_p50_us": percentile(again_us, 0.5),
    }
    yield Row(fields)


def published(scale: Scale) -> Iterator[Row]:
    """One row; none where there is no etcd, by which a node joins."""
    if shutil.which("etcd") is None:
        scale.say("published: left out, as there is no etcd")
        return
    keys = _that_fit(scale, scale.of(KEYS, quick=20_000))
    options: dict[str, Any] = {
        "dram": small_blocks_bytes(keys),
        "max_blocks": keys,
        "evict_ahead": 0,
    }
    with Lab(1, **options) as lab:
        lab.start()
        with lab.nodes[0].connect() as pool:
            filled(pool, keys)
            until(lambda: _directory(lab.nodes[0]).keys == keys, "all is told", _LATE_S)
            lab.add(dram="64MiB", max_blocks=0).start()
            started = time.perf_counter()
            until(lambda: _has_its_share(lab, keys), "the new one is told", _LATE_S)
            seconds = time.perf_counter() - started
        yield _published_row(keys, seconds, [_directory(each) for each in lab.nodes])


def _published_row(keys: int, seconds: float, shards: Sequence[Directory]) -> Row:
    fields: dict[str, Value] = {
        "work": "published",
        "keys": keys,
        "told": shards[1].keys,
        "seconds": seconds,
        "bytes_per_key": sum(each.bytes for each in shards) / sum(each.keys for each in shards),
    }
    return Row(fields)


def _that_fit(scale: Scale, wanted: int) -> int:
    """Fewer where memory is short, which is said then."""
    keys = wanted
    while keys > KEYS_MIN and memory_available_bytes() < (
        small_blocks_bytes(keys) + MEMORY_LEFT_BYTES
    ):
        keys //= 2
    if keys < wanted:
        scale.say(f"published: too little memory for {wanted:,} blocks: {keys:,}")
    return keys


def _has_its_share(lab: Lab, keys: int) -> bool:
    full, empty = (_directory(each) for each in lab.nodes)
    return full.is_told and full.keys + empty.keys >= keys and empty.keys > _OWN_SHARE_MIN * keys


def _directory(node: Node) -> Directory:
    (found,) = node.told().directories
    return found
