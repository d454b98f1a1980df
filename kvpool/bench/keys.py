"""How long it takes to name the blocks of a long prompt: 131,072 tokens in blocks of 16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import kvpool
from kvpool.bench.rows import Row, at_most, expect
from kvpool.bench.scale import Scale
from kvpool.bench.timing import Timing, interleaved

TOKENS = 131_072
BLOCK_TOKENS = 16
P50_US_MAX = {"sha256": 10_000.0, "xxh3": 1_000.0}


def keys(scale: Scale) -> Iterator[Row]:
    """A row per hash algorithm: tokens in, packed keys out."""
    tokens = np.random.default_rng(scale.seed).integers(0, 128_000, TOKENS, dtype=np.uint32)
    with kvpool.open(dram="64MiB", prefault="off") as pool:
        spaces = {name: pool.namespace(_manifest(name)) for name in P50_US_MAX}
        works = {name: lambda space=space: space.keys(tokens) for name, space in spaces.items()}
        timings = interleaved(works, scale.of(200, quick=3))
        for name, space in spaces.items():
            _check(space, tokens)
            yield at_most("p50_us", P50_US_MAX[name], _fields(name, timings[name]))


def _manifest(algorithm: str) -> kvpool.Manifest:
    return kvpool.Manifest(
        model="bench",
        dtype="bfloat16",
        layers=1,
        kv_heads=8,
        head_dim=128,
        block_tokens=BLOCK_TOKENS,
        hash=algorithm,
    )


def _fields(algorithm: str, timing: Timing) -> dict[str, str | int | float]:
    return {
        "work": "keys",
        "hash": algorithm,
        "tokens": TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "p50_us": timing.p50_us,
        "p99_us": timing.p99_us,
    }


def _check(space: kvpool.Namespace, tokens: np.ndarray) -> None:
    """A key names its whole prefix: no later token changes it, every earlier one does."""
    whole = np.asarray(space.keys(tokens))
    expect(len(np.unique(whole)) == TOKENS // BLOCK_TOKENS, "keys repeat or are missing")
    half = np.asarray(space.keys(tokens[: TOKENS // 2]))
    expect(np.array_equal(half, whole[: len(half)]), "later tokens changed earlier keys")
    other = tokens.copy()
    other[0] += 1
    changed = np.asarray(space.keys(other))
    expect(not (changed == whole).any(), "the first token did not change every key")
