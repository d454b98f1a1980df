"""What a member says of itself, and how it stands in etcd.

Promises:  an entry of any content is a Member or a BadEntry that says why: it never costs more than
itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvpool.cluster.names import is_node_id
from kvpool.errors import KvpoolError, shown

FORM = 1  # of the entry; one of a later form that says the same may have more fields
ENTRY_BYTES_MAX = 8192
ADDRESSES_MAX = 8
WEIGHT_MAX = 256
HOST_CHARS_MAX = 64
UP, DRAINING = "up", "draining"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


class BadEntry(KvpoolError):
    """What stands in etcd is no member."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member. incarnation: the life of its process, and so of its memory; registered: etcd's
    revision of its entry, one stay in the cluster (0: of a list, or not entered yet)."""

    id: str
    incarnation: int
    addresses: tuple[str, ...]
    weight: int = 1
    state: str = UP
    host: str = ""  # for people
    registered: int = 0

    @property
    def vote(self) -> tuple[str, int, int]:
        """What decides who keeps which part of the directory."""
        return self.id, self.incarnation, self.weight

    def entry(self) -> bytes:
        """As it stands in etcd."""
        told = {
            "form": FORM,
            "incarnation": self.incarnation,
            "addresses": list(self.addresses),
            "weight": self.weight,
            "state": self.state,
            "host": self.host,
        }
        return json.dumps(told).encode()


def member_of(node_id: str, value: bytes, registered: int) -> Member:
    """Raises BadEntry."""
    if not is_node_id(node_id):
        raise BadEntry(f"{shown(node_id)} is no id of a node")
    told = _content_of(value)
    if told.get("form") != FORM:
        raise BadEntry(f"its form is {shown(told.get('form'))}; this version reads {FORM}")
    addresses = told.get("addresses")
    if not isinstance(addresses, list) or not 1 <= len(addresses) <= ADDRESSES_MAX:
        raise BadEntry(f"it has no list of 1..{ADDRESSES_MAX} addresses")
    for each in addresses:
        if not isinstance(each, str) or not is_address(each):
            raise BadEntry(f"its address {shown(each)} is not host:port")
    state, host = told.get("state"), told.get("host", "")
    if state not in (UP, DRAINING):
        raise BadEntry(f"its state is {shown(state)}")
    if not isinstance(host, str):
        raise BadEntry("its host is no text")
    return Member(
        id=node_id,
        incarnation=_count(told, "incarnation", 2**63 - 1),
        addresses=tuple(addresses),
        weight=_count(told, "weight", WEIGHT_MAX),
        state=state,
        host="".join(char for char in host if char.isprintable())[:HOST_CHARS_MAX],
        registered=registered,
    )


def incarnation_of(value: bytes) -> int:
    """Of an entry under one's own id; 0 where there is none to be respected."""
    try:
        return _count(_content_of(value), "incarnation", 2**63 - 1)
    except BadEntry:
        return 0


def is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65535


def _content_of(value: bytes) -> dict[str, Any]:
    if len(value) > ENTRY_BYTES_MAX:
        raise BadEntry(f"it has {len(value)} bytes; at most {ENTRY_BYTES_MAX}")
    try:
        told = json.loads(value)
    except (ValueError, RecursionError):
        raise BadEntry("it is not JSON") from None
    if not isinstance(told, dict):
        raise BadEntry("it is not an object of JSON")
    return told


def _count(told: dict[str, Any], name: str, most: int) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise BadEntry(f"its {name} is {shown(value)}; it must be 1..{most}")
    return value
