"""`kvpool explain`: why a given prefix missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.observe.explain import Elsewhere, Known, Verdict
    from kvpool.operate.client import Explained, Operator, Space
    from kvpool.operate.prefixes import Given

OTHERS_MAX = 8  # namespaces that are looked at as well, those most like the one asked about first
ROWS_MAX = 24  # of the table; --json has all

Namespace = Annotated[
    str,
    typer.Option("--namespace", metavar="NAME", help="Name or id of the namespace."),
]


def explain(
    *,
    namespace: Namespace,
    tokens: options.Tokens = None,
    key: options.Keys = None,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Say why a prefix missed: which block is the first one missing, and what became of it.

    Exit status 0 whether or not it is there. Tokens are hashed here and never sent.
    """
    from kvpool.observe.explain import known, verdict
    from kvpool.operate import prefixes

    with options.told_plainly():
        prefix = prefixes.given(tokens, key)
    with options.reached(address, token_file, tenant) as operator:
        spaces = operator.spaces()
        space = prefixes.space_of(namespace, spaces)
        keys = prefix.keys(space.manifest)
        told = operator.explain(space, keys)
        blocks = known(told.entries)
        others = []
        if not all(block.tiers for block in blocks):
            others = list(_looked_for(operator, space, spaces, prefix))
        failed = _failed_of(operator, space)
    found = verdict(blocks, elsewhere=others, failed=failed, coldest=told.coldest)
    if as_json:
        options.print_json(_plain(space, found, keys, told))
    else:
        _show(space, found, blocks, keys)


def _looked_for(
    operator: Operator, space: Space, spaces: list[Space], prefix: Given
) -> Iterator[Elsewhere]:
    """The same prefix in the namespaces most like this one, those of other tenants among them.

    Its keys are others there, and can be told from tokens only; the same namespace of another
    tenant has the same keys.
    """
    from kvpool.observe.explain import Elsewhere

    own = space.manifest.namespace_id
    others = [each for each in spaces if each != space]
    if prefix.tokens is None:
        others = [each for each in others if each.manifest.namespace_id == own]
    others.sort(key=lambda each: len(space.manifest.differing(each.manifest)))
    for other in others[:OTHERS_MAX]:
        yield Elsewhere(
            namespace=other.label,
            differing=space.manifest.differing(other.manifest),
            tenant="" if other.tenant == space.tenant else other.tenant,
            present=operator.leading(other, prefix.keys(other.manifest)),
        )


def _failed_of(operator: Operator, space: Space) -> dict[str, int]:
    """What gets of this namespace failed for, in all."""
    id = space.manifest.namespace_id.hex()
    for tenant in operator.report().tenants:
        for each in tenant.namespaces:
            if (tenant.name, each.id) == (space.tenant, id):
                return each.traffic.failed
    return {}


# --- showing -------------------------------------------------------------------------------------


def _plain(space: Space, found: Verdict, keys: bytes, told: Explained) -> dict[str, Any]:
    explained = [
        {"key": keys[at * 16 : at * 16 + 16], **entry} for at, entry in enumerate(told.entries)
    ]
    return {
        "tenant": space.tenant,
        "namespace": space.label,
        "id": space.manifest.namespace_id,
        **dataclasses.asdict(found),
        "coldest": told.coldest,
        "explained": explained,
    }


def _show(space: Space, found: Verdict, blocks: Sequence[Known], keys: bytes) -> None:
    from rich.text import Text

    from kvpool.operate import show

    parts = [Text(show.clean(found.sentence), style="bold")]
    if found.advice:
        parts.append(Text(show.clean(found.advice)))
    counts = (
        f"namespace {show.clean(space.label)}: {found.leading:,} of {found.blocks:,} blocks"
        f" in a row ({found.in_dram:,} in DRAM, {found.on_ssd:,} on SSD)"
    )
    if found.behind:
        counts += f"; {found.behind:,} behind the missing one are here, and of no use without it"
    parts.append(Text(f"\n{counts}"))
    show.show(*parts)
    if blocks:
        show.show(_table(found, blocks, keys))


def _table(found: Verdict, blocks: Sequence[Known], keys: bytes) -> Any:
    from kvpool.operate import show

    made = show.table(
        "", *("block", "key", "where", "heat", "idle", "what became of it"), left=("key", "where")
    )
    made.columns[-1].justify = "left"
    for at in _rows(len(blocks), found.first_missing):
        if at is None:
            made.add_row("..")
            continue
        block = blocks[at]
        where = {0: "-", 1: "DRAM", 2: "SSD", 3: "DRAM, SSD"}[block.tiers & 3]
        idle = "-" if block.idle_s is None or not block.tiers else show.duration(block.idle_s)
        heat = f"{block.heat:.2f}" if block.tiers else "-"
        style = "bold" if at == found.first_missing else ""
        key = keys[at * 16 : at * 16 + 16].hex()
        made.add_row(f"{at + 1}", key, where, heat, idle, _became(block), style=style)
    return made


def _became(block: Known) -> str:
    from kvpool.operate import show

    if block.gone is not None and not block.tiers:
        return f"{block.gone.why} {show.duration(block.gone.ago_s)} ago"
    if block.tiers:
        return f"pinned {block.pins} times" if block.pins else ""
    return "" if block.ghost_heat is None else f"evicted; heat {block.ghost_heat:.2f} remembered"


def _rows(count: int, missing: int | None) -> Iterator[int | None]:
    """The first, the last and those around the missing one; None where some are left out."""
    if count <= ROWS_MAX:
        yield from range(count)
        return
    around = count - 1 if missing is None else missing
    wanted = {*range(4), *range(around - 6, around + 10), *range(count - 3, count)}
    last = -1
    for at in sorted(at for at in wanted if 0 <= at < count):
        if at != last + 1:
            yield None
        yield at
        last = at
