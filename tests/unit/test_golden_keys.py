"""Keys and checksums are those that anybody gets from hashlib and xxhash, now and forever."""

from __future__ import annotations

import array
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvpool.errors import BadArgument, BadType

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "golden_keys.json").read_text(encoding="utf-8")
)
SEED = bytes(range(16))


@pytest.fixture(name="core")
def _core() -> Any:
    from kvpool import _core

    return _core


def digest(algorithm: str, message: bytes) -> bytes:
    if algorithm == "sha256":
        return hashlib.sha256(message).digest()[:16]
    return xxhash.xxh3_128_intdigest(message).to_bytes(16, "little")


def chain(
    algorithm: str, seed: bytes, tokens: list[int], block_tokens: int, extra: bytes
) -> list[bytes]:
    """The formula of the docs, read aloud."""
    keys, before = [], seed
    for block in range(len(tokens) // block_tokens):
        ids = tokens[block * block_tokens : (block + 1) * block_tokens]
        before = digest(algorithm, before + struct.pack(f"<{block_tokens}I", *ids) + extra)
        keys.append(before)
    return keys


def cut(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


@pytest.mark.parametrize("case", GOLDEN["prefix"], ids=lambda c: f"{c['algorithm']}: {c['name']}")
def test_prefix_keys_are_golden(core: Any, case: dict[str, Any]) -> None:
    golden = [bytes.fromhex(key) for key in case["keys"]]
    seed, extra = bytes.fromhex(case["namespace_id"]), bytes.fromhex(case["extra"])
    block_tokens, algorithm = case["block_tokens"], case["algorithm"]
    assert chain(algorithm, seed, case["tokens"], block_tokens, extra) == golden
    for dtype in (np.uint32, np.int64, np.uint64):
        tokens = np.array(case["tokens"], dtype)
        assert cut(core.prefix_hash(seed, tokens, block_tokens, extra, algorithm)) == golden
    if max(case["tokens"]) < 2**31:
        tokens = np.array(case["tokens"], np.int32)
        assert cut(core.prefix_hash(seed, tokens, block_tokens, extra, algorithm)) == golden


@pytest.mark.parametrize("case", GOLDEN["fold"], ids=lambda c: str(c["hash_bytes"]))
def test_folded_keys_are_golden(core: Any, case: dict[str, Any]) -> None:
    golden = [bytes.fromhex(key) for key in case["keys"]]
    seed, packed = bytes.fromhex(case["namespace_id"]), bytes.fromhex(case["hashes"])
    size = case["hash_bytes"]
    records = [packed[at : at + size] for at in range(0, len(packed), size)]
    assert [hashlib.sha256(seed + record).digest()[:16] for record in records] == golden
    assert cut(core.fold(seed, packed, size)) == golden
    assert cut(core.fold(bytearray(seed), np.frombuffer(packed, np.uint8), size)) == golden


@pytest.mark.parametrize("case", GOLDEN["checksum"], ids=lambda c: str(c["bytes"]))
def test_checksums_are_golden(core: Any, case: dict[str, Any]) -> None:
    data = bytes((i * 131 + 17) % 251 for i in range(case["bytes"]))
    golden = bytes.fromhex(case["checksum"])
    assert xxhash.xxh3_128_intdigest(data).to_bytes(16, "little") == golden
    assert core.checksum(data) == golden
    assert core.checksum(memoryview(bytearray(data))) == golden


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_random_chains_are_those_of_the_formula(
    core: Any, algorithm: str, rng: np.random.Generator
) -> None:
    for _ in range(60):
        block_tokens = int(rng.choice([1, 2, 7, 16, 64, 256, 400]))
        dtype = (np.uint32, np.int64, np.uint64)[rng.integers(3)]
        tokens = rng.integers(2**32, size=rng.integers(3000), dtype=np.uint64).astype(dtype)
        extra, namespace = rng.bytes(int(rng.choice([0, 0, 1, 40, 500]))), rng.bytes(16)
        keys = core.prefix_hash(namespace, tokens, block_tokens, extra, algorithm)
        expected = chain(algorithm, namespace, tokens.tolist(), block_tokens, extra)
        assert cut(keys) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        array.array("i", [1, 2, 3, 4]),
        memoryview(np.array([1, 2, 3, 4], np.dtype("<i8"))),
        np.frombuffer(b"x" + struct.pack("<4I", 1, 2, 3, 4), np.uint8)[1:].view(np.uint32),
    ],
    ids=["array", "memoryview", "unaligned"],
)
def test_any_integer_buffer_will_do(core: Any, tokens: Any) -> None:
    assert cut(core.prefix_hash(SEED, tokens, 2, b"", "sha256")) == chain(
        "sha256", SEED, [1, 2, 3, 4], 2, b""
    )


def test_no_tokens_and_no_hashes_have_no_keys(core: Any) -> None:
    assert core.prefix_hash(SEED, np.empty(0, np.uint32), 16, b"", "sha256") == b""
    assert core.fold(SEED, b"", 32) == b""


@pytest.mark.parametrize(
    ("dtype", "tokens", "message"),
    [
        (np.int32, [0, 1, -5, -6], "token 2 is -5; a token id must be in 0 .. 4294967295"),
        (np.int64, [2**32, -1], "token 0 is 4294967296; a token id must be in 0 .. 4294967295"),
        (np.uint64, [1, 2**64 - 1], "token 1 is 18446744073709551615; a token id must be in"),
    ],
)
def test_the_first_token_out_of_range_is_named(
    core: Any, dtype: Any, tokens: list[int], message: str
) -> None:
    with pytest.raises(BadArgument, match=message):
        core.prefix_hash(SEED, np.array(tokens, dtype), 16, b"", "sha256")


def test_a_bad_token_far_into_a_long_array_is_named(core: Any) -> None:
    tokens = np.zeros(100_000, np.int64)
    tokens[99_999] = -1
    with pytest.raises(BadArgument, match="token 99999 is -1"):
        core.prefix_hash(SEED, tokens, 16, b"", "sha256")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": b"short"}, BadArgument, "seed has 5 bytes; it must have 16"),
        ({"seed": "text"}, BadType, "seed is str"),
        ({"block_tokens": 0}, BadArgument, "block_tokens is 0; it must be at least 1"),
        ({"block_tokens": -3}, BadArgument, "block_tokens is -3; it must be at least 1"),
        ({"algorithm": "md5"}, BadArgument, "algorithm is 'md5'; it can be 'sha256' or 'xxh3'"),
        ({"extra": 5}, BadType, "extra is int"),
        ({"tokens": [1, 2]}, BadType, "tokens must be a contiguous integer array"),
        ({"tokens": b"raw bytes"}, BadType, "item format 'B'; they must be int32, int64"),
        ({"tokens": np.zeros(4)}, BadType, "item format 'd'; they must be int32, int64"),
        ({"tokens": np.zeros(4, ">i4")}, BadType, "item format '>i'; they must be int32, int64"),
        ({"tokens": np.zeros((2, 2), np.int32)}, BadArgument, "have 2 dimensions"),
        ({"tokens": np.zeros(8, np.int32)[::2]}, BadType, "tokens must be a contiguous"),
    ],
)
def test_bad_arguments_are_refused_with_value_and_limit(
    core: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {
        "seed": SEED,
        "tokens": np.zeros(4, np.uint32),
        "block_tokens": 2,
        "extra": b"",
        "algorithm": "sha256",
    }
    with pytest.raises(error, match=message):
        core.prefix_hash(**(arguments | change))


def test_bad_hashes_are_refused(core: Any) -> None:
    with pytest.raises(
        BadArgument, match="hashes have 33 bytes; that is no multiple of hash_bytes"
    ):
        core.fold(SEED, bytes(33), 32)
    with pytest.raises(BadArgument, match="hash_bytes is 0; it must be at least 1"):
        core.fold(SEED, b"", 0)
    with pytest.raises(BadType, match="data is int"):
        core.checksum(7)
