"""The daemon dies and comes back, or stops and goes on; its clients go on without it, and with it.

While there is no node every block is a miss at once; while there is one that says nothing, every
call ends by its deadline. Right bytes or a miss, before, meanwhile and after.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import Miss, Put, Reason, Unreachable
from kvpool.replay.payload import keys_of
from tests import clients
from tests.served import WAIT_S, Blocks, Served, held, served, wait_for, working

CHANNELS = ("shm", "tcp")
SLACK_S = 4.0  # for a machine that is busy with other things
END_S_MAX = 5.0  # from SIGTERM
BACK_S_MAX = 10.0  # a node that came back is found after two seconds at most, and it must start
NUMBERS = range(48)
DEADLINE_S = 0.5


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon with an SSD tier that promises every put. It is running between tests."""
    folder = tmp_path_factory.mktemp("restart")
    options = {
        "dram": "16MiB",
        "ssd": str(folder / "tier"),
        "ssd_capacity": "64MiB",
        "ssd_free_floor": "0",
        "durability": "durable",
        "pin_share": 0.9,
    }
    with served(folder, **options) as daemon:
        yield daemon


def is_connected(pool: kvpool.Pool) -> bool:
    return bool(pool.stats()["client"]["connected"])


def mappings(name: str) -> int:
    """How many mappings of this process have that in their name."""
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_daemon_that_is_killed_and_started_again(lasting: Served, channel: str) -> None:
    with lasting.connect(channel, timeout=2) as pool:
        blocks = Blocks(pool)
        blocks.put_all(NUMBERS)
        arenas = mappings("memfd:kvpool-arena")
        with blocks.space.view(keys_of(NUMBERS)) as viewed:
            assert len(viewed) == len(NUMBERS)
            lasting.kill()
            begin = time.monotonic()
            assert_all_is_missing_at_once(blocks)
            assert all(map(blocks.is_right, NUMBERS, viewed))

            lasting.start()
            wait_for(lambda: is_connected(pool), BACK_S_MAX, "connected again")
            assert blocks.get(NUMBERS) == len(NUMBERS)
            assert pool.stats()["ssd_hits"] >= len(NUMBERS)
            assert pool.stats()["client"]["reconnects"] == 1
            blocks.put_all(range(100, 110))
            assert all(map(blocks.is_right, NUMBERS, viewed))  # of the node that is gone
        print(f"back after {time.monotonic() - begin:.2f} s")
        assert blocks.get(range(100, 110)) == 10
        del viewed
        wait_for(lambda: mappings("memfd:kvpool-arena") <= arenas, what="the old arena is unmapped")


def assert_all_is_missing_at_once(blocks: Blocks) -> None:
    """Once the end was noticed nothing waits for an answer."""
    keys = keys_of(NUMBERS)
    wait_for(lambda: blocks.space.lookup(keys).miss is Miss.DISCONNECTED, SLACK_S, "it is noticed")
    begin = time.monotonic()
    assert blocks.get(NUMBERS) == 0
    misses = bytearray(len(NUMBERS))
    assert blocks.space.get_into(keys, np.empty(len(NUMBERS) * 65536, np.uint8), misses=misses) == 0
    assert list(misses) == [Miss.DISCONNECTED] + [Miss.BEHIND] * (len(NUMBERS) - 1)
    put = blocks.put(range(200, 204))
    assert put.no_room == 4
    assert put.reason is Reason.DISCONNECTED
    with blocks.space.view(keys) as viewed:
        assert not viewed
    slot = blocks.space.reserve(keys_of([300]))
    assert (slot.buffer, slot.reason) == (None, Reason.DISCONNECTED)
    assert blocks.space.remove(keys) == 0
    assert set(blocks.pool.stats()) == {"server", "client"}
    for ask in (blocks.pool.trim, blocks.space.drop):
        with pytest.raises(Unreachable):
            ask()
    assert time.monotonic() - begin < SLACK_S


@pytest.mark.parametrize("channel", CHANNELS)
def test_killed_again_and_again_under_load(lasting: Served, channel: str) -> None:
    """What is under way ends as a miss, or as not stored because of that; then all goes on."""
    with lasting.connect(channel, timeout=2) as pool:
        Blocks(pool).put_all(NUMBERS)
        stop = threading.Event()
        failures: list[BaseException] = []
        rounds: dict[str, int] = {}

        def worker(name: str, once: Callable[[Blocks, int], None]) -> threading.Thread:
            def run() -> None:
                blocks = Blocks(pool)
                try:
                    while not stop.is_set():
                        once(blocks, rounds.setdefault(name, 0))
                        rounds[name] += 1
                except BaseException as error:
                    failures.append(error)

            return threading.Thread(target=run, name=name)

        threads = [worker("get", get), worker("put", put), worker("view", view)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                before = dict(rounds)
                wait_for(
                    lambda before=before: (
                        bool(failures)  # type: ignore[misc]
                        or all(
                            rounds.get(each.name, 0) > before.get(each.name, 0) + 5
                            for each in threads
                        )
                    ),
                    what="all do something",
                )
                assert not failures, failures
                lasting.kill()
                lasting.start()
                wait_for(lambda: is_connected(pool), BACK_S_MAX, "connected again")
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert not failures, failures
        assert Blocks(pool).get(NUMBERS) == len(NUMBERS)


def get(blocks: Blocks, _: int) -> None:
    blocks.get(NUMBERS)


def put(blocks: Blocks, turn: int) -> None:
    """What was acknowledged as durable is found, if there is a node to ask."""
    number = 1000 + turn % 200
    result = blocks.put([number], timeout=2)
    if result[0] is Put.NO_ROOM:
        assert result.reason in (Reason.DISCONNECTED, Reason.TIMED_OUT, Reason.DROPPED), result
    else:
        blocks.get([number])


def view(blocks: Blocks, _: int) -> None:
    with blocks.space.view(keys_of(NUMBERS)) as viewed:
        assert all(
            blocks.is_right(number, each) for number, each in zip(NUMBERS, viewed, strict=False)
        )


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_wait_ends_when_the_daemon_does(lasting: Served, channel: str) -> None:
    with lasting.connect(channel, timeout=2) as pool:
        blocks = Blocks(pool)
        blocks.put_all([9000])
        answers: list[tuple[int, float]] = []

        def wait() -> None:
            begin = time.monotonic()
            answers.append((blocks.space.wait(keys_of([9000, 9001]), 4), time.monotonic() - begin))

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_for(lambda: pool.stats()["clients_waiting"] == 1, what="it waits")
        lasting.kill()
        waiting.join(WAIT_S)
        ((found, took_s),) = answers
        assert found <= 1
        assert took_s < 4 + SLACK_S
    lasting.start()


@pytest.mark.parametrize("channel", CHANNELS)
def test_told_to_end_while_clients_are_at_work(lasting: Served, channel: str) -> None:
    """It ends well, in time. What was put is on the SSD; what was under way was not promised."""
    address = lasting.address(channel)
    with lasting.connect("shm") as pool:
        Blocks(pool).put_all(NUMBERS)
    with (
        working(clients.put_for_ever, address, 20_000, 64 << 10) as putting,
        working(clients.get_for_ever, address, list(NUMBERS), 64 << 10) as getting,
        working(clients.wait_for_ever, address, 30_000, 64 << 10) as waiting,
        lasting.connect("shm", timeout=2) as pool,
    ):
        blocks = Blocks(pool)
        assert [each.hear() for each in (putting, getting, waiting)] == ["ready"] * 3
        wait_for(lambda: held(pool)["clients_waiting"] == 1, what="it waits")
        blocks.put_all([40_000])
        begin = time.monotonic()
        lasting.stop()
        assert time.monotonic() - begin < END_S_MAX
        for each in (putting, getting, waiting):
            each.kill()
    lasting.start()
    with lasting.connect(channel) as pool:
        assert Blocks(pool).get([40_000]) == 1
        Blocks(pool).there(range(20_000, 20_016))  # whole, or not there


# --- SIGSTOP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("stopped")) as running:
        yield running


class Timed:
    """Calls in threads at the same time; how long each took and what it gave."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}
        self.gave: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, name: str, call: Callable[[], Any]) -> None:
        def run() -> None:
            begin = time.monotonic()
            try:
                self.gave[name] = call()
            except BaseException as error:
                self.gave[name] = error
            self.took_s[name] = time.monotonic() - begin

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"a call does not end; these did: {self.took_s}"


def view_count(blocks: Blocks) -> int:
    with blocks.space.view(keys_of(NUMBERS)) as viewed:
        assert all(
            blocks.is_right(number, each) for number, each in zip(NUMBERS, viewed, strict=False)
        )
        return len(viewed)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_stopped_daemon_costs_every_call_its_deadline_at_most(
    daemon: Served, channel: str
) -> None:
    with daemon.connect(channel, timeout=DEADLINE_S) as pool:
        blocks = Blocks(pool)
        blocks.put_all(NUMBERS)
        slot = blocks.space.reserve(keys_of([500]))
        assert slot.buffer is not None
        slot.buffer[:] = blocks.payload([500]).tobytes()
        timed = Timed()
        daemon.signal(signal.SIGSTOP)
        try:
            timed.begin("get", lambda: Blocks(pool).get(NUMBERS))
            timed.begin("lookup", lambda: blocks.space.lookup(keys_of(NUMBERS)).blocks)
            timed.begin("view", lambda: view_count(Blocks(pool)))
            timed.begin("put", lambda: Blocks(pool).put([501], timeout=DEADLINE_S).reason)
            timed.begin("remove", lambda: blocks.space.remove(keys_of([502])))
            timed.begin("wait", lambda: blocks.space.wait(keys_of([0, 503]), DEADLINE_S))
            timed.begin("stats", lambda: set(pool.stats()))
            timed.begin("flush", lambda: pool.flush(timeout=DEADLINE_S))
            timed.begin("connect", lambda: daemon.connect(channel, timeout=DEADLINE_S))
            timed.begin("commit", slot.commit)
            timed.end()
        finally:
            daemon.signal(signal.SIGCONT)
        print({name: round(seconds, 2) for name, seconds in timed.took_s.items()})
        limits = {"flush": 2 * DEADLINE_S, "commit": 5.0}  # seconds of their own
        for name, seconds in timed.took_s.items():
            assert seconds < limits.get(name, DEADLINE_S) + SLACK_S, (name, timed.took_s)
        read = len(NUMBERS) if channel == "shm" else 0  # shared memory needs no answer
        assert [timed.gave[name] for name in ("get", "lookup", "view")] == [read] * 3
        assert timed.gave["put"] in (Reason.TIMED_OUT, Reason.DISCONNECTED)
        assert isinstance(timed.gave["connect"], Unreachable)
        assert_all_works_again(pool)


def assert_all_works_again(pool: kvpool.Pool) -> None:
    blocks = Blocks(pool)
    wait_for(lambda: len(pool.stats()) > 2, BACK_S_MAX, "the control connection answers")
    wait_for(lambda: blocks.get(NUMBERS) == len(NUMBERS), BACK_S_MAX, "blocks are delivered")
    wait_for(lambda: blocks.put([600], timeout=2).no_room == 0, BACK_S_MAX, "a put is taken")
    assert blocks.get([600]) == 1
    assert view_count(blocks) == len(NUMBERS)
    assert blocks.space.wait(keys_of([0, 1]), 5) == 2


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_daemon_that_stops_often(daemon: Served, channel: str) -> None:
    """Calls that were given up do not wear the connection out."""
    with daemon.connect(channel, timeout=0.1) as pool:
        blocks = Blocks(pool)
        blocks.put_all(NUMBERS)
        for turn in range(5):
            daemon.signal(signal.SIGSTOP)
            try:
                for number in range(3):
                    blocks.put([700 + 3 * turn + number], timeout=0.1)
                    blocks.get(NUMBERS)
            finally:
                daemon.signal(signal.SIGCONT)
        assert_all_works_again(pool)


def test_staging_memory_of_a_late_put_is_nobody_elses(daemon: Served) -> None:
    """Its producer may fill it again at any time, and the node may still be reading it."""
    count = 16
    late, others = range(800, 800 + count), range(900, 900 + count)
    with daemon.connect("shm", timeout=DEADLINE_S) as pool:
        blocks = Blocks(pool)
        staged = blocks.space.staging(count)
        fill(staged, blocks.payload(late))
        daemon.signal(signal.SIGSTOP)
        try:
            for _ in range(2):  # the second time, because the node has not answered the first
                result = blocks.space.put_staged(keys_of(list(late)), staged, timeout=0.1)
                assert result.reason is Reason.TIMED_OUT
        finally:
            daemon.signal(signal.SIGCONT)
        wait_for(
            lambda: blocks.space.put_staged(keys_of(list(late)), staged).no_room == 0,
            BACK_S_MAX,
            "the node takes blocks from there again",
        )
        assert blocks.get(late) == count
        another = blocks.space.staging(count)
        fill(another, blocks.payload(others))
        fill(staged, np.zeros((count, blocks.block_bytes), np.uint8))
        assert blocks.space.put_staged(keys_of(list(others)), another).stored == count
        assert blocks.get(others) == count


def test_staging_memory_outlives_the_daemon(tmp_path: Path) -> None:
    """A producer that took it once goes on when the next daemon is there."""
    numbers = range(16)
    with served(tmp_path) as first, first.connect("shm", timeout=DEADLINE_S) as pool:
        blocks = Blocks(pool)
        staged = blocks.space.staging(len(numbers))
        slot = blocks.space.reserve(keys_of([500]))
        assert slot.buffer is not None
        slot.buffer[:] = blocks.payload([500]).tobytes()
        first.kill()
        assert blocks.space.put_staged(keys_of(list(numbers)), staged).stored == 0
        first.start()
        wait_for(lambda: is_connected(pool), BACK_S_MAX, "it is connected again")
        fill(staged, blocks.payload(numbers))
        assert blocks.space.put_staged(keys_of(list(numbers)), staged).stored == len(numbers)
        assert slot.commit() is Put.STORED
        assert blocks.get(numbers) == len(numbers)
        assert blocks.get([500]) == 1


def fill(staged: kvpool.Staging, payload: Any) -> None:
    for place, block in zip(staged, payload, strict=True):
        place[:] = block.tobytes()
