"""`kvpool top` as a textual application: scrolls, resizes, and takes keys while a report is read.

Reports are read by a thread, one at a time and no more often than asked, so that a slow daemon
makes an old picture and never a stuck one.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from rich.console import RenderableType
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import Footer, Static

from kvpool.operate.feed import Feed, Lost, Sample
from kvpool.operate.top_view import KEYS, Top


class TopApp(App[None]):
    """One screen on one feed."""

    TITLE = "kvpool top"
    CSS = "#frame { height: 1fr; width: 1fr; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark" if key == "?" else key, f"press('{key}')", what)
        for key, what in KEYS.items()
    ]

    def __init__(self, feed: Feed, interval_s: float) -> None:
        """Owns neither the feed nor its connection; closes nothing."""
        super().__init__()
        self.top = Top()
        self.samples = 0
        self._feed = feed
        self._interval_s = interval_s
        self._reading = threading.Lock()

    def compose(self) -> ComposeResult:
        """A frame above the keys."""
        yield Static(id="frame", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begins to read."""
        self._draw()
        self._read()
        self.set_interval(self._interval_s, self._read)

    def on_resize(self, _: Resize) -> None:
        """The frame follows the terminal."""
        self._draw()

    def action_press(self, key: str) -> None:
        """As in every form of top."""
        if not self.top.press(key):
            self.exit()
        self._draw()

    def _read(self) -> None:
        if self._reading.acquire(blocking=False):
            threading.Thread(target=self._read_one, name="kvpool-top", daemon=True).start()

    def _read_one(self) -> None:
        try:
            news = self._feed.next()
        finally:
            self._reading.release()
        if self.is_running:
            self.call_later(self._take, news)

    def _take(self, news: Sample | Lost) -> None:
        self.samples += 1
        self.top.feed(news)
        self._draw()

    def _draw(self) -> None:
        frame = self.query_one("#frame", Static)
        frame.update(self._frame())

    def _frame(self) -> RenderableType:
        return self.top.render(self.size.width, self.size.height - 1)


def run(feed: Feed, interval_s: float) -> None:
    """Until q or an interrupt."""
    TopApp(feed, interval_s).run()
