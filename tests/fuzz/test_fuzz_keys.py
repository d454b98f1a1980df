"""Tokens and hashes of every kind: the keys that the formula gives, or a precise error."""

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from kvpool import BadArgument, KvpoolError
from kvpool.keys import KEY_DTYPE, fold_keys, prefix_keys

SEED = bytes(range(16))

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.binary(max_size=20)
    | st.dates()
    | st.decimals()
    | st.fractions(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)
arrays = npst.arrays(
    dtype=npst.scalar_dtypes() | st.just(np.dtype(object)) | npst.array_dtypes(max_size=2),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
)


def expected(tokens: list[int], block_tokens: int, extra: bytes) -> bytes:
    out, before = b"", SEED
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = struct.pack(f"<{block_tokens}I", *tokens[at : at + block_tokens])
        before = hashlib.sha256(before + ids + extra).digest()[:16]
        out += before
    return out


@settings(max_examples=300)
@given(tokens=anything | arrays, block_tokens=st.integers(1, 4))
@example(tokens=[2**32 - 1], block_tokens=1)
@example(tokens=[2**32], block_tokens=1)
@example(tokens=np.array([], dtype="M8[s]"), block_tokens=1)
def test_any_object_as_tokens(tokens: Any, block_tokens: int) -> None:
    try:
        keys = prefix_keys(SEED, tokens, block_tokens)
    except BadArgument:
        return
    as_ints = [int(token) for token in tokens]
    assert keys.dtype == KEY_DTYPE
    assert keys.tobytes() == expected(as_ints, block_tokens, b"")


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(-3, 2**32 + 3), max_size=12),
    dtype=st.sampled_from([None, "i8", "u8", ">i8"]),
    block_tokens=st.integers(1, 5),
    extra=st.binary(max_size=40),
)
def test_lists_of_integers_around_the_limits(
    tokens: list[int], dtype: str | None, block_tokens: int, extra: bytes
) -> None:
    if dtype == "u8":
        tokens = [abs(token) for token in tokens]
    given_tokens: Any = tokens if dtype is None else np.array(tokens, dtype)
    bad = [at for at, token in enumerate(tokens) if not 0 <= token < 2**32]
    if bad:
        with pytest.raises(BadArgument, match=f"token {bad[0]} is {tokens[bad[0]]};"):
            prefix_keys(SEED, given_tokens, block_tokens, extra=extra)
        return
    keys = prefix_keys(SEED, given_tokens, block_tokens, extra=extra)
    assert keys.tobytes() == expected(tokens, block_tokens, extra)


@settings(max_examples=200)
@given(
    seed=st.just(SEED) | anything,
    block_tokens=st.integers() | anything,
    extra=st.just(b"") | anything,
    algorithm=st.sampled_from(["sha256", "xxh3"]) | st.text(max_size=8),
)
def test_any_object_as_another_argument(
    seed: Any, block_tokens: Any, extra: Any, algorithm: Any
) -> None:
    try:
        keys = prefix_keys(seed, [1, 2, 3], block_tokens, extra=extra, algorithm=algorithm)
    except (KvpoolError, TypeError):
        return
    assert len(keys) == 3 // int(block_tokens)


@settings(max_examples=200)
@given(
    hashes=st.lists(st.binary(max_size=33), max_size=4) | anything | arrays,
    hash_bytes=st.none() | st.integers(-1, 40) | anything,
)
def test_any_object_as_hashes(hashes: Any, hash_bytes: Any) -> None:
    try:
        keys = fold_keys(SEED, hashes, hash_bytes)
    except BadArgument:
        return
    if isinstance(hashes, list | tuple):
        each = [bytes(memoryview(one)) for one in hashes]
    else:
        packed = memoryview(hashes).tobytes()
        each = [packed[at : at + hash_bytes] for at in range(0, len(packed), hash_bytes)]
    digests = b"".join(hashlib.sha256(SEED + one).digest()[:16] for one in each)
    assert keys.tobytes() == digests
