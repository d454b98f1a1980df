"""How figures look on a terminal: sizes, times, shares, bars and tables. Pure.

Promises:  what clients call themselves, their namespaces and tenants' files is text and no more: in
           a table it neither is markup nor reaches the terminal as a control sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.config import format_size as size

__all__ = [
    "bar",
    "clean",
    "console",
    "count",
    "duration",
    "percent",
    "rate",
    "size",
    "sparkline",
    "table",
]

PIPE_WIDTH = 120  # columns of a table that does not go to a terminal
_SPARKS = "▁▂▃▄▅▆▇█"


def count(number: float) -> str:
    """1,234; from a million on 1.2 M."""
    for unit, one in (("G", 1e9), ("M", 1e6)):
        if abs(number) >= one:
            return f"{number / one:.1f} {unit}"
    return f"{number:,.0f}"


def rate(per_s: float) -> str:
    """Of counts: with a decimal where that tells anything."""
    return f"{per_s:.1f}/s" if 0 < abs(per_s) < 10 else f"{count(per_s)}/s"


def duration(seconds: float) -> str:
    """The two largest units: 1 d 2 h, 3 min 5 s, 12 s, 250 ms."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    left = int(seconds)
    parts = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length:
            parts.append(f"{left // length} {unit}")
            left %= length
        elif parts:
            break
    return " ".join(parts[:2])


def percent(part: float, whole: float) -> str:
    """- where there is no whole."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def bar(part: float, whole: float, width: int) -> str:
    """Filled from the left."""
    done = min(width, max(0, round(width * part / whole))) if whole else 0
    return "█" * done + "░" * (width - done)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest values at the right, each 0..1; a space where nothing is known."""
    newest = list(values)[-width:]
    drawn = (
        " " if value is None else _SPARKS[min(len(_SPARKS) - 1, int(value * len(_SPARKS)))]
        for value in newest
    )
    return "".join(drawn).rjust(width)


def clean(text: str) -> str:
    """With what would move a cursor, change colours or turn the direction of writing as digits."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _PlainTable(Table):
    """Cells that are str are shown as they are, which rich's own read as markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        plain = (Text(clean(each)) if isinstance(each, str) else each for each in cells)
        super().add_row(*plain, **options)


def table(title: str, *columns: str, left: Iterable[str] = ()) -> Table:
    """The first column and those named in `left` are text; the others are numbers."""
    made = _PlainTable(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    to_the_left = set(left)
    for at, name in enumerate(columns):
        is_text = at == 0 or name in to_the_left
        made.add_column(name, justify="left" if is_text else "right", overflow="ellipsis")
    return made


def console() -> Console:
    """Stdout: as wide as the terminal, or wide enough for a pipe."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def show(*parts: RenderableType) -> None:
    """Prints them one below the other."""
    out = console()
    for part in parts:
        out.print(part)
