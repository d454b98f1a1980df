"""Whether a node opens a lane, and over what; and what it says of lanes that fail."""

import logging
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster import lanes
from kvpool.cluster.lane_watch import LaneWatch
from kvpool.cluster.lanes import LanePlan, lane_plan, open_lane
from kvpool.errors import BadArgument, KvpoolError
from kvpool.serve_log import EventLog

LABEL = "[cluster] ucx"
CMA = {"UCX_TLS": "cma", "UCX_CMA_MEMORY_INVALIDATE": "y"}


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(lanes, "DEVICES", str(tmp_path))


@pytest.fixture
def no_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "DEVICES", str(tmp_path / "nowhere"))


def planned(told: str, environment: dict[str, str], *, is_sealed: bool = True) -> LanePlan | None:
    return lane_plan(LABEL, told, environment, is_sealed=is_sealed)


def test_where_there_is_no_device_nothing_is_opened_by_itself(no_rdma: None) -> None:
    assert planned("auto", {}) is None
    assert planned("auto", {"UCX_TLS": "tcp"}) is None
    assert planned("off", {"UCX_TLS": "tcp"}) is None


def test_with_a_device_the_checked_transports_are_opened(rdma: None) -> None:
    plan = planned("auto", {"UCX_NET_DEVICES": "mlx5_0:1", "UCX_TLS": "tcp"})
    assert plan is not None
    assert (plan.transports, plan.devices) == ("rc,dc", "mlx5_0:1")
    assert not plan.is_required
    assert not plan.is_unchecked
    assert planned("auto", {}, is_sealed=False) is not None  # the log says what is missing
    assert planned("off", {}) is None
    told = planned("on", {})
    assert told is not None
    assert told.is_required
    assert not told.is_unchecked


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"UCX_TLS": "rc_x"}, ("rc_x", "", False)),
        ({"UCX_TLS": "tcp"}, ("tcp", "lo", True)),
        ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth7"}, ("tcp", "eth7", True)),
        (CMA, ("posix,cma", "", True)),
        ({**CMA, "UCX_TLS": "posix,cma"}, ("posix,cma", "", True)),
        ({"UCX_TLS": "rc,tcp"}, ("rc,tcp", "lo", True)),
    ],
)
def test_what_is_named_is_opened(
    no_rdma: None, environment: dict[str, str], expected: tuple[str, str, bool]
) -> None:
    plan = planned("on", environment)
    assert plan is not None
    assert (plan.transports, plan.devices, plan.is_unchecked) == expected
    assert plan.is_required


@pytest.mark.parametrize(
    ("told", "environment", "is_sealed", "why"),
    [
        ("yes", {}, True, "'yes'; it can be"),
        ("on", {}, True, "no RDMA device"),
        ("on", {"UCX_TLS": "tcp"}, False, "arena is elastic"),
        ("on", {"UCX_TLS": "cma"}, True, "UCX_CMA_MEMORY_INVALIDATE=y"),
    ],
)
def test_what_cannot_be(
    no_rdma: None, told: str, environment: dict[str, str], is_sealed: bool, why: str
) -> None:
    with pytest.raises(BadArgument, match=why) as error:
        planned(told, environment, is_sealed=is_sealed)
    assert str(error.value).startswith(LABEL)


# --- opening -------------------------------------------------------------------------------------


class Heard:
    """A log, and what was said in it."""

    def __init__(self) -> None:
        logger = logging.Logger("lanes of a test")
        self.lines: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = self.lines.append  # type: ignore[method-assign]
        logger.addHandler(handler)
        self.log = EventLog(logger)

    def events(self) -> list[str]:
        return [each.getMessage() for each in self.lines]


class Refusing:
    ucx_address = b""

    def open_ucx(self, *told: Any) -> str:
        raise KvpoolError("no UCX library")


class Opening(Refusing):
    ucx_address = b"address"

    def open_ucx(self, *told: Any) -> str:
        return "libucp.so.0 (UCX 1.13)"


def test_what_was_left_to_the_node_is_only_told() -> None:
    heard = Heard()
    assert open_lane(Refusing(), LanePlan("rc,dc", ""), "default", heard.log) == b""
    assert open_lane(Refusing(), None, "default", heard.log) == b""
    assert open_lane(Opening(), LanePlan("rc,dc", ""), "default", heard.log) == b"address"
    with pytest.raises(KvpoolError):
        open_lane(Refusing(), LanePlan("rc,dc", "", is_required=True), "default", heard.log)
    plan = LanePlan("tcp", "lo", is_unchecked=True, is_required=True)
    assert open_lane(Opening(), plan, "default", heard.log) == b"address"
    assert heard.events() == ["ucx not opened", "ucx opened", "ucx opened unchecked"]


# --- watching ------------------------------------------------------------------------------------


class Peers:
    def __init__(self) -> None:
        self.told: dict[str, Any] = {"id": bytes(16), "incarnation": 7}

    def peers(self) -> list[dict[str, Any]]:
        return [self.told]


def test_a_way_that_fails_is_told_once_and_that_it_works_again() -> None:
    heard, core = Heard(), Peers()
    watch = LaneWatch(heard.log)

    def look(**told: Any) -> list[str]:
        before = len(heard.lines)
        core.told.update(told)
        watch.look({"default": core})
        return heard.events()[before:]

    assert look() == []  # a core that counts nothing of it
    assert look(ucx="open", ucx_failed=0) == []
    assert look(ucx="broken", ucx_failed=2, ucx_trouble="a read failed") == ["ucx failed"]
    assert look() == []
    assert look(ucx="open") == ["ucx works again"]
    assert look() == []
    assert look(incarnation=8, ucx_failed=0, ucx="unused") == []
