"""A process of a lab: on a host of its own, killed when its parent's thread ends, its log kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.bench.served import environment_of_child
from kvpool.lab.linux import LabError, before_child
from kvpool.lab.network import Host

WAIT_S = 600.0  # for what must come; machines are slow, and share their cores
END_S = 30.0
LOOK_S = 0.02
_SAID_MAX = 4000


class Child:
    """Begun and ended any number of times, on the same host and with the same log.

    Begin it from a thread that stays: the kernel kills the process when that thread ends.
    """

    def __init__(self, name: str, host: Host, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.host = host
        self.folder = folder
        self.log_path = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """SIGSTOP: returns once every thread has stopped, which is some time after it is sent."""
        process = self._running()
        process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def pause(self) -> None:
        """Its connections stay, and nothing is answered."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)

    def stop(self) -> None:
        """Ends it as an init system does. Raises LabError where it does not end well."""
        code = self.end()
        if code not in (0, -signal.SIGTERM):
            raise LabError(f"{self.name} ended with {code}: {self.said()}")

    def end(self) -> int:
        """The same, however well; its exit code. 0 where it does not run."""
        if not self.is_running:
            return 0
        process = self._running()
        process.terminate()
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return process.returncode

    def close(self) -> None:
        """Whatever became of it, nothing runs any more. Idempotent."""
        self.kill()
        self._forget()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def said(self) -> str:
        """The end of its log, for an error."""
        return self.log()[-_SAID_MAX:].strip() or "it said nothing"

    def _launch(self, command: Sequence[str], *namespaces: int) -> subprocess.Popen[bytes]:
        if self.is_running:
            raise LabError(f"{self.name} runs already")
        self._forget()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment_of_child(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=before_child(self.host.network, *namespaces),
            )
        return self.process

    def _forget(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout) if self.process else ():
            if pipe is not None:
                pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise LabError(f"{self.name} was not begun")
        return self.process


def until(is_so: Callable[[], object], what: str, late_s: float = WAIT_S) -> float:
    """Looks again and again; how long it took. Raises LabError when it is late."""
    begin = time.monotonic()
    while not is_so():
        if time.monotonic() - begin > late_s:
            raise LabError(f"not within {late_s:g} s: {what}")
        time.sleep(LOOK_S)
    return time.monotonic() - begin
