"""Imports point one way only, in both languages, and `import kvpool` stays light.

C++: a folder of csrc/ includes only itself and folders above it in FOLDERS. Python: a module of
kvpool/ imports only modules of its own rank or a lower one. Both tables are the architecture: a
new folder or module gets its place here first.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest

from tests.tidy.tree import CPP, ROOT, Tree, expect_none

FOLDERS = ["base", "block", "memory", "policy", "tier", "node", "net", "cluster", "bindings"]
PACKAGE = "(kvpool)"  # `from kvpool import Pool`: the facade itself, which loads all that it names
RANKS = {
    0: ["errors", "types"],
    1: ["_core", "manifest", "keys", "config", "address"],
    2: [
        "layers",
        "namespace",
        "pool",
        "local",
        "ssd",
        "wire",
        "wire_client",
        "wire_node",
        "wire_proof",
    ],
    3: [
        PACKAGE,
        "remote_link",
        "remote_session",
        "remote",
        "serve_log",
        "serve_options",
        "serve_toml",
    ],
    4: [
        "serve_config",
        "serve_plan",
        "tenants",
        "cluster",
        "events",
        "serve_handshakes",
        "replay",
        "bench",
        "observe",
        "operate",
        "serve_control",
        "serve_clients",
        "serve_listen",
        "serve_nodes",
        "serve_peers",
        "serve_pins",
        "serve_report",
    ],
    5: [
        "connectors",
        "daemon",
        "serve_cluster",
        "serve_drain",
        "serve_events",
        "serve_http",
        "serve_observe",
        "serve_reload",
    ],
    6: ["serve_cli", "ssd_cli", "cli", "__main__"],
}
RANK = {module: rank for rank, modules in RANKS.items() for module in modules}
LIGHT = {"kvpool", "numpy", "msgpack", "xxhash"}

CYTHON = re.compile(r"_?cython_")  # what an extension made with Cython registers for itself
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def upward_includes(tree: Tree) -> Iterator[str]:
    for path, text in tree.select(*CPP, under="csrc/"):
        folder = PurePosixPath(path).parts[1]
        if folder not in FOLDERS:
            yield f"{path}: folder {folder} has no place in FOLDERS"
            continue
        for target in INCLUDE.findall(text):
            above = target.split("/")[0]
            if "/" not in target or above not in FOLDERS:
                yield f'{path}: "{target}" is not a path from csrc/'
            elif FOLDERS.index(above) > FOLDERS.index(folder):
                yield f'{path}: {folder} includes "{target}" from a folder below it'


def package_imports(tree: Tree, path: str, text: str) -> Iterator[str]:
    """The modules of kvpool that a file names, by the key that RANK has for them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolved(path, node)
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "kvpool" else [base]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "kvpool":
                yield module_of(tree, name)


def resolved(path: str, node: ast.ImportFrom) -> str:
    base = node.module or ""
    if node.level == 0:
        return base
    package = PurePosixPath(path).parts[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])


def module_of(tree: Tree, name: str) -> str:
    parts = name.split(".")
    if len(parts) == 1:
        return PACKAGE
    module = parts[1]
    files = (f"kvpool/{module}.py", f"kvpool/{module}.pyi", f"kvpool/{module}/__init__.py")
    is_module = module == "_core" or any(file in tree.paths for file in files)
    return module if is_module else PACKAGE


def upward_imports(tree: Tree) -> Iterator[str]:
    for path, text in tree.select(".py", under="kvpool/"):
        parts = PurePosixPath(path).parts
        module = PACKAGE if path == "kvpool/__init__.py" else PurePosixPath(parts[1]).stem
        if module not in RANK:
            yield f"{path}: module {module} has no rank in RANKS"
            continue
        for target in package_imports(tree, path, text):
            if target not in RANK:
                yield f"{path}: imports {target}, which has no rank in RANKS"
            elif RANK[target] > RANK[module]:
                yield f"{path}: {module} (rank {RANK[module]}) imports {target} ({RANK[target]})"


def loaded_by(statement: str) -> set[str]:
    """The packages from outside the standard library that one statement loads."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    return {name for name in names if not CYTHON.match(name)}


def test_includes_point_one_way(repository: Tree) -> None:
    expect_none(upward_includes(repository))


def test_imports_point_one_way(repository: Tree) -> None:
    expect_none(upward_imports(repository))


def test_import_kvpool_is_light() -> None:
    assert loaded_by("import kvpool") <= LIGHT


def test_a_heavy_import_is_seen() -> None:
    assert {"typer", "rich"} <= loaded_by("import typer, rich")


@pytest.mark.parametrize(
    ("include", "complaint"),
    [
        ('#include "node/node.h"', "from a folder below it"),
        ('#  include "status.h"', "not a path from csrc/"),
        ('#include "../base/status.h"', "not a path from csrc/"),
    ],
)
def test_bad_include_is_found(
    tree_of: Callable[[dict[str, str]], Tree], include: str, complaint: str
) -> None:
    good = '#include "base/status.h"\n#include <vector>\n'
    tree = tree_of({"csrc/policy/heat.h": good + include + "\n", "csrc/policy/fine.h": good})
    (found,) = upward_includes(tree)
    assert "csrc/policy/heat.h" in found
    assert complaint in found


def test_unknown_folder_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    (found,) = upward_includes(tree_of({"csrc/misc/a.h": ""}))
    assert "no place in FOLDERS" in found


@pytest.mark.parametrize(
    "statement",
    [
        "import kvpool.pool",
        "from kvpool.pool import Pool",
        "from kvpool import pool",
        "from kvpool import Pool",
        "from . import pool",
        "from .pool import Pool",
        "def late():\n    from kvpool.pool import Pool",
    ],
)
def test_bad_import_is_found(tree_of: Callable[[dict[str, str]], Tree], statement: str) -> None:
    tree = tree_of(
        {
            "kvpool/__init__.py": "from kvpool.pool import Pool\n",
            "kvpool/pool.py": "from kvpool import keys\nfrom kvpool._core import Node\n",
            "kvpool/keys.py": f"import numpy\nfrom kvpool.errors import KvpoolError\n{statement}\n",
            "kvpool/errors.py": "",
        }
    )
    (found,) = upward_imports(tree)
    assert found.startswith("kvpool/keys.py: keys (rank 1) imports")


def test_unknown_module_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    (found,) = upward_imports(tree_of({"kvpool/extra/deep.py": "import os\n"}))
    assert "no rank in RANKS" in found
