"""What must hold of the vLLM connector where its halves meet the engine at odd moments."""

import math
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.connectors.options import read_options
from kvpool.connectors.vllm_lookup import GroupShape
from kvpool.connectors.vllm_messages import Part, Save, Step
from kvpool.connectors.vllm_requests import unit_of
from kvpool.connectors.vllm_worker import WorkerHalf
from tests.served import Served, served
from tests.vllm_fakes import (
    BLOCK,
    BLOCK_BYTES,
    FULL,
    FakeAttachment,
    Rig,
    a_request,
    a_step,
    answer,
    blocks,
    hashes_of,
    manifest,
)


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with kvpool.open(dram="64MiB") as pool:
        yield pool


def long_hashes(prompt: int, count: int) -> list[bytes]:
    return [prompt.to_bytes(2, "big") * 8 + at.to_bytes(8, "big") * 2 for at in range(count)]


# --- reset ---------------------------------------------------------------------------------------


def test_what_a_running_request_had_before_a_reset_is_not_stored_after_it(
    pool: kvpool.Pool,
) -> None:
    rig = Rig(pool)
    request = rig.arrive(a_request("a", tokens=100))
    assert rig.offered(request) == 0
    tables = {"a": [list(range(1, 9))]}
    first = rig.half.next_step(a_step({"a": 64}, tables))
    assert [len(save.parts[0].pages) for save in first.saves] == [4]
    request.num_computed_tokens = 64
    rig.half.reset()  # the weights changed, and the request runs on
    later = rig.half.next_step(a_step({"a": 36}, tables))
    assert later.saves == []


class GatedMover:
    """Copies nothing; the bytes of a block are those of its page number."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def gather(self, pages: Any, out: Any) -> Any:
        for page, block in zip(pages, out, strict=True):
            block[:] = page
        return SimpleNamespace(wait=self.open.wait)

    def load(self, space: Any, pages: Any, keys: Any) -> int:
        return int(space.lookup(keys).blocks)

    def fence(self) -> None:
        pass

    def order_loads(self) -> None:
        pass


def a_worker(pool: Any, *, extra: dict[str, Any] | None = None) -> tuple[WorkerHalf, GatedMover]:
    from kvpool.connectors.save_buffer import SaveBuffer

    options = read_options(extra or {})
    half = WorkerHalf(None, None, options, FakeAttachment(pool))  # type: ignore[arg-type]
    mover = GatedMover()
    group: Any = SimpleNamespace(facts=SimpleNamespace(block_bytes=BLOCK_BYTES))
    half._groups = [group]
    half._manifests = [manifest()]
    half._movers = [mover]
    half._buffer = SaveBuffer(1 << 20, BLOCK_BYTES)
    half._start()
    return half, mover


def test_a_save_under_way_when_the_pool_is_reset_goes_where_it_belongs(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    worker, mover = a_worker(pool)
    try:
        worker.begin_saves(Step(saves=[Save(0, "", [Part(0, [1, 2], hashes_of(1, 2))])]))
        rig.half.reset()
        mover.open.set()
        step = rig.half.next_step(a_step({}, {}))
        step.saves.append(Save(0, "", [Part(0, [3], hashes_of(1, 3)[2:], hashes_of(1, 2)[1])]))
        worker.begin_loads(step)
        worker.begin_saves(step)
    finally:
        mover.open.set()
        worker.close()  # all that was under way has ended
    (space,) = rig.spaces()
    keys = space.fold(hashes_of(1, 3))
    assert space.lookup(keys[:2]).blocks == 2
    assert space.lookup(keys[2:]).blocks == 0  # it is in a namespace of this engine alone


def test_nothing_of_before_a_reset_is_offered_after_it(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    worker, mover = a_worker(pool)
    worker.begin_saves(Step(saves=[Save(0, "", [Part(0, [1, 2], hashes_of(1, 2))])]))
    rig.half.reset()
    mover.open.set()
    worker.close()  # the engine is idle: its worker stores what it has
    assert rig.offered(rig.arrive(a_request("a"))) == 0


# --- steps ---------------------------------------------------------------------------------------


def test_a_fault_in_a_save_does_not_lose_the_loads_of_its_step(pool: kvpool.Pool) -> None:
    rig = Rig(pool)
    rig.store(hashes_of(1, 6))
    request = rig.arrive(a_request("a"))
    tokens = rig.offered(request)
    rig.half.allocated(request, blocks(range(10, 16)), tokens)
    other = rig.arrive(a_request("b", prompt=2))
    del other.block_hashes
    loads = []
    for _ in range(2):  # as connectors/vllm.py does it: a fault is an empty Step
        try:
            step = rig.half.next_step(a_step({"b": 100}, {"b": [list(range(20, 27))]}))
        except AttributeError:
            step = Step()
        loads += step.loads
    assert [load.request for load in loads] == ["a"]


def test_prefixes_end_where_blocks_of_all_groups_end() -> None:
    sizes = (32, 48)
    unit = unit_of([GroupShape(size, size // 16, None) for size in sizes])
    assert unit == math.lcm(*sizes)


def test_a_draft_models_shorter_prefix_has_its_window_in_the_pool(pool: kvpool.Pool) -> None:
    window = GroupShape(BLOCK, 1, 33)
    rig = Rig(pool, groups=(FULL, window), has_eagle=True)
    rig.store(hashes_of(1, 6))
    space = rig.spaces()[1]
    # Of the window's blocks only what a token after 96 tokens sees is left: 4 and 5.
    for at in range(4):
        assert space.remove(space.fold(hashes_of(1, 6)[at : at + 1])) == 1
    offered = rig.offered(rig.arrive(a_request("a", tokens=97)))
    first = window.first_needed(offered)
    needed = hashes_of(1, 6)[first : offered // BLOCK]
    assert space.lookup(space.fold(needed)).blocks == len(needed)


# --- pins ----------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram="256MiB", log_level="warning") as daemon:
        yield daemon


def test_a_second_lease_does_not_wait_for_a_node_that_is_stopped(daemon: Served) -> None:
    count = 200
    with daemon.connect(timeout=5.0) as pool:
        rig = Rig(pool)
        for prompt in (1, 2):
            rig.store(long_hashes(prompt, count))
        requests = [
            rig.arrive(
                a_request(str(p), tokens=count * BLOCK + 1, block_hashes=long_hashes(p, count))
            )
            for p in (1, 2)
        ]
        assert rig.offered(requests[0]) == count * BLOCK  # held until its load is over
        daemon.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            rig.half.matched(requests[1], 0)
            took_s = time.monotonic() - began
        finally:
            daemon.signal(signal.SIGCONT)
        rig.half.close()
    assert took_s < 1.0, took_s  # a request to the node takes its timeout: 5 s


def test_a_prefix_longer_than_one_may_pin_is_offered_as_far_as_it_can_be(daemon: Served) -> None:
    count = 20000  # of 4 KiB: more than a quarter of 256 MiB
    with daemon.connect(timeout=5.0) as pool:
        rig = Rig(pool)
        rig.store(long_hashes(1, count))
        request = a_request("a", tokens=0, block_hashes=long_hashes(1, count))
        request.num_tokens = request.num_prompt_tokens = count * BLOCK + 1
        rig.arrive(request)
        offered = rig.offered(request)
        counted = rig.counted()
        rig.half.close()
    assert offered > 0, counted


def test_loads_from_a_node_elsewhere_that_is_stopped_end_within_the_deadline(
    daemon: Served,
) -> None:
    with daemon.connect("tcp", timeout=1.0) as pool:
        worker, mover = a_worker(pool, extra={"load_timeout_s": 1.0})
        mover.load = lambda space, pages, keys: space.get_into(  # type: ignore[method-assign]
            keys, np.empty((len(pages), BLOCK_BYTES), np.uint8)
        )
        space = pool.namespace(manifest())
        space.put(space.fold(hashes_of(1, 4)), np.zeros(4 * BLOCK_BYTES, np.uint8))
        from kvpool.connectors.vllm_messages import Load

        loads = [Load(str(n), "", [Part(0, [1, 2], hashes_of(1, 2))]) for n in range(40)]
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        ended: set[str] = set()
        try:
            worker.begin_loads(Step(loads=loads))
            while len(ended) < len(loads) and time.monotonic() - began < 60:
                ended |= worker.finished_loads(True).requests
            took_s = time.monotonic() - began
        finally:
            daemon.signal(signal.SIGCONT)
            worker.close()
    print("took", took_s, "ended", len(ended))
    assert took_s < 10


# --- threads -------------------------------------------------------------------------------------


def test_requests_that_wait_for_another_engine_do_not_keep_others_from_being_looked_up(
    pool: kvpool.Pool,
) -> None:
    rig = Rig(pool, shares_memory=False, extra={"wait_s": 3.0})
    rig.store(hashes_of(1, 6))
    for n in range(16):
        waiting = a_request(f"w{n}", prompt=2, kv_transfer_params={"kvpool_blocks": 6})
        rig.half.matched(rig.arrive(waiting), 0)
    request = rig.arrive(a_request("a"))
    began = time.monotonic()
    assert rig.offered(request) == 96
    took_s = time.monotonic() - began
    rig.half.close()
    assert took_s < 2.0, took_s


_ = (queue, answer)
