"""`kvpool doctor`: what works here, and how to mend what does not."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.operate.doctor import Finding
    from kvpool.operate.probes import DaemonFacts

_LOOK_S = 2.0
_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def doctor(
    *,
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Payload memory that you mean to give.")
    ] = None,
    ssd: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where an SSD tier is to lie.")
    ] = None,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Check this machine for a pool: memory, limits, disk, sockets, daemon, devices.

    Changes nothing. Exit status 0: all works; 1: something does not. Warnings are not failures.
    """
    from kvpool.address import default_sockets
    from kvpool.config import parse_size
    from kvpool.operate import probes
    from kvpool.operate.doctor import examine

    with options.told_plainly():
        asked = None if dram is None else parse_size(dram)
        found = examine(
            probes.gather(
                asked_dram_bytes=asked,
                ssd=ssd,
                daemon=_daemon(address, token_file, tenant),
                sockets=default_sockets(os.environ),
            )
        )
    if as_json:
        options.print_json([dataclasses.asdict(each) for each in found])
    else:
        _show(found)
    if any(each.verdict == "fail" for each in found):
        raise typer.Exit(1)


def _daemon(address: str | None, token_file: str | None, tenant: str | None) -> DaemonFacts:
    from kvpool.errors import Unreachable
    from kvpool.operate.client import Operator, Reach
    from kvpool.operate.probes import DaemonFacts

    try:
        with Operator.connect(Reach(address, token_file, tenant), _LOOK_S) as operator:
            return DaemonFacts(where=operator.where, version=operator.version or None)
    except Unreachable as error:
        return DaemonFacts(reason=str(error))


def _show(found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvpool.operate import show

    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(overflow="fold")
    for each in found:
        mark, style = _MARKS[each.verdict]
        grid.add_row(Text(mark, style=style), Text(each.name, style="bold"), each.found)
        if each.remedy:
            grid.add_row("", "", Text(f"-> {each.remedy}", style="italic"))
    warned = sum(each.verdict == "warn" for each in found)
    failed = sum(each.verdict == "fail" for each in found)
    show.show(grid, Text(f"\n{len(found)} checks, {warned} warnings, {failed} failures"))
