"""`kvpool stat`: what a daemon knows about itself, once or again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.operate.feed import Sample

WATCH_S_MIN = 0.2


def stat(
    *,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch", metavar="SECONDS", min=WATCH_S_MIN, help="Again and again, with rates."
        ),
    ] = None,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Show a daemon's tiers, hit rates, traffic, tenants, clients, leases and refusals.

    An admin sees every tenant, a tenant itself. --json gives the whole report, one object a line.
    """
    from kvpool.operate.client import Reach
    from kvpool.operate.feed import Feed, Lost

    with options.told_plainly(), Feed(Reach(address, token_file, tenant)) as feed:
        while True:
            begin = time.monotonic()
            sample = feed.next()
            if isinstance(sample, Lost):
                if watch is None:
                    options.fail(sample.reason)
                options.tell(sample.reason)
            else:
                _show(sample, as_json=as_json, is_watched=watch is not None)
            if watch is None:
                return
            time.sleep(max(0.0, begin + watch - time.monotonic()))


def _show(sample: Sample, *, as_json: bool, is_watched: bool) -> None:
    if as_json:
        from kvpool.observe.report import as_json as encoded

        print(encoded(sample.report).decode(), flush=True)
        return
    from kvpool.operate import show, tables

    out = show.console()
    if is_watched and out.is_terminal and not out.is_dumb_terminal:
        out.clear()
    show.show(*tables.tables(sample))
