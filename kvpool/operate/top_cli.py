"""`kvpool top`: a daemon, live."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.operate.feed import Feed

INTERVAL_S_MIN = 0.5


def top(
    *,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=INTERVAL_S_MIN, help="Between two reports.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Draw one frame and leave.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without textual, even if it is installed.")
    ] = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Watch a daemon: tiers, hit rate, hottest prefixes, clients, tenants. ? lists the keys."""
    from kvpool.operate.client import Reach
    from kvpool.operate.feed import Feed

    with (
        options.told_plainly(),
        Feed(Reach(address, token_file, tenant), with_hottest=True) as feed,
    ):
        if once or svg is not None:
            _once(feed, svg)
        else:
            _watch(feed, interval, is_plain=plain)


def _once(feed: Feed, svg: str | None) -> None:
    from kvpool.operate import show, top_plain

    view, lost = top_plain.once(feed)
    if lost is not None:
        options.fail(lost.reason)
    if svg is None:
        out = show.console()
        width, height = out.size if out.is_terminal else top_plain.ONCE_SIZE
        out.print(view.render(width, height))
        return
    try:
        with open(svg, "w", encoding="utf-8") as file:
            file.write(top_plain.svg(view))
    except OSError as error:
        options.fail(f"{svg}: cannot be written: {error.strerror}")


def _watch(feed: Feed, interval_s: float, *, is_plain: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if can_draw and not is_plain and importlib.util.find_spec("textual") is not None:
        from kvpool.operate import top_app

        top_app.run(feed, interval_s)
        return
    from kvpool.operate import top_plain

    if can_draw and not is_plain:
        options.tell("top is plainer without textual: pip install 'kvpool[top]'")
    with top_plain.keys() as pressed:
        top_plain.run(feed, interval_s, console, pressed)
