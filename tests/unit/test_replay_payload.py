"""Payload gives away every kind of wrong bytes; keys of different ids differ."""

import numpy as np
import pytest

from kvpool.replay.payload import Payload, keys_of, mix

BLOCK_BYTES = 4096
WORDS = BLOCK_BYTES // 8


def written(payload: Payload, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    keys = keys_of(ids)
    blocks = np.zeros((len(ids), WORDS), dtype=np.uint64)
    payload.write(keys, blocks)
    return keys, blocks


def test_what_was_written_is_right() -> None:
    payload = Payload(BLOCK_BYTES)
    ids = [*range(200), 2**63 - 1]  # more blocks than the scratch holds at a time
    assert payload.wrong(*written(payload, ids)) == []
    assert payload.wrong(*written(payload, [])) == []


def test_two_payloads_agree() -> None:
    keys, blocks = written(Payload(BLOCK_BYTES), [1, 2])
    assert Payload(BLOCK_BYTES).wrong(keys, blocks) == []


def foreign(blocks: np.ndarray) -> None:
    blocks[70] = blocks[71].copy()


def torn(blocks: np.ndarray) -> None:
    blocks[70, WORDS // 2 :] = blocks[71, WORDS // 2 :]


def shifted(blocks: np.ndarray) -> None:
    blocks[70] = np.roll(blocks[70], 1)


def last_line_of_another(blocks: np.ndarray) -> None:
    blocks[70, -1] = blocks[71, -1]


def first_word_left_out(blocks: np.ndarray) -> None:
    blocks[70, 0] = 0


def one_bit(blocks: np.ndarray) -> None:
    blocks[70, 100] ^= np.uint64(1 << 63)


@pytest.mark.parametrize(
    "damage", [foreign, torn, shifted, last_line_of_another, first_word_left_out, one_bit]
)
def test_wrong_bytes_are_found_and_named(damage) -> None:
    payload = Payload(BLOCK_BYTES)
    keys, blocks = written(payload, list(range(140)))
    damage(blocks)
    assert payload.wrong(keys, blocks) == [70]


def test_all_words_differ_between_any_two_places() -> None:
    _, blocks = written(Payload(BLOCK_BYTES), list(range(64)))
    assert len(np.unique(blocks)) == blocks.size


def test_keys_of_different_ids_differ_in_both_halves(rng: np.random.Generator) -> None:
    ids = np.unique(rng.integers(0, 2**63, 10_000)).tolist()
    keys = keys_of(ids)
    assert (keys.dtype, keys.shape) == (np.dtype("V16"), (len(ids),))
    halves = keys.view(np.uint64).reshape(-1, 2)
    assert len(np.unique(halves[:, 0])) == len(np.unique(halves[:, 1])) == len(ids)


def test_keys_and_payload_are_the_same_on_every_machine() -> None:
    assert keys_of([0, 1]).tobytes().hex() == GOLDEN_KEYS
    assert [f"{word:016x}" for word in mix(np.arange(2, dtype=np.uint64)).tolist()] == [
        "e220a8397b1dcdaf",  # SplitMix64's own first outputs, published with it
        "910a2dec89025cc1",
    ]


@pytest.mark.parametrize("block_bytes", [0, -8, 12])
def test_a_block_size_that_cannot_be_filled_is_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Payload(block_bytes)


GOLDEN_KEYS = "7e0d950b0e4bbef65697cf3bbe782c8a4579e4e826e150158ab9bb88a4bb2e6a"
