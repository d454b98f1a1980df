"""Tokens become keys: the same ones from every kind of sequence, and a clear refusal otherwise."""

import array
import hashlib
import struct
import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from kvpool import BadArgument, BadType
from kvpool.keys import KEY_DTYPE, fold_keys, prefix_keys
from tests.pools import shown

SEED = bytes(range(16))
TOKENS = [0, 1, 2**16 - 1, 7, 2**31 - 1, 3, 9, 127, 50_000, 4]


def chain(tokens: list[int], block_tokens: int, extra: bytes = b"", seed: bytes = SEED) -> bytes:
    """The formula of the docs, with nothing of kvpool in it."""
    keys, before = [], seed
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = struct.pack(f"<{block_tokens}I", *tokens[at : at + block_tokens])
        before = hashlib.sha256(before + ids + extra).digest()[:16]
        keys.append(before)
    return b"".join(keys)


@pytest.mark.parametrize(
    "given",
    [
        TOKENS,
        tuple(TOKENS),
        array.array("I", TOKENS),
        array.array("q", TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint64),
        np.array(TOKENS, ">i8"),
        np.array(TOKENS, ">u4"),
        np.array([TOKENS, TOKENS]).T[:, 0],
        np.repeat(np.array(TOKENS), 3)[::3],
        np.array(TOKENS)[::-1][::-1],
        np.array(TOKENS)[np.newaxis, :][0],
        memoryview(array.array("I", TOKENS)),
        [np.int64(token) for token in TOKENS],
        np.ma.array(TOKENS),
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_every_kind_of_sequence_gives_the_same_keys(given: Any) -> None:
    keys = prefix_keys(SEED, given, 4)
    assert keys.tobytes() == chain(TOKENS, 4)
    assert (keys.dtype, len(keys)) == (KEY_DTYPE, 2)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_integers_are_widened(dtype: Any) -> None:
    tokens = [0, 1, 127, 5, 9, 3]
    assert prefix_keys(SEED, np.array(tokens, dtype), 2).tobytes() == chain(tokens, 2)


def test_the_largest_tokens() -> None:
    for dtype in (np.uint32, np.int64, np.uint64):
        tokens = [2**32 - 1, 0]
        assert prefix_keys(SEED, np.array(tokens, dtype), 1).tobytes() == chain(tokens, 1)
    assert prefix_keys(SEED, range(2**32 - 2, 2**32), 2).tobytes() == chain(
        [2**32 - 2, 2**32 - 1], 2
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_tokens_than_a_block_make_no_key(count: int) -> None:
    for given in (TOKENS[:count], tuple(TOKENS[:count]), np.array(TOKENS[:count], np.int64)):
        keys = prefix_keys(SEED, given, 4)
        assert (len(keys), keys.dtype) == (0, KEY_DTYPE)


def test_tokens_after_the_last_whole_block_count_for_nothing() -> None:
    assert (prefix_keys(SEED, TOKENS[:9], 4) == prefix_keys(SEED, TOKENS[:8], 4)).all()


@pytest.mark.parametrize(
    ("tokens", "position", "value"),
    [
        ([0, -1], 1, "-1"),
        ([0, 1, 2**32], 2, "4294967296"),
        ([2**63], 0, str(2**63)),
        ([0, 2**64], 1, str(2**64)),
        ([0, 1, 2, 10**30], 3, str(10**30)),
        ([5, -(10**30)], 1, str(-(10**30))),
        ([-1, 2**63], 0, "-1"),
        (np.array([3, -7], np.int32), 1, "-7"),
        (np.array([3, -7], np.int8), 1, "-7"),
        (np.array([2**32], np.uint64), 0, "4294967296"),
        (np.array([2**64 - 1], np.uint64), 0, str(2**64 - 1)),
    ],
)
def test_the_first_token_out_of_range_is_named(tokens: Any, position: int, value: str) -> None:
    with pytest.raises(BadArgument, match=f"token {position} is {value}; a token id must be in 0"):
        prefix_keys(SEED, tokens, 1)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        [1, 2.5],
        np.array([1.0]),
        [True, False],
        np.array([True]),
        ["1", "2"],
        [b"a"],
        [None],
        [[1], [2, 3]],
        [1, [2]],
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.array([1 + 2j]),
        np.array([(1, 2)], [("a", "i4"), ("b", "i4")]),
        [object()],
        [{}],
    ],
    ids=shown,
)
def test_what_is_no_integer_is_a_bad_type(tokens: Any) -> None:
    with pytest.raises(BadType, match="token"):
        prefix_keys(SEED, tokens, 1)


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros((2, 2), np.int32),
        np.zeros((0, 2), np.int32),
        [[1, 2], [3, 4]],
        np.array(5),
        5,
        None,
        "1234",
        b"1234",
        {1, 2},
        {1: 2},
        object(),
        (token for token in TOKENS),
        iter(TOKENS),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_what_is_no_single_sequence_is_refused(tokens: Any) -> None:
    with pytest.raises(BadArgument, match="one sequence"):
        prefix_keys(SEED, tokens, 1)


def test_a_generator_is_refused_before_it_is_used_up() -> None:
    tokens = iter(TOKENS)
    with pytest.raises(BadArgument):
        prefix_keys(SEED, tokens, 1)  # type: ignore[arg-type]
    assert list(tokens) == TOKENS


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
@pytest.mark.parametrize("cut", range(0, 13, 2))
def test_a_chain_can_be_continued_anywhere(algorithm: str, cut: int, rng: Any) -> None:
    tokens = rng.integers(0, 2**32, 12, np.uint32)
    extra = b"an image"
    whole = prefix_keys(SEED, tokens, 2, extra=extra, algorithm=algorithm)
    head = prefix_keys(SEED, tokens[:cut], 2, extra=extra, algorithm=algorithm)
    seed = head[-1].tobytes() if len(head) else SEED
    tail = prefix_keys(seed, tokens[cut:], 2, extra=extra, algorithm=algorithm)
    assert np.concatenate([head, tail]).tobytes() == whole.tobytes()


def test_every_part_of_the_input_changes_the_keys() -> None:
    variants = [
        prefix_keys(SEED, TOKENS, 2),
        prefix_keys(bytes(16), TOKENS, 2),
        prefix_keys(SEED, [1, *TOKENS[1:]], 2),
        prefix_keys(SEED, TOKENS, 2, extra=b"x"),
        prefix_keys(SEED, TOKENS, 2, extra=b"x\x00"),
        prefix_keys(SEED, TOKENS, 2, algorithm="xxh3"),
        prefix_keys(SEED, TOKENS, 5),
    ]
    # Chained: a difference in the first block is one in the last.
    assert len({keys[-1].tobytes() for keys in variants}) == len(variants)


def test_a_late_difference_leaves_the_keys_before_it() -> None:
    one, other = (prefix_keys(SEED, [*TOKENS[:9], last], 2) for last in (1, 2))
    assert one[:4].tobytes() == other[:4].tobytes()
    assert one[4].tobytes() != other[4].tobytes()


def test_xxh3_is_xxh3() -> None:
    message = SEED + struct.pack("<2I", 1, 2) + b"e"
    expected = xxhash.xxh3_128_intdigest(message).to_bytes(16, "little")
    assert prefix_keys(SEED, [1, 2], 2, extra=b"e", algorithm="xxh3").tobytes() == expected


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"seed": b""}, "seed has 0 bytes"),
        ({"seed": bytes(17)}, "seed has 17 bytes"),
        ({"seed": None}, "seed is NoneType"),
        ({"seed": "x" * 16}, "seed is str"),
        ({"seed": 16}, "seed is int"),
        ({"extra": "text"}, "extra is str"),
        ({"extra": None}, "extra is NoneType"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": -1}, "block_tokens is -1"),
        ({"algorithm": "md5"}, "algorithm is 'md5'"),
    ],
)
def test_the_other_arguments_are_checked(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        prefix_keys(**{"seed": SEED, "tokens": TOKENS, "block_tokens": 2, **arguments})


def test_keys_are_read_only_and_packed() -> None:
    keys = prefix_keys(SEED, TOKENS, 2)
    assert not keys.flags.writeable
    assert keys.flags.c_contiguous
    assert keys[1:3].tobytes() == chain(TOKENS, 2)[16:48]


def test_tokens_are_not_changed_and_not_kept(rng: Any) -> None:
    tokens = rng.integers(0, 1000, 64, np.int64)
    before = tokens.copy()
    keys = prefix_keys(SEED, tokens, 4).copy()
    assert (tokens == before).all()
    tokens[:] = 0
    assert (keys == prefix_keys(SEED, before, 4)).all()


def test_long_input_from_many_threads(rng: Any) -> None:
    tokens = rng.integers(0, 2**32, 40_000, np.uint32)
    expected = prefix_keys(SEED, tokens, 16).tobytes()
    found: list[bytes] = []

    def hash_some() -> None:
        for given in (tokens, tokens.astype(np.int64)):
            found.append(prefix_keys(SEED, given, 16).tobytes())

    threads = [threading.Thread(target=hash_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


# --- folding an engine's own hashes ---------------------------------------------------------------


def folded(hashes: list[bytes]) -> bytes:
    return b"".join(hashlib.sha256(SEED + each).digest()[:16] for each in hashes)


@pytest.mark.parametrize("size", [1, 8, 16, 32, 100])
def test_fold_is_a_digest_of_each_hash(size: int, rng: Any) -> None:
    hashes = [rng.bytes(size) for _ in range(5)]
    expected = folded(hashes)
    packed = b"".join(hashes)
    for given in (hashes, tuple(hashes), [bytearray(each) for each in hashes]):
        assert fold_keys(SEED, given).tobytes() == expected
        assert fold_keys(SEED, given, size).tobytes() == expected
    for given in (packed, memoryview(packed), np.frombuffer(packed, np.uint8)):
        assert fold_keys(SEED, given, size).tobytes() == expected


def test_fold_takes_a_hash_as_bytes_whatever_its_items() -> None:
    hashes = [np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)]
    assert fold_keys(SEED, hashes).tobytes() == folded([each.tobytes() for each in hashes])


def test_fold_of_nothing_is_nothing() -> None:
    for keys in (fold_keys(SEED, []), fold_keys(SEED, b"", 32), fold_keys(SEED, (), 32)):
        assert (len(keys), keys.dtype) == (0, KEY_DTYPE)


@pytest.mark.parametrize(
    ("hashes", "hash_bytes", "complaint"),
    [
        ([b"ab", b"c"], None, "different lengths"),
        ([b"ab"], 3, "different lengths"),
        (b"abcd", None, "need hash_bytes"),
        (b"abcd", 3, "no multiple"),
        (b"abcd", 0, "hash_bytes is 0"),
        (b"abcd", -1, "hash_bytes is -1"),
        (b"abcd", 1 << 40, "hash_bytes is 1099511627776"),
        ([b"", b""], None, "must be"),
    ],
)
def test_fold_refuses_lengths_that_do_not_fit(
    hashes: Any, hash_bytes: int | None, complaint: str
) -> None:
    with pytest.raises(BadArgument, match=complaint):
        fold_keys(SEED, hashes, hash_bytes)


@pytest.mark.parametrize(
    ("hashes", "hash_bytes"),
    [(["ab"], None), ([1, 2], None), ([None], None), ("abcd", 2), (None, 2), (5, 1), (b"a", 1.0)],
    ids=shown,
)
def test_fold_refuses_what_is_not_bytes(hashes: Any, hash_bytes: Any) -> None:
    with pytest.raises(BadType):
        fold_keys(SEED, hashes, hash_bytes)
