"""Commands that change a running daemon: drop, resize, trim, reload, pin, unpin, pins."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.operate.client import Operator

RESIZE_SLICE_S = 1.0  # between two looks at how far it is
RESIZE_S_MAX = 300.0
_WORK_S = 60.0  # beside the wait: allocating room on a disk takes its time
_RELOADED = {"changed": "changed", "needs_restart": "needs a restart", "refused": "refused"}

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Namespace = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="Name or id of the namespace.")
]


def drop(
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Its name or id.")],
    *,
    yes: Yes = False,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Make every block of a namespace a miss, at once and for everybody who uses it."""
    if not yes:
        _confirm(f"Drop every block of namespace {namespace!r}?")
    with options.reached(address, token_file, tenant) as operator:
        blocks = int(operator.ask("drop_named", _WORK_S, namespace=namespace)["blocks"])
    if as_json:
        options.print_json({"namespace": namespace, "blocks": blocks})
    else:
        print(f"dropped {blocks:,} blocks of {namespace}")


def resize(
    *,
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Payload memory, such as 8GiB.")
    ] = None,
    max_blocks: Annotated[
        int | None, typer.Option(min=0, max=1 << 62, help="Limit of blocks in DRAM (0: no limit).")
    ] = None,
    ssd_capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of the SSD tier's files together.")
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="The longest to wait for a shrink.")
    ] = 60.0,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Change a daemon's sizes while it runs. For an admin.

    Growing is at once. Shrinking evicts the coldest blocks and gives the memory back; it goes on
    in the daemon when the wait here is over (exit status 1 then).
    """
    from kvpool.config import parse_size
    from kvpool.errors import BadArgument

    with options.told_plainly():
        if dram is None and max_blocks is None and ssd_capacity is None:
            raise BadArgument("say what to change: --dram, --max-blocks or --ssd-capacity")
        asked = {
            "dram": None if dram is None else parse_size(dram),
            "max_blocks": max_blocks,
            "ssd_capacity": None if ssd_capacity is None else parse_size(ssd_capacity),
        }
    with options.reached(address, token_file, tenant) as operator:
        committed = _resized(operator, asked, min(wait, RESIZE_S_MAX))
    target = asked["dram"]
    is_done = target is None or committed <= _rounded(target)
    if as_json:
        options.print_json({"committed_bytes": committed, "is_done": is_done})
    elif is_done:
        from kvpool.operate import show

        print(f"done: {show.size(committed)} of DRAM committed")
    if not is_done:
        from kvpool.operate import show

        options.fail(
            f"{show.size(committed)} are still committed: blocks are pinned or being read; the"
            " daemon goes on, `kvpool stat` shows how far it is"
        )


def _resized(operator: Operator, asked: dict[str, Any], wait_s: float) -> int:
    """Asks again until the memory is given back or the time is over; bytes committed then."""
    end = time.monotonic() + wait_s
    target = asked["dram"]
    with _progress(target) as update:
        while True:
            slice_s = min(RESIZE_SLICE_S, max(0.0, end - time.monotonic()))
            answer = operator.ask("resize", slice_s + _WORK_S, timeout=slice_s, **asked)
            committed = int(answer["bytes"])
            update(committed)
            if target is None or committed <= _rounded(target) or time.monotonic() >= end:
                return committed
            asked = {**asked, "ssd_capacity": None}  # that is done, or goes on by itself


def _rounded(dram_bytes: int) -> int:
    """A node's memory comes in pieces of 2 MiB."""
    step = 2 << 20
    return -(-dram_bytes // step) * step


@contextlib.contextmanager
def _progress(target: int | None) -> Iterator[Callable[[int], None]]:
    """On stderr, on a terminal only."""
    from rich.console import Console

    from kvpool.operate import show

    console = Console(stderr=True)
    if target is None or not console.is_terminal:
        yield lambda committed: None
        return
    with console.status("resizing") as status:
        yield lambda committed: status.update(
            f"{show.size(committed)} committed, on the way to {show.size(target)}"
        )


def reload(
    *,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Have a daemon read its configuration again, as SIGHUP does. For an admin."""
    with options.reached(address, token_file, tenant) as operator:
        told = operator.ask("reload", _WORK_S)
    answer = {what: [str(each) for each in told.get(what, ())] for what in _RELOADED}
    if as_json:
        options.print_json(answer)
        return
    print("read again")
    for what, found in answer.items():
        if found:
            print(f"{_RELOADED[what]}: {', '.join(found)}")


def trim(
    *,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Give memory that holds no block back to the system. For an admin."""
    from kvpool.operate import show

    with options.reached(address, token_file, tenant) as operator:
        before = _committed(operator)
        operator.ask("trim", _WORK_S)
        after = _committed(operator)
    print(f"gave back {show.size(max(0, before - after))}; {show.size(after)} are committed")


def _committed(operator: Operator) -> int:
    return sum(each.dram.committed_bytes for each in operator.report().tenants)


def pin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="To unpin it by.")],
    *,
    namespace: Namespace,
    tokens: options.Tokens = None,
    key: options.Keys = None,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Keep a prefix in DRAM, such as a system prompt, until `kvpool unpin` or the daemon's end."""
    from kvpool.operate import prefixes

    with options.reached(address, token_file, tenant) as operator:
        space = prefixes.space_of(namespace, operator.spaces())
        keys = prefixes.given(tokens, key).keys(space.manifest)
        if not keys:
            options.fail("the prefix is shorter than one block: there is nothing to keep", status=2)
        held, asked = operator.pin(space, keys, name), len(keys) // 16
    if as_json:
        options.print_json({"name": name, "asked": asked, "blocks": held})
    else:
        print(f"{name}: {held:,} of {asked:,} blocks are pinned")
    if held < asked:
        options.fail(f"{asked - held:,} blocks are not present: put them, then pin again")


def unpin(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    *,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Let a pinned prefix go again: it stays as long as it is warm."""
    with options.reached(address, token_file, tenant) as operator:
        blocks = int(operator.ask("unpin", name=name)["blocks"])
    if as_json:
        options.print_json({"name": name, "blocks": blocks})
    else:
        print(f"{name}: {blocks:,} blocks are no longer pinned")


def pins(
    *,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """List the prefixes that operators keep."""
    with options.reached(address, token_file, tenant) as operator:
        found = operator.pins()
    if as_json:
        options.print_json(found)
        return
    from kvpool.operate import show

    made = show.table(
        "", "name", "tenant", "namespace", "blocks", "of", "bytes", left=("tenant", "namespace")
    )
    for each in found:
        sizes = (f"{each.blocks:,}", f"{each.asked:,}", show.size(each.bytes))
        made.add_row(each.name, each.tenant, each.namespace, *sizes)
    show.show(made) if found else print("nothing is pinned")


def _confirm(question: str) -> None:
    """Exit status 2 where nobody can be asked, 1 where the answer is no."""
    if not sys.stdin.isatty():
        options.fail(f"{question} Nobody is here to be asked: say --yes", status=2)
    if not typer.confirm(f"{question} They have to be computed anew", err=True):
        raise typer.Exit(1)
