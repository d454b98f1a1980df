"""kvpool.observe.metrics: what Prometheus reads is what the report says."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.observe import metric_names, metrics, report
from tests import reports

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(
    whole: report.Report, exposition: metrics.Exposition | None = None, tenant: str | None = None
) -> Samples:
    text, content_type = (exposition or metrics.Exposition()).text(whole, tenant=tenant)
    assert content_type.startswith("text/plain; version=0.0.4")
    return samples_of(text)


def samples_of(text: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def at(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[f"kvpool_{name}", frozenset(labels.items())]


def total(samples: Samples, name: str, /, **labels: str) -> float:
    """Over all that have these labels, among others."""
    wanted = set(labels.items())
    return sum(
        value
        for (found, has), value in samples.items()
        if found == f"kvpool_{name}" and wanted <= has
    )


def with_spaces(count: int, first: int = 0) -> report.Report:
    """One tenant with so many namespaces; the later ones have more traffic."""
    whole = reports.example()
    spaces = [reports.namespace(n, f"ns-{n}", 1 + n) for n in range(first, first + count)]
    tenant = msgspec.structs.replace(
        whole.tenants[0],
        namespaces=spaces,
        traffic=report.total(each.traffic for each in spaces),
    )
    return msgspec.structs.replace(whole, tenants=[tenant])


def with_clients(clients: Sequence[report.Client]) -> report.Report:
    whole = reports.example()
    tenant = msgspec.structs.replace(whole.tenants[0], clients=list(clients))
    return msgspec.structs.replace(whole, tenants=[tenant])


def client(number: int, bytes_in: int) -> report.Client:
    return msgspec.structs.replace(
        reports.client(number), bytes_in=bytes_in, bytes_out=2 * bytes_in
    )


def test_traffic_is_the_report_s() -> None:
    samples = scraped(reports.example())
    labels = {"tenant": "default", "namespace": "chat"}
    for name, expected in {
        "lookups": 100,
        "requested_blocks": 1000,
        "requested_tokens": 16_000,
        "gets": 95,
        "asked_blocks": 620,
        "loaded_bytes": 582 * 65_536,
        "given_blocks": 764,
        "given_bytes": 764 * 65_536,
        "stored_blocks": 700,
        "stored_bytes": 700 * 65_536,
        "present_blocks": 50,
    }.items():
        assert at(samples, f"{name}_total", **labels) == expected, name
    for name, part, expected in [
        ("hit", {"tier": "dram"}, 510),
        ("hit", {"tier": "ssd"}, 90),
        ("missed", {"reason": "absent"}, 80),
        ("missed", {"reason": "behind"}, 320),
        ("loaded", {"tier": "dram"}, 500),
        ("loaded", {"tier": "ssd"}, 82),
        ("failed", {"reason": "behind"}, 30),
        ("failed", {"reason": "moved"}, 1),
    ]:
        assert at(samples, f"{name}_blocks_total", **labels, **part) == expected
        assert at(samples, f"{name}_tokens_total", **labels, **part) == 16 * expected
    refused = at(samples, "refused_blocks_total", **labels, reason="pool_pinned")
    assert refused == 3


def test_tiers_and_tenants_are_the_report_s() -> None:
    whole = reports.example(tenants=("a", "b"))
    samples = scraped(whole)
    for tenant in whole.tenants:
        assert tenant.ssd is not None
        for part, names in [
            (tenant.dram, metric_names.DRAM_GAUGES),
            (tenant.ssd, metric_names.SSD_GAUGES),
            (tenant.policy, metric_names.POLICY_GAUGES),
            (tenant, metric_names.TENANT_GAUGES),
        ]:
            for name, _, field in names:
                found = at(samples, name.removeprefix("kvpool_"), tenant=tenant.name)
                assert found == getattr(part, field), name
        for part, names in [
            (tenant.ssd, metric_names.SSD_COUNTERS),
            (tenant.policy, metric_names.POLICY_COUNTERS),
        ]:
            for name, _, field in names:
                found = at(samples, f"{name.removeprefix('kvpool_')}_total", tenant=tenant.name)
                assert found == getattr(part, field), name
        labels = {"tenant": tenant.name}
        assert at(samples, "evictions_total", **labels, tier="dram") == tenant.dram.evictions
        assert at(samples, "evictions_total", **labels, tier="ssd") == 44
        assert at(samples, "ssd_faults_total", **labels, kind="late") == 5
        assert at(samples, "ssd_read_only", **labels) == 0
        assert at(samples, "leases", **labels, age="under_10s") == 2
        assert at(samples, "clients", **labels) == 2
        assert at(samples, "tenant_limit", **labels, limit="max_clients") == 512
        assert at(samples, "tenant_refused_total", **labels, reason="not_admin") == 2
        assert at(samples, "namespace_blocks", **labels, namespace="chat") > 0
    assert at(samples, "ready") == 1
    assert at(samples, "dram_budget_bytes") == 4 << 30
    assert at(samples, "start_time_seconds") == whole.started_s
    assert at(samples, "connections_refused_total", reason="bad_token") == 6
    assert at(samples, "build_info", version="0.4.0") == 1
    assert ("process_resident_memory_bytes", frozenset()) in samples


def test_clients_are_the_report_s() -> None:
    samples = scraped(reports.example())
    labels = {"tenant": "default", "client": "1", "name": "prefill"}
    assert at(samples, "client_bytes_total", **labels, direction="in") == 5_000_001
    assert at(samples, "client_bytes_total", **labels, direction="out") == 6_000_002
    assert at(samples, "client_leases", **labels) == 3
    assert at(samples, "client_leased_bytes", **labels) == 196_608


def test_no_ssd_no_series_of_it() -> None:
    names = {name for name, _ in scraped(reports.example(has_ssd=False))}
    assert not {name for name in names if name.startswith("kvpool_ssd_")}


@pytest.mark.parametrize("spaces", [2, 200])
def test_sums_reconcile(spaces: int) -> None:
    whole = with_spaces(spaces)
    traffic = whole.tenants[0].traffic
    samples = scraped(whole)
    for what, parts in [
        ("requested_blocks", ("hit_blocks", "missed_blocks")),
        ("requested_tokens", ("hit_tokens", "missed_tokens")),
        ("asked_blocks", ("loaded_blocks", "failed_blocks")),
        ("given_blocks", ("stored_blocks", "present_blocks", "refused_blocks")),
    ]:
        whole_sum = total(samples, f"{what}_total")
        assert whole_sum == sum(total(samples, f"{part}_total") for part in parts), what
        assert whole_sum > 0
    assert total(samples, "requested_blocks_total") == traffic.requested
    assert total(samples, "hit_tokens_total") == traffic.hit_tokens
    assert total(samples, "loaded_bytes_total") == traffic.loaded_bytes
    assert total(samples, "stored_bytes_total") == traffic.stored_bytes
    blocks = sum(each.blocks for each in whole.tenants[0].namespaces)
    assert total(samples, "namespace_blocks") == blocks


def namespaces_of(samples: Samples) -> set[str]:
    return {dict(labels)["namespace"] for name, labels in samples if name == "kvpool_gets_total"}


def test_the_busiest_namespaces_have_series_of_their_own() -> None:
    found = namespaces_of(scraped(with_spaces(200)))
    assert found == {f"ns-{n}" for n in range(200 - metrics.NAMESPACES_MAX, 200)} | {metrics.OTHER}


def test_counters_never_fall_when_others_become_busier() -> None:
    exposition = metrics.Exposition()
    before = scraped(with_spaces(70), exposition)
    after = scraped(with_spaces(140), exposition)  # the new ones have more traffic than the old
    assert namespaces_of(before) == namespaces_of(after)
    fallen = [
        key for key, value in before.items() if key[0].endswith("_total") and after[key] < value
    ]
    assert fallen == []


def test_a_namespace_that_is_gone_leaves_its_place() -> None:
    exposition = metrics.Exposition()
    scraped(with_spaces(70), exposition)
    found = namespaces_of(scraped(with_spaces(metrics.NAMESPACES_MAX, first=100), exposition))
    assert len(found) == metrics.NAMESPACES_MAX
    assert metrics.OTHER not in found


def test_clients_are_bounded_and_what_others_moved_stays_counted() -> None:
    exposition = metrics.Exposition()
    clients = [client(n, 1000 * n) for n in range(1, 101)]
    samples = scraped(with_clients(clients), exposition)
    numbers = {dict(has)["client"] for name, has in samples if name == "kvpool_client_bytes_total"}
    assert numbers == {str(n) for n in range(37, 101)} | {metrics.OTHER}
    other = {"tenant": "default", "client": metrics.OTHER, "name": ""}
    expected = sum(1000 * n for n in range(1, 37))
    assert at(samples, "client_bytes_total", **other, direction="in") == expected
    assert at(samples, "client_bytes_total", **other, direction="out") == 2 * expected
    left = [each for each in clients if each.number != 36]
    samples = scraped(with_clients(left), exposition)
    assert at(samples, "client_bytes_total", **other, direction="in") == expected
    grown = [client(each.number, each.bytes_in + 7) for each in left]
    samples = scraped(with_clients(grown), exposition)
    assert at(samples, "client_bytes_total", **other, direction="in") == expected + 7 * 35


def test_a_tenant_s_scrape_says_nothing_of_others() -> None:
    whole = reports.example(tenants=("mine", "theirs"))
    exposition = metrics.Exposition()
    text, _ = exposition.text(whole, tenant="mine")
    assert b"theirs" not in text
    assert b"process_" not in text
    assert b"budget" not in text
    assert b"connections_refused" not in text
    everything = scraped(whole, exposition)
    own = samples_of(text)
    assert own.items() <= everything.items()
    assert total(own, "requested_blocks_total") == 3000


HOSTILE = ['a"b', "a\nb", "a\\b", "{}", "other", "id:020202020202", "<script>", "\u2028é"]


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_a_label(name: str) -> None:
    whole = reports.example()
    spaces = [reports.namespace(0, name), reports.namespace(1, ""), reports.namespace(2, name)]
    tenant = msgspec.structs.replace(whole.tenants[0], namespaces=spaces)
    found = namespaces_of(scraped(msgspec.structs.replace(whole, tenants=[tenant])))
    assert len(found) == 3
    assert metrics.OTHER not in found
    assert sum(each.startswith(name) for each in found) >= 2


def helps(text: bytes) -> Iterable[tuple[str, str]]:
    for line in text.decode().splitlines():
        if line.startswith("# HELP kvpool_"):
            _, _, name, told = line.split(" ", 3)
            yield name, told


def test_every_metric_says_what_it_is() -> None:
    text, _ = metrics.Exposition().text(reports.example())
    found = dict(helps(text))
    names = {name for name, _ in samples_of(text) if name.startswith("kvpool_")}
    assert names == set(found)
    for name, told in found.items():
        assert told.endswith("."), name
        assert len(told) > 10, name


def test_openmetrics_for_whoever_prefers_it() -> None:
    text, content_type = metrics.Exposition().text(
        reports.example(), "application/openmetrics-text; version=1.0.0"
    )
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_promtool_finds_no_fault() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    text, _ = metrics.Exposition().text(reports.example(tenants=("a", "b")))
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
