"""From a plan to a place among members; and what is said in the log, and how often."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool import serve_config, serve_plan
from kvpool.cluster.answers import Denied, Unanswered
from kvpool.cluster.membership import Membership
from kvpool.cluster.node_id import StateRefused
from kvpool.cluster.opening import Place
from kvpool.cluster.plans import ClusterPlan
from kvpool.cluster.static_members import StaticMembers, id_of_address
from kvpool.cluster.told import REPEAT_S, Told
from kvpool.serve_log import EventLog, open_log


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(stream: io.StringIO) -> EventLog:
    return open_log("json", "debug", stream)


def plan_of(folder: Path, **flags: Any) -> ClusterPlan:
    told = {"listen": "127.0.0.1:7070", "cluster_state_dir": str(folder / "state"), **flags}
    found = serve_plan.plan(serve_config.load(None, {}, told), {}).cluster
    assert found is not None
    return found


def test_a_place_in_a_list(tmp_path: Path, log: EventLog) -> None:
    plan = plan_of(tmp_path, cluster_static="127.0.0.1:7070,127.0.0.1:7071")
    place = Place(plan, 7070, log)
    assert isinstance(place.members, StaticMembers)
    assert place.node.id == place.members.roster.own == id_of_address("default", place.address)
    assert place.node.incarnation > 1 << 60
    with pytest.raises(StateRefused, match="another daemon"):
        Place(plan, 7070, log)
    place.close()
    Place(plan, 7070, log).close()


def test_a_place_in_etcd_keeps_its_id(tmp_path: Path, log: EventLog) -> None:
    told = {"listen": "127.0.0.1:0", "cluster_etcd": "127.0.0.1:1", "cluster_weight": "3"}
    plan = plan_of(tmp_path, **told)
    ids = []
    for _ in range(2):
        place = Place(plan, 4711, log)
        assert isinstance(place.members, Membership)
        assert place.address == "127.0.0.1:4711"
        ids.append(place.members.roster.own)
        place.close()  # never begun
    assert ids[0] == ids[1]


def test_trouble_is_told_once_and_each_minute(stream: io.StringIO, log: EventLog) -> None:
    now = [0.0]
    told = Told(log, lambda: now[0])
    for _ in range(1000):
        told.trouble("lease", Unanswered("keep: timed out"))
        told.trouble("members", Unanswered("watch: timed out"))
    now[0] += REPEAT_S
    told.trouble("lease", Unanswered("keep: timed out"))
    told.trouble("check", Denied("read: not allowed"))
    for part in ("lease", "members", "check", "check"):
        told.went_well(part)
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events.count("etcd refuses") == 1
    assert 1 <= events.count("etcd does not answer") <= 2
    assert events[-1] == "etcd answers again"
    assert events.count("etcd answers again") == 1
    assert told.last_error == "read: not allowed"
