"""The arguments of `kvpool replay` that its parser does not know by itself.

The only part of replay/ that knows of the command line.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from kvpool.config import parse_size
from kvpool.replay.payload import WORD_BYTES
from kvpool.replay.score import POLICIES

ALL = "all"
_NAMES = (*POLICIES, ALL)


def spread_values(args: Sequence[str], takes: Mapping[str, Callable[[str], bool]]) -> list[str]:
    """`--n 1 2 3` and `--n=1 2 3` as `--n 1 --n 2 --n 3`, which is what the parser knows.

    A flag's first value is its own whatever it looks like; further ones are taken while
    `takes[flag](value)` holds. Nothing after `--` is touched.
    """
    spread: list[str] = []
    flag = None  # the flag whose further values may follow
    first_is_due = False
    for at, arg in enumerate(args):
        if arg == "--" and not first_is_due:
            return [*spread, *args[at:]]
        if first_is_due:
            first_is_due = False
        elif flag is not None and takes[flag](arg):
            spread.append(flag)
        else:
            name, equals, _ = arg.partition("=")
            flag = name if name in takes else None
            first_is_due = flag is not None and not equals
        spread.append(arg)
    return spread


def _is_count(arg: str) -> bool:
    return re.fullmatch(r"[0-9][0-9_]*", arg) is not None


def _is_policy_like(arg: str) -> bool:
    """A policy, or a plain word that names no file: then a misspelt policy, not the trace."""
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", arg) is not None
    return arg in _NAMES or (is_word and not os.path.exists(arg))


class ReplayCommand(TyperCommand):
    """A command whose --policy and --capacity-blocks take one value or several."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {"--policy": _is_policy_like, "--capacity-blocks": _is_count}
        return super().parse_args(ctx, spread_values(args, takes))


def policies(names: Sequence[str]) -> tuple[str, ...]:
    """The policies named, each once; `all` is every one. A usage error suggests the nearest."""
    for name in names:
        if name not in _NAMES:
            close = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "choose from " + ", ".join(_NAMES)
            raise typer.BadParameter(f"there is no policy {name!r}; {hint}", param_hint="--policy")
    return POLICIES if ALL in names else tuple(dict.fromkeys(names))


def block_bytes(text: str) -> int:
    """A block size that payload can fill; a usage error says what is wrong with it."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size == 0 or size % WORD_BYTES:
        raise typer.BadParameter(f"{text} is not a positive multiple of {WORD_BYTES} bytes")
    return size
