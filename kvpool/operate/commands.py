"""The commands of an operator, as `kvpool --help` groups them."""

from __future__ import annotations

import typer

from kvpool.operate import stat_cli

_WATCH = "Look at a daemon"
_CHANGE = "Change a daemon"
_FILES = "Files in a pool"
_PLAN = "Set up and plan"


def add_to(app: typer.Typer) -> None:
    """Registers all of them."""
    app.command(rich_help_panel=_WATCH)(stat_cli.stat)
