"""A cluster without etcd: every node is told the same list of addresses, and all are members.

Who does not answer stays a member; a node that asks in vain finds that out by itself, and asks
others (the breaker of each peer). A member's id is made of its address, so that every node makes
the same of it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvpool.cluster.member import Member
from kvpool.cluster.roster import Board, Roster
from kvpool.cluster.view import fingerprint_of
from kvpool.errors import BadArgument

LIST_INCARNATION = 1  # of all: which life a member is in, it says itself when it is met


def id_of_address(cluster: str, address: str) -> str:
    """As every node of the cluster makes it, from the address as the list has it."""
    whole = f"kvpool member {cluster} {address}".encode()
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


class StaticMembers:
    """The same face as Membership has."""

    def __init__(self, cluster: str, addresses: tuple[str, ...], own: str) -> None:
        """own: that of this node, which stands in the list too."""
        if own not in addresses:
            raise BadArgument(f"{own} is not in the list of members: {', '.join(addresses)}")
        found = [
            Member(id_of_address(cluster, each), LIST_INCARNATION, (each,)) for each in addresses
        ]
        members = tuple(sorted(found, key=lambda member: member.id))
        print_ = fingerprint_of(members)
        roster = Roster(1, id_of_address(cluster, own), members, print_, is_entered=True)
        self._board = Board(roster)

    def start(self) -> None:
        """Nothing has to be."""

    @property
    def roster(self) -> Roster:
        return self._board.roster

    def newer(self, version: int, timeout_s: float) -> Roster | None:
        return self._board.newer(version, timeout_s)

    def drain(self) -> None:
        """A list cannot tell the others; they find out when they ask."""

    def set_weight(self, weight: int) -> None:
        if weight != 1:
            raise BadArgument("weight is told through etcd; members of a list all have 1")

    def status(self) -> dict[str, Any]:
        roster = self.roster
        return {
            "kind": "static",
            "fingerprint": f"{roster.fingerprint:016x}",
            "members": len(roster.members),
            "frozen": False,
            "entered": True,
            "replaced": False,
        }

    def close(self) -> None:
        self._board.close()
