"""The scheduler's half of the vLLM connector, on a real pool: what it offers, pins and saves."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kvpool
from kvpool.connectors.vllm_lookup import GroupShape
from kvpool.connectors.vllm_messages import Report
from kvpool.connectors.vllm_requests import unit_of
from kvpool.connectors.vllm_scheduler import _OFFER_S
from tests.vllm_fakes import (
    BLOCK,
    FULL,
    NO_ANSWER,
    Rig,
    a_request,
    a_step,
    answer,
    blocks,
    hashes_of,
)

WINDOW = GroupShape(BLOCK, 1, 33)  # sees the two blocks before a border


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with kvpool.open(dram="64MiB") as pool:
        yield pool


def test_whole_blocks_beyond_the_engines_own(pool: kvpool.Pool) -> None:
    rig = Rig(pool, ranks=2)
    rig.store(hashes_of(1, 6))
    assert rig.offered(rig.arrive(a_request("a", tokens=100)), local=32) == 64
    # The engine computes the last token again, from a prompt that was loaded in full; but for that
    # alone, of a prompt that it has otherwise, nothing is loaded.
    assert rig.offered(rig.arrive(a_request("d", tokens=96)), local=80) == 0
    assert rig.offered(rig.arrive(a_request("b", tokens=96))) == 96
    assert rig.offered(rig.arrive(a_request("c", prompt=2))) == 0
    assert rig.counted()["no_hit.not_present"] == 1


def test_no_more_than_every_rank_has(pool: kvpool.Pool) -> None:
    rig = Rig(pool, ranks=2)
    rig.store(hashes_of(1, 6))
    last = rig.spaces()[1]
    assert last.remove(last.fold(hashes_of(1, 6)[3:4])) == 1
    assert rig.offered(rig.arrive(a_request("a"))) == 48


def test_a_draft_model_computes_the_last_block(pool: kvpool.Pool) -> None:
    rig = Rig(pool, has_eagle=True)
    rig.store(hashes_of(1, 6))
    assert rig.offered(rig.arrive(a_request("a"))) == 80


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({"skip_reading_prefix_cache": True}, {}),
        ({"tokens": 5}, {}),
        ({"tokens": 0}, {}),
        ({}, {"min_blocks": 7}),
    ],
)
def test_what_is_not_worth_asking(
    pool: kvpool.Pool, fields: dict[str, Any], extra: dict[str, Any]
) -> None:
    rig = Rig(pool, extra=extra)
    rig.store(hashes_of(1, 6))
    assert rig.offered(rig.arrive(a_request("a", **fields))) == 0
    assert rig.pinned == 0


def test_a_few_blocks_are_left_alone_where_more_are_wanted(pool: kvpool.Pool) -> None:
    rig = Rig(pool, extra={"min_blocks": 3})
    rig.store(hashes_of(1, 4))
    assert rig.offered(rig.arrive(a_request("a")), local=32) == 0
    assert rig.counted()["no_hit.too_few"] == 1
    assert rig.offered(rig.arrive(a_request("b")), local=16) == 48


def test_without_a_node_everything_is_a_miss_and_nothing_is_saved() -> None:
    rig = Rig(None)
    request = rig.arrive(a_request("a"))
    assert rig.offered(request) == 0
    assert rig.counted() == {"no_hit.no_node": 1}
    assert rig.half.next_step(a_step({"a": 100}, {"a": [list(range(1, 8))]})).saves == []


# --- leases --------------------------------------------------------------------------------------


def loading(rig: Rig, request: Any) -> Any:
    """The request at the point where a worker loads; its load."""
    tokens = rig.offered(request)
    rig.half.allocated(request, blocks(range(10, 10 + tokens // BLOCK)), tokens)
    (load,) = rig.half.next_step(a_step({}, {})).loads
    return load


def test_a_lease_lives_until_the_load_is_over(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    load = loading(rig, rig.arrive(a_request("a")))
    (part,) = load.parts
    assert (part.pages, part.hashes) == ([10, 11, 12, 13, 14, 15], hashes_of(1, 6))
    assert rig.pinned == 6
    rig.half.stepped(NO_ANSWER)
    assert rig.pinned == 6
    rig.half.stepped(answer(finished_recving={"a"}))
    assert rig.pinned == 0


def test_a_lease_of_an_aborted_request_lives_until_its_load_is_over(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    request = rig.arrive(a_request("a"))
    loading(rig, request)
    rig.half.finished(request)
    assert rig.pinned == 6
    rig.half.stepped(answer(finished_recving={"a"}))
    assert rig.pinned == 0


def test_what_ends_a_lease_that_was_not_taken_up(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    for end in ("finished", "not wanted", "expired", "preempted", "closed"):
        request = rig.arrive(a_request(end))
        assert rig.offered(request) == 96
        assert rig.pinned == 6
        if end == "finished":
            rig.half.finished(request)
        elif end == "not wanted":
            rig.half.allocated(request, blocks(range(10, 17)), 0)
        elif end == "expired":
            rig.clock.now += _OFFER_S + 1
            rig.half.next_step(a_step({}, {}))
        elif end == "preempted":
            request.num_preemptions += 1
            request.skip_reading_prefix_cache = True  # else it is offered anew
            assert rig.offered(request) == 0
        else:
            rig.half.close()
        assert rig.pinned == 0, end


def test_an_offer_that_expired_is_made_again(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    request = rig.arrive(a_request("a"))
    assert rig.offered(request) == 96
    rig.clock.now += _OFFER_S + 1
    rig.half.next_step(a_step({}, {}))
    assert rig.offered(request) == 96
    assert rig.pinned == 6


@pytest.mark.parametrize(
    "failure", [{"invalid_block_ids": {13}}, {"failed_recving": {"a"}}], ids=["page", "request"]
)
def test_a_load_that_failed_is_not_offered_again(
    pool: kvpool.Pool, failure: dict[str, Any]
) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    request = rig.arrive(a_request("a"))
    loading(rig, request)
    rig.half.stepped(answer(finished_recving={"a"}, **failure))
    assert rig.offered(request) == 0
    assert rig.pinned == 0
    assert rig.counted()["no_hit.load_failed"] == 1
    request.num_preemptions += 1  # a life of its own: the pool may be well again
    assert rig.offered(request) == 96


def test_a_failure_of_others_is_not_ours(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    loading(rig, rig.arrive(a_request("a")))
    rig.half.stepped(answer(finished_recving={"a"}, invalid_block_ids={99}))
    assert "no_hit.load_failed" not in rig.counted()


def test_a_load_after_a_fault_of_ours_fails(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.half.lost(rig.arrive(a_request("a")), blocks([4, 0, 6]))
    (load,) = rig.half.next_step(a_step({}, {})).loads
    assert [(part.pages, part.hashes) for part in load.parts] == [([4, 6], [])]


# --- threads -------------------------------------------------------------------------------------


def test_a_pool_elsewhere_is_asked_on_a_thread_and_not_pinned(pool: kvpool.Pool) -> None:
    rig = Rig(pool, shares_memory=False)
    rig.store(hashes_of(1, 6))
    request = rig.arrive(a_request("a"))
    assert rig.half.matched(request, 0) == (None, False)
    assert rig.offered(request) == 96
    assert rig.pinned == 0


def test_blocks_of_a_prefill_engine_are_waited_for(pool: kvpool.Pool) -> None:
    rig = Rig(pool, ranks=2, extra={"wait_s": 60})
    params = {"kvpool_blocks": 4, "kvpool_namespace": rig.half._ranks.name}
    request = rig.arrive(a_request("a", kv_transfer_params=params))
    assert rig.half.matched(request, 0) == (None, False)
    rig.store(hashes_of(1, 3))
    assert rig.half.matched(request, 0) == (None, False)
    for space in rig.spaces():
        space.put(space.fold(hashes_of(1, 4)[3:]), bytes(4096))
    assert rig.offered(request) == 64


def test_blocks_that_never_come_are_waited_for_so_long(pool: kvpool.Pool) -> None:
    rig = Rig(pool, extra={"wait_s": 0.05})
    request = rig.arrive(a_request("a", kv_transfer_params={"kvpool_blocks": 4}))
    rig.store(hashes_of(1, 2))
    assert rig.offered(request) == 32


@pytest.mark.parametrize(
    "params",
    [
        {"kvpool_blocks": 4, "kvpool_namespace": "another"},
        {"kvpool_blocks": -1},
        {"kvpool_blocks": True},
        {"kvpool_blocks": "4"},
        {"kvpool_blocks": None},
        {},
        [],
        "kvpool_blocks",
    ],
)
def test_params_that_mean_nothing_here_are_no_reason_to_wait(
    pool: kvpool.Pool, params: Any
) -> None:
    rig = Rig(pool, extra={"wait_s": 3600})
    assert rig.offered(rig.arrive(a_request("a", kv_transfer_params=params))) == 0


def test_more_blocks_than_the_prompt_has_are_not_waited_for(pool: kvpool.Pool) -> None:
    rig = Rig(pool, extra={"wait_s": 3600})
    rig.store(hashes_of(1, 6))
    request = rig.arrive(a_request("a", kv_transfer_params={"kvpool_blocks": 10**9}))
    assert rig.offered(request) == 96


def test_an_answer_that_is_late_is_a_miss_and_leaves_nothing_pinned(
    pool: kvpool.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pool, extra={"load_timeout_s": 5})
    rig.store(hashes_of(1, 6))
    goes_on, found = threading.Event(), threading.Event()
    real = rig.half._find

    def slow(*given: Any) -> Any:
        assert goes_on.wait(60)
        try:
            return real(*given)
        finally:
            found.set()

    monkeypatch.setattr(rig.half, "_find", slow)
    request = rig.arrive(a_request("a", kv_transfer_params={"kvpool_blocks": 1}))
    assert rig.half.matched(request, 0) == (None, False)
    asked = rig.half._requests["a"].asked
    assert asked is not None
    rig.clock.now += 5 + rig.options.wait_s + 1
    assert rig.half.matched(request, 0) == (0, False)
    assert rig.counted()["no_hit.late"] == 1
    goes_on.set()
    assert found.wait(60)
    rig.half._waiters.shutdown(wait=True)  # until what follows a lookup has run, too
    assert asked.result()._leases == []
    assert rig.pinned == 0


# --- saves ---------------------------------------------------------------------------------------


def saved(step: Any) -> list[tuple[int, list[int], list[bytes]]]:
    return [
        (part.group, part.pages, [bytes(h[:2]) for h in part.hashes])
        for save in step.saves
        for part in save.parts
    ]


def shorts(first: int, last: int) -> list[bytes]:
    return [bytes([1, at]) for at in range(first, last)]


def test_blocks_are_saved_in_the_step_that_fills_them(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    request = rig.arrive(a_request("a", tokens=100))
    assert rig.offered(request) == 0
    tables = {"a": [list(range(50, 57))]}
    seen = []
    for tokens in (40, 7, 1, 52):
        seen.append(saved(rig.half.next_step(a_step({"a": tokens}, tables))))
        request.num_computed_tokens += tokens
    assert seen == [
        [(0, [50, 51], shorts(0, 2))],
        [],
        [(0, [52], shorts(2, 3))],
        [(0, [53, 54, 55], shorts(3, 6))],
    ]


def test_decode_is_saved_too_unless_only_prompts_are(pool: kvpool.Pool) -> None:
    for saves, expected in (("all", [(0, [51], shorts(1, 2))]), ("prompt", []), ("none", [])):
        rig = Rig(pool, saves=saves)
        request = rig.arrive(a_request("a", tokens=33, num_prompt_tokens=20))
        rig.offered(request)
        rig.half.next_step(a_step({"a": 20}, {"a": [[50, 51, 52]]}))
        request.num_computed_tokens = 20
        assert saved(rig.half.next_step(a_step({"a": 12}, {"a": [[50, 51, 52]]}))) == expected


def test_a_block_whose_tokens_are_not_all_known_waits(pool: kvpool.Pool) -> None:
    """Drafts, or steps scheduled ahead: tokens are computed that have no hash yet."""
    rig = Rig(pool)
    request = rig.arrive(a_request("a", tokens=40))
    rig.offered(request)
    step = rig.half.next_step(a_step({"a": 48}, {"a": [[50, 51, 52]]}))
    assert saved(step) == [(0, [50, 51], shorts(0, 2))]


def test_what_the_pool_has_is_not_saved_and_what_it_lost_is(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 2))
    request = rig.arrive(a_request("a", tokens=100))
    assert rig.offered(request, local=64) == 0  # the engine has four blocks, the pool two
    request.num_computed_tokens = 64
    step = rig.half.next_step(a_step({"a": 36}, {"a": [list(range(50, 57))]}))
    assert saved(step) == [(0, [52, 53, 54, 55], shorts(2, 6))]
    (save,) = step.saves
    assert save.parts[0].parent == hashes_of(1, 2)[1]


def test_what_the_engine_has_in_full_is_not_copied_again(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    request = rig.arrive(a_request("a", tokens=100))
    assert rig.offered(request, local=96) == 0
    request.num_computed_tokens = 96
    assert saved(rig.half.next_step(a_step({"a": 4}, {"a": [list(range(50, 57))]}))) == []


def test_after_a_preemption_nothing_is_saved_twice(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    request = rig.arrive(a_request("a", tokens=100))
    rig.offered(request)
    rig.half.next_step(a_step({"a": 64}, {"a": [[50, 51, 52, 53]]}))
    rig.store(hashes_of(1, 4))
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert rig.offered(request) == 64
    rig.half.allocated(request, blocks([60, 61, 62, 63]), 64)
    rig.half.next_step(a_step({}, {}))
    rig.half.stepped(answer(finished_recving={"a"}))
    request.num_computed_tokens = 64
    step = rig.half.next_step(a_step({"a": 36}, {"a": [[60, 61, 62, 63, 64, 65, 66]]}))
    assert saved(step) == [(0, [64, 65], shorts(4, 6))]


def test_pages_of_a_window(pool: kvpool.Pool) -> None:
    rig = Rig(pool, groups=(FULL, WINDOW))
    request = rig.arrive(a_request("a", tokens=100))
    rig.offered(request)
    table = [[50, 51, 52, 53, 54, 55], [0, 0, 72, 73, 74, 75]]
    step = rig.half.next_step(a_step({"a": 96}, {"a": table}))
    assert saved(step) == [
        (0, [50, 51, 52, 53, 54, 55], shorts(0, 6)),
        (1, [72, 73, 74, 75], shorts(2, 6)),
    ]
    assert [part.parent for part in step.saves[0].parts] == [None, hashes_of(1, 2)[1]]
    rig.store(hashes_of(1, 6))
    other = rig.arrive(a_request("b", tokens=100))
    assert rig.offered(other) == 96
    assert rig.pinned == 6 + 2
    # The engine took a page that no token sees any more: it is loaded like the others.
    rig.half.allocated(other, blocks([1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16]), 96)
    (load,) = rig.half.next_step(a_step({}, {})).loads
    assert [part.pages for part in load.parts] == [[1, 2, 3, 4, 5, 6], [14, 15, 16]]
    assert load.parts[1].hashes == hashes_of(1, 6)[3:]


def test_a_window_keeps_the_last_token_to_be_computed(pool: kvpool.Pool) -> None:
    """vLLM would go back by a token, whose window begins a token, and maybe a block, earlier."""
    rig = Rig(pool, groups=(FULL, WINDOW))
    rig.store(hashes_of(1, 6))
    assert rig.offered(rig.arrive(a_request("a", tokens=96))) == 80


def test_what_a_decode_engine_is_told(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    request = rig.arrive(a_request("a", tokens=70, num_prompt_tokens=50))
    rig.offered(request)
    rig.half.next_step(a_step({"a": 70}, {"a": [[50, 51, 52, 53, 54]]}))
    told = rig.half.finished(request)
    assert told == {"kvpool_blocks": 3, "kvpool_namespace": rig.half._ranks.name}
    assert rig.half.finished(request) is None


def test_events_name_what_every_rank_has_stored(pool: kvpool.Pool) -> None:
    rig = Rig(pool, ranks=2, publishes_events=True)
    request = rig.arrive(a_request("a", tokens=100))
    rig.offered(request)
    (save,) = rig.half.next_step(a_step({"a": 40}, {"a": [[50, 51, 52]]})).saves
    assert save.number == 1
    events = rig.half.events
    rig.half.stepped(answer(kv_connector_worker_meta=Report(stored={1: 1})))
    assert events._ready == []
    rig.half.stepped(answer(kv_connector_worker_meta=Report(stored={1: 1})))
    (ready,) = events._ready
    assert (ready.tokens, ready.block_tokens) == (list(range(32)), 16)


def test_after_a_reset_an_engine_is_alone(pool: kvpool.Pool) -> None:
    rig, other = Rig(pool, ranks=2), Rig(pool, ranks=2)
    rig.store(hashes_of(1, 6))
    running, waiting = rig.arrive(a_request("running", prompt=2)), rig.arrive(a_request("waiting"))
    assert rig.offered(running) == 0
    assert rig.offered(waiting) == 96
    running.num_computed_tokens = 20
    rig.half.reset()
    assert rig.pinned == 0
    assert rig.offered(waiting) == 0
    # What was computed with the old weights is not stored, until it is computed anew.
    table = {"running": [list(range(50, 57))]}
    step = rig.half.next_step(a_step({"running": 80}, table))
    assert (step.saves, step.generation) == ([], 1)
    running.num_preemptions, running.num_computed_tokens = 1, 0
    assert rig.offered(running) == 0
    (save,) = rig.half.next_step(a_step({"running": 100}, table)).saves
    assert save.parts[0].pages == list(range(50, 56))
    # Others keep what they have. What is stored now is found by this engine, until the next reset.
    assert other.offered(other.arrive(a_request("a"))) == 96
    rig.store_own(hashes_of(3, 6))
    own, theirs = a_request("own", prompt=3), a_request("theirs", prompt=3)
    assert rig.offered(rig.arrive(own)) == 96
    assert other.offered(other.arrive(theirs)) == 0
    rig.half.reset()
    assert rig.offered(rig.arrive(a_request("again", prompt=3))) == 0


def test_a_reset_may_mean_nothing(pool: kvpool.Pool) -> None:
    rig = Rig(pool, extra={"on_reset": "keep"})
    rig.store(hashes_of(1, 6))
    rig.half.reset()
    assert rig.offered(rig.arrive(a_request("a"))) == 96


def test_a_reset_needs_no_node() -> None:
    rig = Rig(None)
    rig.half.reset()
    assert rig.offered(rig.arrive(a_request("a"))) == 0


def test_more_pins_than_are_quick_are_made_on_a_thread(pool: kvpool.Pool) -> None:
    rig = Rig(pool, ranks=3)
    rig.store(hashes_of(1, 60))
    first = rig.arrive(a_request("a", tokens=961))
    assert rig.half.matched(first, 0) == (960, True)
    assert rig.pinned == 180
    second = rig.arrive(a_request("b", tokens=961))
    assert rig.half.matched(second, 0) == (None, False)
    assert rig.offered(second) == 960


def test_a_prefix_ends_where_blocks_of_all_groups_end(pool: kvpool.Pool) -> None:
    assert unit_of((GroupShape(32, 2, None), GroupShape(48, 3, None))) == 96


def test_a_load_that_takes_longer_than_to_compute(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    rig.half.pace.computed(1000, 0.1)  # so that 96 tokens take 10 ms
    rig.half.pace.loaded(1 << 20, 1.0)  # a megabyte per second: 24 KiB take 23 ms
    offers = [rig.offered(rig.arrive(a_request(f"{at}"))) for at in range(32)]
    assert offers.count(96) == 2  # tried now and then, so that a better pool is noticed
    assert rig.counted()["no_hit.not_worth"] == 30
    rig.half.pace.loaded(1 << 30, 0.001)
    assert rig.offered(rig.arrive(a_request("later"))) == 96
