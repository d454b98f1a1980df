"""Values that calls return: small, frozen, and honest about what was not stored."""

import copy
import pickle

import pytest

from kvpool import BadArgument, Hit, ManualClock, Miss, Put, PutResult, Reason, Tier
from kvpool.types import Reason as ReasonOfTypes

STORED, PRESENT = 0, 1
CODES = bytes([STORED, PRESENT, STORED, Reason.TIMED_OUT, Reason.CHAIN_BROKEN])


def test_a_put_result_counts_each_kind() -> None:
    result = PutResult(CODES)
    assert (len(result), result.stored, result.present, result.no_room) == (5, 2, 1, 2)
    assert list(result) == [Put.STORED, Put.PRESENT, Put.STORED, Put.NO_ROOM, Put.NO_ROOM]
    assert result.reasons == [
        *[Reason.NONE] * 3,
        Reason.TIMED_OUT,
        Reason.CHAIN_BROKEN,
    ]
    assert result.reason is Reason.TIMED_OUT
    assert repr(result) == "PutResult(stored=2, present=1, no_room=2, reason=TIMED_OUT)"


def test_a_put_result_shows_blocks_that_are_readable_but_not_durable() -> None:
    result = PutResult(bytes([STORED, *[Reason.NOT_DURABLE] * 2, Reason.FAILED]))
    assert (result.stored, result.present, result.no_room, result.not_durable) == (1, 0, 3, 2)
    assert result.stored + result.present + result.no_room == len(result)
    shown = "PutResult(stored=1, present=0, no_room=3, not_durable=2, reason=NOT_DURABLE)"
    assert repr(result) == shown
    assert PutResult(CODES).not_durable == 0


def test_a_put_result_without_misses_has_no_reason() -> None:
    result = PutResult(bytes([STORED, PRESENT]))
    assert result.reason is Reason.NONE
    assert repr(result) == "PutResult(stored=1, present=1, no_room=0)"
    empty = PutResult(b"")
    assert (len(empty), list(empty), empty.reason) == (0, [], Reason.NONE)


def test_a_put_result_is_a_sequence() -> None:
    result = PutResult(CODES)
    assert result[0] is Put.STORED
    assert result[-1] is Put.NO_ROOM
    assert result[1:4] == PutResult(CODES[1:4])
    assert result[::-1].reasons[0] is Reason.CHAIN_BROKEN
    assert Put.PRESENT in result
    assert result.count(Put.STORED) == 2
    assert result.index(Put.NO_ROOM) == 3
    assert next(reversed(result)) is Put.NO_ROOM
    with pytest.raises(IndexError):
        result[5]
    with pytest.raises(TypeError):
        result["a"]  # type: ignore[call-overload]


def test_put_results_compare_by_what_happened() -> None:
    assert PutResult(CODES) == PutResult(bytes(CODES))
    assert PutResult(CODES) != PutResult(CODES[:4])
    assert PutResult(CODES) != list(PutResult(CODES))
    assert len({PutResult(CODES), PutResult(CODES)}) == 1
    assert pickle.loads(pickle.dumps(PutResult(CODES))) == PutResult(CODES)
    assert copy.deepcopy(PutResult(CODES)) == PutResult(CODES)


@pytest.mark.parametrize("reason", [each for each in Reason if each is not Reason.NONE])
def test_every_reason_is_a_block_without_room(reason: Reason) -> None:
    result = PutResult(bytes([reason]))
    assert result[0] is Put.NO_ROOM
    assert result.reason is reason


def test_a_hit_is_true_when_there_is_something() -> None:
    hit = Hit(1, bytes([Tier.DRAM, Tier.ABSENT]))
    assert hit
    assert not Hit(0, bytes(2))
    assert [Tier(tier) for tier in hit.tiers] == [Tier.DRAM, Tier.ABSENT]
    blocks, tiers, miss = hit
    assert (blocks, tiers, miss) == (hit.blocks, hit.tiers, hit.miss)
    with pytest.raises(AttributeError):
        hit.blocks = 2  # type: ignore[misc]


def test_a_hit_says_why_each_block_is_missing() -> None:
    hit = Hit(1, bytes(4), Miss.ABSENT)
    assert hit.misses == [Miss.NONE, Miss.ABSENT, Miss.BEHIND, Miss.BEHIND]
    assert Hit(2, bytes(2)).misses == [Miss.NONE] * 2
    assert Hit(0, b"").misses == []


def test_the_public_names_are_the_ones_of_the_modules() -> None:
    import kvpool

    assert Reason is ReasonOfTypes
    assert all(hasattr(kvpool, name) for name in kvpool.__all__)
    assert sorted(kvpool.__all__) == list(kvpool.__all__)


def test_a_manual_clock_moves_forward_only() -> None:
    clock = ManualClock()
    assert clock.now() == 0.0
    for given, then in ((5, 5.0), (3.0, 5.0), (5.5, 5.5), (0, 5.5), (1e12, 1e12)):
        clock.set(given)
        assert clock.now() == then
    for given in (-1, -0.001, float("nan"), float("inf"), 1.1e12):
        with pytest.raises(BadArgument, match="a time is"):
            clock.set(given)
    assert clock.now() == 1e12
    with pytest.raises(TypeError):
        clock.set("5")  # type: ignore[arg-type]
