"""kvpool.observe.report: sums that hold, and one form for everybody."""

from __future__ import annotations

import msgspec
import pytest

from kvpool.observe import report
from kvpool.types import Miss, Put, Reason
from tests import reports


def test_a_report_reconciles() -> None:
    for each in reports.example(tenants=("a", "b")).tenants:
        for traffic in (each.traffic, *(space.traffic for space in each.namespaces)):
            assert traffic.requested == traffic.hit + sum(traffic.missed.values())
            assert traffic.asked == traffic.loaded + sum(traffic.failed.values())
            assert traffic.given == traffic.stored + traffic.present + sum(traffic.refused.values())


def test_every_reason_has_a_series_from_the_start() -> None:
    traffic = report.traffic_of(reports.counted(), 16)
    assert set(traffic.failed) == {each.name.lower() for each in Miss if each is not Miss.NONE}
    told = {each.name.lower() for each in Reason if each not in (Reason.NONE, Put.PRESENT)}
    assert set(traffic.refused) == told
    assert (traffic.failed["absent"], traffic.refused["pool_pinned"]) == (7, 3)


def test_counts_of_an_older_core_are_padded() -> None:
    counted = reports.counted()
    counted["missed"], counted["put_status"] = counted["missed"][:4], counted["put_status"][:5]
    traffic = report.traffic_of(counted, 16)
    assert (traffic.failed["fault"], traffic.refused["disconnected"]) == (0, 0)


def test_tokens_and_bytes_follow_blocks() -> None:
    traffic = report.traffic_of(reports.counted(), 16)
    assert traffic.requested_tokens == 16 * 1000
    assert traffic.hit_tokens == 16 * 600
    assert traffic.loaded_tokens == 16 * 582
    assert traffic.loaded_bytes == 582 * 65_536
    assert (traffic.given_bytes, traffic.stored_bytes) == (764 * 65_536, 700 * 65_536)


def test_the_hit_ratio_is_of_lookups_or_of_gets_or_unknown() -> None:
    assert report.traffic_of(reports.counted(), 16).hit_ratio() == pytest.approx(0.6)
    only_gets = report.Traffic(asked=10, loaded_dram=3, loaded_ssd=1)
    assert only_gets.hit_ratio() == pytest.approx(0.4)
    assert report.Traffic().hit_ratio() is None


def test_a_total_is_the_sum() -> None:
    one, two = (report.traffic_of(reports.counted(scale=scale), 16) for scale in (1, 3))
    both = report.total([one, two])
    assert both == report.traffic_of(reports.counted(scale=4), 16)
    assert report.total([]) == report.Traffic()


def test_what_must_fit_keeps_its_totals_and_what_is_in_front() -> None:
    whole = reports.example(tenants=("a", "b"))
    spaces = [reports.namespace(number % 200, name="n" * 200) for number in range(500)]
    wide = msgspec.structs.replace(whole.tenants[0], namespaces=spaces)
    told = msgspec.structs.replace(whole, tenants=[wide, whole.tenants[1]])
    data = report.as_json_within(told, 100_000)
    assert 50_000 < len(data) <= 100_000
    cut = report.from_json(data)
    assert cut.tenants[0].namespaces == spaces[: len(cut.tenants[0].namespaces)]
    assert cut.tenants[0].traffic == wide.traffic
    assert cut.tenants[1] == whole.tenants[1]
    assert report.as_json_within(whole, 100_000) == report.as_json(whole)


def test_json_comes_back_as_it_was() -> None:
    whole = reports.example(tenants=("a", "b"), has_ssd=False)
    assert report.from_json(report.as_json(whole)) == whole


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"{", b'{"version": 1}', b"\xff"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError)):
        report.from_json(data)
