"""Scores as tables, JSON lines and a plot. Reads Scores, prints; computes nothing but shares."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.config import format_size
from kvpool.replay.score import ONLINE_POLICIES, ORACLE, POLICIES, Score, json_fields

BASELINE = "lru"
REFERENCES = (BASELINE, ORACLE)
HIT_NOTE = (
    "[dim]hit rate over blocks; beside it, how much of the gap from LRU to Belady (which knows the"
    " future) is recovered; * best online policy[/]"
)
COPY_NOTE = (
    "[dim]GB/s of one thread inside the pool's calls, and of memcpy of as many bytes between them;"
    " every hit compared byte by byte[/]"
)
POLICY_COLUMNS = 12  # of a terminal: the longest policy and a space
HIT_COLUMNS = 16  # "1,073,741,824 blocks" is rarer than "0.1569*  +20%" and wraps nothing
COPY_HEADERS = (
    "blocks",
    "tokens not\nrecomputed",
    "evicted",
    "GB\nmoved",
    "GB/s",
    "memcpy",
    "ratio",
    "mis-\nmatches",
)

Grid = dict[tuple[str, int], Score]


def json_line(trace: str, score: Score) -> str:
    """The score as `kvpool replay --json` prints it."""
    return json.dumps(json_fields(trace, score))


def tables(
    title: str, scores: Sequence[Score], *, block_bytes: int | None, width: int
) -> list[RenderableType]:
    """What to print, in order: hit rates of all scores and, when bytes moved, what moved.

    width: columns there are; capacities that do not fit get a table of their own.
    """
    heading = Text(printable(title), style="bold")  # Text: a path is not markup
    capacities = sorted({score.capacity_blocks for score in scores})
    per_table = max(1, (width - POLICY_COLUMNS) // HIT_COLUMNS)
    shown: list[RenderableType] = [heading]
    for start in range(0, len(capacities), per_table):
        part = capacities[start : start + per_table]
        fitting = [score for score in scores if score.capacity_blocks in part]
        shown.append(hit_table(fitting, block_bytes=block_bytes))
    shown.append(HIT_NOTE)
    moved = [score for score in scores if score.copied is not None]
    return [*shown, "", copy_table(moved), COPY_NOTE] if moved else shown


def printable(path: str) -> str:
    """The path with a mark in place of bytes that are no UTF-8, which a file name may have."""
    return path.encode("utf-8", "replace").decode()


def gap_recovered(grid: Grid, score: Score) -> float | None:
    """Share of the way from LRU to Belady that the score covers; negative below LRU.

    None without both references, or when they lie within a block in a thousand of each other: a
    share of nothing says nothing.
    """
    low = grid.get((BASELINE, score.capacity_blocks))
    high = grid.get((ORACLE, score.capacity_blocks))
    if low is None or high is None or high.hit_rate - low.hit_rate < 0.001:
        return None
    return (score.hit_rate - low.hit_rate) / (high.hit_rate - low.hit_rate)


def best_online(grid: Grid, capacity_blocks: int) -> str | None:
    """The policy without foresight that hit most; None when fewer than two ran."""
    found = (grid.get((policy, capacity_blocks)) for policy in ONLINE_POLICIES)
    rivals = [score for score in found if score is not None]
    return max(rivals, key=lambda score: score.hit_blocks).policy if len(rivals) > 1 else None


def plain_table(*, gap: int) -> Table:
    """A table without frame whose columns lie `gap` apart."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0))


def hit_table(scores: Sequence[Score], *, block_bytes: int | None = None) -> Table:
    """Policies down, capacities across; Belady on top as the bound.

    block_bytes: when given, capacities are shown in bytes as well.
    """
    grid = {(score.policy, score.capacity_blocks): score for score in scores}
    policies = [
        policy for policy in (ORACLE, *ONLINE_POLICIES) if any(p == policy for p, _ in grid)
    ]
    capacities = sorted({capacity for _, capacity in grid})
    table = plain_table(gap=2)
    table.add_column("policy")
    for capacity in capacities:
        size = f"\n{format_size(capacity * block_bytes)}" if block_bytes else ""
        table.add_column(f"{capacity:,} blocks{size}", justify="right", no_wrap=True)
    for policy in policies:
        cells = [hit_cell(grid, policy, capacity) for capacity in capacities]
        table.add_row(policy, *cells, end_section=policy == ORACLE)
    return table


def hit_cell(grid: Grid, policy: str, capacity_blocks: int) -> str:
    """Hit rate and, but for the references, the share of the gap; marked when it is the best."""
    score = grid.get((policy, capacity_blocks))
    if score is None:
        return ""
    share = gap_recovered(grid, score)
    beside = f"{share:+5.0%}" if share is not None and policy not in (ORACLE, BASELINE) else " " * 5
    text = f"{score.hit_rate:.4f}"
    if best_online(grid, capacity_blocks) == policy:
        return f"[bold green]{text}*[/] [dim]{beside}[/]"
    return f"{text}  [dim]{beside}[/]"


def copy_table(scores: Sequence[Score]) -> Table:
    """What moved through the pool, a row per score, each of which moved bytes."""
    table = plain_table(gap=1)
    table.add_column("policy", no_wrap=True)
    for header in COPY_HEADERS:
        table.add_column(header, justify="right", vertical="bottom")
    for score in scores:
        table.add_row(*copy_cells(score))
    return table


def copy_cells(score: Score) -> list[str]:
    """The policy, and a cell per COPY_HEADERS; the score has moved bytes."""
    copied = score.copied
    assert copied is not None
    floor = copied.memcpy_bytes_per_s
    wrong = f"{copied.mismatches:,}"
    return [
        score.policy,
        f"{score.capacity_blocks:,}",
        f"{score.hit_tokens:,}",
        f"{score.evictions:,}",
        f"{copied.moved_bytes / 1e9:.2f}",
        f"{copied.bytes_per_s / 1e9:.2f}",
        f"{floor / 1e9:.2f}",
        f"{copied.bytes_per_s / floor:.2f}" if floor else "",
        f"[bold red]{wrong}[/]" if copied.mismatches else f"[green]{wrong}[/]",
    ]


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises what `plot` would raise for this file name, before the work instead of after it."""
    from matplotlib.figure import Figure

    ending = os.path.splitext(path)[1].removeprefix(".").lower()
    known = Figure().canvas.get_supported_filetypes()
    if ending not in known:
        raise ValueError(f"the ending {ending!r} is none of " + ", ".join(sorted(known)))
    folder = os.path.dirname(os.fspath(path)) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"there is no folder {folder}")


def plot(path: str | os.PathLike[str], title: str, scores: Sequence[Score]) -> None:
    """Draws hit rate against capacity (log scale), a line per policy, into an image file.

    ImportError without matplotlib; ValueError for a file name whose ending it does not know.
    """
    from matplotlib.figure import Figure  # optional and slow to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for policy in (ORACLE, *(name for name in POLICIES if name != ORACLE)):
        line = sorted(
            (score.capacity_blocks, score.hit_rate) for score in scores if score.policy == policy
        )
        if line:
            style = "--" if policy == ORACLE else "-"
            axes.plot(*zip(*line, strict=True), style, marker="o", markersize=4, label=policy)
    axes.set_xscale("log")
    ticks = sorted({score.capacity_blocks for score in scores})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="capacity, blocks", ylabel="hit rate over blocks")
    axes.set_title(printable(title), parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
