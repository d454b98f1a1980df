"""Words that do not belong in the repository: loose ends, vague class names, one machine's paths.

The patterns are written so that they do not match themselves: this file obeys its own rules.
"""

import re
from collections.abc import Callable, Iterator

import pytest

from tests.tidy.tree import CPP, PYTHON, Tree, expect_none

CODE = (
    *CPP,
    *PYTHON,
    "Makefile",
    "CMakeLists.txt",
    ".sh",
    ".ci/run",
    ".ci/setup",
    ".ci/setup-engines",
    ".toml",
)
PROSE = (".md",)

LOOSE_END = re.compile(r"\b(FIX[M]E|X[X]X|HAC[K])\b|\bTOD[O]\b(?!\(#\d+\))")
VAGUE_CLASS = re.compile(r"\b(?:class|struct)\s+(\w*(?:Manager|Helper|Util)s?\w*)")
# Code gets scratch folders from tempfile or tmp_path; prose may show one in an example.
MACHINE_PATH = re.compile(r"(?<![\w.~/$}-])/(?:hom[e]|roo[t]|wor[k]|tm[p])(?![\w-])")
MACHINE_PATH_IN_PROSE = re.compile(r"(?<![\w.~/$}-])/(?:hom[e]|roo[t]|wor[k])/")
REGISTRY = re.compile(
    r"\b(?:(?:test\.)?pyp[i]\.(?:org|io)|files\.pythonhoste[d]\.org|deb\.debia[n]\.org"
    r"|(?:archive|security)\.ubunt[u]\.com|registry\.npmj[s]\.org|prox[y]\.golang\.org"
    r"|crate[s]\.io|[\w-]+\.pkg\.de[v])\b"
)


def found_in(tree: Tree, rule: re.Pattern[str], *endings: str) -> Iterator[str]:
    for path, text in tree.select(*endings):
        for number, line in enumerate(text.splitlines(), 1):
            for match in rule.finditer(line):
                yield f"{path}:{number}: {match[0]}"


RULES = {
    "loose end": (LOOSE_END, (*CODE, *PROSE)),
    "vague class": (VAGUE_CLASS, (*CPP, *PYTHON)),
    "machine path in code": (MACHINE_PATH, CODE),
    "machine path in prose": (MACHINE_PATH_IN_PROSE, PROSE),
    "registry host": (REGISTRY, (*CODE, *PROSE)),
}


@pytest.mark.parametrize("name", RULES)
def test_no_banned_word(repository: Tree, name: str) -> None:
    rule, endings = RULES[name]
    expect_none(found_in(repository, rule, *endings))


# Each bad word is put together here, for this file is read by the rules as well.
BAD = [
    ("loose end", "FIX" + "ME"),
    ("loose end", "X" + "XX: later"),
    ("loose end", "HA" + "CK"),
    ("loose end", "TO" + "DO: some day"),
    ("vague class", "class Pool" + "Manager"),
    ("vague class", "struct IoHel" + "per"),
    ("vague class", "class Uti" + "ls"),
    ("machine path in code", '"/ho' + 'me/me/kvpool"'),
    ("machine path in code", "/tm" + "p/x"),
    ("machine path in prose", "cd /wor" + "k/kvpool"),
    ("registry host", "https://pyp" + "i.org/simple"),
    ("registry host", "http://" + ".".join(["deb", "debian", "org"]) + "/debian"),
]
GOOD = [
    ("loose end", "TO" + "DO(#12): say when"),
    ("loose end", "mkdtemp('XXXX" + "XX')"),
    ("vague class", "class Pool(AbstractContext" + "Manager)"),
    ("machine path in code", "docs/wor" + "k.md, ~/wor" + "k, $HOME/tm" + "p, tests/tm" + "p"),
    ("machine path in prose", "kvpool serve --dir /tm" + "p/pool"),
    ("registry host", "a package on PyPI"),
]


@pytest.mark.parametrize(("name", "line"), BAD)
def test_bad_word_is_found(tree_of: Callable[[dict[str, str]], Tree], name: str, line: str) -> None:
    rule, endings = RULES[name]
    tree = tree_of({f"some/bad{endings[-1]}": f"fine\n{line}\n"})
    (found,) = found_in(tree, rule, *endings)
    assert found.startswith(f"some/bad{endings[-1]}:2: ")


@pytest.mark.parametrize(("name", "line"), GOOD)
def test_good_word_is_left_alone(
    tree_of: Callable[[dict[str, str]], Tree], name: str, line: str
) -> None:
    rule, endings = RULES[name]
    assert list(found_in(tree_of({f"good{endings[-1]}": line}), rule, *endings)) == []
