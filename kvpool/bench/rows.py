"""Rows that benches yield, and how they are printed."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable

from rich.table import Table

from kvpool.replay.report import plain_table

Value = str | int | float


class BenchError(Exception):
    """A bench found wrong bytes or a wrong answer, so its figures mean nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `fields` are the JSON line; `bar` says what is asked, `holds` whether."""

    fields: dict[str, Value]
    bar: str = ""
    holds: bool | None = None


def expect(condition: bool, what: str) -> None:
    """Keeps a bench honest: it checks its own answers, also under -O."""
    if not condition:
        raise BenchError(what)


def at_least(field: str, bar: float, fields: dict[str, Value]) -> Row:
    """A row that asks for fields[field] >= bar."""
    return Row(fields, f"{field} >= {bar:g}", float(fields[field]) >= bar)


def at_most(field: str, bar: float, fields: dict[str, Value]) -> Row:
    """A row that asks for fields[field] <= bar."""
    return Row(fields, f"{field} <= {bar:g}", float(fields[field]) <= bar)


def json_line(row: Row) -> str:
    return json.dumps({name: _rounded(value) for name, value in row.fields.items()})


def _rounded(value: Value) -> Value:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def tables(rows: Iterable[Row]) -> list[Table]:
    """All rows with the bars they are held to; one table for those that have the same fields."""
    alike = itertools.groupby(rows, key=lambda row: list(row.fields))
    return [_table(list(part)) for _, part in alike]


def _table(rows: list[Row]) -> Table:
    shown = plain_table(gap=2)
    for name, value in rows[0].fields.items():
        shown.add_column(name, justify="left" if isinstance(value, str) else "right")
    if any(row.bar for row in rows):
        shown.add_column("bar")
    for row in rows:
        cells = [_cell(value) for value in row.fields.values()]
        shown.add_row(*cells, *([_verdict(row)] if row.bar else []))
    return shown


def _cell(value: Value) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def _verdict(row: Row) -> str:
    return f"[green]{row.bar}: holds[/]" if row.holds else f"[bold red]{row.bar}: missed[/]"
