"""A headless Chromium, driven by its DevTools protocol over two pipes: JSON objects, each ended by
a NUL byte. No driver and no websocket are needed for that.

The browser is a process group of its own and has a deadline for every answer; whatever happens, the
group is killed at the end.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ANSWER_S = 120.0  # also of the first one, with the start of the browser before it
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
)
_BASH = 'r=$1 w=$2; shift 2; exec "$@" 3<&"$r" 4>&"$w"'  # where Chromium has its pipes


def chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One process; tabs are made of it one after the other."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-web-", ignore_cleanup_errors=True)
        to_read, self._write = _pipe()
        self._read, to_write = _pipe()
        command = [program, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", _BASH, "bash", str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._bytes = b""
        self._last = 0
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(ANSWER_S)
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    @contextlib.contextmanager
    def tab(self, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> Iterator[Tab]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        try:
            yield Tab(self, attached["sessionId"], width, height, is_dark)
        finally:
            self.call("Target.closeTarget", targetId=target)
            self._events.clear()

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        """What Chromium answers. Events that come meanwhile are kept for events()."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._receive(deadline)
            if answer is None:
                raise TimeoutError(f"Chromium does not answer {method}")
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def events(self, session: str) -> list[dict[str, Any]]:
        """All of the tab, up to now."""
        self.call("Target.getTargets")  # its answer comes behind what was on its way
        return [each for each in self._events if each.get("sessionId") == session]

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            got = os.read(self._read, 1 << 20)
            assert got, "Chromium has ended"
            self._bytes += got
        line, _, self._bytes = self._bytes.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "id" not in message:
            self._events.append(message)
        return message


class Tab:
    """One page, of a given size."""

    def __init__(
        self, browser: Browser, session: str, width: int, height: int, is_dark: bool
    ) -> None:
        self._browser = browser
        self._session = session
        self._width, self._height = width, height
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._resize(height)

    def _resize(self, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=self._width,
            height=height,
            deviceScaleFactor=1,
            mobile=self._width < 600,
        )

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Returns when its scripts have run; they may still be asking for what they show."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of JavaScript. A promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What is there to be read; "" for an element that is not there."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait(self, expression: str) -> None:
        """Until it is true. Looks again and again, until a deadline."""
        self.wait_for(lambda: bool(self.value(f"Boolean({expression})")), expression)

    def wait_for(self, is_so: Callable[[], bool], told: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not is_so():
            assert time.monotonic() < deadline, f"never: {told}\n{self.text('body')}"
            select.select([], [], [], 0.05)

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, " ": 32}[key]
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> bytes:
        """A PNG of the whole page, however long."""
        self._resize(int(self.value("document.documentElement.scrollHeight")))
        data = self.call("Page.captureScreenshot", format="png")["data"]
        self._resize(self._height)
        png = base64.b64decode(data)
        path.write_bytes(png)
        return png

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that nobody caught."""
        found = []
        for event in self._browser.events(self._session):
            kind, told = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(f"exception: {told['exceptionDetails']}")
            elif kind == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
                found.append(f"console: {told['args']}")
            elif kind == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {told['entry']['text']} {told['entry'].get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """Every address that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events(self._session)
            if event["method"] == "Network.requestWillBeSent"
        ]


def _pipe() -> tuple[int, int]:
    """Above the numbers that Chromium's own must have."""
    ends = os.pipe()
    above = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return above[0], above[1]
