"""`kvpool top` without textual: rich draws, the terminal's keys are read as they are pressed.

A terminal that cannot move its cursor gets one frame below the other; a pipe gets no colours.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from kvpool.operate.feed import Feed, Lost
from kvpool.operate.top_view import Top

ONCE_SIZE = (100, 34)  # of a picture, and of a frame that goes to no terminal
_FONTS = re.compile(r"@font-face\s*\{[^}]*\}\s*")
_RATE_S = 0.4  # between the two samples of one frame with rates


def once(feed: Feed, *, is_settled: bool = True) -> tuple[Top, Lost | None]:
    """Two samples, so that there are rates; the reason where there is no daemon."""
    top = Top()
    for at in range(2 if is_settled else 1):
        if at:
            time.sleep(_RATE_S)
        news = feed.next()
        if isinstance(news, Lost):
            return top, news
        top.feed(news)
    return top, None


def svg(top: Top) -> str:
    """One frame as a picture for pages. It asks nobody for fonts: any of one width will do."""
    width, height = ONCE_SIZE
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(top.render(width, height))
    return _FONTS.sub("", console.export_svg(title="kvpool top"))


def run(feed: Feed, interval_s: float, console: Console, keys: Keys) -> None:
    """Until q or an interrupt."""
    top = Top()
    with contextlib.suppress(KeyboardInterrupt), _screen(console) as draw:
        while True:
            top.feed(feed.next())
            end = time.monotonic() + interval_s
            draw(top.render(console.width, console.height))
            while (left_s := end - time.monotonic()) > 0:
                key = keys.wait(left_s)
                if key is None:
                    continue
                if not top.press(key):
                    return
                draw(top.render(console.width, console.height))


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Any]:
    if console.is_dumb_terminal or not console.is_terminal:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        yield lambda frame: live.update(frame, refresh=True)


class Keys:
    """What is pressed at a terminal, key by key. Of anything else: nothing, after the wait."""

    def __init__(self, fd: int | None) -> None:
        """fd: of a terminal; None: there is none."""
        self._fd = fd

    def wait(self, seconds: float) -> str | None:
        """The next key; None when the time is over."""
        if self._fd is None:
            time.sleep(seconds)
            return None
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return None
        pressed = os.read(self._fd, 1)
        if not pressed:  # the terminal is gone
            raise KeyboardInterrupt
        return pressed.decode(errors="replace")


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Of stdin, one by one and not shown, for as long as this lasts."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
