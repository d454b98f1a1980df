"""No file is dead, every C++ test has its source, and one version is told everywhere."""

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from tests.tidy.test_imports import INCLUDE
from tests.tidy.tree import CPP, Tree, expect_none

CMAKE = "csrc/CMakeLists.txt"
# Tests of tests: the runner's main function, the cases that must fail; and programs that tests run.
NOT_MIRRORS = ("tests/core/main.cc", "tests/core/canary.cc")
TOOLS = "tests/core/tools/"


def dead_files(tree: Tree) -> Iterator[str]:
    """A source is compiled when CMakeLists.txt names it or its folder's glob."""
    cmake = tree.text(CMAKE)
    includers = list(tree.select(*CPP, under="csrc/")) + list(tree.select(*CPP, under="tests/"))
    included = {f"csrc/{target}" for _, text in includers for target in INCLUDE.findall(text)}
    for path, _ in tree.select(*CPP, under="csrc/"):
        inside = PurePosixPath(path).relative_to("csrc")
        if inside.suffix == ".cc":
            names = (str(inside), f"{inside.parent}/*.cc")
            if not any(re.search(rf"(?<![\w/]){re.escape(name)}", cmake) for name in names):
                yield f"{path}: not compiled by {CMAKE}"
        elif path not in included:
            yield f"{path}: included by nothing"
    for path in tree.paths:
        if path.startswith("csrc/") and not path.endswith((*CPP, "CMakeLists.txt")):
            yield f"{path}: neither a source nor a build file"


def orphaned_core_tests(tree: Tree) -> Iterator[str]:
    """tests/core/test_<folder>_<topic>.cc includes that folder; test_<source>.cc has its source."""
    sources = {PurePosixPath(path).stem for path, _ in tree.select(*CPP, under="csrc/")}
    tests = list(tree.select(*CPP, under="tests/core/"))
    included = {PurePosixPath(target).name for _, text in tests for target in INCLUDE.findall(text)}
    for path, text in tests:
        file = PurePosixPath(path)
        name = file.stem.removeprefix("test_")
        if path in NOT_MIRRORS or (path.startswith(TOOLS) and file.suffix == ".cc"):
            continue
        if file.suffix != ".cc":
            if file.name not in included:
                yield f"{path}: included by nothing"
        elif not file.name.startswith("test_"):
            yield f"{path}: not named test_<folder>_<topic>.cc"
        elif name not in sources and f"{name.split('_')[0]}/" not in "\n".join(
            INCLUDE.findall(text)
        ):
            yield f"{path}: includes nothing of what it is named after"


def versions(tree: Tree) -> dict[str, str]:
    """The version as others tell it; kvpool/__init__.py is the one place where it is written."""
    released = re.search(r"^## \[(\d[^\]]*)\]", tree.text("CHANGELOG.md"), re.MULTILINE)
    return {
        "installed": importlib.metadata.version("kvpool"),
        "CHANGELOG.md": released[1] if released else "none",
    }


def test_no_file_is_dead(repository: Tree) -> None:
    expect_none(dead_files(repository))


def test_every_core_test_has_its_source(repository: Tree) -> None:
    expect_none(orphaned_core_tests(repository))


def test_one_version(repository: Tree) -> None:
    import kvpool

    assert set(versions(repository).values()) == {kvpool.__version__}


def test_dead_file_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    tree = tree_of(
        {
            CMAKE: "file(GLOB S base/*.cc)\nadd_library(x one/named.cc)\n",
            "csrc/base/alive.cc": '#include "base/alive.h"\n',
            "csrc/base/alive.h": "",
            "csrc/base/tested.h": "",
            "csrc/one/named.cc": "",
            "csrc/base/dead.h": "// base/alive.h\n",
            "csrc/node/dead.cc": "",
            "csrc/node/notes.txt": "",
            "tests/core/test_tested.cc": '#include "base/tested.h"\n',
        }
    )
    assert [line.split(":")[0] for line in dead_files(tree)] == [
        "csrc/base/dead.h",
        "csrc/node/dead.cc",
        "csrc/node/notes.txt",
    ]


def test_orphaned_core_test_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    tree = tree_of(
        {
            "csrc/policy/heat.h": "",
            "tests/core/main.cc": "",
            "tests/core/test_heat.cc": "",
            "tests/core/test_policy_ghosts.cc": '#include "policy/heat.h"\n#include "shared.h"\n',
            "tests/core/test_policy_gone.cc": '#include "shared.h"\n',
            "tests/core/other.cc": '#include "policy/heat.h"\n',
            "tests/core/shared.h": "",
            "tests/core/unused.h": "",
        }
    )
    assert list(orphaned_core_tests(tree)) == [
        "tests/core/other.cc: not named test_<folder>_<topic>.cc",
        "tests/core/test_policy_gone.cc: includes nothing of what it is named after",
        "tests/core/unused.h: included by nothing",
    ]


def test_other_version_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    tree = tree_of(
        {
            "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [1.2.2] - 2020-01-01\n",
        }
    )
    assert versions(tree)["CHANGELOG.md"] == "1.2.2"
