"""An engine's process as the bench sees it: started, asked, and gone when the `with` ends.

Every answer has a deadline; an engine that is late is killed, and the end of what it logged becomes
the error. Not thread-safe: one order at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvpool.bench.rows import BenchError

START_S_MAX = 300.0
ANSWER_S_MAX = 600.0
LOG_LINES_TOLD = 3
ENGINE = Path(__file__).with_name("vllm_engine.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one batch took, gave, and was served of its prompts, in tokens."""

    seconds: float
    outputs: list[list[int]]
    local: int
    external: int


class Engine:
    """A running engine. `name`: the system whose connector it has."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, *, keeps: bool = False
    ) -> Answer:
        """Runs one batch to its end. `keeps`: the engine's own prefix cache is left as it is.

        Raises BenchError if the engine fails, or does not answer within ANSWER_S_MAX.
        """
        order = {
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "output_tokens": output_tokens,
            "keeps": keeps,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: hear() tells why
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return Answer(**self.hear(ANSWER_S_MAX))

    def hear(self, seconds_max: float) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        watch = threading.Timer(seconds_max, self.end)  # closes the pipe, which ends the read
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line.endswith(b"\n"):
            raise BenchError(f"the engine for {self.name!r} has ended: {self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """With all processes that it started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-LOG_LINES_TOLD:]) or "it said nothing"


@contextlib.contextmanager
def engine(
    python: Path,
    name: str,
    llm: Mapping[str, object],
    *,
    environment: Mapping[str, str],
    hides_numba: bool = False,
) -> Iterator[Engine]:
    """Starts an engine of this Python and waits until it takes requests.

    environment: added to ours. Raises BenchError if it cannot start.
    """
    setup = json.dumps({"llm": dict(llm), "hides_numba": hides_numba})
    with (
        tempfile.TemporaryFile(prefix="kvpool-bench-engine-") as log,
        subprocess.Popen(
            [str(python), "-P", str(ENGINE), setup],  # -P: our modules are not on its path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        running = Engine(name, process, log)
        try:
            if running.hear(START_S_MAX) != {"ready": True}:
                raise BenchError(f"the engine for {name!r} speaks out of turn")
            yield running
        finally:
            running.end()
