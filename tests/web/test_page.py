"""The status page in a real browser, served by the real server: it says what the report says."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.observe import http_static
from kvpool.observe.http_access import Access
from tests.web.browser import Browser, Tab
from tests.web.moving import Moving, Running, running

UNKNOWN = "\N{EN DASH}"
SHOWN = "!document.getElementById('main').hidden"
HOSTILE = "<script>document.title='taken'</script>"
ADMIN, MINE = "admin-" + "a" * 32, "mine-" + "b" * 32


@pytest.fixture
def busy() -> Iterator[Running]:
    source = Moving(spaces=("chat", HOSTILE, ""))
    source.fill(320)
    with running(source) as site:
        source._step_s = 0.0  # from here on the numbers stand still, to be compared
        yield site


def opened(tab: Tab, site: Running) -> None:
    tab.open(site.url + "/")
    tab.wait(SHOWN)


def table(tab: Tab, name: str) -> list[list[str]]:
    """The cells of its body."""
    rows: list[list[str]] = tab.value(
        f"[...document.getElementById('{name}').tBodies[0].rows]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return rows


def size(value: float) -> str:
    """As the page writes a size: three digits."""
    name = "GiB" if value >= 999.5 * 2**20 else "MiB"
    value /= 2**30 if name == "GiB" else 2**20
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {name}"


def test_it_shows_the_report_s_numbers(browser: Browser, busy: Running) -> None:
    (tenant,) = busy.source.now.tenants
    ratio = tenant.traffic.hit_ratio()
    with browser.tab() as tab:
        opened(tab, busy)
        assert tab.text("#state") == "ready"
        assert tab.text("#daemon") == "0.4.0 · pid 4242 · up 1 d"
        asked = f"{tenant.traffic.requested:,}"
        assert tab.text("#now-hit-more") == f"{ratio:.0%} of {asked} since the start"
        assert tab.text("#now-dram") == size(tenant.dram.used_bytes)
        assert tab.text("#now-dram-more") == "of 2 GiB · 809 blocks, 21 pinned"
        assert tab.text("#now-ssd") == size(tenant.ssd.used_bytes)
        assert tab.text("#now-get-more") == f"{size(tenant.traffic.loaded_bytes)} since the start"
        spaces = table(tab, "spaces")
        assert [row[0] for row in spaces] == ["chat", HOSTILE, "030303030303"]
        for row, space in zip(spaces, tenant.namespaces, strict=True):
            assert row[2:4] == [
                f"{space.traffic.hit_ratio():.0%}",
                f"{space.traffic.requested:,}",
            ]
        clients = table(tab, "clients")
        assert [row[0] for row in clients] == ["prefill", "decode"]
        assert clients[0][1:4] == ["4001 · uid:1001", "shared memory", "5 min 21 s"]
        assert table(tab, "hottest")[0][0] == "00" * 16
        trouble = {(row[0], row[1]): row[2] for row in table(tab, "trouble")}
        refused = tenant.traffic.refused["pool_pinned"]
        assert trouble["put", "pool pinned"] == f"{refused:,}"
        assert trouble["connection", "bad token"] == "6"
        assert tab.text("#curve-says") == "Doubling DRAM: hit 37% → 53%."
        assert "within 1.3 points" in tab.text("#curve-more")
        assert tab.complaints() == []


def test_a_name_is_text(browser: Browser, busy: Running) -> None:
    with browser.tab() as tab:
        opened(tab, busy)
        assert tab.value("document.title") == "kvpool"
        scripts = tab.value("[...document.scripts].map((each) => each.src)")
        assert all(each.startswith(busy.url) for each in scripts)
        assert HOSTILE in tab.text("#spaces")


def test_nothing_comes_from_elsewhere(browser: Browser, busy: Running) -> None:
    with browser.tab() as tab:
        opened(tab, busy)
        requested = tab.requested()
        assert len(requested) > 8
        assert [each for each in requested if not each.startswith(busy.url + "/")] == []


def test_it_moves_on(browser: Browser, busy: Running) -> None:
    with browser.tab() as tab:
        opened(tab, busy)
        before = tab.text("#now-hit-more")
        busy.source.advance(60.0)
        asked = f"{busy.source.now.tenants[0].traffic.requested:,}"
        assert asked not in before
        tab.wait(f"document.getElementById('now-hit-more').textContent.includes('{asked}')")
        assert tab.complaints() == []


def test_charts_are_drawn_and_their_numbers_are_tables(browser: Browser, busy: Running) -> None:
    assert http_static.has_charts(), "the chart library is one of the packages for development"
    with browser.tab() as tab:
        opened(tab, busy)
        for figure in (
            "chart-hit",
            "chart-bytes",
            "chart-memory",
            "chart-evictions",
            "chart-curve",
        ):
            colors = tab.value(
                f"""(() => {{
                    const canvas = document.querySelector('#{figure} canvas');
                    const drawn = canvas.getContext('2d');
                    const all = drawn.getImageData(0, 0, canvas.width, canvas.height);
                    return new Set(new Uint32Array(all.data.buffer)).size;
                }})()"""
            )
            assert colors > 10, figure
            label = tab.value(f"document.querySelector('#{figure} canvas').ariaLabel")
            assert "table below" in label
            assert not tab.value(f"document.querySelector('#{figure} details').open")
            tab.value(f"document.querySelector('#{figure} summary').click()")
            tab.wait(f"document.querySelectorAll('#{figure} tbody tr').length > 10")
        newest = busy.source.history().series(1)["hit_ratio"][-1]
        first = tab.value("document.querySelector('#chart-hit tbody tr').cells[1].textContent")
        assert first == f"{newest:.0%}"


def test_the_range_is_chosen_by_keys(browser: Browser, busy: Running) -> None:
    with browser.tab() as tab:
        opened(tab, busy)
        for _ in range(10):
            tab.press("Tab")
            if tab.value("document.activeElement.name") == "step":
                break
        assert tab.value("document.activeElement.name") == "step"
        style = "getComputedStyle(document.activeElement.nextElementSibling)"
        assert tab.value(f"{style}.outlineStyle") == "solid"
        tab.press("ArrowRight")
        assert tab.value("document.querySelector('[name=step]:checked').value") == "10"
        tab.wait_for(
            lambda: any("step=10" in each for each in tab.requested()), "step=10 asked for"
        )
        tab.press("Tab")
        assert tab.value("document.activeElement.tagName") == "SUMMARY"
        tab.press("Enter")
        tab.wait("document.activeElement.parentElement.open")


@pytest.mark.parametrize(
    ("width", "is_dark"),
    [(320, False), (390, False), (390, True), (768, True), (1280, False), (1280, True)],
)
def test_it_fits(
    browser: Browser, busy: Running, tmp_path: Path, width: int, is_dark: bool
) -> None:
    with browser.tab(width=width, height=844, is_dark=is_dark) as tab:
        opened(tab, busy)
        folder = Path(os.environ.get("KVPOOL_PICTURES", tmp_path))  # where to keep them, for people
        name = f"status-{width}{'-dark' if is_dark else ''}.png"
        png = tab.picture(folder / name)
        assert struct.unpack(">II", png[16:24])[0] == width
        assert len(png) > 20_000
        tab.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        tab.wait("document.querySelectorAll('#chart-hit tbody tr').length > 10")
        assert tab.value("document.documentElement.scrollWidth") <= width
        hidden = tab.value(
            "[...document.querySelectorAll('main td, main th, main dd, h2, h3')].filter((each) => "
            "each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"
        )
        assert hidden == []
        background = tab.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 128) == is_dark


def contrast(one: list[float], other: list[float]) -> float:
    """As WCAG 2 has it: 4.5 and more is legible."""

    def luminance(color: list[float]) -> float:
        parts = [c / 255 for c in color]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True])
def test_its_colors_are_legible(browser: Browser, busy: Running, is_dark: bool) -> None:
    with browser.tab(is_dark=is_dark) as tab:
        opened(tab, busy)
        colors: dict[str, Any] = tab.value(
            """Object.fromEntries(["page", "text", "quiet", "one", "two", "here", "good", "bad"]
            .map((name) => {
                const probe = document.createElement("i");
                probe.style.color = `var(--${name})`;
                document.body.append(probe);
                const found = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
                probe.remove();
                return [name, found.slice(0, 3)];
            }))"""
        )
        page = colors.pop("page")
        poor = {name: contrast(page, each) for name, each in colors.items()}
        assert {name: value for name, value in poor.items() if value < 4.5} == {}


def test_a_daemon_that_is_away(browser: Browser) -> None:
    source = Moving()
    source.fill(30)
    with running(source) as site, browser.tab() as tab:
        opened(tab, site)
        asked = tab.text("#now-hit-more")
        site.close()
        tab.wait("!document.getElementById('notice').hidden")
        assert tab.text("#notice").startswith("The daemon does not answer. This is what it said at")
        assert tab.text("#state") == "away"
        assert asked.split(" ")[0] in tab.text("#now-hit-more")  # what it said last is still there
        again = Running(source, port=site.port)
        try:
            tab.wait("document.getElementById('notice').hidden")
            tab.wait("document.getElementById('state').textContent === 'ready'")
        finally:
            again.close()


def test_nothing_yet(browser: Browser) -> None:
    with running(Moving(is_busy=False, has_ssd=False)) as site, browser.tab() as tab:
        opened(tab, site)
        assert tab.text("#now-hit") == UNKNOWN
        assert tab.text("#now-hit-more") == "nobody has asked yet"
        assert tab.text("#now-ssd") == "none"
        assert tab.text("#curve-says") == "Not enough reads yet to tell."
        assert table(tab, "spaces") == [["No engine has opened a namespace yet."]]
        assert table(tab, "clients") == [["Nobody is connected."]]
        assert "NaN" not in tab.text("body")
        assert "undefined" not in tab.text("body")
        assert tab.complaints() == []


def test_thirty_tenants_and_one_of_them(browser: Browser) -> None:
    source = Moving([f"team-{n}" for n in range(30)])
    source.fill(30)
    with running(source) as site, browser.tab() as tab:
        opened(tab, site)
        assert len(table(tab, "tenants")) == 30
        assert tab.text("#spaces-title") == "Namespaces: the first 25 of 60"
        choice = "document.getElementById('tenant')"
        assert tab.value(f"{choice}.options.length") == 31
        tab.value(f"{choice}.value = 'team-7'; {choice}.dispatchEvent(new Event('change'))")
        tab.wait("document.getElementById('tenants').tBodies[0].rows.length === 1")
        assert {row[1] for row in table(tab, "spaces")} == {"team-7"}
        tab.wait("document.getElementById('hottest').textContent.includes('team-7')")
        assert {row[1] for row in table(tab, "hottest")} == {"team-7"}
        assert tab.complaints() == []


def test_it_asks_for_a_token_and_keeps_it_out_of_addresses(browser: Browser) -> None:
    source = Moving(("mine", "theirs"))
    source.fill(30)
    access = Access(is_loopback=True, admin_token=ADMIN, tenant_tokens={"mine": MINE})
    with running(source, access) as site, browser.tab() as tab:
        tab.open(site.url + "/")
        tab.wait("!document.getElementById('login').hidden")
        assert not tab.value(SHOWN)
        assert tab.value("document.activeElement.id") == "token"
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.getElementById('login-error').textContent !== ''")
        tab.type(MINE)
        tab.press("Enter")
        tab.wait(SHOWN)
        assert "theirs" not in tab.text("body")
        assert {row[0] for row in table(tab, "spaces")} == {"chat", "020202020202"}
        assert [each for each in tab.requested() if MINE in each] == []
        assert tab.value("document.cookie + JSON.stringify(localStorage)") == "{}"
        tab.open(site.url + "/")
        tab.wait(SHOWN)  # kept for this tab


def test_without_the_chart_library_it_is_tables(
    browser: Browser, busy: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_static, "_CHARTS_IN_PACKAGE", ("no_such_package", "x.js"))
    http_static.file.cache_clear()
    try:
        with browser.tab(width=390) as tab:
            opened(tab, busy)
            assert "pip install 'kvpool[page]'" in tab.text("#no-charts")
            assert tab.value("document.querySelector('#chart-hit .canvas').hidden")
            assert tab.value("document.querySelectorAll('#chart-hit tbody tr').length") > 10
            assert tab.value("document.documentElement.scrollWidth") <= 390
            assert tab.complaints() == []
    finally:
        http_static.file.cache_clear()
