"""What a daemon tells of itself on control connections, and a few things that an operator does.

Reports, hottest prefixes, miss-ratio curves, why a block is not there; pins and drops by name.

Promises:  1. a caller sees its own tenant and nothing of another, unless it is an admin;
           2. every answer is bounded, whatever there is: what was left out is counted;
           3. the tokens of a prompt are never asked for: keys are computed where the tokens are.
Thread rule: every method from any thread but the event loop's; none holds a lock while the core
works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvpool import config
from kvpool.errors import BadArgument
from kvpool.manifest import Manifest
from kvpool.observe import report
from kvpool.serve_report import Node, Tenant, curves_of, prefix_of, tenant_of
from kvpool.wire import Map

KEY_BYTES = 16
KEYS_MAX = 32_768  # of one request: 512 KiB, half a control message
EXPLAINED_MAX = 256  # blocks that one answer describes, from the first missing one on
HOTTEST_MAX = 1000
MANIFESTS_MAX = 500  # of one answer; a manifest may have some KiB of text
MANIFEST_BYTES_MAX = 512 << 10


class Caller(Protocol):
    """Who asks."""

    @property
    def tenant(self) -> str: ...
    @property
    def is_admin(self) -> bool: ...


class Observer:
    """Answers questions about a daemon."""

    def __init__(self, node: Node, clock: Callable[[], float] = time.time) -> None:
        self._node = node
        self._clock = clock

    def operations(self) -> dict[str, Callable[[Map, Caller], Map]]:
        """By the name of the request."""
        return {
            "report": self._report,
            "hottest": self._hottest,
            "reuse": self._reuse,
            "manifests": self._manifests,
            "lookup": self._lookup,
            "explain": self._explain,
            "pin": self._pin,
            "unpin": self._unpin,
            "pins": self._pins,
            "drop_named": self._drop_named,
        }

    # --- for everybody who shows it --------------------------------------------------------------

    def report(self, tenant: str | None = None) -> report.Report:
        """Of all tenants, or of one."""
        tenants = self._node.tenants()
        shown = list(tenants.values()) if tenant is None else [tenants[tenant]]
        return report.Report(
            version=self._node.version,
            pid=self._node.pid,
            started_s=self._node.started_s,
            now_s=self._clock(),
            is_ready=self._node.is_ready(),
            budget_bytes=self._node.budget_bytes() if tenant is None else 0,
            tenants=[tenant_of(each) for each in shown],
            refused=dict(self._node.refused()) if tenant is None else {},
        )

    def hottest(self, count: int, tenant: str | None = None) -> list[dict[str, Any]]:
        """The ends of prefixes in use, hottest first."""
        tenants = self._node.tenants()
        shown = list(tenants.values()) if tenant is None else [tenants[tenant]]
        found = [prefix_of(each, one) for each in shown for one in each.node.hottest(count)]
        found.sort(key=lambda one: one["heat"], reverse=True)
        return found[:count]

    def curves(self, tenant: str | None = None) -> dict[str, dict[str, Any]]:
        """By tenant: {"all": Curve, "spaces": {name or id: Curve}, "dram_bytes", "ssd_bytes"}."""
        tenants = self._node.tenants()
        shown = list(tenants.values()) if tenant is None else [tenants[tenant]]
        return {each.name: curves_of(each) for each in shown}

    # --- requests --------------------------------------------------------------------------------

    def _report(self, request: Map, caller: Caller) -> Map:
        return {"report": report.as_json(self.report(self._scope(request, caller)))}

    def _hottest(self, request: Map, caller: Caller) -> Map:
        count = config.check_count("count", request.get("count", 20), 1, HOTTEST_MAX)
        return {"hottest": self.hottest(count, self._scope(request, caller))}

    def _reuse(self, request: Map, caller: Caller) -> Map:
        return {"reuse": msgspec.json.encode(self.curves(self._scope(request, caller)))}

    def _manifests(self, request: Map, caller: Caller) -> Map:
        """[{"tenant", "number", "manifest"}], and how many were left out."""
        scope = self._scope(request, caller)
        found: list[Map] = []
        left_out = held = 0
        for tenant in self._node.tenants().values():
            if scope not in (None, tenant.name):
                continue
            for number, manifest in list(tenant.manifests.items()):
                packed = manifest.pack()
                held += len(packed)
                if len(found) >= MANIFESTS_MAX or held > MANIFEST_BYTES_MAX:
                    left_out += 1
                    continue
                found.append({"tenant": tenant.name, "number": number, "manifest": packed})
        return {"manifests": found, "left_out": left_out}

    def _lookup(self, request: Map, caller: Caller) -> Map:
        """Which of these keys are there; counted as nobody's lookup."""
        tenant, number, _ = self._named(request, caller)
        keys = _keys(request)
        tiers = bytes(one["tiers"] for one in tenant.node.explain(number, keys))
        return {"tiers": tiers}

    def _explain(self, request: Map, caller: Caller) -> Map:
        tenant, number, manifest = self._named(request, caller)
        keys = _keys(request)
        found = tenant.node.explain(number, keys)
        missing = next((i for i, one in enumerate(found) if not one["tiers"]), len(found))
        start = max(0, min(missing - 1, len(found) - EXPLAINED_MAX))
        coldest = tenant.node.coldest()
        return {
            "blocks": len(found),
            "missing": missing,
            "first": start,
            "explained": found[start : start + EXPLAINED_MAX],
            "tiers": bytes(one["tiers"] for one in found),
            "coldest": coldest,
            "manifest": b"" if manifest is None else manifest.pack(),
        }

    def _pin(self, request: Map, caller: Caller) -> Map:
        tenant, number, _ = self._named(request, caller)
        name, keys = _text(request, "name"), _keys(request)
        opened = tenant.opened(number)
        blocks = tenant.pins.pin(name, _text(request, "namespace"), opened, keys)
        return {"blocks": blocks, "asked": len(keys) // KEY_BYTES}

    def _unpin(self, request: Map, caller: Caller) -> Map:
        return {"blocks": self._tenant(request, caller).pins.unpin(_text(request, "name"))}

    def _pins(self, request: Map, caller: Caller) -> Map:
        scope = self._scope(request, caller)
        return {
            "pins": [
                {
                    "tenant": tenant.name,
                    "name": pin.name,
                    "namespace": pin.namespace,
                    "blocks": len(pin.views),
                    "bytes": pin.bytes,
                }
                for tenant in self._node.tenants().values()
                if scope in (None, tenant.name)
                for pin in tenant.pins.all()
            ]
        }

    def _drop_named(self, request: Map, caller: Caller) -> Map:
        tenant, number, _ = self._named(request, caller)
        return {"blocks": tenant.node.drop(number), "tenant": tenant.name}

    # --- whom and what a request means -----------------------------------------------------------

    def _scope(self, request: Map, caller: Caller) -> str | None:
        """The tenant that the answer is about; None: all. Raises BadArgument."""
        asked = request.get("tenant")
        if asked is None:
            return None if caller.is_admin else caller.tenant
        # One text for another's name and for nobody's: which names there are is nobody's business.
        if not isinstance(asked, str) or (not caller.is_admin and asked != caller.tenant):
            raise BadArgument(f"there is no tenant {asked!r:.64} for you to ask about")
        if asked not in self._node.tenants():
            names = ", ".join(sorted(self._node.tenants())) if caller.is_admin else caller.tenant
            raise BadArgument(f"there is no tenant {asked!r:.64}; there are: {names}")
        return asked

    def _tenant(self, request: Map, caller: Caller) -> Tenant:
        tenants = self._node.tenants()
        return tenants[self._scope(request, caller) or caller.tenant]

    def _named(self, request: Map, caller: Caller) -> tuple[Tenant, int, Manifest | None]:
        """A namespace by name, by its id in hexadecimal, or by the first digits of one."""
        asked = _text(request, "namespace")
        scope = self._scope(request, caller)
        tenants = self._node.tenants()
        searched = [tenants[scope]] if scope is not None else list(tenants.values())
        found = [
            (tenant, number, manifest)
            for tenant in searched
            for number, manifest in list(tenant.manifests.items())
            if manifest.name == asked or _is_prefix(asked, manifest.namespace_id.hex())
        ]
        if len(found) == 1:
            return found[0]
        known = sorted(
            {
                one.name or one.namespace_id.hex()
                for t in searched
                for one in list(t.manifests.values())
            }
        )
        if not found:
            names = ", ".join(known[:16]) or "none since the daemon started"
            raise BadArgument(f"there is no namespace {asked!r:.64}; there are: {names}")
        which = ", ".join(f"{m.namespace_id.hex()} of {t.name}" for t, _, m in found[:8])
        raise BadArgument(f"{asked!r:.64} can be {len(found)} namespaces: {which}; say more of it")


def _keys(request: Map) -> bytes:
    keys = request.get("keys")
    if not isinstance(keys, bytes) or not keys or len(keys) % KEY_BYTES:
        raise BadArgument(f"keys must be one or more keys of {KEY_BYTES} bytes, packed")
    if len(keys) > KEYS_MAX * KEY_BYTES:
        raise BadArgument(f"{len(keys) // KEY_BYTES} keys; at most {KEYS_MAX} of one request")
    return keys


def _text(request: Map, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise BadArgument(f"{name} must be text, not {value!r:.64}")
    return value


def _is_prefix(asked: str, id: str) -> bool:
    return len(asked) >= 6 and id.startswith(asked.lower())
