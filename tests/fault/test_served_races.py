"""Many at once: two processes that put the same blocks, and one pool that many threads use."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvpool
from kvpool import Put, Reason
from kvpool.replay.payload import keys_of
from tests import clients
from tests.served import (
    WAIT_S,
    Blocks,
    Served,
    assert_all_comes_back,
    held,
    nobody_holds,
    served,
    wait_for,
    working,
)

CHANNELS = ("shm", "tcp")
PAIRS = (("shm", "shm"), ("shm", "tcp"), ("tcp", "tcp"))
TURNS = 60
CHAIN = 8
THREADS = 8
ROUNDS = 400


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("races")) as running:
        yield running


@pytest.fixture(params=CHANNELS)
def pool(daemon: Served, request: pytest.FixtureRequest) -> Iterator[kvpool.Pool]:
    with daemon.connect(request.param, connections=4) as connected:
        yield connected
        wait_for(lambda: nobody_holds(connected), what=f"{held(connected)} is free")
        assert_all_comes_back(connected, Blocks(connected).space)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_clients_put_the_same_keys(daemon: Served, pair: tuple[str, str]) -> None:
    """Each block is stored once; the other client is told that it is present, and reads it."""
    with daemon.connect("shm") as observer:
        before = observer.stats()
        one, other = ((clients.put_same, daemon.address(channel), TURNS, CHAIN) for channel in pair)
        with working(*one) as first, working(*other) as second:
            for _ in range(TURNS):
                assert first.hear() == second.hear() == "ready"
                first.tell()
                second.tell()
                outcomes = []
                for codes, reasons in (first.hear(), second.hear()):
                    assert set(reasons) == {Reason.NONE}
                    outcomes.append(codes)
                assert [sorted(both) for both in zip(*outcomes, strict=True)] == [
                    [Put.STORED, Put.PRESENT]
                ] * CHAIN
        stats = observer.stats()
        assert stats["puts"] - before["puts"] == TURNS * CHAIN
        assert stats["put_bytes"] - before["put_bytes"] == TURNS * CHAIN * (64 << 10)
        blocks = Blocks(observer)
        assert len(blocks.there(range(TURNS * CHAIN))) == TURNS * CHAIN
        wait_for(lambda: nobody_holds(observer), what="both are gone")
        assert_all_comes_back(observer, blocks.space)


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def test_threads_that_do_anything(pool: kvpool.Pool, rng: np.random.Generator) -> None:
    seeds = rng.integers(1 << 32, size=THREADS)

    def work(number: int) -> None:
        random = np.random.default_rng(int(seeds[number]))
        blocks = Blocks(pool)
        for _ in range(ROUNDS):
            clients.do_anything(blocks, random)

    in_threads(work)


def test_threads_that_hand_blocks_over(pool: kvpool.Pool) -> None:
    """Of each pair one waits for a chain that the other one puts; and then the other way round."""

    def work(number: int) -> None:
        blocks = Blocks(pool)
        pair, is_second = divmod(number, 2)
        for turn in range(30):
            numbers = range(10_000 * pair + 8 * turn, 10_000 * pair + 8 * turn + 8)
            if turn % 2 == is_second:
                assert blocks.put(numbers).stored == 8
            else:
                assert blocks.space.wait(keys_of(list(numbers)), WAIT_S) == 8
                assert blocks.get(numbers) == 8

    in_threads(work)


def test_many_that_wait_at_once(pool: kvpool.Pool) -> None:
    """One put wakes all of them."""
    waits = 24
    found: list[int] = []

    def wait() -> None:
        found.append(Blocks(pool).space.wait(keys_of([5, 6]), WAIT_S))

    threads = [threading.Thread(target=wait) for _ in range(waits)]
    for thread in threads:
        thread.start()
    try:
        wait_for(
            lambda: bool(found) or pool.stats()["clients_waiting"] == waits, what="all of them wait"
        )
        assert not found
    finally:
        Blocks(pool).put_all([5, 6])
        for thread in threads:
            thread.join(WAIT_S)
    assert found == [2] * waits
