"""`kvpool config ...`: what a daemon would be told, and what is wrong with a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from kvpool.operate import options

app = typer.Typer(help="Look at a configuration of `kvpool serve`.", no_args_is_help=True)

File = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE]", help="TOML (default: $KVPOOL_SERVE_CONFIG).", show_default=False
    ),
]


@app.command()
def show(file: File = None, as_json: options.AsJson = False) -> None:
    """Show every option, its value and where that comes from. Opens nothing but the file."""
    from kvpool import serve_config

    with options.told_plainly():
        settings = serve_config.load(file, os.environ)
        print((serve_config.as_json if as_json else serve_config.as_toml)(settings))


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TOML.")],
    as_json: options.AsJson = False,
) -> None:
    """Name everything that is wrong with a file: line, option, and what was likely meant.

    Exit status 0: nothing is wrong; 1: something is. Reads the token files that it names.
    """
    from kvpool.serve_config import faults

    found = faults(file)
    if as_json:
        told = [fault._asdict() for fault in found]
        options.print_json({"file": file, "faults": told})
    else:
        for line, where, message, suggestion in found:
            place = f"{file}:{line}" if line is not None else file
            is_placed = not where or message.startswith(("[", where))
            print(f"{place}: {message if is_placed else f'{where}: {message}'}")
            if suggestion:
                print(f"    {suggestion}")
        print(f"{file}: nothing is wrong" if not found else f"{file}: {_counted(found)}")
    if found:
        raise typer.Exit(1)


def _counted(found: Sequence[object]) -> str:
    return "1 fault" if len(found) == 1 else f"{len(found)} faults"
