"""`kvpool nodes` and `kvpool locate`: who is in the cluster, and who has the blocks of a prefix."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.observe.cluster import Cluster, Node
    from kvpool.operate.client import Located, Space

ID_DIGITS = 8  # of a member's id in a table
ROWS_MAX = 24  # of the table of `locate`; --json has all
_MET_NS = 10**15  # below it an incarnation is no time: of a list, and not met yet

Namespace = Annotated[
    str,
    typer.Option("--namespace", metavar="NAME", help="Name or id of the namespace."),
]


def nodes(
    *,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Show the members of a daemon's cluster, and how it reaches each of them."""
    with options.reached(address, token_file, tenant) as operator:
        found = operator.nodes()
    if found is None:
        options.fail("this daemon is in no cluster: it has no [cluster] in its configuration")
    if as_json:
        options.print_json(found)
    else:
        _show_nodes(found)


def locate(
    *,
    namespace: Namespace,
    tokens: options.Tokens = None,
    key: options.Keys = None,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Say which members have the blocks of a prefix.

    As the directory of the cluster has it, which may be a moment behind, and as the daemon that is
    asked has it itself. Tokens are hashed here and never sent.
    """
    from kvpool.operate import prefixes

    with options.told_plainly():
        prefix = prefixes.given(tokens, key)
    with options.reached(address, token_file, tenant) as operator:
        space = prefixes.space_of(namespace, operator.spaces())
        keys = prefix.keys(space.manifest)
        found = operator.locate(space, keys)
    if as_json:
        options.print_json(_plain(space, found, keys))
    else:
        _show_located(space, found, keys)


# --- nodes ---------------------------------------------------------------------------------------


def _show_nodes(found: Cluster) -> None:
    from rich.text import Text

    from kvpool.operate import show

    out = show.table(
        "",
        *("node", "address", "state", "up", "weight", "breaker", "conns", "latency"),
        *("fetched", "given", "failed"),
        left=("address", "state", "breaker"),
    )
    now_ns = time.time_ns()
    for each in found.nodes:
        out.add_row(*_cells(each, now_ns), style="bold" if each.is_own else "")
    show.show(Text(show.clean(_head(found))), "", out)
    remarks = [Text(show.clean(line)) for line in _remarks(found)]
    show.show(*([""] if remarks else []), *remarks)


def _head(found: Cluster) -> str:
    count = len(found.nodes) + found.left_out
    known = {"etcd": "from etcd", "static": "from a list"}.get(found.kind, found.kind)
    members = "1 member" if count == 1 else f"{count:,} members"
    return f"cluster {found.name}, {members} {known}, view {found.version} ({found.fingerprint})"


def _cells(node: Node, now_ns: int) -> Iterator[str]:
    from kvpool.operate import show

    yield node.id[:ID_DIGITS]
    yield node.address
    yield f"{node.state}, this one" if node.is_own else node.state
    is_met = node.incarnation >= _MET_NS
    yield show.duration((now_ns - node.incarnation) / 1e9) if is_met else "-"
    yield f"{node.weight}"
    links = node.links
    if node.is_own or not links:
        yield from ("-", "-", "-", "-", "-", "-")
        return
    yield _worst(node)
    yield f"{sum(each.streams for each in links)}"
    slowest = max(each.latency_us for each in links)
    yield f"{slowest / 1000:.1f} ms" if slowest else "-"
    yield show.size(sum(each.bytes_in for each in links))
    yield show.size(sum(each.bytes_out for each in links))
    yield show.count(sum(each.failed for each in links))


def _worst(node: Node) -> str:
    """Of the breakers of all tenants."""
    from kvpool.observe.cluster import BREAKERS

    states = {each.breaker for each in node.links}
    return next((each for each in reversed(BREAKERS) if each in states), "-").replace("_", " ")


def _remarks(found: Cluster) -> Iterator[str]:
    """What an operator has to know, worst first."""
    if found.is_replaced:
        yield "another process has this node's id, and others find that: was a state_dir copied?"
    elif not found.is_entered:
        yield "this node does not stand in the list yet: its log says what etcd answers"
    if found.is_frozen:
        yield "etcd does not answer: members are kept as they were, and blocks are served on"
    for each in found.nodes:
        if each.trouble:
            yield f"{each.id[:ID_DIGITS]} was not reached: {each.trouble}"
    if found.left_out:
        yield f"{found.left_out:,} members are left out here"


# --- locate --------------------------------------------------------------------------------------


def _plain(space: Space, found: Sequence[Located], keys: bytes) -> dict[str, Any]:
    return {
        "tenant": space.tenant,
        "namespace": space.label,
        "id": space.manifest.namespace_id,
        "blocks": [
            {"key": keys[at * 16 : at * 16 + 16], "tiers": each.tiers, "nodes": each.nodes}
            for at, each in enumerate(found)
        ],
    }


def _show_located(space: Space, found: Sequence[Located], keys: bytes) -> None:
    from rich.text import Text

    from kvpool.operate import show

    here = sum(each.tiers != 0 for each in found)
    anywhere = sum(bool(each.tiers or each.nodes) for each in found)
    lines = [
        f"namespace {space.label}: {len(found):,} blocks, {here:,} here, {anywhere:,} anywhere"
    ]
    holders = Counter(node for each in found for node in each.nodes)
    for node, count in holders.most_common(8):
        lines.append(f"{node} has {count:,}")
    made = show.table("", "block", "key", "here", "elsewhere", left=("key", "here", "elsewhere"))
    for at, each in enumerate(found[:ROWS_MAX]):
        where = {0: "-", 1: "DRAM", 2: "SSD", 3: "DRAM, SSD"}[each.tiers & 3]
        others = ", ".join(node[:ID_DIGITS] for node in each.nodes) or "-"
        made.add_row(f"{at + 1}", keys[at * 16 : at * 16 + 16].hex(), where, others)
    if len(found) > ROWS_MAX:
        made.add_row("..")
    show.show(*(Text(show.clean(line)) for line in lines), made)
