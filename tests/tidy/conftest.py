"""Two trees: this repository, and a small one that a test fills with bad examples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, Tree


@pytest.fixture(scope="session")
def repository() -> Tree:
    return Tree(ROOT)


@pytest.fixture
def tree_of(tmp_path: Path) -> Callable[[dict[str, str]], Tree]:
    def build(files: dict[str, str]) -> Tree:
        for path, text in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return Tree(tmp_path)

    return build
