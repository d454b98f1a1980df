"""The files that tidy looks at: what git tracks or would track, as text, by path from the root.

Each rule takes a Tree, so that the same rule judges this repository and the tiny bad one that
proves that it can fail.
"""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = (".h", ".inl", ".cc")
PYTHON = (".py", ".pyi")
IGNORED = {".git", ".venv", ".venv-vllm", "build", "dist", "__pycache__"}
GENERATED = ("kvpool/_core.pyi",)


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = sorted(path for path in listed(root) if (root / path).is_file())

    def text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def select(self, *endings: str, under: str = "") -> Iterator[tuple[str, str]]:
        """Path and text of the files with one of the endings below one folder."""
        for path in self.paths:
            if path.startswith(under) and path.endswith(endings) and path not in GENERATED:
                yield path, self.text(path)


def listed(root: Path) -> list[str]:
    """Asks git; where it cannot answer (no clone, no git, another owner) walks the folders."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    if (root / ".git").exists() and shutil.which("git"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return [path for path in done.stdout.split("\0") if path]
    paths = [path.relative_to(root) for path in root.rglob("*")]
    return [str(path) for path in paths if not IGNORED.intersection(path.parts)]


def expect_none(violations: Iterable[str]) -> None:
    """Fails with one violation a line."""
    found = list(violations)
    if found:
        pytest.fail("\n".join(found), pytrace=False)
