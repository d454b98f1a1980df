"""What a daemon tells of its cluster: the members, and how each is reached.

Promises:  1. a tenant's part has no address, and no link of another tenant;
           2. what the core does not count yet is 0, never an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

HOLDERS_MAX = 4  # of a key that are named
_HOLDERS = struct.Struct("<4H")
_NOBODY = 0xFFFF

BREAKERS = ("closed", "half_open", "open")  # from well to ill


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How one member is reached for one tenant."""

    tenant: str
    breaker: str
    streams: int
    latency_us: float  # to the first byte of an answer, smoothed; 0: none yet
    bytes_in: int  # payload fetched from there
    bytes_out: int  # given to it on its own connections, all of them
    fetched_blocks: int
    failed: int  # requests
    in_flight_bytes: int
    # Reads out of its memory: none (one of the two has no lane), unused, open, or broken.
    ucx: str = "none"
    ucx_blocks: int = 0  # of the fetched ones
    ucx_failed: int = 0  # times that it broke; those blocks came over streams, or were misses


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One member."""

    id: str  # hexadecimal
    address: str
    state: str  # up or draining
    incarnation: int  # nanoseconds since 1970 at its start; 1: of a list, and not met yet
    weight: int
    host: str  # for people
    is_own: bool
    trouble: str  # why it was not reached the last time that it was dialled
    links: list[Link]


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's shard of the directory, and what this node tells those of others."""

    tenant: str
    slots: int  # of 65,536 that this node keeps
    keys: int
    bytes: int
    evicted: int  # keys that made room for others
    is_told: bool  # all that is here, to all who keep the directory
    queued: int  # changes that are not told yet
    published: int
    withdrawn: int
    announced: int  # keys told once more, as another member keeps them now
    lost: int  # times that changes could not be kept until they were told
    copied_bytes: int = 0  # of what is hot here: that others fetched as this node asked them to


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """As this node sees it."""

    name: str
    kind: str  # etcd or static
    own: str
    version: int  # of the view: grows with each change, on this node
    fingerprint: str  # of who keeps which part of the directory: the same where views are
    is_frozen: bool  # etcd is away: nobody is taken off the list
    is_entered: bool
    is_replaced: bool  # another process has this node's id
    left_out: int  # of the members, as the answer has no room for more
    nodes: list[Node]
    directories: list[Directory]


def link_of(tenant: str, counted: Mapping[str, Any], bytes_out: int) -> Link:
    """From one entry of the core's peers(), and what the member has got from this node's server."""
    return Link(
        tenant=tenant,
        breaker=str(counted.get("breaker", BREAKERS[0])),
        streams=int(counted.get("streams", 0)),
        latency_us=float(counted.get("latency_us", 0)),
        bytes_in=int(counted.get("bytes_in", 0)),
        bytes_out=bytes_out,
        fetched_blocks=int(counted.get("fetched_blocks", 0)),
        failed=int(counted.get("failed", 0)),
        in_flight_bytes=int(counted.get("in_flight_bytes", 0)),
        ucx=str(counted.get("ucx", "none")),
        ucx_blocks=int(counted.get("ucx_blocks", 0)),
        ucx_failed=int(counted.get("ucx_failed", 0)),
    )


def directory_of(tenant: str, counted: Mapping[str, Any]) -> Directory:
    """From the core's stats()."""
    return Directory(
        tenant=tenant,
        slots=int(counted.get("slots_owned", 0)),
        keys=int(counted.get("directory_keys", 0)),
        bytes=int(counted.get("directory_bytes", 0)),
        evicted=int(counted.get("directory_evicted", 0)),
        is_told=bool(counted.get("is_told", False)),
        queued=int(counted.get("told_queued", 0)),
        published=int(counted.get("told_published", 0)),
        withdrawn=int(counted.get("told_withdrawn", 0)),
        announced=int(counted.get("told_announced", 0)),
        lost=int(counted.get("told_lost", 0)) + int(counted.get("told_overflows", 0)),
        copied_bytes=int(counted.get("replica_bytes", 0)),
    )


def part_of(cluster: Cluster, tenant: str | None) -> Cluster:
    """What a tenant may see; None: all of it."""
    if tenant is None:
        return cluster
    nodes = [
        msgspec.structs.replace(
            each,
            address="",
            host="",
            trouble="",
            links=[link for link in each.links if link.tenant == tenant],
        )
        for each in cluster.nodes
    ]
    own = [each for each in cluster.directories if each.tenant == tenant]
    return msgspec.structs.replace(cluster, nodes=nodes, directories=own)


def as_json_within(cluster: Cluster, bytes_max: int) -> bytes:
    """Of ever fewer members until it fits; `left_out` says how many are missing."""
    kept = len(cluster.nodes)
    while len(data := msgspec.json.encode(cluster)) > bytes_max and kept:
        kept = kept * 3 // 4
        cluster = cut_nodes(cluster, kept)
    return data


def cut_nodes(cluster: Cluster, kept: int) -> Cluster:
    """The first members, and how many that leaves out."""
    left_out = cluster.left_out + max(0, len(cluster.nodes) - kept)
    return msgspec.structs.replace(cluster, nodes=cluster.nodes[:kept], left_out=left_out)


def packed_holders(found: Iterable[Iterable[bytes]]) -> tuple[list[bytes], bytes]:
    """The ids of all holders, and for each key four places among them: an answer about many keys
    stays small."""
    places: dict[bytes, int] = {}
    packed = bytearray()
    for holders in found:
        row = [_NOBODY] * HOLDERS_MAX
        for at, holder in zip(range(HOLDERS_MAX), holders, strict=False):
            row[at] = places.setdefault(holder, len(places))
        packed += _HOLDERS.pack(*row)
    return list(places), bytes(packed)


def unpacked_holders(nodes: Sequence[bytes], packed: bytes) -> list[list[bytes]]:
    """Raises ValueError."""
    if len(packed) % _HOLDERS.size:
        raise ValueError(f"holders take {len(packed)} bytes")
    rows = list(_HOLDERS.iter_unpack(packed))
    if any(len(nodes) <= place != _NOBODY for row in rows for place in row):
        raise ValueError("a holder has no name")
    return [[nodes[place] for place in row if place != _NOBODY] for row in rows]


def from_json(data: bytes) -> Cluster:
    """Raises msgspec.DecodeError, msgspec.ValidationError."""
    return msgspec.json.decode(data, type=Cluster)
