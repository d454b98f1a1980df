"""top: what a frame shows at every size, keys, a daemon that goes and comes back, and pictures."""

import asyncio
import io
import os
import pty
import select
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvpool.observe import report
from kvpool.operate import top_plain
from kvpool.operate.client import Hot, Reach
from kvpool.operate.feed import Feed, Lost, Sample
from kvpool.operate.top_view import HEIGHT_MIN, HISTORY_MAX, SORTS, WIDTH_MIN, Top
from tests import reports
from tests.operated import ENVIRONMENT, command, controlled, hottest
from tests.pools import ROOT
from tests.served import WAIT_S

TENANTS = ("acme", "umbrella")
_RICH = "https://www.textualize.io"  # a comment names who drew it


def hot(tenants: tuple[str, ...]) -> list[Hot]:
    """Shared out among the tenants."""
    told = [{**each, "tenant": tenants[n % len(tenants)]} for n, each in enumerate(hottest(12))]
    return msgspec.convert(told, list[Hot])


def sample(
    *, scale: int = 1, seconds: float = 2.0, tenants: tuple[str, ...] = ("default",)
) -> Sample:
    """In which `scale` times what was counted came in the last seconds."""
    before = reports.example(tenants=tenants)
    now = msgspec.structs.replace(
        before,
        tenants=[reports.tenant(name, scale + 1 + at) for at, name in enumerate(tenants)],
        now_s=before.now_s + seconds,
    )
    return Sample(now, "here", hot(tenants), before)


def frame(top: Top, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(top.render(width, height))
    return console.export_text().splitlines()


def shown(top: Top, width: int = 80, height: int = 24) -> str:
    return "\n".join(frame(top, width, height))


@pytest.mark.parametrize("height", [HEIGHT_MIN, 24, 31, 32, 60])
@pytest.mark.parametrize("width", [WIDTH_MIN, 80, 200])
def test_a_frame_fits(width: int, height: int) -> None:
    top = Top()
    top.feed(sample(tenants=TENANTS))
    for news in (None, Lost("no daemon answers; looked at\n  unix:/here: gone")):
        if news is not None:
            top.feed(news)
        lines = frame(top, width, height)
        assert len(lines) <= height
        assert max(len(line) for line in lines) <= width


def test_a_usual_terminal_shows_everything() -> None:
    top = Top()
    top.feed(sample())
    text = shown(top)
    for word in (
        *("kvpool 0.4.0", "DRAM", "1.8 GiB of 2 GiB", "SSD", "60% now, 60% since start"),
        *("get   54.6 MiB/s", "lookups 150/s", "hottest prefixes", "01010101..", "50.0"),
        *("clients (2 of 2)", "prefill", "memory", "tenants (1 of 1)", "? help"),
    ):
        assert word in text, text


def test_a_small_terminal_shares_its_rows() -> None:
    top = Top()
    top.feed(sample(tenants=TENANTS))
    text = shown(top, 80, 18)
    assert "hottest prefixes (2 of 12)" in text
    assert "clients (1 of 4)" in text


def test_before_the_first_report_it_waits() -> None:
    assert "waiting for the first report" in shown(Top())


def test_no_ssd_no_line() -> None:
    top = Top()
    top.feed(Sample(reports.example(has_ssd=False), "here"))
    assert "SSD  " not in shown(top).split("hit")[0]


def test_a_lost_daemon_is_told_and_the_picture_stays() -> None:
    top = Top()
    top.feed(sample())
    top.feed(Lost("no daemon answers"))
    text = shown(top)
    assert "no daemon answers" in text
    assert "hottest prefixes" in text
    top.feed(sample())
    assert "no daemon answers" not in shown(top)


def test_sorting_goes_round() -> None:
    top = Top()
    top.feed(sample())
    firsts = []
    for name in SORTS:
        assert top.sort == name
        rows = frame(top)
        at = next(n for n, line in enumerate(rows) if line.startswith("hottest"))
        firsts.append(rows[at + 3][:8])
        assert top.press("s")
    assert firsts == ["01010101", "0c0c0c0c", "01010101"]
    assert top.sort == SORTS[0]


def test_a_pause_holds_the_picture() -> None:
    top = Top()
    top.feed(sample(scale=1))
    top.press("p")
    before = shown(top)
    assert "paused" in before
    top.feed(sample(scale=5))
    assert shown(top).replace(" ", "") != ""
    assert "150/s" in shown(top)
    top.press("p")
    top.feed(sample(scale=5))
    assert "750/s" in shown(top)


def test_tenants_go_round() -> None:
    top = Top()
    top.feed(sample(tenants=TENANTS))
    assert "tenants (2 of 2)" in shown(top)
    seen = []
    for _ in range(3):
        top.press("t")
        seen.append(top.tenant)
    assert seen == ["acme", "umbrella", None]
    top.press("t")
    text = shown(top)
    assert "tenant acme" in text
    assert "umbrella" not in text
    assert "hottest prefixes (6 of 6)" in text
    assert "tenants (1 of 1)" in text


def test_help_is_shown_and_goes() -> None:
    top = Top()
    top.feed(sample())
    top.press("?")
    assert "hold the picture still" in shown(top)
    top.press("?")
    assert "hottest" in shown(top)


def test_only_q_leaves() -> None:
    top = Top()
    assert [top.press(key) for key in "pst?xQq"] == [True] * 6 + [False]


def test_the_history_is_bounded() -> None:
    top = Top()
    for _ in range(HISTORY_MAX + 50):
        top.feed(Lost("gone"))
    assert len(top._rates) == HISTORY_MAX


# --- the commands --------------------------------------------------------------------------------


def test_once_prints_a_frame(tmp_path: Path) -> None:
    with controlled(tmp_path) as server:
        text = command("top", "--once", "--address", server.address).stdout
    assert "hottest prefixes" in text
    assert len(text.splitlines()) <= top_plain.ONCE_SIZE[1]
    done = command("top", "--once", "--address", server.address, status=1)
    assert "no daemon answers" in done.stderr


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "top.svg"
    with controlled(tmp_path) as server:
        command("top", "--svg", path, "--address", server.address)
        missing = tmp_path / "absent" / "top.svg"
        done = command("top", "--svg", missing, "--address", server.address, status=1)
    assert "cannot be written" in done.stderr
    assert "://" not in path.read_text().replace("http://www.w3.org", "").replace(_RICH, "")
    text = "".join(ElementTree.parse(path).getroot().itertext()).replace("\xa0", " ")
    assert "hottest prefixes" in text


def test_a_pipe_gets_frame_after_frame(tmp_path: Path) -> None:
    with controlled(tmp_path) as server:
        words = ("top", "--interval", "0.5", "--address", server.address)
        watching = subprocess.Popen(
            [sys.executable, "-m", "kvpool", *words],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            text=True,
        )
        try:
            assert watching.stdout is not None
            heads = 0
            while heads < 3:
                line = watching.stdout.readline()
                assert line
                assert "\x1b" not in line
                heads += line.startswith("kvpool 0.4.0")
        finally:
            watching.kill()
            watching.communicate()


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_terminal_s_keys_are_heard_without_textual(tmp_path: Path, term: str) -> None:
    ours, theirs = pty.openpty()
    with controlled(tmp_path) as server:
        words = ("top", "--plain", "--interval", "0.5", "--address", server.address)
        watching = subprocess.Popen(
            [sys.executable, "-m", "kvpool", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "TERM": term},
        )
        os.close(theirs)
        try:
            _read_until(ours, b"hottest prefixes")
            os.write(ours, b"p")
            _read_until(ours, b"paused")
            os.write(ours, b"q")
            _drain(ours)
            assert watching.wait(20) == 0
        finally:
            watching.kill()
            _, errors = watching.communicate()
            os.close(ours)
    assert b"Traceback" not in errors


def _read_until(fd: int, words: bytes) -> None:
    seen, end = b"", time.monotonic() + WAIT_S
    while words not in seen:
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{words!r} did not come; {seen[-2000:]!r}"
        seen += os.read(fd, 65_536)


def _drain(fd: int) -> None:
    """To the end: a program that leaves must not wait for its reader."""
    try:
        while os.read(fd, 65_536):
            pass
    except OSError:
        return


# --- with textual --------------------------------------------------------------------------------


def piloted(
    address: str, steps: Callable[[Any, Any], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    """Runs the application without a terminal and lets `steps` press its keys."""
    pytest.importorskip("textual", reason="textual is not installed: pip install 'kvpool[top]'")
    from kvpool.operate.top_app import TopApp

    async def run() -> None:
        with Feed(Reach(address), with_hottest=True) as feed:
            app = TopApp(feed, 0.05)
            async with app.run_test(size=size) as pilot:
                await steps(app, pilot)

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(pilot: Any, true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        await pilot.pause(0.01)
    raise AssertionError("did not become true")


def seen_by(app: Any) -> str:
    """What is on its screen."""
    text = "".join(ElementTree.fromstring(app.export_screenshot()).itertext())
    return text.replace("\xa0", " ")


def test_textual_shows_the_frame_and_hears_the_keys(tmp_path: Path) -> None:
    async def steps(app: Any, pilot: Any) -> None:
        await until(pilot, lambda: "hottest prefixes" in seen_by(app))
        assert "prefill" in seen_by(app)
        await pilot.press("s")
        await until(pilot, lambda: "by depth" in seen_by(app))
        await pilot.press("p")
        await until(pilot, lambda: "paused" in seen_by(app))
        await pilot.press("t")
        await until(pilot, lambda: "tenant default" in seen_by(app))
        await pilot.press("question_mark")
        await until(pilot, lambda: "hold the picture still" in seen_by(app))
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    with controlled(tmp_path) as server:
        piloted(server.address, steps)


def test_textual_outlives_a_daemon(tmp_path: Path) -> None:
    async def steps(app: Any, pilot: Any) -> None:
        await until(pilot, lambda: "hottest prefixes" in seen_by(app))
        server.stop()
        await until(pilot, lambda: "no daemon answers" in seen_by(app))
        assert "hottest prefixes" in seen_by(app)
        server.start()
        await until(pilot, lambda: "no daemon answers" not in seen_by(app))

    with controlled(tmp_path) as server:
        piloted(server.address, steps, size=(120, 40))


def test_textual_reads_one_report_at_a_time(tmp_path: Path) -> None:
    import threading

    under_way, most = 0, 0
    lock = threading.Lock()

    def slow(_: dict[str, Any]) -> dict[str, Any]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        threading.Event().wait(0.2)
        with lock:
            under_way -= 1
        return {"report": report.as_json(reports.example())}

    async def steps(app: Any, pilot: Any) -> None:
        await until(pilot, lambda: app.samples >= 3)

    with controlled(tmp_path, report=slow) as server:
        piloted(server.address, steps)
    assert most == 1
