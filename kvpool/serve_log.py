"""The daemon's log: one line an event on stderr, as key=value or as JSON.

Promises:  1. what a stranger sent is on one line and cannot look like a line of our own;
           2. an event that many strangers can cause fills no disk: at most BURST of a kind in
              WINDOW_S, and then one line which says how many more there were.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

BURST = 20
WINDOW_S = 10.0
_PLAIN = re.compile(r"[\w./:@%+\[\]-]+", re.ASCII)


class EventLog:
    """Events with fields. Thread-safe, as logging is; but often() is for the event loop only."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}  # begin of the window, events in it

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def often(self, level: int, event: str, **fields: Any) -> None:
        """For what others can cause again and again; `event` is one of a few fixed texts."""
        now = self._clock()
        begin, count = self._windows.get(event, (now, 0))
        if now - begin >= WINDOW_S:
            if count > BURST:
                self._log(level, event, {"left_out": count - BURST})
            begin, count = now, 0
        self._windows[event] = begin, count + 1
        if count < BURST:
            self._log(level, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        self._logger.log(level, event, extra={"fields": fields})


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO ready socket=/run/kvpool/node.sock pid=12"""

    def format(self, record: logging.LogRecord) -> str:
        pairs = [f"{key}={_plain(value)}" for key, value in _fields(record).items()]
        return " ".join([_time(record), record.levelname, record.getMessage(), *pairs])


class JsonLines(logging.Formatter):
    """{"time": ..., "level": "info", "event": "ready", "socket": ..., "pid": 12}"""

    def format(self, record: logging.LogRecord) -> str:
        level, event = record.levelname.lower(), record.getMessage()
        line = {"time": _time(record), "level": level, "event": event, **_fields(record)}
        return json.dumps(line, default=str)


def open_log(form: str, level: str, stream: TextIO | None = None) -> EventLog:
    """The log of this process; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logger = logging.getLogger("kvpool.serve")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    logging.raiseExceptions = False  # a reader of stderr that left is no reason to print more to it
    return EventLog(logger)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _plain(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
