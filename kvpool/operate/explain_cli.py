"""`kvpool explain`: why a given prefix missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.manifest import Manifest
    from kvpool.observe.explain import Elsewhere, Known, Verdict
    from kvpool.operate.client import Operator

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
        manifests = operator.manifests()
        manifest = prefixes.manifest_of(namespace, manifests)
        keys = prefix.keys(manifest)
        told, beside = operator.explain(prefixes.label(manifest), keys)
        blocks = known(told)
        others = list(_told(beside))
        if prefix.tokens is not None and not all(block.tiers for block in blocks):
            others += _looked_for(operator, manifest, manifests, prefix.tokens)
        failed = _failed_of(operator, manifest)
    found = verdict(blocks, elsewhere=others, failed=failed)
    if as_json:
        options.print_json(_plain(manifest, found, keys, told))
    else:
        _show(manifest, found, blocks, keys)


def _told(beside: Sequence[Mapping[str, Any]]) -> Iterator[Elsewhere]:
    """What the daemon says of other places."""
    from kvpool.observe.explain import Elsewhere

    for each in beside:
        differing = each.get("differing") or {}
        yield Elsewhere(
            namespace=str(each.get("namespace", "")),
            differing={str(name): (pair[0], pair[1]) for name, pair in differing.items()},
            tenant=str(each.get("tenant") or ""),
        )


def _looked_for(
    operator: Operator, manifest: Manifest, manifests: list[Manifest], tokens: Sequence[int]
) -> Iterator[Elsewhere]:
    """The same tokens in the namespaces most like this one: their keys are others there."""
    from kvpool.observe.explain import Elsewhere
    from kvpool.operate import prefixes

    others = [each for each in manifests if each.namespace_id != manifest.namespace_id]
    others.sort(key=lambda each: len(manifest.differing(each)))
    for other in others[:OTHERS_MAX]:
        present = operator.leading(prefixes.label(other), prefixes.token_keys(other, tokens))
        yield Elsewhere(prefixes.label(other), manifest.differing(other), present=present)


def _failed_of(operator: Operator, manifest: Manifest) -> dict[str, int]:
    """What gets of this namespace failed for, in all."""
    id = manifest.namespace_id.hex()
    for tenant in operator.report().tenants:
        for space in tenant.namespaces:
            if space.id == id:
                return space.traffic.failed
    return {}


# --- showing -------------------------------------------------------------------------------------


def _plain(
    manifest: Manifest, found: Verdict, keys: bytes, told: list[dict[str, Any]]
) -> dict[str, Any]:
    from kvpool.operate import prefixes

    return {
        "namespace": prefixes.label(manifest),
        "id": manifest.namespace_id,
        **{name: value for name, value in dataclasses.asdict(found).items() if name != "elsewhere"},
        "elsewhere": [dataclasses.asdict(each) for each in found.elsewhere],
        "explained": [
            {"key": keys[at * 16 : at * 16 + 16], **entry} for at, entry in enumerate(told)
        ],
    }


def _show(manifest: Manifest, found: Verdict, blocks: Sequence[Known], keys: bytes) -> None:
    from rich.text import Text

    from kvpool.operate import prefixes, show

    parts = [Text(found.sentence, style="bold")]
    if found.advice:
        parts.append(Text(found.advice))
    counts = (
        f"namespace {prefixes.label(manifest)}: {found.leading:,} of {found.blocks:,} blocks"
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
