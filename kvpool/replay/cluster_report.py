"""Scores of simulated clusters as tables and JSON lines. Reads scores, computes shares."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.replay.cluster import WINDOW_S, ClusterPlan, ClusterScore, Messages
from kvpool.replay.report import plain_table, printable

_Cells = Callable[[ClusterScore], list[str]]  # of a row, behind policy and nodes

HIT_HEADERS = (
    "nodes",
    "blocks\nin all",
    "hit\nrate",
    "one\npool",
    "Belady",
    "of one\npool",
    "remote,\nof hits",
    "kept,\nof remote",
    "evicted",
    "of these\nlast copies",
)
MESSAGE_HEADERS = (
    "nodes",
    "asked a\nrequest",
    "p99",
    "told a\nrequest",
    "busiest\nowner",
    "by run:\nasked",
    "p99",
    "told",
    "busiest\nowner",
)
TRAFFIC_HEADERS = (
    "nodes",
    "sent, mean\nof nodes, GB",
    "most\nGB",
    "most /\nmean",
    f"most in\n{WINDOW_S} s, GB",
    "sources a\nrequest",
    "copies\nGB",
    "replicas\nGB",
    "most\nrequests /\nmean",
)
HIT_NOTE = (
    "[dim]hit rate over blocks; one pool: of the same policy, as large as all nodes together, as is"
    " Belady's (which knows the future); kept: remote hits that left a copy on the gateway[/]"
)
MESSAGE_NOTE = (
    "[dim]messages of the directory, first with the owner drawn by key, then by run of 64 blocks;"
    " asked: to owners, in one round for each request; told: batches of publish and withdraw;"
    " busiest owner: its messages over the mean[/]"
)
TRAFFIC_NOTE = (
    "[dim]sent: blocks to other nodes, replicas too; sources: nodes that a request fetches from[/]"
)


def json_line(plan: ClusterPlan, score: ClusterScore) -> str:
    """The score as `kvpool replay --nodes --json` prints it."""
    options = plan.options
    fields: dict[str, object] = {
        "trace": plan.trace.path,
        "policy": score.policy,
        "nodes": score.nodes,
        "capacity_blocks": score.capacity_blocks,
        "spread": plan.spreads,
        "route": options.route,
        "keep": options.keep,
        "replicate_above": options.replicate_above,
        "replicas_max": options.replicas_max,
        "spare_last": options.spare_last,
        "requests": score.requests,
        "blocks": score.blocks,
        "local_hit_blocks": score.local_hits,
        "remote_hit_blocks": score.remote_hits,
        "hit_rate": round(score.hit_rate, 6),
        "one_pool_hit_rate": round(score.share(score.one_pool_hits), 6),
        "belady_hit_rate": round(score.share(score.belady_hits), 6),
        "remote_share": round(score.remote_share, 6),
        "kept_blocks": score.kept,
        "replica_blocks": score.replicas,
        "evictions": score.evictions,
        "last_copies_evicted": score.last_evicted,
        "hidden_requests": score.hidden,
        "unlisted_copies": score.crowded,
        "sources_per_request": round(score.per_request(score.sources), 4),
        "sharding": score.sharding,
        "by_key": _message_fields(score, score.by_key),
        "by_run": _message_fields(score, score.by_run),
    }
    return json.dumps(fields | _traffic_fields(score, plan.block_bytes))


def _message_fields(score: ClusterScore, messages: Messages) -> dict[str, object]:
    return {
        "asks_per_request": round(score.per_request(messages.asks), 4),
        "asks_p99": messages.asks_p99,
        "asks_max": messages.asks_max,
        "asked_keys_per_request": round(score.per_request(messages.asked_keys), 4),
        "publishes_per_request": round(score.per_request(messages.publishes), 4),
        "withdraws_per_request": round(score.per_request(messages.withdraws), 4),
        "told_keys_per_request": round(score.per_request(messages.told_keys), 4),
        "busiest_owner_skew": _rounded(messages.skew(score.nodes)),
    }


def _traffic_fields(score: ClusterScore, block_bytes: int) -> dict[str, object]:
    return {
        "block_bytes": block_bytes,
        "sent_bytes_mean": round(sum(score.sent) * block_bytes / score.nodes),
        "sent_bytes_max": max(score.sent) * block_bytes,
        "sent_skew": _rounded(score.sent_skew),
        "busiest_window_s": WINDOW_S,
        "busiest_window_bytes": score.busiest_window * block_bytes,
        "copied_bytes": score.kept * block_bytes,
        "replica_bytes": score.replicas * block_bytes,
        "routed_skew": _rounded(_routed_skew(score)),
        "seconds": round(score.seconds, 6),
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def _routed_skew(score: ClusterScore) -> float | None:
    return max(score.routed) * score.nodes / score.requests if score.requests else None


def tables(plan: ClusterPlan, scores: Sequence[ClusterScore]) -> list[RenderableType]:
    """What to print, in order: hits, messages of the directory, bytes between nodes."""
    options = plan.options
    copies = f"replicas above heat {options.replicate_above:g}, {options.replicas_max} at most"
    how = [
        "simulated",
        f"requests by {options.route}",
        f"copies kept: {options.keep}",
        copies if options.replicate_above else "no replicas",
    ]
    if plan.spreads:
        how.append("times spread")
    if options.spare_last:
        how.append(f"{options.spare_last} last copies spared")
    return [
        Text(printable(plan.trace.path), style="bold"),
        Text(", ".join(how)),
        _table(HIT_HEADERS, scores, _hit_cells),
        HIT_NOTE,
        "",
        _table(MESSAGE_HEADERS, scores, _message_cells),
        MESSAGE_NOTE,
        "",
        _table(TRAFFIC_HEADERS, scores, lambda score: _traffic_cells(score, plan.block_bytes)),
        TRAFFIC_NOTE,
    ]


def _table(headers: Sequence[str], scores: Sequence[ClusterScore], cells: _Cells) -> Table:
    table = plain_table(gap=1)
    table.add_column("policy", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", vertical="bottom")
    for score in scores:
        table.add_row(score.policy, f"{score.nodes:,}", *cells(score))
    return table


def _hit_cells(score: ClusterScore) -> list[str]:
    of_pool = score.hits / score.one_pool_hits if score.one_pool_hits else None
    kept = score.kept / score.remote_hits if score.remote_hits else None
    return [
        f"{score.capacity_blocks:,}",
        f"{score.hit_rate:.4f}",
        f"{score.share(score.one_pool_hits):.4f}",
        f"{score.share(score.belady_hits):.4f}",
        _ratio(of_pool),
        f"{score.remote_share:.3f}",
        _ratio(kept),
        f"{score.evictions:,}",
        f"{score.last_evicted:,}",
    ]


def _message_cells(score: ClusterScore) -> list[str]:
    cells = []
    for messages in (score.by_key, score.by_run):
        cells += [
            f"{score.per_request(messages.asks):.2f}",
            f"{messages.asks_p99:,}",
            f"{score.per_request(messages.told):.2f}",
            _ratio(messages.skew(score.nodes)),
        ]
    return cells


def _traffic_cells(score: ClusterScore, block_bytes: int) -> list[str]:
    def gigabytes(blocks: float) -> str:
        return f"{blocks * block_bytes / 1e9:.2f}"

    return [
        gigabytes(sum(score.sent) / score.nodes),
        gigabytes(max(score.sent)),
        _ratio(score.sent_skew),
        gigabytes(score.busiest_window),
        f"{score.per_request(score.sources):.2f}",
        gigabytes(score.kept),
        gigabytes(score.replicas),
        _ratio(_routed_skew(score)),
    ]


def _ratio(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
