"""`kvpool drain`: a member of a cluster hands on what it has, before it is stopped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.operate.client import Operator

_EVERY_S = 0.5  # between two looks at how far it is
_SLACK_S = 10.0  # beside its time: the others are told last
_MIB = 1 << 20


def drain(
    *,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, max=86_400, help="The longest."),
    ] = 600.0,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Have other members fetch what only this one has, hottest first. For an admin.

    Afterwards nobody is sent to it for blocks any more: stop it. It serves its own clients until
    then. Blocks that are colder than all that the others have are left behind. Exit status 1: the
    time was over first, or nobody was there.
    """
    with options.reached(address, token_file, tenant) as operator:
        told = _followed(operator, timeout, is_quiet=as_json)
    if as_json:
        options.print_json(told)
    else:
        print(
            f"{told['state']}: {told['blocks']:,} blocks ({told['bytes'] / _MIB:,.0f} MiB) are at"
            f" others now, {told['refused_blocks']:,} were colder than what those have"
        )
    if told["state"] != "done":
        raise typer.Exit(1)


def _followed(operator: Operator, timeout_s: float, *, is_quiet: bool) -> dict[str, Any]:
    """Until it ends, or should long have."""
    until = time.monotonic() + timeout_s + _SLACK_S
    told: dict[str, Any] = operator.ask("drain", timeout=timeout_s)["drain"]
    while told["state"] == "running" and time.monotonic() < until:
        if not is_quiet:
            options.tell(
                f"{told['prefixes_left']:,} of {told['prefixes']:,} prefixes left,"
                f" {told['bytes'] / _MIB:,.0f} MiB handed on"
            )
        time.sleep(_EVERY_S)
        told = operator.ask("drain")["drain"]
    return told
