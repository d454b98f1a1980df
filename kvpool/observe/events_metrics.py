"""The events' part of the metrics. Relies on: prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvpool.observe.events import Events

Named = tuple[str, str, str]  # name, HELP, field

GAUGES: tuple[Named, ...] = (
    (
        "kvpool_events_buffered_batches",
        "Batches kept for subscribers that missed them.",
        "buffered_batches",
    ),
    ("kvpool_events_buffered_bytes", "As kvpool_events_buffered_batches.", "buffered_bytes"),
    ("kvpool_events_answering", "Subscribers that are being told what they missed.", "answering"),
)
COUNTERS: tuple[Named, ...] = (
    ("kvpool_events_batches", "Messages published.", "batches"),
    ("kvpool_events_bytes", "As kvpool_events_batches, in bytes, once for all.", "bytes"),
    ("kvpool_events_stored_keys", "Keys in BlockStored events.", "stored"),
    ("kvpool_events_removed_keys", "Keys in BlockRemoved events.", "removed"),
    (
        "kvpool_events_announced_keys",
        "Keys of kvpool_events_stored_keys that were here before, told as all was told anew.",
        "announced",
    ),
    (
        "kvpool_events_anew",
        "Times that subscribers were told to forget all, and then all that is here: at the start, "
        "and when changes could not be named one by one.",
        "anew",
    ),
    (
        "kvpool_events_lost",
        "Times that more changed than could be noted in a window, or a namespace was dropped. "
        "Growing without drops: make the window shorter.",
        "lost",
    ),
    (
        "kvpool_events_failures",
        "Turns of the publisher that failed; its log says at what.",
        "failures",
    ),
    ("kvpool_events_replays", "Requests of subscribers that missed something.", "replays"),
    (
        "kvpool_events_snapshots",
        "Times that all that is here was told to one subscriber. Growing with no new subscribers: "
        "one is too slow, or buffer is too small.",
        "snapshots",
    ),
    ("kvpool_events_malformed_requests", "Requests that were none.", "malformed"),
    ("kvpool_events_stalled_answers", "Answers that a subscriber stopped taking.", "stalled"),
)


def families(events: Events | None) -> Iterator[Metric]:
    """Nothing where there is no publisher."""
    if events is None:
        return
    for name, text, field in GAUGES:
        yield GaugeMetricFamily(name, text, value=getattr(events, field))
    for name, text, field in COUNTERS:
        yield CounterMetricFamily(name, text, value=getattr(events, field))
