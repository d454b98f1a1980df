"""The daemon's log: one line an event, whatever strangers put into it, and not too many."""

import io
import json
import logging
from pathlib import Path

import pytest

from kvpool.serve_log import BURST, WINDOW_S, EventLog, open_log
from kvpool.tenants.opening import tell_if_buffered
from tests.daemons import planned


def lines_of(form: str, level: str = "debug") -> tuple[EventLog, io.StringIO]:
    stream = io.StringIO()
    return open_log(form, level, stream), stream


def test_text_has_time_level_event_and_fields() -> None:
    log, stream = lines_of("text")
    log.info("client connected", pid=7, socket="/run/kvpool/node.sock", name="my engine", of="")
    time, rest = stream.getvalue().split(" ", 1)
    assert rest == (
        'INFO client connected pid=7 socket=/run/kvpool/node.sock name="my engine" of=""\n'
    )
    assert time.endswith("Z")


HOSTILE = 'x\n2026-01-01T00:00:00.000Z INFO ready pid=1\r\x1b[31m "\\ \u2028 模'


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_stranger_says_stays_on_its_line(form: str) -> None:
    log, stream = lines_of(form)
    log.warning("refused", reason=HOSTILE)
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["reason"] == HOSTILE
    else:
        assert json.loads(line.split(" reason=")[1]) == HOSTILE


def test_json_has_an_object_for_each_event() -> None:
    log, stream = lines_of("json")
    log.error("failed", reason=ValueError("why"), count=3, none=None)
    found = json.loads(stream.getvalue())
    del found["time"]
    assert found == {
        "level": "error",
        "event": "failed",
        "reason": "why",
        "count": 3,
        "none": None,
    }


def test_the_level_leaves_out_what_is_below_it() -> None:
    log, stream = lines_of("text", "warning")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["c", "d"]


def test_what_comes_often_is_cut_and_counted() -> None:
    stream, now = io.StringIO(), [100.0]
    open_log("json", "debug", stream)
    log = EventLog(logging.getLogger("kvpool.serve"), clock=lambda: now[0])
    for number in range(BURST + 30):
        log.often(logging.INFO, "refused", number=number)
    log.often(logging.INFO, "another", number=0)  # each kind has a window of its own
    now[0] += WINDOW_S
    log.often(logging.INFO, "refused", number=99)
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    refused = [each for each in found if each["event"] == "refused"]
    assert [each.get("number") for each in refused] == [*range(BURST), None, 99]
    assert refused[BURST]["left_out"] == 30
    assert len(found) == BURST + 3


def test_a_reader_that_left_is_no_failure() -> None:
    log, stream = lines_of("text")
    stream.close()
    log.info("nobody reads this")


def test_a_tier_without_direct_io_is_told(tmp_path: Path) -> None:
    log, stream = lines_of("text")
    flags = {"ssd": str(tmp_path / "tier"), "ssd_capacity": "16MiB"}
    told = planned(tmp_path, **flags).tenants["default"]
    tell_if_buffered(told, {"ssd_direct": True, "ssd_buffered_reason": ""}, log)
    assert stream.getvalue() == ""
    reason = {"ssd_direct": False, "ssd_buffered_reason": "EINVAL"}
    tell_if_buffered(planned(tmp_path).tenants["default"], reason, log)
    assert stream.getvalue() == ""
    tell_if_buffered(told, reason, log)
    assert "WARNING SSD tier goes through the page cache" in stream.getvalue()
    assert "reason=EINVAL" in stream.getvalue()
