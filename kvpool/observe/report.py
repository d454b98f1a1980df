"""What a daemon knows about itself at one moment: the one source of /metrics, /v1, the page and the
command line, so that no two of them disagree.

Counts are of blocks and grow from the daemon's start; tokens are blocks times the namespace's
block_tokens; times are Unix seconds, or durations in seconds, as their names say.

Promises:  1. requested = hit + missed, asked = loaded + failed, given = stored + present + refused,
              in every Traffic of a report, once the calls under way have ended;
           2. pure: what the node counted goes in, structs come out; the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvpool.observe.cluster import Cluster, cut_nodes
from kvpool.observe.events import Events
from kvpool.types import Miss, Put, Reason

LEASE_AGES_S = (1, 10, 60, 600)  # upper bounds; the last group has none


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What clients asked for and got. Blocks, where a name says nothing else."""

    lookups: int = 0  # calls
    requested: int = 0  # blocks that lookups asked for
    requested_tokens: int = 0
    hit_dram: int = 0
    hit_ssd: int = 0  # there only
    hit_remote: int = 0  # on another node of the cluster only
    hit_tokens: int = 0
    missed: dict[str, int] = {}  # of lookups: absent, and behind an absent one
    gets: int = 0  # calls: copies, views and leases
    asked: int = 0
    loaded_dram: int = 0
    loaded_ssd: int = 0
    loaded_remote: int = 0  # fetched from another node of the cluster
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    failed: dict[str, int] = {}  # of gets, by reason
    given: int = 0  # blocks that puts brought
    given_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    present: int = 0  # were there already
    refused: dict[str, int] = {}  # of puts, by reason; not_durable ones are readable all the same

    @property
    def hit(self) -> int:
        return self.hit_dram + self.hit_ssd + self.hit_remote

    @property
    def loaded(self) -> int:
        return self.loaded_dram + self.loaded_ssd + self.loaded_remote

    def hit_ratio(self) -> float | None:
        """Of what lookups asked for; of gets, where nobody looks up. None: nobody asked."""
        if self.requested:
            return self.hit / self.requested
        return self.loaded / self.asked if self.asked else None


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of KV of a tenant."""

    name: str  # "" when its manifest has none, or is not known since a restart
    id: str  # hexadecimal; of the manifest
    number: int
    model: str
    block_tokens: int  # 0: not known
    block_bytes: int
    blocks: int  # resident in any tier
    traffic: Traffic


class Dram(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that blocks lie in."""

    limit_bytes: int
    max_bytes: int  # what a resize may ask for
    committed_bytes: int  # taken from the system
    used_bytes: int  # by blocks
    book_bytes: int  # index, records, ghosts
    blocks: int
    pinned_blocks: int
    held_slots: int  # left by a block, and still looked at by a client
    evictions: int


class Ssd(msgspec.Struct, frozen=True, kw_only=True):
    """The tier on disk."""

    capacity_bytes: int
    used_bytes: int
    index_bytes: int
    index_used_bytes: int
    blocks: int
    queue_blocks: int  # wait to be written
    written_blocks: int
    written_bytes: int
    read_blocks: int
    read_bytes: int
    evictions: int
    faults: dict[str, int]  # read, write, commit, damaged, late
    quarantined_blocks: int
    read_only_reason: str  # "" while it takes writes


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Who goes first."""

    tau_s: float
    ghosts: int
    ghost_hits: int
    demotions: int
    promotions: int
    not_worth: int  # too cold for a full SSD


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One connected pool object of some process."""

    number: int
    name: str
    pid: int
    peer: str
    age_s: float
    has_shm: bool
    bytes_in: int  # by sockets and lanes
    bytes_out: int
    requests: int
    leases: int
    leased_bytes: int
    gets: int
    loaded: int
    loaded_bytes: int


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: everything of it and nothing of the others."""

    name: str
    dram: Dram
    ssd: Ssd | None
    policy: Policy
    traffic: Traffic  # of its namespaces together
    namespaces: list[Namespace]
    clients: list[Client]
    lease_ages: list[int]  # leases by age, bounds LEASE_AGES_S
    pinned_prefixes: int  # by an operator
    limits: dict[str, int]
    refused: dict[str, int]  # connections and operations, by reason


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, or one tenant's part."""

    version: str
    pid: int
    started_s: float
    now_s: float
    is_ready: bool
    budget_bytes: int  # of DRAM, for all tenants together
    tenants: list[Tenant]
    refused: dict[str, int]  # connections that belong to no tenant, by reason; {} for a tenant
    cluster: Cluster | None = None  # where it is in one; a tenant sees its part
    events: Events | None = None  # where it publishes any; never for a tenant


def as_json(report: Report) -> bytes:
    """One object. Read again by from_json()."""
    return msgspec.json.encode(report)


def as_json_within(report: Report, bytes_max: int) -> bytes:
    """As as_json(), of ever fewer namespaces and clients until it fits: those in front stay.

    The totals of the tenants are of all of them all the same. What clients name has no bound that
    an answer could rely on.
    """
    kept = max((len(each.namespaces) + len(each.clients) for each in report.tenants), default=0)
    if report.cluster is not None:
        kept = max(kept, len(report.cluster.nodes))
    while len(data := as_json(report)) > bytes_max and kept:
        kept = kept * 3 // 4
        report = msgspec.structs.replace(
            report,
            tenants=[_cut(each, kept) for each in report.tenants],
            cluster=None if report.cluster is None else cut_nodes(report.cluster, kept),
        )
    return data


def _cut(tenant: Tenant, kept: int) -> Tenant:
    return msgspec.structs.replace(
        tenant, namespaces=tenant.namespaces[:kept], clients=tenant.clients[:kept]
    )


def from_json(data: bytes) -> Report:
    """Raises msgspec.DecodeError, msgspec.ValidationError."""
    return msgspec.json.decode(data, type=Report)


# --- from what the core counts -------------------------------------------------------------------


def traffic_of(counted: Mapping[str, Any], block_tokens: int) -> Traffic:
    """From one entry of Node.traffic()."""
    block_bytes = counted["block_bytes"]
    hits = counted["lookup_dram"] + counted["lookup_ssd"] + counted["lookup_remote"]
    absent = counted["lookup_missed"]
    loaded = counted["loaded_dram"] + counted["loaded_ssd"] + counted["loaded_remote"]
    status = counted["put_status"]
    stored = status[Put.STORED]
    return Traffic(
        lookups=counted["lookups"],
        requested=counted["lookup_blocks"],
        requested_tokens=counted["lookup_blocks"] * block_tokens,
        hit_dram=counted["lookup_dram"],
        hit_ssd=counted["lookup_ssd"],
        hit_remote=counted["lookup_remote"],
        hit_tokens=hits * block_tokens,
        missed={"absent": absent, "behind": counted["lookup_blocks"] - hits - absent},
        gets=counted["gets"],
        asked=counted["get_blocks"],
        loaded_dram=counted["loaded_dram"],
        loaded_ssd=counted["loaded_ssd"],
        loaded_remote=counted["loaded_remote"],
        loaded_tokens=loaded * block_tokens,
        loaded_bytes=loaded * block_bytes,
        failed=_by_reason(counted["missed"], Miss, Miss.NONE),
        given=counted["put_blocks"],
        given_bytes=counted["put_blocks"] * block_bytes,
        stored=stored,
        stored_bytes=stored * block_bytes,
        present=status[Put.PRESENT],
        refused=_by_reason(status, Reason, Reason.NONE, Put.PRESENT),
    )


def total(parts: Iterable[Traffic]) -> Traffic:
    """The sum of all fields."""
    sums: dict[str, Any] = dict.fromkeys(Traffic.__struct_fields__, 0)
    for name in ("missed", "failed", "refused"):
        sums[name] = {}
    for part in parts:
        for name in Traffic.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, dict):
                for reason, count in value.items():
                    sums[name][reason] = sums[name].get(reason, 0) + count
            else:
                sums[name] += value
    return Traffic(**sums)


def dram_of(stats: Mapping[str, Any]) -> Dram:
    """From Node.stats()."""
    return Dram(
        limit_bytes=stats["bytes_limit"],
        max_bytes=stats["bytes_max"],
        committed_bytes=stats["bytes_committed"],
        used_bytes=stats["bytes_taken"],
        book_bytes=stats["bytes_index_and_books"],
        blocks=stats["blocks"],
        pinned_blocks=stats["blocks_pinned"],
        held_slots=stats["slots_held_for_views"],
        evictions=stats["evictions"],
    )


def ssd_of(stats: Mapping[str, Any]) -> Ssd | None:
    """From Node.stats(); None without a tier."""
    if not stats["ssd_capacity_bytes"]:
        return None
    return Ssd(
        capacity_bytes=stats["ssd_capacity_bytes"],
        used_bytes=stats["ssd_bytes_taken"],
        index_bytes=stats["ssd_index_bytes"],
        index_used_bytes=stats["ssd_index_used_bytes"],
        blocks=stats["ssd_blocks"],
        queue_blocks=stats["ssd_queue_blocks"],
        written_blocks=stats["ssd_written_blocks"],
        written_bytes=stats["ssd_written_bytes"],
        read_blocks=stats["ssd_read_blocks"],
        read_bytes=stats["ssd_read_bytes"],
        evictions=stats["ssd_evictions"],
        faults={
            "read": stats["ssd_read_faults"],
            "write": stats["ssd_write_faults"],
            "commit": stats["ssd_commit_faults"],
            "damaged": stats["ssd_damaged"],
            "late": stats["ssd_timeouts"],
        },
        quarantined_blocks=stats["ssd_quarantined_blocks"],
        read_only_reason=stats["ssd_read_only_reason"],
    )


def policy_of(stats: Mapping[str, Any]) -> Policy:
    """From Node.stats()."""
    return Policy(
        tau_s=stats["tau_s"],
        ghosts=stats["ghosts"],
        ghost_hits=stats["ghost_hits"],
        demotions=stats["demotions"],
        promotions=stats["promotions"],
        not_worth=stats["ssd_not_worth"],
    )


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def _by_reason(counts: Sequence[int], names: Any, *left_out: int) -> dict[str, int]:
    """By the lower-case names of an enumeration, all of them: a series that is there from the start
    can be told from one that never was."""
    return {
        each.name.lower(): _at(counts, each.value) for each in names if each.value not in left_out
    }
