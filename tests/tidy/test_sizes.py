"""Files, functions, parameter lists and lines stay small enough to be read at one go.

Python is measured by its syntax tree. C++ is measured by its braces: good enough for sources in the
house format, which `make check` holds them to.
"""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.tidy.tree import CPP, PYTHON, Tree, expect_none

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
LINE_COLUMNS_MAX = 100

# What a comment or a literal holds is no code: each is blanked, with its line breaks kept.
NOT_CODE = re.compile(
    r'R"(?P<raw>[^(\s]*)\(.*?\)(?P=raw)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
CONTAINER = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b")
MEMBER_INIT = re.compile(r"\)[^:;{}]*[^:]:[^:].*[\w>]\s*$", re.DOTALL)


def long_files(tree: Tree) -> Iterator[str]:
    for path, text in tree.select(*CPP, *PYTHON):
        lines = text.splitlines()
        if len(lines) > FILE_LINES_MAX:
            yield f"{path}: {len(lines)} lines"
        for number, line in enumerate(lines, 1):
            if len(line) > LINE_COLUMNS_MAX:
                yield f"{path}:{number}: {len(line)} columns"


def python_functions(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, first line, lines and parameters of each function.

    Without self and cls, and without options (keyword-only, with a default): a call need not name
    them, so they cost its reader nothing.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            needed = [
                x for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if not default
            ]
            names = [each.arg for each in (*a.posonlyargs, *a.args, *needed)]
            parameters = len([name for name in names if name not in ("self", "cls")])
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield node.name, node.lineno, lines, parameters


def code_only(text: str) -> str:
    return NOT_CODE.sub(lambda match: '""' + "\n" * match[0].count("\n"), text)


def cpp_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and lines of each outermost braced block that has a parameter list."""
    code = code_only(text)
    line, head, head_line = 1, "", 1
    open_blocks: list[str] = []  # kind of each open brace
    function = ("", 0)
    for char in code:
        if not head.strip():
            head, head_line = "", line
        if char == "\n":
            line += 1
        if char == "{":
            kind = kind_of(head, "function" in open_blocks)
            open_blocks.append(kind)
            if kind == "function":
                function = (name_of(head), head_line)
            head = head + "()" if kind == "init" else ""
        elif char == "}" and open_blocks:
            kind = open_blocks.pop()
            if kind == "function":
                yield function[0], function[1], line - function[1] + 1
            head = head if kind == "init" else ""
        elif char == ";" and "init" not in open_blocks:
            head = ""
        elif "init" not in open_blocks:
            head += char


def kind_of(head: str, inside_function: bool) -> str:
    if inside_function:
        return "inner"
    if MEMBER_INIT.search(head):
        return "init"  # a member's initializer, in front of a constructor's body
    outer = re.sub(r"\([^()]*\)|<[^<>]*>", "()", head)
    if CONTAINER.search(outer) and not re.search(
        r"\)\s*(const|noexcept|override|->.*)*\s*$", outer
    ):
        return "container"
    return "function" if "(" in head else "inner"


def name_of(head: str) -> str:
    found = re.search(r"(~?[\w:]+|operator\S+)\s*\(", head)
    return found[1] if found else head.strip()


def large_functions(tree: Tree) -> Iterator[str]:
    for path, text in tree.select(*PYTHON):
        for name, first, lines, parameters in python_functions(text):
            if lines > FUNCTION_LINES_MAX:
                yield f"{path}:{first}: {name} has {lines} lines"
            if parameters > PARAMETERS_MAX:
                yield f"{path}:{first}: {name} has {parameters} parameters"
    for path, text in tree.select(*CPP):
        for name, first, lines in cpp_functions(text):
            if lines > FUNCTION_LINES_MAX:
                yield f"{path}:{first}: {name} has {lines} lines"


def test_files_and_lines_are_short(repository: Tree) -> None:
    expect_none(long_files(repository))


def test_functions_are_short(repository: Tree) -> None:
    expect_none(large_functions(repository))


def test_long_file_and_line_are_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    tree = tree_of(
        {
            "kvpool/long.py": "x = 1\n" * (FILE_LINES_MAX + 1),
            "csrc/base/wide.h": "//" + "-" * LINE_COLUMNS_MAX,
            "kvpool/fits.py": "x = 1\n" * FILE_LINES_MAX,
        }
    )
    assert list(long_files(tree)) == [
        "csrc/base/wide.h:1: 102 columns",
        "kvpool/long.py: 601 lines",
    ]


def test_large_python_function_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    body = "    x = 1\n"
    tree = tree_of(
        {
            "kvpool/a.py": "async def long():\n" + body * FUNCTION_LINES_MAX,
            "kvpool/b.py": "def fits(a, b, c, d, e, f):\n" + body * (FUNCTION_LINES_MAX - 1),
            "kvpool/c.py": "class C:\n    def wide(self, a, b, c, d, /, e, *, f, g): ...\n",
        }
    )
    assert list(large_functions(tree)) == [
        "kvpool/a.py:1: long has 71 lines",
        "kvpool/c.py:2: wide has 7 parameters",
    ]


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("int f(int a) {", "f"),
        ("static Result<std::map<int, int>> Node::put(Key key) const {", "Node::put"),
        ("Node::Node(int a)\n    : a_{a}, b_(2), c_{} {", "Node::Node"),
        ("auto g() noexcept -> std::vector<int> {", "g"),
        ("template <class T>\nT h(struct stat* s) {", "h"),
        ('TEST_CASE("braces } in { text") {', "TEST_CASE"),
        ("bool operator()(int a) const {", "operator"),
    ],
)
@pytest.mark.parametrize(
    "inside", ["", "namespace kvpool {\n", "namespace {\nclass C final : B {\n"]
)
def test_long_cpp_function_is_found(
    tree_of: Callable[[dict[str, str]], Tree], head: str, name: str, inside: str
) -> None:
    def source(body_lines: int) -> str:
        body = "  if (x == '{') { y({1}); }  // }\n" * body_lines
        return inside + f"int x = 1;\n{head}\n{body}}}\nint small() {{ return 1; }}\n"

    fitting = FUNCTION_LINES_MAX - head.count("\n") - 2
    tree = tree_of({"csrc/base/fits.cc": source(fitting), "csrc/base/long.cc": source(fitting + 1)})
    (found,) = large_functions(tree)
    assert found.startswith("csrc/base/long.cc:")
    assert f"{name} has 71 lines" in found
