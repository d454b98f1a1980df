"""Events of a pool that lives in this process, without a daemon."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvpool.events.plans import EventsPlan, checked_endpoint
from kvpool.events.publisher import Life, Place, Publisher, feed_of

if TYPE_CHECKING:
    from kvpool.pool import Pool


class _Log:
    """As the log of an application has it."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("kvpool.events")

    def info(self, event: str, **fields: Any) -> None:
        self._logger.info("%s %s", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._logger.warning("%s %s", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._logger.error("%s %s", event, fields)


@contextlib.contextmanager
def publishing(
    pool: Pool,
    endpoint: str,
    replay_endpoint: str | None = None,
    *,
    topic: str = "kvpool",
    node: bytes | None = None,
) -> Iterator[Publisher]:
    """`with publishing(pool, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"):` around its use.

    node: 16 bytes, the same whenever this pool is opened; by default of this host and endpoint.
    Binds what it is told, and whoever reaches that may subscribe. Raises BadArgument, NoResource.
    """
    plan = EventsPlan(
        endpoint=checked_endpoint("endpoint", endpoint, port_min=0)[0],
        replay_endpoint=None
        if replay_endpoint is None
        else checked_endpoint("replay_endpoint", replay_endpoint, port_min=0)[0],
        topic=topic.encode(),
    )
    life = Life(node or node_id_of(endpoint), time.time_ns())
    publisher = Publisher(plan, life, [Place("", feed_of(pool._node), _nothing_named)], _Log())
    try:
        publisher.start()
        yield publisher
    finally:
        publisher.close()


def node_id_of(place: str) -> bytes:
    """Of a node that no cluster gave an id: the same for this place on this host."""
    said = f"kvpool events\0{socket.gethostname()}\0{os.getuid()}\0{place}"
    return hashlib.sha256(said.encode()).digest()[:16]


def _nothing_named() -> Mapping[int, tuple[str, int]]:
    return {}
