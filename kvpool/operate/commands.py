"""The commands of an operator, as `kvpool --help` groups them."""

from __future__ import annotations

import typer

from kvpool.operate import (
    change_cli,
    cluster_cli,
    config_cli,
    doctor_cli,
    drain_cli,
    events_cli,
    explain_cli,
    files_cli,
    size_cli,
    stat_cli,
    top_cli,
)

_WATCH = "Look at a daemon"
_CHANGE = "Change a daemon"
_FILES = "Files in a pool"
_PLAN = "Set up and plan"


def add_to(app: typer.Typer) -> None:
    """Registers all of them."""
    app.command(rich_help_panel=_WATCH)(stat_cli.stat)
    app.command(rich_help_panel=_WATCH)(top_cli.top)
    app.command(rich_help_panel=_WATCH)(explain_cli.explain)
    for each in ("nodes", "locate"):
        app.command(rich_help_panel=_WATCH)(getattr(cluster_cli, each))
    app.command(rich_help_panel=_WATCH)(events_cli.events)
    for each in ("drop", "resize", "trim", "reload", "pin", "unpin", "pins"):
        app.command(rich_help_panel=_CHANGE)(getattr(change_cli, each))
    app.command(rich_help_panel=_CHANGE)(drain_cli.drain)
    for each in ("put", "get", "rm"):
        app.command(rich_help_panel=_FILES)(getattr(files_cli, each))
    app.command(rich_help_panel=_PLAN)(doctor_cli.doctor)
    app.command(rich_help_panel=_PLAN)(size_cli.size)
    app.add_typer(config_cli.app, name="config", rich_help_panel=_PLAN)
