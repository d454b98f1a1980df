"""What clients ask on their control connections, and what the node answers.

A request is {"id", "op", ...}, its answer {"id", "ok": true, ...} or {"id", "ok": false, "error",
"message"}; docs/protocol.md has the operations.

Promises:  1. whatever a request holds, it is answered: a mistake with what is wrong about it;
           2. no request waits longer than it asks for, and never longer than WAIT_S_MAX or
              RESIZE_WAIT_S_MAX; beside that it takes what the work itself takes;
           3. who asks sees and changes its own tenant alone, but for administrators; what is
              refused says the same whether or not there is such a tenant.
Thread rule: answer() from any thread, none of which is the event loop's; add() before it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpool import config
from kvpool.errors import (
    BadArgument,
    KvpoolError,
    ManifestMismatch,
    NoResource,
    NotAllowed,
    PoolClosed,
    TierRefused,
)
from kvpool.manifest import unpack
from kvpool.serve_log import EventLog
from kvpool.tenants.tenant import Client, Tenant
from kvpool.wire import Map

WAIT_S_MAX = 1.0  # a client that would wait longer asks again
RESIZE_WAIT_S_MAX = 10.0  # its answer does not say whether all is done: so in one go
KEY_BYTES = 16
_NUMBER_MAX = (1 << 32) - 1
_SIZE_MAX = 1 << 62

Call = Callable[[Map, Client], Map]
Resize = Callable[[int, float], int]  # bytes and seconds to bytes committed


@dataclass(frozen=True, slots=True)
class Operation:
    """call: raises KvpoolError. is_slow: its end may lie behind a disk, so it has other threads.

    takes_turns: much work for little that is asked: of one tenant one at a time, so that all of
    its clients together keep one thread from the others.
    """

    call: Call
    needs_admin: bool = False
    is_slow: bool = False
    takes_turns: bool = False


class Refusals:
    """How often who was told no, by reason. Thread-safe."""

    def __init__(self) -> None:
        self.of_nobody: Counter[str] = Counter()  # what belongs to no tenant
        self._lock = threading.Lock()

    def count(self, reason: str, tenant: Tenant | None = None) -> None:
        with self._lock:
            (self.of_nobody if tenant is None else tenant.refused)[reason] += 1


class Requests:
    """The operations on a daemon's tenants, by name."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        log: EventLog,
        refusals: Refusals,
        *,
        resize_budget: Resize | None = None,
    ) -> None:
        """resize_budget: changes the memory of all tenants together; None where there is one."""
        self._tenants = tenants
        self._log = log
        self._refusals = refusals
        self._resize_budget = resize_budget
        self._operations = {
            "open_namespace": Operation(self._open_namespace),
            "drop": Operation(self._drop, is_slow=True),
            "temperature": Operation(self._temperature),
            "stats": Operation(self._stats),
            "resize": Operation(self._resize, needs_admin=True, is_slow=True),
            "trim": Operation(self._trim, needs_admin=True, is_slow=True),
            "flush": Operation(self._flush, is_slow=True),
            "settle": Operation(self._settle, needs_admin=True, is_slow=True),
            "ping": Operation(self._ping),
        }

    def add(self, operations: Mapping[str, Operation | tuple[Call, bool]]) -> None:
        """More of them: name -> an Operation, or (call, needs_admin)."""
        for name, each in operations.items():
            self._operations[name] = each if isinstance(each, Operation) else Operation(*each)

    def is_slow(self, op: object) -> bool:
        operation = self._operations.get(op) if isinstance(op, str) else None
        return operation is not None and operation.is_slow

    def takes_turns(self, op: object) -> bool:
        operation = self._operations.get(op) if isinstance(op, str) else None
        return operation is not None and operation.takes_turns

    def answer(self, request: Map, caller: Client) -> Map:
        """Does what is asked. Blocks for as long as the core does; releases the GIL with it."""
        number = request.get("id")
        if not isinstance(number, int) or isinstance(number, bool):
            number = 0
        operation = self._operations.get(str(request.get("op")))
        try:
            if operation is None:
                names = ", ".join(self._operations)
                raise BadArgument(f"there is no operation {request.get('op')!r:.64}; {names}")
            if operation.needs_admin and not caller.is_admin:
                raise NotAllowed(
                    f"{request.get('op')} is for administrators: root, the daemon's own user on"
                    " its unix socket, or who has the admin token"
                )
            return {"id": number, "ok": True, **operation.call(request, caller)}
        except NotAllowed as error:
            self._refusals.count("not_admin", caller.tenant)
            return _refused(number, "not_allowed", error)
        except ManifestMismatch as error:
            more = {"name": error.name, "differing": _listed(error.differing)}
            return _refused(number, "manifest_mismatch", error, **more)
        except BadArgument as error:
            return _refused(number, "bad_argument", error)
        except (NoResource, TierRefused) as error:
            return _refused(number, "no_resource", error)
        except PoolClosed as error:
            return _refused(number, "closing", error)
        except KvpoolError as error:
            return _refused(number, "failed", error)
        except Exception as error:  # our bug: the client is told, and the others are served on
            self._log.error("a request failed", op=request.get("op"), reason=repr(error))
            return _refused(number, "internal", "the node failed at this; its log says at what")

    def tenant_of(self, request: Map, caller: Client) -> Tenant:
        """Whom a request is about: `tenant` of it, for administrators, else who asks.

        Raises NotAllowed, BadArgument.
        """
        found = self.named_tenant(request, caller) or caller.tenant
        if found is None:
            raise BadArgument("this client is no tenant; name the one that is meant: tenant")
        return found

    def named_tenant(self, request: Map, caller: Client) -> Tenant | None:
        """The tenant that a request names, if it names one. Raises NotAllowed, BadArgument."""
        name = request.get("tenant")
        if name is None or (caller.tenant is not None and name == caller.tenant.name):
            return None if name is None else caller.tenant
        if not caller.is_admin:
            raise NotAllowed("another tenant is for administrators to ask about")
        tenant = self._tenants.get(name) if isinstance(name, str) else None
        if tenant is None:
            raise BadArgument(f"there is no tenant {name!r:.64}; {', '.join(self._tenants)}")
        return tenant

    def _open_namespace(self, request: Map, caller: Client) -> Map:
        packed = _bytes(request, "manifest")
        manifest = unpack(packed)
        number = self.tenant_of(request, caller).open_namespace(manifest, len(packed))
        return {"number": number, "block_bytes": manifest.block_bytes}

    def _drop(self, request: Map, caller: Client) -> Map:
        tenant = self.tenant_of(request, caller)
        return {"blocks": tenant.drop(_count(request, "number", _NUMBER_MAX))}

    def _temperature(self, request: Map, caller: Client) -> Map:
        number, key = _count(request, "number", _NUMBER_MAX), _bytes(request, "key", KEY_BYTES)
        return {"temperature": self.tenant_of(request, caller).node.temperature(number, key)}

    def _stats(self, request: Map, caller: Client) -> Map:
        """Of one tenant; for an administrator who is none, of each by its name."""
        tenant = self.named_tenant(request, caller) or caller.tenant
        if tenant is not None:
            return _stats_of(tenant)
        every = {name: _stats_of(each) for name, each in self._tenants.items()}
        return {"node": {}, "server": {}, "tenants": every}

    def _resize(self, request: Map, caller: Client) -> Map:
        """As Pool.resize(): the SSD first, as it can be refused, and then nothing has changed.

        `dram` is of all tenants together, the rest of one.
        """
        wait_s = _wait(request, RESIZE_WAIT_S_MAX)
        dram = _count(request, "dram", _SIZE_MAX, is_optional=True)
        max_blocks = _count(request, "max_blocks", _SIZE_MAX, is_optional=True)
        capacity = _count(request, "ssd_capacity", _SIZE_MAX, is_optional=True)
        if self._resize_budget is None:
            node = self.tenant_of(request, caller).node
            if capacity is not None:
                node.resize_ssd(capacity, wait_s)
            return {"bytes": node.resize(dram, max_blocks, wait_s)}
        bytes_now = 0
        if capacity is not None or max_blocks is not None:
            node = self.tenant_of(request, caller).node
            if capacity is not None:
                node.resize_ssd(capacity, wait_s)
            bytes_now = node.resize(None, max_blocks, wait_s)
        return {"bytes": bytes_now if dram is None else self._resize_budget(dram, wait_s)}

    def _trim(self, request: Map, caller: Client) -> Map:
        for each in self._asked_about(request, caller):
            each.node.trim()
        return {}

    def _flush(self, request: Map, caller: Client) -> Map:
        return {"done": self.tenant_of(request, caller).node.flush(_wait(request))}

    def _settle(self, request: Map, caller: Client) -> Map:
        wait_s = _wait(request)
        return {
            "done": all(each.node.settle(wait_s) for each in self._asked_about(request, caller))
        }

    def _ping(self, request: Map, caller: Client) -> Map:
        return {}

    def _asked_about(self, request: Map, caller: Client) -> list[Tenant]:
        """By an administrator: all, if neither it nor its request is about one."""
        tenant = self.named_tenant(request, caller) or caller.tenant
        return list(self._tenants.values()) if tenant is None else [tenant]


def _stats_of(tenant: Tenant) -> Map:
    return {"node": tenant.node.stats(), "server": tenant.server.stats(), "tenant": tenant.stats()}


def _refused(number: int, code: str, message: object, **more: Any) -> Map:
    return {"id": number, "ok": False, "error": code, "message": str(message)[:4096], **more}


def _listed(differing: dict[str, tuple[object, object]]) -> dict[str, list[object]]:
    return {field: list(pair) for field, pair in differing.items()}


def _bytes(request: Map, name: str, length: int | None = None) -> bytes:
    value = request.get(name)
    if not isinstance(value, bytes) or (length is not None and len(value) != length):
        raise BadArgument(f"{name} must be {'' if length is None else f'{length} '}bytes")
    return value


def _count(request: Map, name: str, most: int, *, is_optional: bool = False) -> Any:
    value = request.get(name)
    return None if value is None and is_optional else config.check_count(name, value, 0, most)


def _wait(request: Map, most_s: float = WAIT_S_MAX) -> float:
    return min(config.check_number("timeout", request.get("timeout"), 0, 86_400), most_s)
