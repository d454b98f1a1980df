"""A client stops in the middle of something, and goes on later. Nobody else waits for it."""

import signal
import time
from collections.abc import Iterator

import pytest

import kvpool
from kvpool import Reason
from kvpool.replay.payload import keys_of
from tests import clients
from tests.served import (
    Blocks,
    Served,
    Worker,
    assert_all_comes_back,
    held,
    nobody_holds,
    served,
    stop_while,
    wait_for,
    working,
)

OTHERS = range(1000, 1032)
OTHERS_S_MAX = 4.0  # for some MiB in and out, on a machine that does other things
GIVEN_UP_S_MAX = 10.0  # after two seconds of a put, or five without a byte, the node gives up
CHANNELS = ("shm", "tcp")
# More than the kernel's buffers of a socket grow to for a reader that lags behind (32 MiB to read
# and 4 to write, by default): what fits there is sent, whether or not anybody takes it.
HUGE_BYTES = 64 << 20
SIZES = (64 << 10, clients.LARGE_BYTES, HUGE_BYTES)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("stops"), dram="256MiB") as running:
        yield running


@pytest.fixture
def observer(daemon: Served) -> Iterator[kvpool.Pool]:
    with daemon.connect("shm", name="observer") as pool:
        yield pool
        wait_for(lambda: nobody_holds(pool), what="all is free again")
        assert_all_comes_back(pool, *(Blocks(pool, size).space for size in SIZES))


def others_work(daemon: Served, observer: kvpool.Pool) -> None:
    begin = time.monotonic()
    blocks = Blocks(observer)
    blocks.space.remove(keys_of(list(OTHERS)))
    blocks.put_all(OTHERS)
    assert blocks.get(OTHERS) == len(OTHERS)
    with daemon.connect("tcp") as pool:
        assert Blocks(pool).get(OTHERS) == len(OTHERS)
    assert time.monotonic() - begin < OTHERS_S_MAX


def goes_on(worker: Worker) -> None:
    """It stores whole chains again, after one perhaps that was given up."""
    worker.signal(signal.SIGCONT)
    worker.heard()
    wait_for(lambda: worker.hear() == 4, what="it puts again")


@pytest.mark.parametrize("channel", CHANNELS)
def test_stopped_while_writing(daemon: Served, observer: kvpool.Pool, channel: str) -> None:
    large = Blocks(observer, clients.LARGE_BYTES)
    address = daemon.address(channel)
    with working(clients.put_and_tell, address, 0, clients.LARGE_BYTES) as worker:
        assert worker.hear() == "ready"
        assert worker.hear() == 4
        stop_while(worker, lambda: held(observer)["blocks_reserved"] > 0)
        others_work(daemon, observer)
        # Whoever wants to put the same block waits for it, not longer than it wants to.
        begin = time.monotonic()
        refused = [large.put([number], timeout=0.05).reason for number in range(16)]
        assert Reason.TIMED_OUT in refused
        assert time.monotonic() - begin < 16 * 0.05 + OTHERS_S_MAX
        wait_for(
            lambda: held(observer)["blocks_reserved"] == 0, GIVEN_UP_S_MAX, "the put is given up"
        )
        others_work(daemon, observer)
        goes_on(worker)
        worker.kill()


def test_stopped_while_viewing(daemon: Served, observer: kvpool.Pool) -> None:
    """What it views stays as it is for as long as it lives, and the rest of the pool works."""
    blocks = Blocks(observer)
    numbers = list(range(40))
    blocks.put_all(numbers)
    with working(clients.view_and_hold, daemon.unix_address, numbers, 64 << 10) as worker:
        assert worker.hear() == len(numbers)
        worker.signal(signal.SIGSTOP)
        assert blocks.space.remove(keys_of(numbers)) == len(numbers)
        others_work(daemon, observer)
        fill(observer)
        assert held(observer)["slots_held_for_views"] == len(numbers)
        worker.signal(signal.SIGCONT)
        worker.tell("look")
        assert worker.hear() is True
        worker.tell("leave")
        assert worker.join() == 0


def fill(pool: kvpool.Pool) -> None:
    """More than fits: the coldest blocks leave, and every slot that is free is used."""
    large = Blocks(pool, clients.LARGE_BYTES)
    before = pool.stats()["evictions"]
    for first in range(2000, 2048, 4):
        large.put_all(range(first, first + 4))
    assert pool.stats()["evictions"] > before


def test_stopped_while_it_is_sent_blocks(daemon: Served, observer: kvpool.Pool) -> None:
    """Over a socket the node pins what it sends, and gives up a peer that takes nothing."""
    huge = Blocks(observer, HUGE_BYTES)
    numbers = list(range(2))
    once = len(numbers) * HUGE_BYTES
    huge.put_all(numbers)
    late = observer.stats()["server"]["closed_late"]
    with working(clients.get_for_ever, daemon.tcp_address, numbers, HUGE_BYTES) as worker:
        assert worker.hear() == "ready"

        def is_given_up() -> bool:
            stop_while(worker, lambda: held(observer)["blocks_pinned"] > 0)
            others_work(daemon, observer)
            pinned = "pins are given up"
            wait_for(lambda: held(observer)["blocks_pinned"] == 0, GIVEN_UP_S_MAX, pinned)
            if observer.stats()["server"]["closed_late"] > late:
                return True
            worker.signal(signal.SIGCONT)  # the rest of a block fitted its socket
            return False

        wait_for(is_given_up, 4 * GIVEN_UP_S_MAX, "it is stopped while it is sent blocks")
        server = observer.stats()["server"]
        assert " take " in server["last_closed"]
        worker.signal(signal.SIGCONT)
        wait_for(
            lambda: observer.stats()["server"]["bytes_out"] > server["bytes_out"] + once,
            what="it reads again",
        )
        worker.kill()
