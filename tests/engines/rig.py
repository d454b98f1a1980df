"""Real engines as processes of their own, and what one may ask of them.

The test's Python has no engine in it: engines run in .venv-vllm (or $KVPOOL_ENGINE_PYTHON), where
kvpool is installed as a user has it. An Engine is vLLM in one process, told by lines of JSON.

Promises:  1. every answer has a deadline, and what an engine wrote is shown when it is missed;
           2. whatever a test does, no process of an engine outlives it.
Nothing here sleeps to let something happen, and nothing is tried twice.
"""

import contextlib
import functools
import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.pools import ROOT, alone_with
from tests.served import die_with_parent

CHILDREN = Path(__file__).parent / "children"
# Until an engine is ready: some 10 s on a machine with nothing else to do, and on one of ten
# times less, beside another engine, minutes.
START_S = 600.0
ANSWER_S = 600.0
END_S = 60.0  # that an engine may take to end when it is asked to; then it is killed
ERROR_LINES = 60  # of what an engine wrote, shown when it fails
BLOCK_TOKENS = 32  # the smallest that vLLM has for CPUs

Prompt = str | Sequence[int]

_NUMBERS = itertools.count()
Process = TypeVar("Process", bound="Asked")


def engine_python() -> Path:
    path = Path(os.environ.get("KVPOOL_ENGINE_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    assert path.exists(), f"there is no {path}: `make test-engines` makes it"
    return path


def environment() -> dict[str, str]:
    """Of an engine: one thread, one GiB for KV, nothing asked of the network."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("KVPOOL_")}
    own.pop("PYTHONPATH", None)  # kvpool is to come from where it is installed
    return {
        **own,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        # Else an engine takes every processor all the same, and two of them wait for each other's
        # threads, which keep the processors by spinning: a prompt of 300 tokens took a minute.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass(frozen=True)
class Model:
    """A folder with weights, and how engines are to take it."""

    name: str
    folder: Path
    dtype: str = "float32"
    block_tokens: int = BLOCK_TOKENS
    has_tokenizer: bool = False
    has_windows: bool = False
    backend: str = ""  # of attention, where the processor would decide

    def arguments(self) -> dict[str, Any]:
        """Of vllm.LLM and of its server."""
        return {
            "model": str(self.folder),
            "dtype": self.dtype,
            "block_size": self.block_tokens,
            "max_model_len": 2048,
            "enforce_eager": True,
            "skip_tokenizer_init": not self.has_tokenizer,
            **({"attention_config": {"backend": self.backend}} if self.backend else {}),
        }


@dataclass(frozen=True)
class Output:
    """What became of one prompt. finish: "length", or "error".

    gaps: for each token, by how much its logarithm of probability exceeds the next best one's.
    """

    prompt_tokens: int
    tokens: list[int]
    gaps: list[float]
    finish: str
    kv_transfer_params: Any = None


class Metrics:
    """Samples of vLLM's metrics at one moment; minus an earlier one: what was counted between."""

    def __init__(self, samples: Mapping[tuple[str, frozenset[Any]], float]) -> None:
        self._samples = dict(samples)

    @staticmethod
    def of(samples: Sequence[Sequence[Any]]) -> "Metrics":
        return Metrics(
            {(name, frozenset(labels.items())): value for name, labels, value in samples}
        )

    def __sub__(self, earlier: "Metrics") -> "Metrics":
        before = earlier._samples
        return Metrics({key: value - before.get(key, 0) for key, value in self._samples.items()})

    def value(self, name: str, **labels: str) -> int:
        """The sum over all samples of that name with these labels. 0 where there is none."""
        wanted = set(labels.items())
        return int(
            sum(
                value
                for (sample, has), value in self._samples.items()
                if sample == f"vllm:{name}" and wanted <= has
            )
        )

    @property
    def external_tokens(self) -> int:
        """Prompt tokens whose KV a connector promised."""
        return self.value("external_prefix_cache_hits_total")

    @property
    def local_tokens(self) -> int:
        """Prompt tokens whose KV the engine had itself."""
        return self.value("prefix_cache_hits_total")

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens whose KV the engine computed."""
        return self.value("prompt_tokens_by_source_total", source="local_compute")

    @property
    def preemptions(self) -> int:
        return self.value("num_preemptions_total")

    def named(self, part: str) -> str:
        """What was counted with that in its name, for messages."""
        found = [
            f"{name} {labels.get('reason', '')} {value:g}"
            for (name, pairs), value in self._samples.items()
            if part in name and value and not name.endswith("_created")
            for labels in [dict(pairs)]
        ]
        return "\n".join(["", *sorted(found)])


class Child:
    """A process of an engine, in a group of its own. Its stderr goes to folder/name.log."""

    def __init__(self, command: Sequence[str], folder: Path, name: str, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [str(engine_python()), *command],
                cwd=folder,
                stdin=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
                **{"stdout": subprocess.PIPE, "env": environment(), **options},
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def failure(self, text: str) -> AssertionError:
        lines = self.log_path.read_text(errors="replace").splitlines()[-ERROR_LINES:]
        return AssertionError("\n".join([f"{self.log_path.stem}: {text}", *lines]))

    def close(self) -> None:
        """The whole group ends, whatever it does. Idempotent.

        It is asked first: vLLM that is killed leaves shared memory that has a name behind.
        """
        if self.is_running:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ANSWER_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Asked:
    """A process of an engine that is asked by lines of JSON; the first waits until it is ready."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._unread = b""
        self._is_ready = False

    def ask(self, op: str, **fields: Any) -> Any:
        self._send(op, **fields)
        return self._answer(ANSWER_S)

    def wait_ready(self) -> Self:
        if not self._is_ready:
            self._is_ready = True
            self._answer(START_S)
        return self

    def is_alive(self) -> bool:
        return self.child.is_running

    def close(self) -> None:
        self.child.close()

    def _send(self, op: str, **fields: Any) -> None:
        self.wait_ready()
        self._write({"op": op, **fields})

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:
            raise self.child.failure("has ended") from None

    def _answer(self, timeout_s: float) -> Any:
        message = self._read(time.monotonic() + timeout_s)
        if "ok" not in message:
            raise self.child.failure(f"answers {message.get('error', message)}")
        return message["ok"]

    def _read(self, deadline: float) -> dict[str, Any]:
        assert self.child.process.stdout is not None
        pipe = self.child.process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self.child.failure("says nothing in time")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self.child.failure(f"has ended with {self.child.process.wait(ANSWER_S)}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))


class Engine(Asked):
    """vLLM in a process. It starts at once; the first question waits until it is ready."""

    def __init__(
        self,
        model: Model,
        folder: Path,
        name: str = "engine",
        *,
        connector: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """connector: a kv_transfer_config. options: more arguments of vllm.LLM."""
        self.model = model
        arguments = {
            **model.arguments(),
            "distributed_executor_backend": "uni",
            "num_gpu_blocks_override": 512,
            "disable_log_stats": False,
            **options,
        }
        self._id = f"kvpool-test-{os.getpid()}-{next(_NUMBERS)}"
        if connector is not None:
            arguments["kv_transfer_config"] = {**connector, "engine_id": self._id}
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "KVPOOL_CONNECTOR_STRICT": "1",  # a fault of kvpool itself ends the engine
            **(variables or {}),
        }
        command = [str(CHILDREN / "engine.py"), json.dumps(arguments)]
        super().__init__(Child(command, folder, name, env={**environment(), **own}))

    # --- questions -------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, **options: Any) -> list[Output]:
        """All prompts at once. options: salts, kv_transfer_params: one each."""
        self.begin(prompts, max_tokens, **options)
        return self.outputs()

    def begin(self, prompts: Sequence[Prompt], max_tokens: int, **options: Any) -> None:
        """A generate whose outputs() are asked for later."""
        plain = [
            each if isinstance(each, str) else [int(token) for token in each] for each in prompts
        ]
        self._send("generate", prompts=plain, max_tokens=max_tokens, **options)

    def outputs(self, timeout_s: float = ANSWER_S) -> list[Output]:
        return [Output(**each) for each in self._answer(timeout_s)]

    def reset_prefix_cache(self) -> None:
        """Of the engine alone."""
        assert self.ask("reset_prefix_cache") is True

    def wait_saved(self) -> None:
        """Blocks come to the pool after the answer, from another thread."""
        self.ask("wait_saved", timeout_s=ANSWER_S / 2)

    def wait_connected(self) -> None:
        """Of a daemon that came back."""
        self.ask("wait_connected", timeout_s=ANSWER_S / 2)

    def metrics(self) -> Metrics:
        return Metrics.of(self.ask("metrics"))

    @contextlib.contextmanager
    def counting(self) -> Iterator[Metrics]:
        """What is given is filled when the with ends: with what was counted in it."""
        before, counted = self.metrics(), Metrics({})
        yield counted
        counted._samples = (self.metrics() - before)._samples

    def hold(self, place: str, *, after: bool = False, skip: int = 0) -> None:
        """See children/engine.py."""
        self.ask("hold", place=place, after=after, skip=skip)

    def wait_held(self) -> None:
        """Until some thread of the engine waits at the place that was named last."""
        message = self._read(time.monotonic() + ANSWER_S)
        if "held" not in message:
            raise self.child.failure(f"nothing was held: {message}")

    def go(self) -> None:
        self._write({"op": "go"})

    def close(self) -> None:
        """And the memory of its CPU tier, which has a name, goes too."""
        super().close()
        for left in Path("/dev/shm").glob(f"vllm_offload_{self._id}*"):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def engines(*started: Process) -> Iterator[tuple[Process, ...]]:
    """These, closed at the end."""
    try:
        yield started
    finally:
        for each in started:
            each.close()


@functools.cache
def model_folder(name: str) -> Path:
    """Made at the first use, and kept in build/ for as long as what makes it stays the same."""
    script = CHILDREN / "make_models.py"
    makers = script.read_bytes() + (ROOT / "kvpool" / "bench" / "vllm_smollm.py").read_bytes()
    folder = ROOT / "build" / "engines" / "models" / name
    stamp = folder / "made_by"
    folder.mkdir(parents=True, exist_ok=True)
    with alone_with(folder):
        if stamp.exists() and stamp.read_bytes() == makers:
            return folder
        child = Child([str(script), name, str(folder)], folder.parent, name, stdout=None)
        try:
            if child.process.wait(START_S) != 0:
                raise child.failure("could not be made")
        finally:
            child.close()
        stamp.write_bytes(makers)
    return folder
