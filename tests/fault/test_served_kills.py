"""kill -9 of a client in the middle of everything it can do: what it held is free within 100 ms.

The time counts from the signal to the moment when another client is told so by the node. The bound
is held to the median of several kills, as the machine may have given the processors to somebody
else; and no kill takes a second.
"""

import contextlib
import signal
import statistics
from collections.abc import Iterator

import pytest

import kvpool
from kvpool.replay.payload import keys_of
from tests import clients, frames
from tests.frames import raw_client
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

KILLS = 5
MEDIAN_S_MAX = 1.0  # a tenth of it on a machine with nothing else to do
EACH_S_MAX = 4.0  # below every time-out that would free it otherwise: 5 s and more
BLOCK_BYTES = 64 << 10
SIZES = (4096, BLOCK_BYTES, clients.LARGE_BYTES)  # a namespace each
OURS = range(1000, 1032)  # blocks that nobody but the observer puts or removes
CHANNELS = ("shm", "tcp")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("kills"), dram="256MiB") as running:
        yield running


@pytest.fixture
def observer(daemon: Served) -> Iterator[kvpool.Pool]:
    with daemon.connect("shm", name="observer") as pool:
        ours = Blocks(pool)
        ours.put_all(OURS)
        yield pool
        assert ours.get(OURS) == len(OURS), "blocks of another client are gone"
        assert_all_comes_back(pool, *(Blocks(pool, size).space for size in SIZES))


class Kills:
    """Counts how long each took."""

    def __init__(self, observer: kvpool.Pool) -> None:
        self._observer = observer
        self.took_s: list[float] = []

    def kill(self, worker: Worker) -> None:
        begin = worker.kill()
        end = wait_for(lambda: nobody_holds(self._observer), 10, "all is free again")
        self.took_s.append(end - begin)
        assert worker.join() == -signal.SIGKILL

    def check(self) -> None:
        shown = [f"{each * 1e3:.1f}" for each in self.took_s]
        print(f"until all was free, in ms: {', '.join(shown)}")
        assert statistics.median(self.took_s) < MEDIAN_S_MAX, shown
        assert max(self.took_s) < EACH_S_MAX, shown


@pytest.mark.parametrize("channel", CHANNELS)
def test_killed_while_writing(daemon: Served, observer: kvpool.Pool, channel: str) -> None:
    kills = Kills(observer)
    large = Blocks(observer, clients.LARGE_BYTES)
    for turn in range(KILLS):
        first = 100 * turn
        with working(
            clients.put_for_ever, daemon.address(channel), first, clients.LARGE_BYTES
        ) as worker:
            assert worker.hear() == "ready"
            stop_while(worker, lambda: held(observer)["blocks_reserved"] > 0)
            kills.kill(worker)
        # Whole, or not there: get() looks at every byte. The key of the one that was half there is
        # free to be put by others at once.
        large.there(range(first, first + 16))
        large.put_all(range(first, first + 4))
        assert large.get(range(first, first + 4)) == 4
    kills.check()


@pytest.mark.parametrize("channel", CHANNELS)
def test_killed_while_reserving(daemon: Served, observer: kvpool.Pool, channel: str) -> None:
    kills = Kills(observer)
    blocks = Blocks(observer)
    for _ in range(KILLS):
        with working(clients.reserve_and_hold, daemon.address(channel), 7, BLOCK_BYTES) as worker:
            assert worker.hear() == "ready"
            kills.kill(worker)
        assert blocks.get([7]) == 0
        assert blocks.put([7]).stored == 1  # the key is nobody's
        assert blocks.get([7]) == 1
        blocks.space.remove(keys_of([7]))
    kills.check()


@pytest.mark.parametrize("channel", CHANNELS)
def test_killed_while_reading(daemon: Served, observer: kvpool.Pool, channel: str) -> None:
    """Over sockets the node pins what it is sending; the kill comes while it does."""
    kills = Kills(observer)
    large = Blocks(observer, clients.LARGE_BYTES)
    numbers = list(range(8))
    large.put_all(numbers)
    for _ in range(KILLS):
        with working(
            clients.get_for_ever, daemon.address(channel), numbers, clients.LARGE_BYTES
        ) as worker:
            assert worker.hear() == "ready"
            if channel == "tcp":
                stop_while(worker, lambda: held(observer)["blocks_pinned"] > 0)
            kills.kill(worker)
        assert large.get(numbers) == len(numbers)
    kills.check()


def test_killed_while_viewing(daemon: Served, observer: kvpool.Pool) -> None:
    """Its slots are kept from others while it lives, although the blocks were removed."""
    kills = Kills(observer)
    blocks = Blocks(observer)
    numbers = list(range(20))
    for _ in range(KILLS):
        blocks.put_all(numbers)
        with working(clients.view_and_hold, daemon.unix_address, numbers, BLOCK_BYTES) as worker:
            assert worker.hear() == len(numbers)
            assert blocks.space.remove(keys_of(numbers)) == len(numbers)
            blocks.put_all(range(200, 240))  # would take the slots, if they were free
            assert held(observer)["slots_held_for_views"] == len(numbers)
            worker.tell("look")
            assert worker.hear() is True
            kills.kill(worker)
        assert blocks.get(range(200, 240)) == 40
        blocks.space.remove(keys_of(range(200, 240)))
    kills.check()


def test_killed_while_viewing_more_than_it_has_words_for(
    daemon: Served, observer: kvpool.Pool
) -> None:
    """The rest is pinned by leases of the node."""
    kills = Kills(observer)
    small = Blocks(observer, 4096)
    numbers = list(range(400))
    for _ in range(KILLS):
        small.put_all(numbers)
        with working(clients.view_and_hold, daemon.unix_address, numbers, 4096) as worker:
            assert worker.hear() == len(numbers)
            assert held(observer)["leases"] > 0
            assert small.space.remove(keys_of(numbers)) == len(numbers)
            worker.tell("look")
            assert worker.hear() is True
            kills.kill(worker)
        assert small.get(numbers) == 0
    kills.check()


@pytest.mark.parametrize("channel", CHANNELS)
def test_killed_while_waiting(daemon: Served, observer: kvpool.Pool, channel: str) -> None:
    kills = Kills(observer)
    for _ in range(KILLS):
        with working(clients.wait_for_ever, daemon.address(channel), 9, BLOCK_BYTES) as worker:
            assert worker.hear() == "ready"
            wait_for(lambda: held(observer)["clients_waiting"] == 1, what="it waits")
            kills.kill(worker)
    kills.check()


@pytest.mark.parametrize("channel", CHANNELS)
def test_killed_while_it_waits_for_another_writer(
    daemon: Served, observer: kvpool.Pool, channel: str
) -> None:
    """Of the same block, who takes its time: a thread of the node waits on behalf of the dead."""
    blocks = Blocks(observer)
    key, payload = keys_of([7]).tobytes(), blocks.payload([7]).tobytes()
    with raw_client(daemon.tcp_address) as slow, contextlib.closing(slow.stream()) as stream:
        number = slow.space(blocks.space.manifest)
        request, block = frames.put(number, [key], [payload], deadline_ms=30_000)
        stream.send(request + block[:1000])
        wait_for(lambda: held(observer)["blocks_reserved"] == 1, what="it is being put")
        before = connections(observer)
        took_s = []
        for turn in range(KILLS):
            with working(clients.put_one, daemon.address(channel), 7, BLOCK_BYTES) as waiter:
                requests = observer.stats()["server"]["requests"]
                assert waiter.hear() == "ready"
                wait_for(
                    lambda: observer.stats()["server"]["requests"] > requests,  # noqa: B023
                    what="its put has come",
                )
                begin = waiter.kill()
                end = wait_for(lambda: connections(observer) == before, 10, "its threads are free")
                took_s.append(end - begin)
            stream.send(block[1000 + turn : 1001 + turn])
        print(f"until all was free, in ms: {[round(each * 1e3, 1) for each in took_s]}")
        assert statistics.median(took_s) < MEDIAN_S_MAX, took_s
        stream.send(block[1000 + KILLS :])
        assert stream.answer().body == bytes([kvpool.Put.STORED])
    assert blocks.get([7]) == 1
    wait_for(lambda: nobody_holds(observer), what="all is free")


def connections(pool: kvpool.Pool) -> tuple[int, ...]:
    """Of all clients; one that a thread is at work for counts until that thread is done."""
    server = pool.stats()["server"]
    return server["clients"], server["streams"], server["shm_clients"]
