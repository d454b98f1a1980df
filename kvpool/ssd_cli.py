"""`kvpool ssd ...`: looks at an SSD tier while no pool has it open."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import kvpool

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvpool.ssd import Inspection, Progress, Verification

DAMAGE_SHOWN = 20  # rows of a table; --json has up to 1,000
_PIPE_WIDTH = 120  # columns of a table that does not go to a terminal
_BAR_WIDTH = 24

app = typer.Typer(help="Look at an SSD tier while no pool has it open.", no_args_is_help=True)

Path = Annotated[str, typer.Argument(help="Directory of the tier.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def inspect(path: Path, as_json: AsJson = False) -> None:
    """Show what a tier holds: namespaces, sizes, fill, and when blocks were last used."""
    from kvpool import ssd

    with _told_plainly():
        found = ssd.inspect(path)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _show(found)


@app.command()
def verify(path: Path, as_json: AsJson = False) -> None:
    """Read and check every block.

    Exit status 0: all whole; 1: damage found, or it could not be read.
    """
    from kvpool import ssd

    with _told_plainly(), _bar() as progress:
        found = ssd.verify(path, progress=progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _show_verification(found)
    if found.damaged:
        raise typer.Exit(1)


# --- showing -------------------------------------------------------------------------------------


def size(count: int) -> str:
    """Bytes with a unit, three digits or so: 1.5 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.{1 if value < 100 else 0}f} {unit}"


def _show(found: Inspection) -> None:
    console = _console()
    console.print(_facts(found))
    if found.namespaces:
        console.print(_namespaces(found))
    if found.classes:
        console.print(_classes(found))
    if found.blocks:
        console.print(_ages(found))
    if found.missing_parents:
        console.print(
            f"{found.missing_parents:,} blocks have a parent that is not in this tier; a pool drops"
            " what it cannot reach when it opens it."
        )
    if found.damaged:
        console.print(
            f"{found.damaged:,} entries are damaged; `kvpool ssd verify` names them. A pool drops"
            " them when it opens the tier."
        )


def _facts(found: Inspection) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_column()
    filled = f"{size(found.slot_bytes)} of {size(found.payload_bytes_max)}"
    index = f"{size(found.index_used_bytes)} of {size(found.index_bytes)}"
    grid.add_row("tier", found.path)
    grid.add_row("id", f"{found.tier_id}, format {found.format_version}")
    grid.add_row("node", found.node_id)
    grid.add_row("capacity", size(found.capacity_bytes))
    grid.add_row("filled", filled, _share(found.slot_bytes, found.payload_bytes_max))
    grid.add_row("index", index, _share(found.index_used_bytes, found.index_bytes))
    blocks = f"{found.blocks:,} of {found.blocks_max:,}"
    grid.add_row("blocks", blocks, _share(found.blocks, found.blocks_max))
    grid.add_row("commits", f"{found.commits:,}")
    return grid


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _namespaces(found: Inspection) -> Table:
    table = _table("\nnamespaces", "id", "block", "blocks", "bytes", "share")
    for each in sorted(found.namespaces, key=lambda each: -each.bytes):
        share = f"{each.bytes / max(found.bytes, 1):.1%}"
        table.add_row(each.id, size(each.block_bytes), f"{each.blocks:,}", size(each.bytes), share)
    return table


def _classes(found: Inspection) -> Table:
    table = _table("\nsize classes", "slot", "slab", "slabs", "blocks", "filled")
    for each in sorted(found.classes, key=lambda each: each.slot_bytes):
        slots = each.slabs * (each.slab_bytes // max(each.slot_bytes, 1))
        filled = f"{each.blocks / slots:.1%}" if slots else "-"
        counts = (f"{each.slabs:,}", f"{each.blocks:,}", filled)
        table.add_row(size(each.slot_bytes), size(each.slab_bytes), *counts)
    return table


def _ages(found: Inspection) -> Table:
    table = _table("\nlast used", "within", "blocks", "bytes", "heat each", "")
    most = max(each.blocks for each in found.ages)
    for each in found.ages:
        heat = f"{each.heat / each.blocks:.2f}" if each.blocks else "-"
        within = _duration(each.seconds_max) if each.seconds_max else "longer ago"
        bar = "█" * round(_BAR_WIDTH * each.blocks / max(most, 1))
        table.add_row(within, f"{each.blocks:,}", size(each.bytes), heat, bar)
    table.columns[-1].justify = "left"
    return table


def _show_verification(found: Verification) -> None:
    console = _console()
    if found.damaged:
        table = _table("", "damage", "namespace", "hash", "at", "bytes")
        for each in found.damage[:DAMAGE_SHOWN]:
            place = (f"{each.offset:,}", f"{each.bytes:,}")
            table.add_row(each.kind, each.namespace, each.hash, *place)
        console.print(table)
        if found.damaged > DAMAGE_SHOWN:
            console.print(f"and {found.damaged - DAMAGE_SHOWN:,} more; --json has up to 1,000")
    rate = size(int(found.bytes / max(found.seconds, 1e-6)))
    whole = "all whole" if not found.damaged else f"{found.damaged:,} damaged"
    read = f"{size(found.bytes)} read in {found.seconds:.1f} s, {rate}/s"
    console.print(f"{found.blocks:,} blocks, {whole} ({read})")


def _duration(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _share(part: int, whole: int) -> str:
    share = part / max(whole, 1)
    done = min(_BAR_WIDTH, round(_BAR_WIDTH * share))
    return f"{'█' * done}{'░' * (_BAR_WIDTH - done)} {share:.0%}"


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=_PIPE_WIDTH, highlight=False)


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    """Bytes read so far, on stderr when that is a terminal, else nowhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("verify"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("[red]{task.fields[damaged]}"),
        console=Console(stderr=True),
        transient=True,
    )
    bar.disable = not bar.console.is_terminal
    with bar:
        task = bar.add_task("verify", total=None, damaged="")

        def update(done: int, in_all: int, damaged: int) -> None:
            told = f"{damaged:,} damaged" if damaged else ""
            bar.update(task, total=in_all, completed=done, damaged=told)

        yield update


@contextlib.contextmanager
def _told_plainly() -> Iterator[None]:
    try:
        yield
    except kvpool.KvpoolError as error:
        print(f"kvpool: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
