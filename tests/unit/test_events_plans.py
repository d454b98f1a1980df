"""The table [events]: what is refused, and in which words."""

from pathlib import Path

import pytest

from kvpool.errors import BadArgument
from kvpool.events import plans
from kvpool.events.plans import EventsPlan, checked_endpoint
from kvpool.serve_config import faults, load
from kvpool.serve_plan import plan


def planned(**flags: object) -> EventsPlan | None:
    told = {f"events_{name}" if name != "events" else name: value for name, value in flags.items()}
    return plan(load(None, {}, told), {}).events


def test_nothing_is_published_by_itself() -> None:
    assert planned() is None


def test_every_option_arrives(tmp_path: Path) -> None:
    assert planned(
        events="tcp://127.0.0.1:5557",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv@10.0.0.7@llama",
        buffer="7",
        window="20ms",
        high_water="9",
    ) == EventsPlan(
        endpoint="tcp://127.0.0.1:5557",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic=b"kv@10.0.0.7@llama",
        buffer=7,
        window_s=0.02,
        high_water=9,
    )


@pytest.mark.parametrize(
    ("text", "endpoint", "host"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "127.0.0.1"),
        ("tcp://*:5557", "tcp://*:5557", "*"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557", "::1"),
        ("ipc:///run/kvpool/events", "ipc:///run/kvpool/events", None),
    ],
)
def test_endpoints_are_those_of_zmq(text: str, endpoint: str, host: str | None) -> None:
    assert checked_endpoint("here", text, port_min=0) == (endpoint, host)


@pytest.mark.parametrize(
    "text",
    ["", "5557", "127.0.0.1:5557", "tcp://", "tcp://host", "udp://h:1", "inproc://x", "ipc://"],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match=r"^here "):
        checked_endpoint("here", text)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"topic": "x"}, "--events-topic is 'x', but no events are published"),
        ({"events": "tcp://*:1"}, "--events is 'tcp://.*:1': other machines could follow"),
        ({"events": "tcp://192.0.2.1:1"}, "set open = true if they may"),
        (
            {"events": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://0.0.0.0:1"},
            "--events-replay-endpoint is",
        ),
        ({"events": "nonsense"}, "--events is 'nonsense'; write tcp://host:port"),
        ({"events": "tcp://127.0.0.1:1", "buffer": "0"}, "--events-buffer"),
        ({"events": "tcp://127.0.0.1:1", "window": "11"}, "--events-window"),
        ({"events": "tcp://127.0.0.1:1", "high_water": "0"}, "--events-high-water"),
        ({"events": "tcp://127.0.0.1:1", "topic": "x" * 256}, "--events-topic has 256 bytes"),
        ({"events": "tcp://collector:0", "connect": "true"}, "--events has the port 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        planned(**flags)


def test_other_machines_may_where_that_is_said() -> None:
    assert planned(events="tcp://*:5557", open="true") == EventsPlan("tcp://*:5557")
    collected = planned(events="tcp://192.0.2.1:5557", connect="true")
    assert collected is not None
    assert collected.connect


def test_without_pyzmq_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "has_zmq", lambda: False)
    with pytest.raises(BadArgument, match=r"--events needs pyzmq.*pip install 'kvpool\[events\]'"):
        planned(events="tcp://127.0.0.1:5557")
    file = tmp_path / "kvpool.toml"
    file.write_text('[events]\nendpoint = "tcp://127.0.0.1:5557"\n')
    (fault,) = faults(str(file), {})
    assert (fault.line, fault.where) == (2, "[events] endpoint")
