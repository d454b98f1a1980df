"""The arguments of `kvpool replay` that are about simulated clusters."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Annotated

import typer

from kvpool.replay.cluster import KEEPS, NODES_MAX, PICKS, ROUTES, ClusterOptions

TOTAL_BLOCKS = 50_000  # of all nodes, when nothing is said
_USUAL = ClusterOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterArguments:
    """What was asked about clusters, as it was asked."""

    nodes: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...",
            min=1,
            max=NODES_MAX,
            help="Simulate clusters of so many nodes; --capacity-blocks is then of all together"
            f" (default {TOTAL_BLOCKS}).",
        ),
    ] = None
    blocks_each: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=2**30, help="With --nodes: blocks of each node."),
    ] = None
    route: Annotated[
        str,
        typer.Option(metavar="RULE", help="Which node a request comes to: " + ", ".join(ROUTES)),
    ] = _USUAL.route
    route_blocks: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=2**20, help="Leading blocks that 'prefix' looks at."),
    ] = _USUAL.route_blocks
    route_seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of 'random' and 'prefix'.")
    ] = _USUAL.seed
    keep: Annotated[
        str,
        typer.Option(
            metavar="RULE", help="Copies of what other nodes have that stay: " + ", ".join(KEEPS)
        ),
    ] = _USUAL.keep
    pick: Annotated[
        str,
        typer.Option(metavar="RULE", help="Which of several nodes sends: " + ", ".join(PICKS)),
    ] = _USUAL.pick
    replicate_above: Annotated[
        float,
        typer.Option(metavar="HEAT", min=0, help="Push blocks this hot to more nodes; 0: never."),
    ] = _USUAL.replicate_above
    max_replicas: Annotated[
        int, typer.Option(metavar="N", min=0, max=NODES_MAX, help="Copies beside the first.")
    ] = _USUAL.replicas_max
    spare_last: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=2**20,
            help="Evict a block that others have instead of up to so many colder last copies.",
        ),
    ] = _USUAL.spare_last
    spread: Annotated[
        bool,
        typer.Option("--spread", help="Spread requests of one time evenly until the next."),
    ] = False

    def cluster_options(self) -> ClusterOptions:
        """Raises a usage error for a word that is none of those there are."""
        return ClusterOptions(
            route=_one_of(self.route, ROUTES, "--route"),
            route_blocks=self.route_blocks,
            seed=self.route_seed,
            keep=_one_of(self.keep, KEEPS, "--keep"),
            pick=_one_of(self.pick, PICKS, "--pick"),
            replicate_above=self.replicate_above,
            replicas_max=self.max_replicas,
            spare_last=self.spare_last,
        )

    def cluster_sizes(self, capacities_blocks: Sequence[int] | None) -> list[tuple[int, int]]:
        """Nodes, and blocks of all together, for each cluster; a usage error where none fits."""
        nodes = list(dict.fromkeys(self.nodes or ()))
        if self.blocks_each is not None:
            if capacities_blocks:
                raise typer.BadParameter(
                    "does not go with --capacity-blocks", param_hint="--blocks-each"
                )
            sizes = [(each, each * self.blocks_each) for each in nodes]
        else:
            totals = dict.fromkeys(capacities_blocks or (TOTAL_BLOCKS,))
            sizes = [(each, total) for total in totals for each in nodes]
        for each, total in sizes:
            if total > 2**30:
                raise typer.BadParameter(
                    f"{total:,} blocks are too many; at most {2**30:,}", param_hint="--blocks-each"
                )
            if total < each:
                raise typer.BadParameter(
                    f"{total:,} blocks are none for some of {each:,} nodes", param_hint="--nodes"
                )
        return sizes

    def check_no_cluster(self) -> None:
        """Raises a usage error for options that mean nothing without --nodes."""
        for field in dataclasses.fields(ClusterArguments):
            if field.name != "nodes" and getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise typer.BadParameter("needs --nodes", param_hint=option)


def _one_of(text: str, choices: Sequence[str], option: str) -> str:
    if text in choices:
        return text
    close = difflib.get_close_matches(text, choices, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "choose from " + ", ".join(choices)
    raise typer.BadParameter(f"there is no {text!r}; {hint}", param_hint=option)
