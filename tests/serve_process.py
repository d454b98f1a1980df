"""`kvpool serve` as a process of its own, for tests that kill, stop and starve it."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.pools import ROOT

READY_S = 30.0
END_S = 5.0  # from SIGTERM, as promised
KILL_S = 30.0


class Served:
    """A running daemon. Its log is read all the time, so that it never waits for the reader."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        code: str = "from kvpool.cli import main; main()",
        environment: dict[str, str] | None = None,
        descriptors_max: int | None = None,
    ) -> None:
        """words: flags beside the socket. code: what Python runs in place of the command."""
        self.socket = str(folder / "node.sock")
        self.address = f"unix:{self.socket}"
        own = ("serve", "--socket", self.socket, "--prefault", "off")
        usual = () if "--dram" in words else ("--dram", "16MiB")
        plain = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_SERVE")}
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code, *own, *usual, *words],
            cwd=ROOT,
            env={**plain, "NO_COLOR": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if descriptors_max is None else _limit(descriptors_max),
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def listen(self) -> str:
        """Where it listens for TCP, as an address."""
        (found,) = [word for word in self.ready.split() if word.startswith("listen=")]
        return f"tcp://{found.removeprefix('listen=')}"

    def is_logged(self, text: str) -> bool:
        return any(text in line for line in self.log)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit status, and how long it took from the signal."""
        begin = time.monotonic()
        self.process.send_signal(number)
        return self.wait(), time.monotonic() - begin

    def wait(self) -> int:
        status = self.process.wait(KILL_S)
        self._reader.join(KILL_S)
        return status

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))


def _limit(descriptors_max: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors_max, descriptors_max))


@contextlib.contextmanager
def served(folder: Path, *words: str, **options: Any) -> Iterator[Served]:
    """A daemon that is ready; killed at the end, if it still lives."""
    daemon = Served(folder, *words, **options)
    try:
        assert daemon.ready.startswith("kvpool: ready "), daemon.log
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.process.send_signal(signal.SIGCONT)
            daemon.kill()
        assert daemon.process.stdout is not None
        daemon.process.stdout.close()


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_s_of(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
