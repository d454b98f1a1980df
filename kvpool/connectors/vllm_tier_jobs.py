"""Threads that move chunks between vLLM's CPU tier and the pool, one job after the other.

Promises:  1. submit() never waits and never raises; a full queue fails the job at once;
           2. every job that was submitted is told once by finished(), whatever became of it;
           3. a load that waited for longer than its deadline fails without being tried: the request
              is better off computing.
Thread rule: the scheduler's thread submits and asks; one thread loads, another one stores, so that
stores never stand in the way of a load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.connectors.vllm_tier_rows import Moved

JOBS_MAX = 1024  # that wait, of each kind

_log = logging.getLogger("vllm.kvpool")


@dataclass(slots=True)
class Job:
    """Chunks of one request to be moved."""

    number: int
    request: str
    is_load: bool
    keys: Sequence[bytes]
    chunks: Sequence[int]
    submitted: float = field(default_factory=time.monotonic)
    parents: dict[int, bytes] = field(default_factory=dict)  # of a store: by group, what is before
    moved: Moved = field(default_factory=lambda: Moved([], {}))
    seconds: float = 0.0


class Line:
    """Jobs of one kind, and the thread that does them."""

    def __init__(self, name: str, work: Callable[[Job], Moved], wait_s_max: float) -> None:
        """wait_s_max: a job that waited for longer fails as `late`."""
        self._work = work
        self._wait_s_max = wait_s_max
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Job] = deque()
        self._done: list[Job] = []
        self._is_busy = False
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Done some time; see finished()."""
        with self._changed:
            if self._is_ending or len(self._waiting) >= JOBS_MAX:
                job.moved = Moved([], {"queue_full": len(job.keys)})
                self._done.append(job)
                return
            self._waiting.append(job)
            self._changed.notify_all()

    def finished(self) -> list[Job]:
        """Jobs that ended since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def drain(self) -> None:
        """Wait until nothing waits and nothing is moved."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_busy)

    def close(self) -> None:
        """What waits fails; what is moved is waited for, for the pool's timeout at most."""
        with self._changed:
            self._is_ending = True
            self._fail_waiting()
            self._changed.notify_all()
        self._thread.join()

    def _fail_waiting(self) -> None:
        for job in self._waiting:
            job.moved = Moved([], {"closed": len(job.keys)})
        self._done += self._waiting
        self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if self._is_ending:
                    return
                job, self._is_busy = self._waiting.popleft(), True
            self._do(job)
            with self._changed:
                self._is_busy = False
                self._done.append(job)
                self._changed.notify_all()

    def _do(self, job: Job) -> None:
        begin = time.monotonic()
        if begin - job.submitted > self._wait_s_max:
            job.moved = Moved([], {"late": len(job.keys)})
            return
        try:
            job.moved = self._work(job)
        except Exception:  # a bug of ours, which is not to end the thread: every job is told
            _log.exception("kvpool: a job of the tier failed")
            job.moved = Moved([], {"bug": len(job.keys)})
        job.seconds = time.monotonic() - begin
