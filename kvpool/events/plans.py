"""From the table [events] to what is published, every value checked.

Promises:  1. nobody beyond this host is listened for unless that is said, since ZMQ asks nobody who
              they are;
           2. an option that would have no effect is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.address import check_socket_path, parse_host_and_port
from kvpool.cluster.plans import is_loopback
from kvpool.errors import BadArgument, shown
from kvpool.events.sockets import HINT, has_zmq
from kvpool.serve_options import EventsOptions, Settings
from kvpool.tenants.plans import Checked

TABLE = "events"
BUFFER_MAX = 1_000_000
HIGH_WATER_MAX = 1_000_000
WINDOW_S_MIN, WINDOW_S_MAX = 0.001, 10.0
TOPIC_BYTES_MAX = 255
_FORMS = "write tcp://host:port or ipc:///path/to/socket"


@dataclass(frozen=True, slots=True)
class EventsPlan:
    """What a publisher does. buffer: batches kept for who missed them; high_water: batches that
    wait for each subscriber; connect: to a collector, which listens."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: bytes = b"kvpool"
    buffer: int = 10_000
    window_s: float = 0.05
    high_water: int = 1000
    connect: bool = False


def events_plan(settings: Settings) -> EventsPlan | None:
    """None: nothing is published. Raises BadArgument, which begins with the option as written."""
    told = settings.config.events
    if told == EventsOptions():
        return None
    checked = Checked(settings)
    if told.endpoint is None:
        key = next(
            key for key in told.__struct_fields__
            if getattr(told, key) != getattr(EventsOptions(), key)
        )  # fmt: skip
        raise BadArgument(
            f"{checked.label(TABLE, key)} is {getattr(told, key)!r}, but no events are published;"
            " set the endpoint (--events tcp://127.0.0.1:5557)"
        )
    label = checked.label(TABLE, "endpoint")
    if not has_zmq():
        raise BadArgument(f"{label} needs pyzmq, which is not installed: {HINT}")
    replay = told.replay_endpoint
    replay_label = checked.label(TABLE, "replay_endpoint")
    topic = told.topic.encode()
    if len(topic) > TOPIC_BYTES_MAX:
        raise BadArgument(
            f"{checked.label(TABLE, 'topic')} has {len(topic)} bytes; at most {TOPIC_BYTES_MAX}"
        )
    return EventsPlan(
        endpoint=_endpoint(label, told.endpoint, told, is_bound=not told.connect),
        replay_endpoint=None if replay is None else _endpoint(replay_label, replay, told),
        topic=topic,
        buffer=checked.count(TABLE, "buffer", told.buffer, 1, BUFFER_MAX),
        window_s=checked.duration(TABLE, "window", told.window, WINDOW_S_MIN, WINDOW_S_MAX),
        high_water=checked.count(TABLE, "high_water", told.high_water, 1, HIGH_WATER_MAX),
        connect=told.connect,
    )


def checked_endpoint(label: str, text: str, *, port_min: int = 1) -> tuple[str, str | None]:
    """As ZMQ takes it, and its host; None for a socket in the filesystem. Raises BadArgument."""
    scheme, mark, rest = text.partition("://")
    if mark and scheme == "ipc":
        return f"ipc://{check_socket_path(label, rest)}", None
    if not mark or scheme != "tcp" or not rest:
        raise BadArgument(f"{label} is {shown(text)}; {_FORMS}")
    host, port = parse_host_and_port(label, rest, port_min=port_min)
    shown_host = f"[{host}]" if ":" in host else host
    return f"tcp://{shown_host}:{port or '*'}", host


def _endpoint(label: str, text: str, told: EventsOptions, *, is_bound: bool = True) -> str:
    endpoint, host = checked_endpoint(label, text, port_min=0 if is_bound else 1)
    if not is_bound or host is None or told.open:
        return endpoint
    if host == "*" or not is_loopback(host, label):
        raise BadArgument(
            f"{label} is {text!r}: other machines could follow what this node holds, and ZMQ asks"
            " nobody who they are; listen on 127.0.0.1, or set open = true if they may"
        )
    return endpoint
