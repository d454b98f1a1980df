"""Memory that goes between the nodes of tenants, look by look; the looks are the test's own."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool import BadArgument, _core
from kvpool.serve_log import open_log
from kvpool.tenants.sharing import IDLE_S, LOOK_S, Sharing
from kvpool.tenants.tenant import Tenant
from tests.daemons import BookServer
from tests.pools import key
from tests.tenants import configuration, planned

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
IDLE_LOOKS = int(IDLE_S / LOOK_S)


class Crowd:
    """Two tenants with real nodes, 16 MiB each, of which each has 4 for certain."""

    def __init__(self, folder: Path, **flags: str) -> None:
        lines = 'dram_min = "4MiB"'
        plan = planned(configuration(folder, {"a": lines, "b": lines}), **flags)
        self.tenants = {
            name: Tenant(name, _core.Node.open(**each.node), BookServer(), each.limits)
            for name, each in plan.tenants.items()
        }
        self.sharing = Sharing(plan, self.tenants, open_log("text", "debug", io.StringIO()))
        self._spaces = {
            name: _core.Space(each.node.open_space(bytes(16), BLOCK_BYTES))
            for name, each in self.tenants.items()
        }
        self._next = 0

    def put(self, who: str, count: int) -> None:
        block = np.zeros(BLOCK_BYTES, np.uint8)
        for _ in range(count):
            self._next += 1
            self._spaces[who].put_codes([key(self._next)], block, None, None, None, 5.0)

    def get(self, who: str) -> None:
        self._spaces[who].get_into([key(1)], bytearray(BLOCK_BYTES))

    def limits(self) -> tuple[int, int]:
        """In MiB."""
        a, b = (each.node.stats()["bytes_limit"] // MIB for each in self.tenants.values())
        return a, b

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.sharing.look()
            assert sum(self.limits()) * MIB <= self.sharing.budget


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    made = Crowd(tmp_path, dram="32MiB", evict_ahead="0", prefault="off", huge_pages="false")
    yield made
    for each in made.tenants.values():
        each.node.check()
        each.node.close(0)


def test_nobody_is_touched_while_nobody_lacks_anything(crowd: Crowd) -> None:
    crowd.put("a", 100)
    crowd.look(3 * IDLE_LOOKS)
    assert crowd.limits() == (16, 16)


def test_one_burst_moves_nothing_and_a_second_does(crowd: Crowd) -> None:
    crowd.look()
    crowd.put("a", 400)
    crowd.look(2)
    assert crowd.limits() == (16, 16)
    for _ in range(3):
        crowd.put("a", 50)
        crowd.look()
    assert crowd.limits()[0] > 16


def test_who_uses_its_share_keeps_it_until_it_has_been_left_for_long(crowd: Crowd) -> None:
    crowd.put("b", 400)
    for _ in range(IDLE_LOOKS - 2):
        crowd.put("a", 50)
        crowd.get("b")
        crowd.look()
    assert crowd.limits() == (16, 16)
    for _ in range(IDLE_LOOKS + 20):
        crowd.put("a", 50)
        crowd.look()
    assert crowd.limits() == (28, 4)


def test_two_that_want_all_of_it_have_half_each_and_rest(crowd: Crowd) -> None:
    for _ in range(20):
        crowd.put("a", 50)
        crowd.look()
    assert crowd.limits()[0] > 20
    for _ in range(20):
        crowd.put("a", 50)
        crowd.put("b", 50)
        crowd.look()
    assert crowd.limits() == (16, 16)
    for _ in range(10):
        crowd.put("a", 50)
        crowd.put("b", 50)
        crowd.look()
        assert crowd.limits() == (16, 16)


def test_a_smaller_budget_comes_with_the_next_look(crowd: Crowd) -> None:
    crowd.put("a", 400)
    crowd.put("b", 400)
    committed = crowd.sharing.resize(16 * MIB, 5.0)
    assert sum(crowd.limits()) <= 16
    assert committed <= 16 * MIB
    for budget, told in ((7 * MIB, "have for certain"), (1 << 40, "dram_max")):
        with pytest.raises(BadArgument, match=told):
            crowd.sharing.resize(budget, 0.0)
    assert crowd.sharing.budget == 16 * MIB


def test_sealed_arenas_stay_as_they_are(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, dram="32MiB", arena="sealed", prefault="off", huge_pages="false")
    for _ in range(5):
        crowd.put("a", 300)
        crowd.look()
    assert crowd.limits() == (16, 16)
    with pytest.raises(BadArgument, match="sealed"):
        crowd.sharing.resize(64 * MIB, 0.0)
    for each in crowd.tenants.values():
        each.node.close(0)
