"""Saves of a window whose earlier blocks the pool does not have."""

from collections.abc import Iterator

import numpy as np
import pytest

import kvpool
from kvpool.connectors.vllm_lookup import GroupShape
from tests.vllm_fakes import BLOCK, BLOCK_BYTES, FULL, Rig, a_request, a_step

WINDOW = GroupShape(BLOCK, 1, 33)


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with kvpool.open(dram="64MiB") as pool:
        yield pool


def test_what_the_pool_lost_of_a_window_is_stored_again(pool: kvpool.Pool) -> None:
    """The engine has a prefix of 96 tokens, of whose window it keeps the last two blocks."""
    rig = Rig(pool, groups=(FULL, WINDOW))
    request = rig.arrive(a_request("a", tokens=113))
    assert rig.offered(request, local=96) == 0
    request.num_computed_tokens = 96
    tables = {"a": [list(range(1, 9)), [0, 0, 0, 0, 15, 16, 17, 18]]}
    (save,) = rig.half.next_step(a_step({"a": 17}, tables)).saves
    for part, space in zip(save.parts, rig.spaces(), strict=True):
        parent = None if part.parent is None else space.fold([part.parent])[0].tobytes()
        data = np.zeros(BLOCK_BYTES * len(part.pages), np.uint8)
        result = space.put(space.fold(part.hashes), data, parent=parent)
        assert result.stored == len(part.pages), (part.group, [r.name for r in result.reasons])
    assert rig.offered(rig.arrive(a_request("b", tokens=113))) == 112


def test_what_a_thread_found_is_unpinned_where_the_engine_does_not_come_back_for_it(
    pool: kvpool.Pool,
) -> None:
    """A full engine does not ask its queue again for minutes."""
    rig = Rig(pool)
    hashes = [at.to_bytes(16, "big") * 2 for at in range(600)]  # too many to pin at once
    rig.store(hashes)
    request = a_request("a", tokens=0, block_hashes=hashes)
    request.num_tokens = request.num_prompt_tokens = 600 * BLOCK + 1
    assert rig.half.matched(rig.arrive(request), 0) == (None, False)
    asked = rig.half._requests["a"].asked
    assert asked is not None
    assert asked.result().tokens == 600 * BLOCK
    assert rig.pinned == 600
    rig.clock.now += 3600.0
    rig.half.next_step(a_step({}, {}))
    assert rig.pinned == 0
    assert rig.offered(request) == 600 * BLOCK  # when it does come back
