"""What the core tells Python about single blocks and about the sizes a pool could have."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType, PoolClosed, Put, Reason, _core
from kvpool.observe.curve import of_counts, table
from tests.pools import got, is_there, key, keys, opaque, opened, payload, payloads
from tests.tiers import on_tier

CURVE = {
    "references",
    "sampled",
    "samples",
    "rate",
    "seen_bytes",
    "cold",
    "bounds_bytes",
    "counts",
}


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened(max_blocks=8) as pool:
        yield pool.namespace(opaque())


def number_of(space: kvpool.Namespace) -> int:
    return space.number


def explained(space: kvpool.Namespace, wanted: list[bytes]) -> list[dict[str, Any]]:
    return list(space.pool._node.explain(number_of(space), wanted))


def test_a_block_that_is_here_says_where_and_how_warm(space: kvpool.Namespace) -> None:
    some = keys(range(3))
    space.put(some, payloads(some))
    with space.view(some[:1]):
        first, second, missing = explained(space, [*some[:2], key(99)])
    assert set(first) == {
        "tiers",
        "heat",
        "temperature",
        "idle_s",
        "pins",
        "gone",
        "ghost_heat",
    }
    assert (first["tiers"], first["pins"], first["gone"], first["ghost_heat"]) == (1, 1, None, None)
    assert second["pins"] == 0
    assert first["heat"] > second["heat"] > 0
    assert 0 <= second["idle_s"] < 60
    assert second["temperature"] == space.temperature(some[1])
    assert (missing["tiers"], missing["gone"]) == (0, None)


def test_a_block_that_left_says_why(space: kvpool.Namespace) -> None:
    some = keys(range(12))
    for each in some:
        space.put([each], payload(each))
    (evicted,) = explained(space, some[:1])
    assert evicted["tiers"] == 0
    assert evicted["gone"]["why"] == "evicted"
    assert evicted["gone"]["status"] is None
    assert evicted["gone"]["ssd"] is False
    assert 0 <= evicted["gone"]["ago_s"] < 60
    assert evicted["ghost_heat"] == pytest.approx(evicted["gone"]["heat"], rel=0.5)
    assert space.remove(some[11:]) == 1
    assert explained(space, some[11:])[0]["gone"]["why"] == "removed"
    here = [each for each in some if is_there(space, each)]
    space.drop()
    assert {each["gone"]["why"] for each in explained(space, here)} == {"dropped"}


def test_a_put_that_was_refused_is_remembered(space: kvpool.Namespace) -> None:
    held, more = keys(range(8)), keys(range(100, 102))
    space.put(held, payloads(held))
    with space.view(held):
        assert space.put(more, payloads(more)).reason == Reason.POOL_PINNED
    refused, behind = explained(space, more)
    assert refused["gone"]["why"] == behind["gone"]["why"] == "refused"
    assert refused["gone"]["status"] == Reason.POOL_PINNED
    assert behind["gone"]["status"] == Reason.CHAIN_BROKEN
    assert Put.PRESENT < Reason.POOL_PINNED  # one numbering


def test_a_block_on_disk_says_so(tmp_path: Path) -> None:
    some = keys(range(4))
    with on_tier(tmp_path / "tier") as pool:
        space = pool.namespace(opaque())
        for each in some:
            space.put([each], payload(each))
        assert {each["tiers"] for each in explained(space, some)} == {3}
    with on_tier(tmp_path / "tier") as pool:
        space = pool.namespace(opaque())
        assert {each["tiers"] for each in explained(space, some)} == {2}


def test_the_hottest_prefixes_come_first() -> None:
    with opened() as pool:
        space = pool.namespace(opaque())
        prompt, hot, cool = keys(range(4)), keys(range(10, 12)), keys(range(20, 22))
        for chain in (prompt + hot, prompt + cool):
            space.put(chain, payloads(chain))
        for _ in range(20):
            assert got(space, prompt + hot) == 6
        found = pool._node.hottest(10)
        assert [each["key"] for each in found] == [hot[-1], cool[-1]]
        assert [each["depth"] for each in found] == [6, 6]
        assert {each["number"] for each in found} == {number_of(space)}
        assert {each["children"] for each in found} == {0}
        assert found[0]["heat"] > 2 * found[1]["heat"]
        assert len(pool._node.hottest(1)) == 1


def test_the_curve_of_a_pool_says_what_more_memory_would_give() -> None:
    # 300 blocks in turn through a pool of 128: it never hits, and twice to three times it would.
    with opened("2MiB", max_blocks=128) as pool:
        space = pool.namespace(opaque(block_bytes=16384))
        other = pool.namespace(opaque("other"))
        some = keys(range(300))
        for _ in range(6):
            for each in some:
                if not got(space, [each]):
                    space.put([each], payload(each, 16384))
        other.put(some[:5], payloads(some[:5]))
        told = pool._node.reuse()
    assert set(told["all"]) == CURVE
    assert set(told["spaces"]) == {number_of(space), number_of(other)}
    assert told["bytes"] <= 4 << 20
    curve = of_counts(told["spaces"][number_of(space)])
    assert curve.references == pytest.approx(1800, rel=0.02)  # a little fades meanwhile
    assert curve.cold == pytest.approx(300, rel=0.02)
    made = table(curve, 2 << 20)
    assert [round(row.hit, 2) for row in made.rows[:4]] == [0, 0, 0, 0]
    assert made.rows[4].hit == pytest.approx(5 / 6, abs=0.01)


def test_reuse_distances_of_a_stream_of_ids() -> None:
    exact = _core.Reuse(exact=True)
    for dtype in (np.int64, np.uint64):
        exact.add(np.arange(1000, dtype=dtype), 4096)
    curve = exact.curve()
    assert set(curve) == CURVE
    assert (curve["references"], curve["cold"], curve["rate"]) == (2000, 1000, 1)
    assert sum(curve["counts"]) == 1000
    # Each was used a thousand blocks ago, itself included.
    assert curve["counts"][-1] == 1000
    assert curve["bounds_bytes"][-2] < 1000 * 4096 <= curve["bounds_bytes"][-1]
    fading = _core.Reuse(samples=64, half_life_s=10.0)
    before = fading.bytes
    fading.add(np.arange(5000), 4096, now=0.0)
    assert fading.curve(now=10.0)["references"] == pytest.approx(2500)
    assert fading.curve(now=10.0)["samples"] <= 64
    assert fading.bytes == before


def test_wrong_arguments_are_refused(space: kvpool.Namespace) -> None:
    node = space.pool._node
    with pytest.raises(BadArgument, match="no namespace"):
        node.explain(7, [key(1)])
    with pytest.raises((BadArgument, BadType)):
        node.explain(number_of(space), [b"short"])
    for count in (0, 1001):
        with pytest.raises(BadArgument, match=r"1\.\.1000"):
            node.hottest(count)
    for samples in (0, 63, 100):
        with pytest.raises(BadArgument, match="power of two"):
            _core.Reuse(samples=samples)
    with pytest.raises(BadArgument, match="half_life_s"):
        _core.Reuse(half_life_s=-1.0)
    reuse = _core.Reuse()
    with pytest.raises(BadArgument, match="block_bytes"):
        reuse.add(np.arange(3), 0)
    with pytest.raises(BadArgument, match="now"):
        reuse.add(np.arange(3), 1, now=float("nan"))
    with pytest.raises(TypeError):
        reuse.add(np.arange(3.0), 1)  # type: ignore[arg-type]
    space.pool.close()
    for call in (node.reuse, lambda: node.hottest(1), lambda: node.explain(0, [])):
        with pytest.raises(PoolClosed):
            call()


def test_who_asks_is_in_nobodys_way() -> None:
    with opened("4MiB") as pool:
        space = pool.namespace(opaque())
        stop = threading.Event()

        def work() -> None:
            for first in range(0, 1 << 30, 8):
                chain = keys(range(first, first + 8))
                space.put(chain, payloads(chain))
                assert got(space, chain) == 8 or pool.stats()["evictions"]
                if stop.is_set():
                    return

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(30):
            pool._node.hottest(100)
            pool._node.reuse()
            explained(space, keys(range(50)))
        stop.set()
        thread.join()
        assert pool._node.reuse()["all"]["references"] > 0
