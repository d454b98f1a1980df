"""A daemon, and clients that each are a process of their own: to be killed, stopped and starved.

Client processes are forked from a server process of multiprocessing that has kvpool imported and
never opened a pool, so one costs some milliseconds. Nothing here sleeps to let something happen:
whoever waits looks again and again, until a deadline.
"""

import contextlib
import ctypes
import functools
import multiprocessing as mp
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kvpool
from kvpool.replay.payload import Payload, keys_of
from tests.pools import ROOT, opaque

WAIT_S = 30.0  # the longest that a test waits for what must come
END_S = 10.0  # of a daemon that was told to end; it has five seconds
PDEATHSIG = 1  # of prctl(2)


class Served:
    """`kvpool serve` as a process. Options by their name: ssd_capacity="64MiB"."""

    def __init__(
        self,
        folder: Path,
        *,
        tcp: bool = True,
        limits: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        """limits: number of a resource -> what setrlimit(2) is to set before the daemon begins."""
        self.folder = folder
        self.socket_path = str(folder / "node.sock")
        self.log_path = folder / "daemon.log"
        self.limits = dict(limits or {})
        self.options = {
            "dram": "64MiB",
            "prefault": "off",
            "huge_pages": False,
            "socket": self.socket_path,
            "log_level": "debug",
            **({"listen": "127.0.0.1:0"} if tcp else {}),
            **options,
        }
        self.tcp_address = ""
        self.http_address = ""
        self.process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def unix_address(self) -> str:
        return f"unix:{self.socket_path}"

    def address(self, channel: str) -> str:
        """channel: shm or tcp."""
        return self.unix_address if channel == "shm" else self.tcp_address

    def command(self) -> list[str]:
        return [sys.executable, "-X", "faulthandler", "-m", "kvpool"]

    def launch(self) -> None:
        """Begins; whether it gets ready is another matter."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command(), "serve", *self._flags()],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=functools.partial(_before_daemon, self.limits),
            )

    def refused(self) -> tuple[int, str]:
        """Of one that must not get ready: its exit code, and the line that says why."""
        self.launch()
        assert self.process.stdout is not None
        assert self.process.wait(WAIT_S) > 0
        assert self.process.stdout.read() == b""
        lines = [line for line in self.log().splitlines() if line.startswith("kvpool: error: ")]
        assert lines, self.log()
        return self.process.returncode, lines[-1]

    def start(self) -> "Served":
        """Returns when clients can connect. A second time, it listens where it did before."""
        self.launch()
        line = self._first_line()
        assert line.startswith("kvpool: ready "), f"{line}\n{self.log()}"
        words = dict(word.split("=", 1) for word in line.split()[2:])
        if "listen" in words:
            self.tcp_address = f"tcp://{words['listen']}"
            self.options["listen"] = words["listen"]
        self.http_address = words.get("http", "")
        return self

    def _flags(self) -> Iterator[str]:
        for name, value in self.options.items():
            if value is None:  # left to the file
                continue
            flag = name.replace("_", "-")
            yield f"--{flag}" if value is not False else f"--no-{flag}"
            if not isinstance(value, bool):
                yield str(value)

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], WAIT_S)
        assert ready, f"the daemon does not get ready\n{self.log()}"
        return self.process.stdout.readline().decode()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP: returns once every thread has stopped, which is some time after it is sent."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        """Ends it as an init system does; it must end well and in time."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(WAIT_S)
        assert self.process.returncode == 0, f"ended with {self.process.returncode}\n{self.log()}"

    def close(self) -> None:
        """Whatever became of it: nothing of it is left."""
        if not hasattr(self, "process"):
            return
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def connect(self, channel: str = "shm", **options: Any) -> kvpool.Pool:
        return kvpool.connect(self.address(channel), **{"timeout": 5.0, **options})


def served(folder: Path, **options: Any) -> contextlib.AbstractContextManager[Served]:
    """A daemon that must end well when it is told to, unless the test has killed it."""
    return running(Served(folder, **options))


Daemon = TypeVar("Daemon", bound=Served)


@contextlib.contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    """As served(), of a daemon that has not been started yet."""
    try:
        daemon.start()
        yield daemon
        if daemon.process.returncode != -signal.SIGKILL:
            daemon.stop()
        assert "Traceback" not in daemon.log(), daemon.log()
    finally:
        daemon.close()


def _before_daemon(limits: Mapping[int, int]) -> None:
    die_with_parent()
    for number, limit in limits.items():
        resource.setrlimit(number, (limit, limit))


def die_with_parent() -> None:
    """The calling process is killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)


# --- client processes ----------------------------------------------------------------------------


@functools.cache
def _processes() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.served", "tests.clients"])
    return context


class Worker:
    """A process that runs work(pipe, *arguments), a function of a module; it can be killed."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _processes().Pipe()
        self.process = _processes().Process(target=_work, args=(theirs, work, arguments))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert isinstance(pid, int)
        return pid

    def hear(self, timeout_s: float = WAIT_S) -> Any:
        """What it says next. Fails if it says nothing in time, or died of an error."""
        assert self.pipe.poll(timeout_s), "a client process says nothing"
        said = self.pipe.recv()
        if isinstance(said, Failed):
            raise AssertionError(f"a client process failed:\n{said.text}")
        return said

    def heard(self) -> list[Any]:
        """All that it said and nobody heard yet, also of a process that was killed since."""
        found = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll(0):
                found.append(self.hear())
        return found

    def tell(self, word: Any = None) -> None:
        self.pipe.send(word)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> float:
        """The time just after the signal was sent, if it had not ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return time.monotonic()

    def join(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code: minus the number of the signal that ended it."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        assert isinstance(code, int), "a client process does not end"
        return code

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(WAIT_S)
        self.pipe.close()


class Failed:
    def __init__(self, text: str) -> None:
        self.text = text


def _work(pipe: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import traceback

    die_with_parent()
    os.setpgid(0, 0)  # a ^C is for the test, which ends its clients
    try:
        work(pipe, *arguments)
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        raise


@contextlib.contextmanager
def working(work: Callable[..., None], *arguments: Any) -> Iterator[Worker]:
    worker = Worker(work, *arguments)
    try:
        yield worker
    finally:
        worker.close()


# --- blocks --------------------------------------------------------------------------------------


class Blocks:
    """A namespace whose payload follows from the keys; keys are numbers. One thread at a time."""

    def __init__(self, pool: kvpool.Pool, block_bytes: int = 64 << 10, model: str = "m") -> None:
        self.pool = pool
        self.space = pool.namespace(opaque(model, block_bytes=block_bytes))
        self.block_bytes = block_bytes
        self._payload = Payload(block_bytes)

    def keys(self, numbers: Iterable[int]) -> Any:
        return keys_of(list(numbers))

    def payload(self, numbers: Iterable[int]) -> Any:
        keys = keys_of(list(numbers))
        out = np.empty((len(keys), self.block_bytes // 8), np.uint64)
        self._payload.write(keys, out)
        return out

    def put(self, numbers: Iterable[int], **options: Any) -> kvpool.PutResult:
        numbers = list(numbers)
        return self.space.put(keys_of(numbers), self.payload(numbers), **options)

    def put_all(self, numbers: Iterable[int]) -> None:
        result = self.put(numbers)
        assert result.no_room == 0, result

    def get(self, numbers: Iterable[int]) -> int:
        """How many leading blocks are delivered. Every byte of them is looked at."""
        keys = keys_of(list(numbers))
        out = np.full((len(keys), self.block_bytes // 8), 0xA5A5, np.uint64)
        count = self.space.get_into(keys, out)
        wrong = self._payload.wrong(keys[:count], out[:count])
        assert not wrong, f"wrong bytes in {len(wrong)} of {count} blocks"
        return count

    def there(self, numbers: Iterable[int]) -> list[int]:
        """The numbers of the blocks that a get delivers, each asked for by itself."""
        return [number for number in numbers if self.get([number]) == 1]

    def is_right(self, number: int, block: Any) -> bool:
        words = np.frombuffer(block, np.uint64).reshape(1, -1)
        return not self._payload.wrong(keys_of([number]), words)


# --- what must be so -----------------------------------------------------------------------------


def wait_for(true: Callable[[], bool], timeout_s: float = WAIT_S, what: str = "") -> float:
    """Looks again and again; answers when it was seen to be true. Fails at the time-out."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.0005)
    return time.monotonic()


def stop_while(worker: Worker, holding: Callable[[], bool]) -> None:
    """Stops the process at a moment when the node says that it holds something for it."""

    def is_stopped_so() -> bool:
        worker.signal(signal.SIGSTOP)
        # Twice: what was seen first may have been on its way when the signal came.
        if holding() and holding():
            return True
        worker.signal(signal.SIGCONT)
        return False

    wait_for(is_stopped_so, what="stopped in the middle of it")


HELD = ("blocks_pinned", "blocks_reserved", "slots_held_for_views", "clients_waiting")


def held(pool: kvpool.Pool) -> dict[str, int]:
    """What somebody holds of the node: all of it is 0 when nobody does anything."""
    stats = pool.stats()
    found = {name: int(stats[name]) for name in HELD}
    return {**found, "leases": int(stats["server"]["leases"])}


def clients(pool: kvpool.Pool) -> int:
    return int(pool.stats()["server"]["clients"])


def nobody_holds(pool: kvpool.Pool, but_clients: int = 1) -> bool:
    return not any(held(pool).values()) and clients(pool) == but_clients


def assert_all_comes_back(pool: kvpool.Pool, *spaces: kvpool.Namespace) -> None:
    """free + held = total, seen from outside: without blocks and holders no slot is taken."""
    for space in spaces:
        space.drop()
    wait_for(lambda: pool.stats()["bytes_taken"] == 0, what="every slot is free again")
    stats = pool.stats()
    assert (stats["blocks"], stats["blocks_removed_while_pinned"]) == (0, 0)
    assert stats["bytes_committed"] <= stats["bytes_limit"] + (4 << 20)


def process_facts(pid: int) -> dict[str, int]:
    """Of a daemon, from /proc: its own resident memory, descriptors, threads, clients' memory."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "client_mappings": maps.count("memfd:kvpool-control") + maps.count("memfd:kvpool-staging"),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }
