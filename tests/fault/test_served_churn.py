"""Clients come and go by the hundred, half of them by kill -9, and leave nothing behind."""

import os
import signal
import time
from pathlib import Path

import numpy as np

import kvpool
from tests import clients
from tests.served import (
    WAIT_S,
    Blocks,
    Served,
    Worker,
    assert_all_comes_back,
    nobody_holds,
    process_facts,
    served,
    wait_for,
)

IS_LONG = os.environ.get("KVPOOL_LONG") == "1"
SECONDS = 60.0 if IS_LONG else 20.0
PROCESSES = 40 if IS_LONG else 10  # at a time
CLIENTS_EACH = 5
CLIENTS_MIN = 200  # altogether
TURNS_MAX = 200
GROWTH_KIB_MAX = 12 << 10  # of the heap, which keeps what it once took; of hundreds of clients
FIRST_S = 2.0


class Crowd:
    """Processes of five clients each, that are replaced when they end or are killed."""

    def __init__(self, daemon: Served, random: np.random.Generator) -> None:
        self._addresses = [daemon.unix_address] * 3 + [daemon.tcp_address] * 2
        self._random = random
        self._workers: list[Worker] = []
        self.started = self.killed = self.ended = 0

    def keep(self, processes: int) -> None:
        while len(self._workers) < processes:
            seed, turns = self._random.integers(1 << 32), self._random.integers(TURNS_MAX)
            self._workers.append(Worker(clients.live, self._addresses, int(seed), int(turns)))
            self.started += 1

    def bury(self) -> None:
        """Takes those away that have ended by themselves; each must have ended well."""
        for worker in [each for each in self._workers if not each.process.is_alive()]:
            assert worker.join() == 0, worker.heard()
            assert worker.heard()[-1] == "done"
            self._take_away(worker)
            self.ended += 1

    def kill_one(self) -> None:
        worker = self._workers[self._random.integers(len(self._workers))]
        worker.kill()
        code = worker.join()
        assert code in (-signal.SIGKILL, 0)
        worker.heard()  # fails for one that saw wrong bytes
        self._take_away(worker)
        self.killed += code != 0
        self.ended += code == 0

    def wait_for_one(self) -> None:
        def is_one_ready() -> bool:
            return any(each.pipe.poll(0) for each in self._workers)

        wait_for(is_one_ready, what="a client is ready")

    def close(self) -> None:
        for worker in list(self._workers):
            self._take_away(worker)

    def _take_away(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()


def churn(daemon: Served, random: np.random.Generator, seconds: float) -> Crowd:
    crowd = Crowd(daemon, random)
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            crowd.keep(PROCESSES)
            crowd.wait_for_one()
            crowd.bury()
            if crowd.killed <= crowd.ended and crowd.started > crowd.killed + crowd.ended:
                crowd.kill_one()
    finally:
        crowd.close()
    return crowd


def at_rest(daemon: Served, pool: kvpool.Pool) -> dict[str, int]:
    wait_for(lambda: nobody_holds(pool), what="only the observer is left")
    assert_all_comes_back(pool, Blocks(pool).space)
    return process_facts(daemon.pid)


def test_hundreds_of_clients_of_which_half_are_killed(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with (
        served(tmp_path, dram="16MiB", log_level="warning") as daemon,
        daemon.connect("shm", name="observer") as pool,
    ):
        churn(daemon, rng, FIRST_S)  # what the first crowd takes for good is no leak
        before = at_rest(daemon, pool)
        crowd = churn(daemon, rng, SECONDS)
        wait_for(lambda: pool.stats()["server"]["threads"] <= 2, WAIT_S, "idle threads end")
        after = at_rest(daemon, pool)
        count = crowd.started * CLIENTS_EACH
        print(f"{count} clients, {crowd.killed} of {crowd.started} processes killed")
        print(f"before: {before}\nafter:  {after}")
        assert count >= CLIENTS_MIN
        assert crowd.killed >= crowd.started // 3
        for name in ("descriptors", "threads", "client_mappings"):
            assert after[name] <= before[name], (name, before, after)
        assert after["anonymous_kib"] - before["anonymous_kib"] < GROWTH_KIB_MAX
        assert pool.stats()["server"]["closed_garbage"] == 0, pool.stats()["server"]
