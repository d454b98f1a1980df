"""Scores of a pool with an SSD tier, tier by tier. Reads Scores, prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from kvpool.replay.report import plain_table
from kvpool.replay.score import OnSsd, Score

HEADERS = (
    "DRAM\nblocks",
    "SSD\nblocks",
    "hits\nDRAM",
    "hits\nSSD",
    "hits\nrestored",
    "demoted\nGB",
    "promoted\nGB",
    "SSD read\nGB",
    "SSD written\nGB",
    "writes\nper hit",
    "mis-\nmatches",
)
TIER_NOTE = (
    "[dim]hits as shares of all blocks; hits restored: those of them on blocks that an earlier life"
    " of the pool left on the SSD, from there or from DRAM once they came back; demoted: left DRAM,"
    " stays on SSD; promoted: back in DRAM; writes per hit: blocks written to the SSD per block"
    " served from it; the replay waits for the SSD after every request[/]"
)


def one_tier_notes(scores: Sequence[Score]) -> list[RenderableType]:
    """Which of the scores were simulated as one tier of both capacities; nothing for none."""
    names = dict.fromkeys(score.policy for score in scores if score.on_ssd is None)
    if not names:
        return []
    return [f"[dim]{' and '.join(names)}: as if DRAM and SSD were one tier of both capacities[/]"]


def tier_parts(
    scores: Sequence[Score], block_bytes: int, *, alone: Sequence[Score] = ()
) -> list[RenderableType]:
    """The table with what it means, and a line for whatever makes the figures worth less.

    alone: scores of pools without an SSD tier, to be shown above those with one. Of `scores`, only
    those that a pool with a tier has are shown.
    """
    found = [score for score in scores if score.on_ssd is not None]
    if not found:
        return []
    parts: list[RenderableType] = [_table([*alone, *found], block_bytes), TIER_NOTE]
    late = sum(score.on_ssd.unflushed for score in found if score.on_ssd)
    if late:
        parts.append(
            f"[bold red]After {late:,} requests the SSD could not take what was due: the hits"
            " depend on how fast it was.[/]"
        )
    if not all(score.on_ssd.is_direct for score in found if score.on_ssd):
        parts.append("[dim]The filesystem has no O_DIRECT: the SSD was used by the page cache.[/]")
    return parts


def _table(scores: Sequence[Score], block_bytes: int) -> Table:
    table = plain_table(gap=1)
    table.add_column("policy", no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right", vertical="bottom")
    for score in scores:
        table.add_row(*_cells(score, block_bytes))
    return table


def _cells(score: Score, block_bytes: int) -> list[str]:
    assert score.copied is not None
    wrong = f"{score.copied.mismatches:,}"
    wrong = f"[bold red]{wrong}[/]" if score.copied.mismatches else f"[green]{wrong}[/]"
    first = [score.policy, f"{score.capacity_blocks:,}", f"{score.ssd_capacity_blocks:,}"]
    if score.on_ssd is None:
        return [*first, f"{score.hit_rate:.4f}", *[""] * (len(HEADERS) - 4), wrong]
    return [*first, *_tier_cells(score, score.on_ssd, block_bytes), wrong]


def _tier_cells(score: Score, done: OnSsd, block_bytes: int) -> list[str]:
    def share(blocks: int) -> str:
        return f"{blocks / score.blocks:.4f}" if score.blocks else ""

    wear = done.writes_per_hit
    return [
        share(done.dram_hit_blocks),
        share(done.ssd_hit_blocks),
        share(done.restored_hits),
        f"{done.demotions * block_bytes / 1e9:.2f}",
        f"{done.promotions * block_bytes / 1e9:.2f}",
        f"{done.read_bytes / 1e9:.2f}",
        f"{done.written_bytes / 1e9:.2f}",
        "" if wear is None else f"{wear:.2f}",
    ]
