"""The core's part of a cluster, as the rest of the daemon sees it.

One Core for each tenant's node: its directory shard, its peers, and what it fetches from them. The
sockets to peers are made by `dialer`, who is a member is told by `joined`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvpool import _core
from kvpool.cluster.peer_link import Own

DIRECTORY_BYTES_MIN, DIRECTORY_BYTES_MAX = 1 << 20, 1 << 36
REPLICAS_MAX = 4  # as many holders of a key as the directory names
REPLICA_BYTES_PER_S_MIN, REPLICA_BYTES_PER_S_MAX = 1 << 20, 1 << 40
STREAMS_PER_PEER = 4
FETCH_S = 1.0  # of a get that names no time of its own
LOCATE_S = 0.25

Vote = tuple[bytes, int, int, bool]  # node id, incarnation, weight, is it draining


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Of each tenant's node."""

    directory_bytes: int = 64 << 20
    max_replicas: int = 2  # 1: no copies are made
    replica_bytes_per_s: int = 64 << 20


class Core(Protocol):
    """Thread-safe. Every call that can wait releases the interpreter, and ends by its time."""

    def serve(self, server: Any) -> None:
        """That server's peers are answered from this directory shard."""
        ...

    def set_members(self, members: list[Vote]) -> None:
        """All of them, this node too, in any order. Half a millisecond for each."""
        ...

    def open_ucx(
        self,
        transports: str,
        devices: str,
        library: str,
        settings: list[tuple[str, str]],
        is_unchecked: bool,
    ) -> str:
        """Reads out of the memory of members, and lets them read out of this node's. Before members
        are told. -> which library it is. Raises KvpoolError where that cannot be."""
        ...

    @property
    def ucx_address(self) -> bytes:
        """What members need to read out of this node's memory; empty: they cannot."""
        ...

    def add_stream(self, id: bytes, incarnation: int, descriptor: int, ucx: bytes = b"") -> None:
        """A socket to that member, its hello done, in which it said `ucx` of its memory. It is the
        core's from here on, also on failure."""
        ...

    def wait_wanted(self, timeout_s: float) -> list[tuple[bytes, int]]:
        """Members that more connections are wanted to, and how many; [] at the end of the time."""
        ...

    def note_failed(self, id: bytes, incarnation: int) -> None:
        """That member was not reached: nobody is to wait for it for a while."""
        ...

    def locate(self, space_id: bytes, keys: bytes, timeout_s: float) -> list[list[bytes]]:
        """Members that have each of the packed keys, as far as was answered in time."""
        ...

    def stats(self) -> dict[str, Any]: ...
    def peers(self) -> list[dict[str, Any]]: ...
    def leave(self, timeout_s: float) -> bool:
        """Tells the others that this node's blocks go. False: not all were reached."""
        ...

    def close(self, timeout_s: float) -> bool:
        """wait_wanted() returns, now and always. False: some calls had not ended in time."""
        ...


def open_core(node: _core.Node, own: Own, limits: CoreLimits = CoreLimits()) -> Core:
    """Of a node, which serves alone until it is told members. Raises KvpoolError."""
    opened: Core = vars(_core)["Cluster"].open(
        node,
        own.node,
        own.incarnation,
        directory_bytes=limits.directory_bytes,
        streams_per_peer=STREAMS_PER_PEER,
        fetch_timeout_s=FETCH_S,
        locate_timeout_s=LOCATE_S,
        max_replicas=limits.max_replicas,
        replica_bytes_per_s=limits.replica_bytes_per_s,
    )
    return opened
