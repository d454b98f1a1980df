"""What is counted of events, in the metrics and in a report."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvpool.observe import report
from kvpool.observe.events import Events
from kvpool.observe.events_metrics import COUNTERS, GAUGES
from kvpool.observe.metrics import Exposition
from tests import reports

COUNTS = {
    name: 1000 + at
    for at, name in enumerate(Events.__struct_fields__)
    if name not in ("endpoint", "replay_endpoint", "node")
}
EVENTS = Events(
    endpoint="tcp://127.0.0.1:5557", replay_endpoint="", node="6e" * 16, **COUNTS
)  # fmt: skip


def scraped(tenant: str | None = None) -> dict[str, float]:
    whole = msgspec.structs.replace(reports.example(), events=EVENTS)
    body, _ = Exposition().text(whole, tenant=tenant)
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith("kvpool_events_")
    }


def test_every_count_is_the_report_s() -> None:
    assert scraped() == {
        **{name: COUNTS[field] for name, _, field in GAUGES},
        **{f"{name}_total": COUNTS[field] for name, _, field in COUNTERS},
    }


def test_a_tenant_sees_none_of_it() -> None:
    assert scraped(reports.example().tenants[0].name) == {}


def test_a_report_keeps_them() -> None:
    whole = msgspec.structs.replace(reports.example(), events=EVENTS)
    assert report.from_json(report.as_json(whole)).events == EVENTS
