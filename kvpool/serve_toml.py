"""On which line an option of a TOML file stands, which the parser does not tell.

Promises:  no line rather than a wrong one: what is not written in the plain form of tables and keys
(multi-line text, inline tables, a key twice) has none.
"""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+(?:\s*\.\s*[A-Za-z0-9_-]+)*)\s*=")
_MULTI_LINE = ('"""', "'''")


def lines_of(text: str) -> dict[tuple[str, str], int]:
    """(table, key) -> line, from 1; (table, "") is the line of its header.

    A key above all tables is ("", key).
    """
    found: dict[tuple[str, str], int] = {}
    twice: set[tuple[str, str]] = set()
    table = ""
    if any(quotes in text for quotes in _MULTI_LINE):
        return found  # what looks like a key may be a line of text
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _HEADER.fullmatch(line)) is not None:
            table = _plain(header[1])
            at = (table, "")
        elif (key := _KEY.match(line)) is not None:
            *above, last = _plain(key[1]).split(".")
            at = (".".join(filter(None, [table, *above])), last)
        else:
            continue
        if at in found:
            twice.add(at)
        found[at] = number
    return {at: number for at, number in found.items() if at not in twice}


def _plain(name: str) -> str:
    """A name with dots, less its spaces and the quotes around its parts."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
