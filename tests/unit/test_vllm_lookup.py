"""How much of a prompt the pool has, for several ranks and KV cache groups at once."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.connectors.vllm_lookup import GroupShape, Lookup
from kvpool.namespace import Namespace
from kvpool.types import Miss, Tier
from tests.served import served

BLOCK_BYTES = 4096
FULL = GroupShape(block_tokens=16, hashes_per_block=1, window=None)
WINDOW = GroupShape(block_tokens=16, hashes_per_block=1, window=40)  # sees three blocks, or four
HASHES = [bytes([at, 7]) * 16 for at in range(20)]


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with kvpool.open(dram="64MiB") as pool:
        yield pool


def space(pool: kvpool.Pool, model: str) -> Namespace:
    return pool.namespace(
        kvpool.Manifest(model=model, layout="opaque", block_tokens=16, block_bytes=BLOCK_BYTES)
    )


def put(space: Namespace, blocks: range) -> None:
    for at in blocks:
        data = np.full(BLOCK_BYTES, at, np.uint8)
        assert space.put(space.fold([HASHES[at]]), data).stored == 1


def remove(space: Namespace, block: int) -> None:
    assert space.remove(space.fold([HASHES[block]])) == 1


def test_a_prefix_counts_where_every_rank_has_it(pool: kvpool.Pool) -> None:
    ranks = [[space(pool, "rank 0")], [space(pool, "rank 1")]]
    put(ranks[0][0], range(10))
    put(ranks[1][0], range(7))
    offer = Lookup((FULL,), 16).find(ranks, HASHES, 20 * 16)
    assert offer.tokens == 7 * 16
    assert offer.tokens_by_tier(2 * 16, 16) == {Tier.DRAM: 5 * 16}


def test_never_more_than_the_limit_nor_a_part_of_a_block(pool: kvpool.Pool) -> None:
    ranks = [[space(pool, "rank 0")]]
    put(ranks[0][0], range(10))
    lookup = Lookup((FULL,), 16)
    assert lookup.find(ranks, HASHES, 5 * 16 + 15).tokens == 5 * 16
    assert lookup.find(ranks, HASHES, 15).tokens == 0
    assert lookup.find(ranks, [], 0).tokens == 0


def test_a_hole_ends_it(pool: kvpool.Pool) -> None:
    ranks = [[space(pool, "rank 0")]]
    put(ranks[0][0], range(10))
    remove(ranks[0][0], 4)
    assert Lookup((FULL,), 16).find(ranks, HASHES, 160).tokens == 4 * 16


def test_a_window_needs_only_what_the_next_token_sees(pool: kvpool.Pool) -> None:
    whole, window = space(pool, "whole"), space(pool, "window")
    put(whole, range(10))
    put(window, range(7, 10))
    lookup = Lookup((FULL, WINDOW), 16)
    # Token 160 sees tokens 121..159: blocks 7, 8 and 9.
    assert WINDOW.first_needed(160) == 7
    assert lookup.find([[whole, window]], HASHES, 160).tokens == 160
    remove(window, 7)
    assert lookup.find([[whole, window]], HASHES, 160).tokens == 0


def test_a_window_may_end_earlier(pool: kvpool.Pool) -> None:
    whole, window = space(pool, "whole"), space(pool, "window")
    put(whole, range(10))
    put(window, range(10))
    remove(window, 8)
    assert Lookup((FULL, WINDOW), 16).find([[whole, window]], HASHES, 160).tokens == 8 * 16


def test_only_windows_before_a_hole_in_the_other_group_count(pool: kvpool.Pool) -> None:
    whole, window = space(pool, "whole"), space(pool, "window")
    put(whole, range(6))
    put(window, range(4, 12))
    # Six blocks are whole, but their window begins at block 3, which nobody has.
    assert Lookup((FULL, WINDOW), 16).find([[whole, window]], HASHES, 12 * 16).tokens == 0


@pytest.mark.parametrize("seed", range(40))
def test_against_a_plain_search(pool: kvpool.Pool, seed: int) -> None:
    random = np.random.default_rng(seed)
    shapes = (FULL, WINDOW, GroupShape(32, 2, None), GroupShape(16, 1, 17))
    spaces = [space(pool, f"{seed} {at}") for at in range(len(shapes))]
    present: list[set[int]] = []
    for shape, each in zip(shapes, spaces, strict=True):
        count = 20 // shape.hashes_per_block
        share = random.choice([0.5, 0.9, 1.0])
        held = {at for at in range(count) if random.random() < share}
        for at in held:
            hash_at = (at + 1) * shape.hashes_per_block - 1
            put(each, range(hash_at, hash_at + 1))
        present.append(held)

    def is_whole(tokens: int) -> bool:
        return all(
            set(range(shape.first_needed(tokens), tokens // shape.block_tokens)) <= held
            for shape, held in zip(shapes, present, strict=True)
        )

    wanted = max(tokens for tokens in range(0, 20 * 16 + 1, 32) if is_whole(tokens))
    assert Lookup(shapes, 32).find([spaces], HASHES, 20 * 16).tokens == wanted


def test_what_is_leased_stays_until_released(pool: kvpool.Pool) -> None:
    whole, window = space(pool, "whole"), space(pool, "window")
    put(whole, range(10))
    put(window, range(10))
    lookup, ranks = Lookup((FULL, WINDOW), 16), [[whole, window]]
    offer = lookup.lease(ranks, HASHES, lookup.find(ranks, HASHES, 160))
    assert offer.tokens == 160
    assert pool.stats()["blocks_pinned"] == 13  # ten blocks, and the window's three
    offer.release()
    offer.release()
    assert pool.stats()["blocks_pinned"] == 0


def test_a_lease_takes_what_is_left(pool: kvpool.Pool) -> None:
    whole = space(pool, "whole")
    put(whole, range(10))
    lookup, ranks = Lookup((FULL,), 16), [[whole]]
    found = lookup.find(ranks, HASHES, 160)
    remove(whole, 6)
    offer = lookup.lease(ranks, HASHES, found)
    assert offer.tokens == 6 * 16
    assert pool.stats()["blocks_pinned"] == 6
    offer.release()
    assert pool.stats()["blocks_pinned"] == 0


def test_as_much_as_a_client_may_pin(tmp_path: Path) -> None:
    """The node of this test lets a client pin a quarter of 8 MiB: 512 blocks of 4 KiB."""
    with served(tmp_path, dram="8MiB") as daemon, daemon.connect() as pool:
        whole = space(pool, "whole")
        hashes = [at.to_bytes(4, "little") * 8 for at in range(1000)]
        data = np.zeros(BLOCK_BYTES * len(hashes), np.uint8)
        assert whole.put(whole.fold(hashes), data).stored == 1000
        lookup, ranks = Lookup((FULL,), 16), [[whole]]
        offer = lookup.lease(ranks, hashes, lookup.find(ranks, hashes, 16_000))
        assert 256 * 16 <= offer.tokens < 1000 * 16
        assert offer.tokens == offer.pins * 16
        assert offer.miss is Miss.PIN_LIMIT
        offer.release()
