"""What the pages point at exists: files, headings, and the commands that they tell to type."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.tidy.tree import Tree, expect_none

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)|!\[[^\]]*\]\(([^)\s]+)\)")
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|//")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)|`[^`\n]+`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
MAKE = re.compile(r"\bmake((?: +[a-z][a-z-]*)+)")


def anchors(text: str) -> set[str]:
    """The names that a page's headings have in links, repeated ones numbered."""
    seen: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        seen[words] = seen.get(words, -1) + 1
        if seen[words]:
            seen[f"{words}-{seen[words]}"] = 0
    return set(seen)


def broken_links(tree: Tree) -> Iterator[str]:
    for path, text in tree.select(".md"):
        for match in LINK.finditer(CODE.sub("", text)):
            link = match[1] or match[2]
            if not ABSOLUTE.match(link) and not leads_somewhere(tree, path, link):
                yield f"{path}: {link}"


def leads_somewhere(tree: Tree, path: str, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (tree.root / path).parent / file if file else tree.root / path
    target = target.resolve()
    if not target.is_relative_to(tree.root.resolve()) or not is_kept(tree, target):
        return False
    return not anchor or (target.is_file() and anchor in anchors(target.read_text()))


def is_kept(tree: Tree, target: Path) -> bool:
    """Whether the target is in the repository, not only on this disk."""
    inside = str(target.relative_to(tree.root.resolve()))
    return any(path == inside or path.startswith(f"{inside}/") for path in tree.paths)


def unknown_targets(tree: Tree) -> Iterator[str]:
    known = set(re.findall(r"^([a-z][a-z-]*):(?!=)", tree.text("Makefile"), re.MULTILINE))
    for path, text in tree.select(".md"):
        for code in CODE.findall(text):
            for words in MAKE.findall(code):
                for target in words.split():
                    if target not in known:
                        yield f"{path}: make {target}"


def test_links_lead_somewhere(repository: Tree) -> None:
    expect_none(broken_links(repository))


def test_make_targets_exist(repository: Tree) -> None:
    expect_none(unknown_targets(repository))


def test_broken_link_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    page = """# Top of it
    [web](https://example.org/x) [up](#top-of-it) [file](docs/b.md#two-words) [folder](docs)
    `[in code](nowhere)`
    [gone](docs/gone.md) [no heading](#bottom) ![picture](gone.png) [outside](../README.md)
    """
    tree = tree_of({"README.md": page, "docs/b.md": "# B\n## Two words!\n"})
    assert list(broken_links(tree)) == [
        "README.md: docs/gone.md",
        "README.md: #bottom",
        "README.md: gone.png",
        "README.md: ../README.md",
    ]


def test_unknown_target_is_found(tree_of: Callable[[dict[str, str]], Tree]) -> None:
    page = "To make sure: `make test`, `make check gone`.\n\n```\nmake lost ARGS=x\n```\n"
    tree = tree_of({"README.md": page, "Makefile": "test: a\ncheck:\nlost := 1\n"})
    assert list(unknown_targets(tree)) == ["README.md: make gone", "README.md: make lost"]


def events_of(text: str) -> set[str]:
    """The events that a source logs: the first text of a call on the daemon's log."""
    call = re.compile(r'log\.(?:debug|info|warning|error|often)\((?:logging\.\w+,)?\s*"([^"%]+)"')
    return set(call.findall(text))


def test_every_event_of_the_log_is_in_its_table(repository: Tree) -> None:
    """People look for them, and programs match them: a name is kept, and told.

    Connectors speak in sentences, in the log of their engine.
    """
    found = {
        event
        for path, text in repository.select(".py")
        if path.startswith("kvpool/") and not path.startswith("kvpool/connectors/")
        for event in events_of(text)
    }
    (page,) = [text for path, text in repository.select(".md") if path == "docs/operating.md"]
    table = page[page.index("### The log") : page.index("### When something dies")]
    assert {"ready", "refused", "memory shared out"} <= found
    assert not {event for event in found if f"`{event}`" not in table}


def test_an_event_is_found_however_it_is_logged() -> None:
    text = (
        'self.log.often(logging.INFO, "one", a=1)\nlog.info("two")\nlog.error(\n    "three", b=2)'
    )
    assert events_of(text) == {"one", "two", "three"}
