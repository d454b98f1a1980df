"""One sentence for each cause of a miss, from what a node says of its blocks."""

from typing import Any

import pytest

from kvpool.errors import KvpoolError
from kvpool.observe.explain import Cause, Elsewhere, Gone, Known, Verdict, known, verdict
from kvpool.types import Reason
from tests.pools import keys, opaque, opened

HERE = Known(tiers=1, heat=3.0, temperature=3.0, idle_s=1.0)
ON_SSD = Known(tiers=2, heat=0.5)
NOWHERE = Known()
BLOCK = 64 << 10


def gone(why: str, **more: Any) -> Known:
    return Known(gone=Gone(why=why, ago_s=750.0, heat=0.02, **more))


def judged(*blocks: Known, **more: Any) -> Verdict:
    return verdict(blocks, **more)


@pytest.mark.parametrize(
    ("why", "cause", "words"),
    [
        ("evicted", Cause.EVICTED, "evicted from DRAM 12 minutes ago"),
        ("not_worth", Cause.NOT_WORTH, "too cold for the SSD"),
        ("evicted_ssd", Cause.EVICTED_SSD, "evicted from the SSD 12 minutes ago"),
        ("removed", Cause.REMOVED, "removed 12 minutes ago"),
        ("dropped", Cause.DROPPED, "with its whole namespace"),
        ("lost", Cause.LOST, "could not be read whole"),
    ],
)
def test_a_block_that_left_says_when_and_why(why: str, cause: Cause, words: str) -> None:
    found = judged(HERE, HERE, gone(why), HERE)
    assert (found.cause, found.first_missing, found.leading) == (cause, 2, 2)
    assert found.sentence.startswith("Block 3 of 4 ")
    assert words in found.sentence
    assert found.advice
    assert found.behind == 1


@pytest.mark.parametrize("why", ["evicted", "not_worth", "evicted_ssd"])
def test_how_cold_it_was_is_told_beside_what_stays(why: str) -> None:
    assert "its heat was 0.02, and the coldest block that stays has 0.40" in (
        judged(HERE, ON_SSD, gone(why), coldest=0.4).sentence
    )
    alone = judged(gone(why)).sentence
    assert "its heat was 0.02" in alone
    assert "stays" not in alone


@pytest.mark.parametrize("reason", [each for each in Reason if each > 1])
def test_a_refused_put_names_its_reason(reason: Reason) -> None:
    found = judged(gone("refused", status=int(reason)))
    assert found.cause == Cause.REFUSED
    assert f"({reason.name.lower()})" in found.sentence


def test_a_status_of_a_later_version_is_told_as_a_number() -> None:
    assert "(status 200)" in judged(gone("refused", status=200)).sentence


def test_a_reason_of_a_later_version_is_told_as_it_is() -> None:
    assert "(stolen)" in judged(gone("stolen")).sentence


def test_a_ghost_was_evicted_once() -> None:
    found = judged(HERE, Known(ghost_heat=0.1))
    assert found.cause == Cause.EVICTED
    assert "the time is forgotten" in found.sentence


def test_never_stored_from_some_block_on() -> None:
    found = judged(HERE, ON_SSD, NOWHERE, NOWHERE)
    assert found.cause == Cause.NEVER_STORED
    assert found.sentence.startswith("The first 2 blocks are here; block 3 of 4 was never stored")
    assert (found.in_dram, found.on_ssd, found.leading, found.behind) == (1, 1, 2, 0)


def test_never_stored_at_all() -> None:
    found = judged(NOWHERE, HERE)
    assert found.cause == Cause.NEVER_STORED
    assert "never stored under this key" in found.sentence
    assert found.behind == 1


def test_another_namespace_has_it_and_the_field_is_named() -> None:
    near = Elsewhere("chat-fp8", {"dtype": ("bfloat16", "float8_e4m3")}, present=4)
    far = Elsewhere("other", {"model": ("a", "b"), "dtype": ("c", "d")}, present=4)
    found = judged(NOWHERE, NOWHERE, elsewhere=[far, near])
    assert found.cause == Cause.OTHER_NAMESPACE
    assert "'chat-fp8' has 4 blocks of the same prefix" in found.sentence
    assert "dtype is 'bfloat16' here and 'float8_e4m3' there" in found.sentence


def test_of_an_engine_the_parts_that_differ_are_told() -> None:
    engines = tuple(f"vllm=1; attention={name}; block=32" for name in ("A", "B"))
    found = judged(NOWHERE, elsewhere=[Elsewhere("x", {"engine": engines}, present=4)])
    assert "engine is 'attention=A' here and 'attention=B' there." in found.sentence


def test_another_namespace_without_the_missing_block_is_only_a_hint() -> None:
    near = Elsewhere("chat-fp8", {"dtype": ("bfloat16", "float8_e4m3")}, present=1)
    found = judged(HERE, NOWHERE, elsewhere=[near])
    assert found.cause == Cause.NEVER_STORED
    assert "'chat-fp8'" in found.advice


def test_many_fields_are_counted() -> None:
    fields = dict.fromkeys(("a", "b", "c", "d", "e"), (1, 2))
    found = judged(NOWHERE, elsewhere=[Elsewhere("x", fields, present=1)])
    assert "and 2 more fields differ" in found.sentence


def test_fields_that_follow_from_others_are_left_out() -> None:
    fields = {"name": ("a", "b"), "dtype": ("x", "y"), "block_bytes": (2, 1)}
    found = judged(NOWHERE, elsewhere=[Elsewhere("b", fields, present=1)])
    assert "; dtype is 'x' here and 'y' there." in found.sentence
    only = judged(NOWHERE, elsewhere=[Elsewhere("b", {"name": ("a", "b")}, present=1)])
    assert "; name is 'a' here and 'b' there." in only.sentence


def test_another_tenant_has_it() -> None:
    found = judged(NOWHERE, elsewhere=[Elsewhere("chat", {}, present=3, tenant="acme")])
    assert found.cause == Cause.OTHER_TENANT
    assert "tenant 'acme' has 3 blocks of the same prefix" in found.sentence
    nothing = Elsewhere("chat", {}, present=0, tenant="acme")
    assert judged(NOWHERE, elsewhere=[nothing]).cause == Cause.NEVER_STORED


def test_what_left_goes_before_what_is_elsewhere() -> None:
    near = Elsewhere("chat-fp8", {"dtype": ("a", "b")}, present=9)
    assert judged(gone("removed"), elsewhere=[near]).cause == Cause.REMOVED


def test_all_there() -> None:
    found = judged(HERE, Known(tiers=3), ON_SSD)
    assert (found.cause, found.first_missing) == (Cause.PRESENT, None)
    assert "All 3 blocks are here now (2 in DRAM, 1 on SSD)" in found.sentence


@pytest.mark.parametrize("reason", ["ssd_late", "timed_out"])
def test_all_there_and_too_late(reason: str) -> None:
    found = judged(HERE, ON_SSD, failed={reason: 5, "moved": 2})
    assert found.cause == Cause.DEADLINE
    assert "gave up on 5 blocks" in found.sentence


def test_what_is_in_memory_is_never_late() -> None:
    assert judged(HERE, failed={"ssd_late": 5}).cause == Cause.PRESENT


def test_less_than_a_block() -> None:
    assert "shorter than one block" in judged().sentence


@pytest.mark.parametrize(
    ("ago_s", "words"),
    [
        (0.2, "less than a second ago"),
        (59, "59 s ago"),
        (119, "119 s ago"),
        (7000, "117 minutes ago"),
        (7300, "2 hours ago"),
        (400_000, "5 days ago"),
    ],
)
def test_times_as_people_say_them(ago_s: float, words: str) -> None:
    assert words in judged(Known(gone=Gone(why="removed", ago_s=ago_s))).sentence


def test_entries_of_a_node_are_read() -> None:
    left = {"why": "evicted", "ago_s": 3.0, "heat": 0.5, "ssd": True, "status": None}
    entry = {"tiers": 0, "heat": 0.0, "temperature": 0.0, "idle_s": None, "pins": 0}
    (block,) = known([{**entry, "gone": left, "ghost_heat": 0.4}])
    assert block.gone == Gone(why="evicted", ago_s=3.0, heat=0.5, ssd=True)
    assert block.ghost_heat == 0.4


def test_entries_of_another_form_are_refused() -> None:
    with pytest.raises(KvpoolError, match="form not known"):
        known([{"tiers": "many"}])


# --- of a real pool ------------------------------------------------------------------------------


def test_what_a_pool_says_of_its_own_blocks_is_understood() -> None:
    with opened("8MiB") as pool:
        space = pool.namespace(opaque(block_bytes=BLOCK))
        mine, others = keys(range(10)), keys(range(100, 2100))

        def cause() -> Cause:
            packed = b"".join(mine)
            return verdict(known(pool._node.explain(space.number, packed))).cause

        seen = [cause()]
        space.put(mine, bytes(BLOCK * 10))
        seen.append(cause())
        space.remove(mine[3:4])
        seen.append(cause())
        for start in range(0, len(others), 100):
            space.put(others[start : start + 100], bytes(BLOCK * 100))
        seen.append(cause())
        space.drop()
        space.put(mine, bytes(BLOCK * 10))
        space.drop()
        seen.append(cause())
    assert seen == [
        Cause.NEVER_STORED,
        Cause.PRESENT,
        Cause.REMOVED,
        Cause.EVICTED,
        Cause.DROPPED,
    ]


def test_a_put_that_a_pool_refused_is_understood() -> None:
    with opened("8MiB") as pool:
        space = pool.namespace(opaque(block_bytes=16 << 20))
        (key,) = keys([1])
        assert space.put([key], bytes(16 << 20)).reason == Reason.TOO_LARGE
        found = verdict(known(pool._node.explain(space.number, key)))
    assert (found.cause, "(too_large)" in found.sentence) == (Cause.REFUSED, True)
