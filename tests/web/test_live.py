"""The page and the dashboard over a real daemon that real engines use.

Every panel has data, and what the page says is what the daemon counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.observe import report
from tests.fault.test_operating import engine, fetch
from tests.fault.test_tenants import daemon_of
from tests.served import Served, wait_for, working
from tests.web.browser import Browser
from tests.web.test_deploy import TOKEN, Prometheus, expressions, filled_in, needs


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of the tenants a and b, each with an engine at work and an SSD tier."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "http").write_text(TOKEN)
    more = (
        f'[pool]\ndram = "32MiB"\n[http]\ntoken_file = "{folder / "http"}"\n'
        f'[ssd]\npath = "{folder / "tier"}"\ncapacity = "96MiB"\nfree_floor = 0\nadmit = "all"'
    )
    with (
        daemon_of(folder, {"a": "", "b": ""}, more, http="127.0.0.1:0") as running,
        working(engine, running.unix_address, "token of a", 1) as by_shm,
        working(engine, running.tcp_address, "token of b", 2) as by_tcp,
    ):
        for each in (by_shm, by_tcp):
            assert each.pipe.recv() == "ready"
        wait_for(lambda: all(each.traffic.loaded > 0 for each in report_of(running).tenants))
        yield running
        for each in (by_shm, by_tcp):
            each.pipe.send("end")
            assert each.pipe.recv() == "done"


def report_of(daemon: Served) -> report.Report:
    return report.from_json(fetch(daemon, "/v1/stats", TOKEN))


@pytest.fixture(scope="module")
def prometheus(daemon: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    needs("prometheus")
    port = int(daemon.http_address.rpartition(":")[2])
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), port)
    try:
        server.wait_for("up == 1")
        yield server
    finally:
        server.close()


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_panel_has_data_of_the_daemon(
    prometheus: Prometheus, title: str, expression: str
) -> None:
    assert all(value >= 0 for value in prometheus.wait_for(filled_in(expression)))


def test_prometheus_has_what_the_daemon_says(prometheus: Prometheus, daemon: Served) -> None:
    prometheus.wait_for('rate(kvpool_asked_blocks_total{tenant="a"}[10s]) > 0')
    before = {each.name: each.traffic.asked for each in report_of(daemon).tenants}
    (scraped,) = prometheus.wait_for(
        f'sum(kvpool_asked_blocks_total{{tenant="b"}}) >= {before["b"]}'
    )
    after = {each.name: each.traffic.asked for each in report_of(daemon).tenants}
    assert before["b"] <= scraped <= after["b"]


def test_the_page_shows_the_daemon(browser: Browser, daemon: Served, tmp_path: Path) -> None:
    with browser.tab() as tab:
        tab.open(f"{daemon.http_address}/")
        tab.wait("document.activeElement.id === 'token'")  # once it was told that it needs one
        tab.type(TOKEN)
        tab.press("Enter")
        tab.wait("document.body.innerText.includes('chat')")
        told = tab.value("document.body.innerText")
        for tenant in report_of(daemon).tenants:
            assert tenant.name in told.split()
        assert "ready" in told
        pid = str(report_of(daemon).pid)
        assert pid in told
        picture = tab.picture(tmp_path / "live.png")
        assert picture.startswith(b"\x89PNG")
        # Asking before the token was typed was refused, which a browser tells in its console.
        assert all("401" in each for each in tab.complaints())
