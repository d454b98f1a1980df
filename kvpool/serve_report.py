"""From a daemon's parts to what is told about them.

Promises:  1. lists are bounded, and the busiest entries are the ones that stay;
           2. what is said of a tenant comes from its own node and server alone.
Thread rule: every function from any thread but the event loop's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool import _core
from kvpool.manifest import Manifest
from kvpool.observe import report
from kvpool.serve_pins import Pins

CLIENTS_MAX = 1000
NAMESPACES_MAX = 1000


class ClientFacts(Protocol):
    """What is used of a client of the daemon."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def peer(self) -> object: ...
    @property
    def since(self) -> float: ...  # of time.monotonic()


class Tenant(Protocol):
    """What is used of a tenant of the daemon."""

    @property
    def name(self) -> str: ...
    @property
    def node(self) -> _core.Node: ...
    @property
    def server(self) -> Any: ...
    @property
    def pins(self) -> Pins: ...
    @property
    def manifests(self) -> Mapping[int, Manifest]: ...  # by the namespace's number
    @property
    def refused(self) -> Mapping[str, int]: ...
    def clients(self) -> Iterable[ClientFacts]: ...
    def limits(self) -> Mapping[str, int]: ...
    def opened(self, number: int) -> _core.OpenedSpace: ...


@dataclass(frozen=True, slots=True)
class Node:
    """The daemon as a whole."""

    version: str
    pid: int
    started_s: float
    budget_bytes: Callable[[], int]
    is_ready: Callable[[], bool]
    tenants: Callable[[], Mapping[str, Tenant]]
    refused: Callable[[], Mapping[str, int]]


def tenant_of(tenant: Tenant) -> report.Tenant:
    """Everything of one tenant, now. Takes its node's lock a few times, shortly."""
    stats, counted = tenant.node.stats(), tenant.node.traffic()
    manifests = tenant.manifests
    spaces = [_namespace(each, manifests.get(each["number"])) for each in counted]
    traffic = report.total(each.traffic for each in spaces)
    spaces.sort(key=lambda each: each.traffic.requested + each.traffic.asked, reverse=True)
    return report.Tenant(
        name=tenant.name,
        dram=report.dram_of(stats),
        ssd=report.ssd_of(stats),
        policy=report.policy_of(stats),
        traffic=traffic,
        namespaces=spaces[:NAMESPACES_MAX],
        clients=_clients(tenant),
        lease_ages=list(tenant.server.lease_ages()),
        pinned_prefixes=len(tenant.pins),
        limits=dict(tenant.limits()),
        refused=dict(tenant.refused),
    )


def _namespace(counted: Mapping[str, Any], manifest: Manifest | None) -> report.Namespace:
    tokens = 0 if manifest is None else manifest.block_tokens
    return report.Namespace(
        name="" if manifest is None else manifest.name,
        # What the node calls it is not what the manifest is called, where there are tenants.
        id=(counted["id"] if manifest is None else manifest.namespace_id).hex(),
        number=counted["number"],
        model="" if manifest is None else manifest.model,
        block_tokens=tokens,
        block_bytes=counted["block_bytes"],
        blocks=counted["blocks"],
        traffic=report.traffic_of(counted, tokens),
    )


def _clients(tenant: Tenant) -> list[report.Client]:
    counted = {each["number"]: each for each in tenant.server.clients()}
    now = time.monotonic()
    found = []
    for client in tenant.clients():
        counts = counted.get(client.number)
        if counts is None:
            continue  # it came or went between the two
        found.append(
            report.Client(
                number=client.number,
                name=client.name,
                pid=client.pid,
                peer=str(client.peer),
                age_s=round(now - client.since, 3),
                has_shm=counts["shm"],
                bytes_in=counts["bytes_in"],
                bytes_out=counts["bytes_out"],
                requests=counts["requests"],
                leases=counts["leases"],
                leased_bytes=counts["leased_bytes"],
                gets=counts["gets"],
                loaded=counts["get_blocks"],
                loaded_bytes=counts["get_bytes"],
            )
        )
    found.sort(key=lambda each: each.loaded_bytes + each.bytes_in, reverse=True)
    return found[:CLIENTS_MAX]


def prefix_of(tenant: Tenant, found: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of Node.hottest(), with names instead of numbers."""
    manifest = tenant.manifests.get(found["number"])
    tokens = 0 if manifest is None else manifest.block_tokens * found["depth"]
    name = "" if manifest is None else manifest.name or manifest.namespace_id.hex()
    shown = {key: value for key, value in found.items() if key not in ("key", "number")}
    return {
        "tenant": tenant.name,
        "namespace": name,
        "key": bytes(found["key"]).hex(),
        "tokens": tokens,
        **shown,
    }


def curves_of(tenant: Tenant) -> dict[str, Any]:
    """Node.reuse(), by the names of namespaces, and the sizes of the tiers now."""
    counted, stats = tenant.node.reuse(), tenant.node.stats()
    names = {n: m.name or m.namespace_id.hex() for n, m in list(tenant.manifests.items())}
    return {
        "all": counted["all"],
        "spaces": {names.get(n, str(n)): curve for n, curve in counted["spaces"].items()},
        "dram_bytes": stats["bytes_limit"],
        "ssd_bytes": stats["ssd_payload_bytes"],
    }
