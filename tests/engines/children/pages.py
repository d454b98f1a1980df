"""Pages of caches in every order that vLLM has, moved for real by what moves them in a worker.

Prints one line of JSON: what became of each case, "" or a traceback. Needs vLLM and torch.
"""

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvpool
from kvpool.connectors.moving import HostMover, Mover, StagedMover
from kvpool.connectors.options import read_options
from kvpool.connectors.pages import PagedGroup, read_groups
from kvpool.connectors.save_buffer import SaveBuffer
from kvpool.connectors.self_test import SelfTestFailed, check_round_trip
from kvpool.connectors.vllm_messages import Load, Part, Save, Step
from kvpool.connectors.vllm_worker import WorkerHalf

BLOCKS, LAYERS, HEADS, STATES, CONTENT = 8, 3, 2, 4, 6
NAMES = [f"model.layers.{at}.attn" for at in range(LAYERS)]
LAYOUTS = [layout.name for layout in KVCacheLayout]
WAIT_S = 60.0

cases: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    cases[function.__name__] = function
    return function


def for_layouts(function: Callable[[str], None]) -> None:
    for name in LAYOUTS:
        cases[f"{function.__name__}[{name}]"] = lambda name=name: function(name)


def caches_of(layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """One storage for all layers, in that order, seen as vLLM shows it; random bytes."""
    logical = (LAYERS, BLOCKS, HEADS, STATES, CONTENT)
    order = KVCacheLayout[layout].stride_order
    physical = [logical[axis] for axis in order]
    count = int(np.prod(physical))
    raw = np.random.default_rng(7).integers(0, 256, count * dtype.itemsize, np.uint8)
    storage = torch.from_numpy(raw).view(dtype).view(physical)
    seen = storage.permute([order.index(axis) for axis in range(5)])
    return {name: seen[at] for at, name in enumerate(NAMES)}


def config_of(names: list[str] = NAMES, blocks: int = BLOCKS) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=STATES, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def manifest_of(group: PagedGroup) -> kvpool.Manifest:
    return kvpool.Manifest(
        model="pages",
        layout="opaque",
        block_tokens=group.facts.block_tokens,
        block_bytes=group.facts.block_bytes,
    )


def in_memory_order(view: torch.Tensor, block: int) -> bytes:
    """The elements of a block by where they lie: told by strides alone, one by one."""
    row = view[block]
    places = {}
    for index in np.ndindex(*row.shape):
        offset = sum(i * step for i, step in zip(index, row.stride(), strict=True))
        places[offset] = row[index].view(1).view(torch.uint8).numpy().tobytes()
    return b"".join(places[offset] for offset in sorted(places))


def bytes_of(view: torch.Tensor, block: int) -> bytes:
    return bytes(view[block].contiguous().view(torch.uint8).numpy().tobytes())


def movers(group: PagedGroup) -> Iterator[Mover]:
    yield HostMover(group, manifest_of(group))
    yield StagedMover(group, manifest_of(group))


def gathers_the_bytes_of_its_pages(layout: str) -> None:
    caches = caches_of(layout)
    (group,) = read_groups(caches, config_of())
    for mover in movers(group):
        out = [np.zeros(group.facts.block_bytes, np.uint8) for _ in range(2)]
        mover.gather([5, 1], out).wait()
        mover.fence()
        for block, got in zip([5, 1], out, strict=True):
            wanted = b"".join(in_memory_order(caches[name], block) for name in NAMES)
            assert got.tobytes() == wanted, type(mover).__name__


def loads_what_was_gathered_and_nothing_else(layout: str) -> None:
    for at in range(2):
        source, target = caches_of(layout), caches_of(layout)
        for view in target.values():
            view.zero_()
        (out_group,) = read_groups(source, config_of())
        (in_group,) = read_groups(target, config_of())
        mover, other = list(movers(out_group))[at], list(movers(in_group))[at]
        keys = [bytes([7, at]) * 8 for at in range(3)]
        with kvpool.open(dram="64MiB") as pool:
            space = pool.namespace(manifest_of(out_group))
            block = np.empty((3, out_group.facts.block_bytes), np.uint8)
            mover.gather([1, 2, 3], list(block)).wait()
            assert space.put(keys, block).stored == 3
            assert other.load(space, [6, 0, 4], keys) == 3
        for name in NAMES:
            for page, was in {6: 1, 0: 2, 4: 3}.items():
                assert bytes_of(target[name], page) == bytes_of(source[name], was), name
            for page in (1, 2, 3, 5, 7):
                assert not any(bytes_of(target[name], page)), (name, page)


for_layouts(gathers_the_bytes_of_its_pages)
for_layouts(loads_what_was_gathered_and_nothing_else)


@case
def two_engines_with_other_orders_are_told_apart() -> None:
    texts = {name: read_groups(caches_of(name), config_of())[0].facts.layout for name in LAYOUTS}
    # Which of layers and blocks comes first changes no page.
    assert texts["LBHNC"] == texts["BLHNC"]
    assert texts["LBNHC"] == texts["BLNHC"]
    assert texts["LBHNC"] != texts["LBNHC"]


@case
def the_number_of_blocks_does_not_count() -> None:
    whole = caches_of("LBHNC")
    half = {name: view[:4] for name, view in whole.items()}
    one = read_groups(whole, config_of())[0].facts
    assert read_groups(half, config_of(blocks=4))[0].facts == one


@case
def blocks_that_a_backend_cuts_are_whole_again() -> None:
    caches = caches_of("LBHNC")
    group = read_groups(caches, config_of(blocks=4))[0]
    out = np.zeros(group.facts.block_bytes, np.uint8)
    HostMover(group, manifest_of(group)).gather([3], [out]).wait()
    wanted = [in_memory_order(caches[name], block) for name in NAMES for block in (6, 7)]
    assert out.tobytes() == b"".join(wanted)
    check_round_trip(group, manifest_of(group), HostMover(group, manifest_of(group)))


@case
def layers_that_share_a_cache_are_kept_once() -> None:
    caches = caches_of("LBHNC")
    shared = {**caches, "model.layers.9.attn": caches[NAMES[0]]}
    names = [*NAMES, "model.layers.9.attn"]
    assert read_groups(shared, config_of(names))[0].facts.layers == tuple(NAMES)


def refused(caches: dict[str, Any], config: KVCacheConfig, text: str) -> None:
    told = ""
    try:
        read_groups(caches, config)
    except kvpool.BadArgument as error:
        told = str(error)
    assert text in told, told or "it was not refused"


@case
def what_is_no_pages_is_refused() -> None:
    caches = caches_of("LBHNC")
    first = NAMES[0]
    refused({**caches, first: [caches[first]]}, config_of(), "not one tensor")
    refused({**caches, first: caches[first][:7]}, config_of(), "7 rows for 8 blocks")
    refused({**caches, first: caches[first].flatten()}, config_of(), "has shape")
    refused({first: caches[first]}, config_of(), "registered no cache")
    overlapping = torch.zeros(4096).as_strided((BLOCKS, HEADS, STATES, CONTENT), (6, 6, 6, 1))
    refused({**caches, first: overlapping}, config_of(), "overlap")
    held = config_of()
    held.kv_cache_groups[0].enable_kv_transfer = False
    refused(caches, held, "not to be transferred")


@case
def a_self_test_leaves_the_pages_as_they_were() -> None:
    for name in LAYOUTS:
        caches = caches_of(name)
        (group,) = read_groups(caches, config_of())
        for mover in movers(group):
            check_round_trip(group, manifest_of(group), mover)
        for layer, view in caches_of(name).items():
            assert all(bytes_of(view, at) == bytes_of(caches[layer], at) for at in range(BLOCKS))


def fault_of(group: PagedGroup, mover: Mover) -> str:
    """What the self-test says."""
    try:
        check_round_trip(group, manifest_of(group), mover)
    except SelfTestFailed as error:
        return str(error)
    return ""


@case
def a_self_test_finds_pages_that_are_elsewhere() -> None:
    caches = caches_of("LBHNC")
    (group,) = read_groups(caches, config_of())
    wrong = [tensor.clone() for tensor in group.tensors]  # the mover works on other memory
    moved = PagedGroup(group.facts, tuple(wrong), group.views, group.blocks)
    assert NAMES[0] in fault_of(group, HostMover(moved, manifest_of(group)))


@case
def a_self_test_finds_layers_that_lie_in_one_place() -> None:
    whole = torch.zeros((BLOCKS + 1) * STATES * CONTENT * HEADS)
    size = STATES * CONTENT * HEADS
    shape = (BLOCKS, HEADS, STATES, CONTENT)
    caches = {
        NAMES[0]: whole[: BLOCKS * size].view(shape),
        NAMES[1]: whole[size // 2 : size // 2 + BLOCKS * size].view(shape),
    }
    (group,) = read_groups(caches, config_of(NAMES[:2]))
    assert fault_of(group, HostMover(group, manifest_of(group)))


# --- a worker's half -----------------------------------------------------------------------------


class Attached:
    """To a pool of this process."""

    shares_memory = True

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def space(self, manifest: kvpool.Manifest) -> Any:
        return None if self.pool is None else self.pool.namespace(manifest)

    def close(self) -> None:
        """The pool is the case's."""


class Worker(WorkerHalf):
    """With caches of ours; the rest is as in an engine."""

    def __init__(self, pool: Any, extra: dict[str, Any] | None = None) -> None:
        super().__init__(None, config_of(), read_options(extra or {}), Attached(pool))
        self.caches = caches_of("LBHNC")
        self._groups = read_groups(self.caches, self._caches)
        self._manifests = [manifest_of(group) for group in self._groups]
        self._movers = [HostMover(self._groups[0], self._manifests[0])]
        size = self._groups[0].facts.block_bytes
        self._buffer = SaveBuffer(4096 * 4, size)
        self._start()

    def ended(self) -> Any:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            finished = self.finished_loads(is_idle=True)
            if finished.requests:
                return finished
        raise AssertionError("no load ended")

    def stored(self, blocks: int) -> dict[str, float]:
        until, counts = time.monotonic() + WAIT_S, dict[str, float]()
        while time.monotonic() < until:
            for name, amount in self.counts.take().items():
                counts[name] = counts.get(name, 0) + amount
            told = ("saved_blocks", "present_blocks")
            lost = sum(value for name, value in counts.items() if name.startswith("unsaved"))
            if sum(counts.get(name, 0) for name in told) + lost >= blocks:
                return counts
            time.sleep(0.001)
        raise AssertionError(f"not stored: {counts}")


def hashes(count: int, first: int = 0) -> list[bytes]:
    return [bytes([3, at]) * 16 for at in range(first, first + count)]


def step(*, saves: list[Part] = [], loads: list[Part] = [], name: str = "a") -> Step:  # noqa: B006
    return Step(
        [Load(name, "", loads)] if loads else [],
        [Save(5, "", saves)] if saves else [],
    )


@case
def a_worker_stores_and_loads() -> None:
    with kvpool.open(dram="64MiB") as pool:
        worker = Worker(pool)
        worker.begin_saves(step(saves=[Part(0, [1, 2, 3], hashes(3))]))
        wanted = {
            name: [bytes_of(view, at) for at in (1, 2, 3)] for name, view in worker.caches.items()
        }
        for view in worker.caches.values():
            view[1:4] = 0  # pages are the engine's again at once
        assert worker.stored(3)["saved_blocks"] == 3
        report = worker.take_report()
        assert report is not None
        assert report.stored == {5: 1}
        worker.begin_loads(step(loads=[Part(0, [7, 5, 6], hashes(3))]))
        finished = worker.ended()
        assert (finished.requests, finished.failed_pages) == ({"a"}, set())
        for name, view in worker.caches.items():
            assert [bytes_of(view, at) for at in (7, 5, 6)] == wanted[name]
        worker.close()


@case
def a_worker_names_what_it_could_not_load() -> None:
    with kvpool.open(dram="64MiB") as pool:
        worker = Worker(pool)
        worker.begin_saves(step(saves=[Part(0, [1, 2], hashes(2))]))
        worker.stored(2)
        worker.begin_loads(step(loads=[Part(0, [4, 5, 6, 7], hashes(4))]))
        assert worker.ended().failed_pages == {6, 7}
        worker.begin_loads(step(loads=[Part(0, [4, 5], [])]))  # a fault of the scheduler's half
        assert worker.ended().failed_pages == {4, 5}
        worker.begin_loads(Step([Load("empty", "", [])], []))
        assert worker.ended().requests == {"empty"}
        worker.close()
    worker = Worker(None)
    worker.begin_loads(step(loads=[Part(0, [4, 5], hashes(2))]))
    assert worker.ended().failed_pages == {4, 5}
    worker.begin_saves(step(saves=[Part(0, [1, 2], hashes(2))]))
    assert worker.stored(2)["unsaved_blocks.no_node"] == 2
    worker.close()


@case
def a_full_buffer_drops_what_does_not_fit() -> None:
    with kvpool.open(dram="64MiB") as pool:
        worker = Worker(pool)
        assert worker._buffer is not None
        held = worker._buffer.take(3)
        worker.begin_saves(step(saves=[Part(0, [1, 2, 3], hashes(3))]))
        counts = worker.stored(3)
        assert counts["unsaved_blocks.backlog"] >= 1
        assert counts.get("saved_blocks", 0) >= 1
        worker._buffer.give(held)
        worker.close()
        assert worker._buffer.free == 4


@case
def what_is_there_is_not_copied_again() -> None:
    with kvpool.open(dram="64MiB") as pool:
        worker = Worker(pool)
        worker.begin_saves(step(saves=[Part(0, [1, 2], hashes(2))]))
        worker.stored(2)
        worker.begin_saves(step(saves=[Part(0, [1, 2, 3], hashes(3))]))
        counts = worker.stored(3)
        assert (counts["saved_blocks"], counts["present_blocks"]) == (1, 2)
        worker.close()


class Held(HostMover):
    """Its copies are over when somebody says so."""

    def __init__(self, group: PagedGroup, manifest: kvpool.Manifest) -> None:
        super().__init__(group, manifest)
        self.over = threading.Event()

    def gather(self, pages: Any, out: Any) -> Any:
        super().gather(pages, out)
        return self

    def wait(self) -> None:
        assert self.over.wait(WAIT_S)


@case
def what_was_gathered_before_a_reset_is_stored_where_it_belongs() -> None:
    with kvpool.open(dram="64MiB") as pool:
        worker = Worker(pool)
        held = Held(worker._groups[0], worker._manifests[0])
        worker._movers = [held]
        worker.begin_saves(step(saves=[Part(0, [1, 2], hashes(2))]))
        worker.begin_saves(Step([], [Save(0, "", [Part(0, [3], hashes(1, 2))])], False, 1))
        held.over.set()
        assert worker.stored(3)["saved_blocks"] == 3
        space = pool.namespace(worker._manifests[0])
        assert space.lookup(space.fold(hashes(3))).blocks == 2
        own = Load("own", "", [Part(0, [7], hashes(1, 2))], 1)
        worker.begin_loads(Step([own], [], False, 1))
        assert worker.ended().failed_pages == set()
        worker.begin_loads(step(loads=[Part(0, [7], hashes(1, 2))]))
        assert worker.ended().failed_pages == {7}
        worker.close()


@case
def a_worker_ends_twice() -> None:
    worker = Worker(None)
    worker.close()
    worker.close()


def main() -> None:
    results = {}
    for name, function in cases.items():
        try:
            function()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
