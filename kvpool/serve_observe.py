"""What a daemon tells of itself on control connections, and a few things that an operator does.

Reports, hottest prefixes, reuse distances, why a block is not there; pins and drops by name.

Promises:  1. a caller sees its own tenant and nothing of another, unless it is an administrator;
           2. every answer is bounded, whatever there is;
           3. the tokens of a prompt are never asked for: keys are computed where the tokens are.
Thread rule: every method from any thread but the event loop's; none holds a lock while the core
works.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvpool import config
from kvpool.errors import BadArgument, NotAllowed
from kvpool.manifest import Manifest
from kvpool.observe import cluster, report
from kvpool.serve_control import Operation
from kvpool.serve_events import events_of
from kvpool.serve_nodes import cluster_of, given_of
from kvpool.serve_report import label_of, prefix_of, reuse_of, tenant_of
from kvpool.tenants.tenant import Client, Tenant
from kvpool.wire import Map

if TYPE_CHECKING:
    from kvpool.daemon import Daemon

KEY_BYTES = 16
KEYS_MAX = 32_768  # of one request: 512 KiB, half a control message
EXPLAINED_MAX = 256  # blocks that one answer describes, around the first missing one
HOTTEST_MAX = 1000
HOTTEST = 20
ANSWER_BYTES_MAX = 900 << 10  # of one answer, which is of a MiB at most
LOCATE_S = 1.0  # that members have for saying who has a prefix
ID_DIGITS_MIN = 6  # of an id that is cut short


class Observer:
    """Answers questions about a daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def operations(self) -> dict[str, Operation]:
        """By the name of the request."""
        return {
            "report": Operation(self._report, takes_turns=True),
            "hottest": Operation(self._hottest, is_slow=True, takes_turns=True),
            "reuse": Operation(self._reuse, is_slow=True, takes_turns=True),
            "manifests": Operation(self._manifests, takes_turns=True),
            "lookup": Operation(self._lookup, takes_turns=True),
            "explain": Operation(self._explain, takes_turns=True),
            "nodes": Operation(self._nodes, takes_turns=True),
            "locate": Operation(self._locate, is_slow=True, takes_turns=True),
            "pin": Operation(self._pin, needs_admin=True, is_slow=True),
            "unpin": Operation(self._unpin, needs_admin=True),
            "pins": Operation(self._pins),
            "drop_named": Operation(self._drop_named, is_slow=True),
        }

    # --- for everybody who shows it --------------------------------------------------------------

    def report(self, tenant: Tenant | None = None) -> report.Report:
        """Of all tenants, or of one."""
        daemon = self._daemon
        shown = [tenant_of(each) for each in self._all_or(tenant)]
        return report.Report(
            version=daemon.version,
            pid=os.getpid(),
            started_s=daemon.started,
            now_s=time.time(),
            is_ready=daemon.is_ready,
            # A tenant's part is what it has: the whole would tell what others have.
            budget_bytes=daemon.budget_bytes if tenant is None else shown[0].dram.limit_bytes,
            tenants=shown,
            refused={} if tenant is not None else daemon.refused_by_reason(),
            cluster=self.cluster(tenant),
            events=None if tenant is not None else events_of(daemon.events),
        )

    def cluster(self, tenant: Tenant | None = None) -> cluster.Cluster | None:
        """None: this node is in none."""
        joined, peers = self._daemon.joined, self._daemon.peers
        if joined is None or peers is None:
            return None
        given = given_of(self._daemon.tenants.values(), peers.numbers())
        told = cluster_of(joined, given)
        return cluster.part_of(told, None if tenant is None else tenant.name)

    def hottest(self, count: int, tenant: Tenant | None = None) -> list[dict[str, Any]]:
        """The ends of prefixes in use, hottest first."""
        found = [
            prefix_of(each, one)
            for each in self._all_or(tenant)
            for one in each.node.hottest(count)
        ]
        found.sort(key=lambda one: float(one["heat"]), reverse=True)
        return found[:count]

    def reuse(self, tenant: Tenant | None = None) -> dict[str, dict[str, Any]]:
        """Tenant -> Node.reuse() by the names of namespaces, and the sizes of its tiers."""
        return {each.name: reuse_of(each) for each in self._all_or(tenant)}

    def _all_or(self, tenant: Tenant | None) -> list[Tenant]:
        return list(self._daemon.tenants.values()) if tenant is None else [tenant]

    # --- requests --------------------------------------------------------------------------------

    def _report(self, request: Map, caller: Client) -> Map:
        """Of each tenant the busiest namespaces and clients, as many as one answer can hold."""
        told = self.report(self._scope(request, caller))
        return {"report": report.as_json_within(told, ANSWER_BYTES_MAX)}

    def _hottest(self, request: Map, caller: Client) -> Map:
        count = config.check_count("count", request.get("count", HOTTEST), 1, HOTTEST_MAX)
        return {"hottest": self.hottest(count, self._scope(request, caller))}

    def _reuse(self, request: Map, caller: Client) -> Map:
        return {"reuse": msgspec.json.encode(self.reuse(self._scope(request, caller)))}

    def _manifests(self, request: Map, caller: Client) -> Map:
        """[{"tenant", "number", "manifest"}], the newest of a tenant first, as many as one answer
        can hold, and how many were left out."""
        found: list[Map] = []
        left_out = held = 0
        for tenant in self._all_or(self._scope(request, caller)):
            for number, manifest in reversed(tenant.manifests().items()):
                packed = manifest.pack()
                held += len(packed) + len(tenant.name) + 64
                if held > ANSWER_BYTES_MAX:
                    left_out += 1
                else:
                    found.append({"tenant": tenant.name, "number": number, "manifest": packed})
        return {"manifests": found, "left_out": left_out}

    def _lookup(self, request: Map, caller: Client) -> Map:
        """Where each key lies. Not counted as a lookup of an engine."""
        keys = _keys(request)
        tenant, number, _ = self._named(request, caller)
        return {"tiers": tenant.node.tiers(number, keys)}

    def _explain(self, request: Map, caller: Client) -> Map:
        """The tiers of all keys; an entry of Node.explain() for those from `first` on: the missing
        one, some before it, and what is behind."""
        keys = _keys(request)
        tenant, number, manifest = self._named(request, caller)
        tiers = tenant.node.tiers(number, keys)
        missing = (tiers + b"\0").index(0)
        first = max(0, min(missing - EXPLAINED_MAX // 2, len(tiers) - EXPLAINED_MAX))
        told = keys[first * KEY_BYTES : (first + EXPLAINED_MAX) * KEY_BYTES]
        return {
            "tiers": tiers,
            "missing": missing,
            "first": first,
            "explained": tenant.node.explain(number, told),
            "coldest": tenant.node.coldest_heat(),
            "manifest": manifest.pack(),
        }

    def _nodes(self, request: Map, caller: Client) -> Map:
        """The members, as many as one answer can hold; None where there is no cluster."""
        told = self.cluster(self._scope(request, caller))
        return {"nodes": None if told is None else cluster.as_json_within(told, ANSWER_BYTES_MAX)}

    def _locate(self, request: Map, caller: Client) -> Map:
        """Who has each key: by the directory, and here. Asks other members, for LOCATE_S."""
        keys = _keys(request)
        tenant, number, manifest = self._named(request, caller)
        joined = self._daemon.joined
        if joined is None:
            raise BadArgument(
                "this node is in no cluster: it has no [cluster] in its configuration"
            )
        space_id = tenant.space_id(manifest)
        found = joined.cores[tenant.name].locate(space_id, keys, LOCATE_S)
        nodes, holders = cluster.packed_holders(found)
        tiers = tenant.node.tiers(number, keys)
        return {"own": joined.own.node, "nodes": nodes, "holders": holders, "tiers": tiers}

    def _pin(self, request: Map, caller: Client) -> Map:
        keys, name = _keys(request), _text(request, "name")
        tenant, _, manifest = self._named(request, caller)
        blocks = tenant.pins.pin(name, label_of(manifest), tenant.opened(manifest), keys)
        return {"blocks": blocks, "asked": len(keys) // KEY_BYTES}

    def _unpin(self, request: Map, caller: Client) -> Map:
        name, scope = _text(request, "name"), self._scope(request, caller)
        found = [each for each in self._all_or(scope) if each.pins.has(name)]
        if not found:
            known = [pin.name for each in self._all_or(scope) for pin in each.pins.all()]
            there = ", ".join(known[:8]) or "none"
            raise BadArgument(f"nothing is pinned as {name!r:.64}; there are: {there}")
        return {"blocks": sum(each.pins.unpin(name) for each in found)}

    def _pins(self, request: Map, caller: Client) -> Map:
        return {
            "pins": [
                {
                    "tenant": tenant.name,
                    "name": pin.name,
                    "namespace": pin.namespace,
                    "blocks": len(pin.views),
                    "asked": pin.asked,
                    "bytes": pin.bytes,
                }
                for tenant in self._all_or(self._scope(request, caller))
                for pin in tenant.pins.all()
            ]
        }

    def _drop_named(self, request: Map, caller: Client) -> Map:
        tenant, number, manifest = self._named(request, caller)
        return {"blocks": tenant.drop(number), "namespace": label_of(manifest)}

    # --- whom and what a request means -----------------------------------------------------------

    def _scope(self, request: Map, caller: Client) -> Tenant | None:
        """The tenant that the answer is about; None: all of them, for an administrator."""
        named = self._daemon.requests.named_tenant(request, caller)
        if named is not None or caller.is_admin:
            return named
        if caller.tenant is None:
            raise NotAllowed("this client is no tenant")
        return caller.tenant

    def _named(self, request: Map, caller: Client) -> tuple[Tenant, int, Manifest]:
        """A namespace by name, by its id in hexadecimal, or by the first digits of one."""
        asked = _text(request, "namespace")
        scope = self._scope(request, caller)
        if scope is None:  # an administrator: its own tenant first, so that names are as it knows
            scope = caller.tenant
        searched = self._all_or(scope)
        found = [
            (tenant, number, manifest)
            for tenant in searched
            for number, manifest in tenant.manifests().items()
            if manifest.name == asked or _begins(asked, manifest.namespace_id.hex())
        ]
        if len(found) == 1:
            return found[0]
        if found:
            which = ", ".join(f"{m.namespace_id.hex()} of tenant {t.name}" for t, _, m in found[:8])
            raise BadArgument(f"{asked!r:.64} can be {len(found)} namespaces: {which}; say more")
        known = sorted({label_of(m) for t in searched for m in t.manifests().values()})
        names = ", ".join(known[:16]) or "none was opened since the daemon began"
        raise BadArgument(f"there is no namespace {asked!r:.64}; there are: {names}")


def _keys(request: Map) -> bytes:
    keys = request.get("keys")
    if not isinstance(keys, bytes) or not keys or len(keys) % KEY_BYTES:
        raise BadArgument(f"keys must be one or more keys of {KEY_BYTES} bytes, packed")
    if len(keys) > KEYS_MAX * KEY_BYTES:
        raise BadArgument(f"{len(keys) // KEY_BYTES} keys; at most {KEYS_MAX} in one request")
    return keys


def _text(request: Map, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise BadArgument(f"{name} must be text, not {value!r:.64}")
    return value


def _begins(asked: str, id: str) -> bool:
    return len(asked) >= ID_DIGITS_MIN and id.startswith(asked.lower())
