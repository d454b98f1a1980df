"""A node in the test's process that is a member among others: the real core, and its dialer."""

import socket
from typing import Any

from kvpool import _core
from kvpool.cluster.core import Vote, open_core
from kvpool.cluster.dialer import Dialer, Target
from kvpool.cluster.peer_link import Own
from kvpool.serve_log import open_log
from tests.daemons import WAIT_S, Running

HERE = b"h" * 16
US = Own("prod", HERE, 1, "token of the cluster")
NODE = {
    "dram": 4 << 20,
    "dram_max": 4 << 20,
    "max_blocks": 0,
    "policy": "temperature",
    "tau_s": 0.0,
    "prefault": "off",
    "evict_ahead": 0.0,
    "huge_pages": False,
    "salt": 5,
    "clock": None,
}


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


def target(daemon: Running, incarnation: int = 5) -> Target:
    return Target(incarnation, (daemon.listeners.tcp_addresses[0],))


class Watched:
    """A core of a node of its own, and what it was told."""

    def __init__(self, own: Own = US) -> None:
        self.own = own
        self.node = _core.Node.open(**NODE)
        self.server = _core.Server.create(self.node)
        self._peers = self.server.add_client()
        self._core: Any = open_core(self.node, own)
        self._core.serve(self.server)
        self.views: list[list[Vote]] = []
        self.failed: list[tuple[bytes, int]] = []
        self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    @property
    def members(self) -> list[Vote]:
        """As they were told the last time."""
        return self.views[-1] if self.views else []

    def set_members(self, members: list[Vote]) -> None:
        self._core.set_members(members)
        self.views.append(list(members))

    def wait_wanted(self, timeout_s: float) -> list[tuple[bytes, int]]:
        self.waits += 1
        wanted: list[tuple[bytes, int]] = self._core.wait_wanted(timeout_s)
        return wanted

    def note_failed(self, id: bytes, incarnation: int) -> None:
        self.failed.append((id, incarnation))
        self._core.note_failed(id, incarnation)

    def count(self, id: bytes) -> int:
        """Connections to that member that live."""
        return sum(each["streams"] for each in self._core.peers() if each["id"] == id)

    def reach(self, other: "Watched") -> None:
        """A connection, as a dialer makes it."""
        ours, theirs = socket.socketpair()
        other.server.add_stream(
            other._peers, theirs.detach(), True, self.own.node, self.own.incarnation
        )
        self._core.add_stream(other.own.node, other.own.incarnation, ours.detach())

    def is_told(self) -> bool:
        """All that its node has is known to whoever keeps it."""
        return bool(self._core.stats()["is_told"])

    def end(self) -> None:
        """Its node too; idempotent."""
        assert self._core.close(WAIT_S)
        self.server.close()
        self.node.close(0)


class Dialling:
    """A dialer over such a core. It is told the members by show()."""

    def __init__(self, own: Own = US, **options: Any) -> None:
        self.own = own
        self.core = Watched(own)
        log = open_log("text", "error")
        self.dialer = Dialer(own, {"default": self.core}, log, **options)
        self.dialer.start()

    def show(self, targets: dict[bytes, Target], *, unknown: tuple[bytes, ...] = ()) -> None:
        """unknown: members of whom the dialer has not been told."""
        self.dialer.set_targets(targets)
        lives = {id: each.incarnation for id, each in targets.items()}
        lives |= {self.own.node: self.own.incarnation, **dict.fromkeys(unknown, 5)}
        self.core.set_members([(id, life, 1, False) for id, life in lives.items()])

    def close(self) -> None:
        self.dialer.stop()
        self.core.end()
        assert self.dialer.close(WAIT_S)
