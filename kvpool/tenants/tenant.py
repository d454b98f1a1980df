"""One tenant of a daemon: a node and a server of its own, and who is connected to them.

Promises:  1. a tenant's arena, index, names and numbers are its own: another's are not in any
              memory, table or answer that it is given;
           2. what one tenant names takes no room for names from another.
Thread rule: namespaces from any thread; clients are changed by the event loop only, and may be
looked at from any.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool import _core, wire
from kvpool.errors import ManifestMismatch, NoResource
from kvpool.manifest import Manifest
from kvpool.serve_pins import Pins
from kvpool.tenants.identity import Claim
from kvpool.tenants.plans import DEFAULT_TENANT, Limits
from kvpool.wire_proof import Verifier

PINNED_SHARE = 0.5  # of a tenant's DRAM that an operator may pin
NAMED_BYTES_MAX = 64 << 20  # of manifests that a tenant's namespaces are known by


class Server(Protocol):
    """What is used of the core's Server."""

    @property
    def sources(self) -> int: ...
    def sources_of(self, client: int) -> int: ...
    def add_client(self) -> int: ...
    def drop_client(self, client: int) -> None: ...
    def add_stream(
        self, client: int, fd: int, is_peer: bool = False, node: bytes = b"", incarnation: int = 0
    ) -> None: ...
    def make_shm(self, client: int, fd: int) -> tuple[list[int], dict[str, Any]]: ...
    def start_shm(self, client: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def clients(self) -> list[dict[str, Any]]: ...
    def lease_ages(self) -> list[int]: ...
    def set_rates(self, put_bytes_per_s: int, get_bytes_per_s: int) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a connection comes from. pid: 0 if the kernel does not tell; uid: None likewise."""

    name: str
    pid: int
    is_unix: bool
    uid: int | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, eq=False)
class Client:
    """One connected pool object of some process. tenant: None for an administrator of none."""

    number: int  # the tenant's server's; 0 without a tenant
    name: str
    pid: int
    peer: Peer
    tenant: Tenant | None = field(repr=False)
    is_admin: bool
    claim: Claim = field(repr=False)
    verifier: Verifier | None = field(default=None, repr=False)  # of one that proved a token
    since: float = field(default_factory=time.time)  # Unix time
    id: bytes = field(default_factory=lambda: secrets.token_bytes(wire.CLIENT_ID_BYTES), repr=False)
    has_shm: bool = False

    def described(self) -> dict[str, Any]:
        """Its fields in a log line."""
        told = {"client": self.number, "name": self.name, "pid": self.pid, "peer": self.peer}
        if self.tenant is not None and self.tenant.name == DEFAULT_TENANT:
            return told
        return {**told, "tenant": "" if self.tenant is None else self.tenant.name}


class Tenant:
    """What a daemon has of one tenant."""

    def __init__(self, name: str, node: _core.Node, server: Server, limits: Limits) -> None:
        self.name = name
        self.node = node
        self.server = server
        self.limits = limits  # replaced as a whole
        self.clients: list[Client] = []  # connected now
        self.refused: Counter[str] = Counter()  # of this tenant's connections and requests
        self.named: dict[int, Manifest] = {}  # by the number of the namespace in the node
        self.pins = Pins(node, PINNED_SHARE)
        self.turn = asyncio.Lock()  # for requests that are much work; the event loop's
        self._lock = threading.Lock()  # guards what follows, and changes of `named`
        self._by_name: dict[str, Manifest] = {}
        self._named_bytes = 0

    def space_id(self, manifest: Manifest) -> bytes:
        """Of a namespace in this tenant's node, and in its SSD tier.

        Another tenant's is another, so that a tier that ends up under a wrong tenant is no hit.
        """
        if self.name == DEFAULT_TENANT:
            return manifest.namespace_id
        said = b"kvpool tenant\0" + self.name.encode() + b"\0" + manifest.namespace_id
        return hashlib.sha256(said).digest()[:16]

    def open_namespace(self, manifest: Manifest, packed_bytes: int) -> int:
        """The number of its namespace. Raises ManifestMismatch, NoResource, BadArgument."""
        assert manifest.block_bytes is not None  # computed by the manifest
        name = manifest.name
        with self._lock:
            known = self._by_name.get(name) if name else None
            if known is not None and known != manifest:
                raise ManifestMismatch(name, known.differing(manifest))
            is_full = self._named_bytes > NAMED_BYTES_MAX
            if is_full and name and known is None:
                raise NoResource(f"the names of namespaces take {self._named_bytes} bytes already")
            opened = self.node.open_space(self.space_id(manifest), manifest.block_bytes)
            number = _core.Space(opened).number
            if name:
                self._by_name[name] = manifest
            if not is_full and number not in self.named:
                self.named[number] = manifest
                self._named_bytes += packed_bytes
        return number

    def manifests(self) -> dict[int, Manifest]:
        """Those that are known, by the number of their namespace in the node: a copy."""
        with self._lock:
            return dict(self.named)

    def opened(self, manifest: Manifest) -> _core.OpenedSpace:
        """Its namespace, for calls on blocks in this process."""
        assert manifest.block_bytes is not None  # computed by the manifest
        return self.node.open_space(self.space_id(manifest), manifest.block_bytes)

    def drop(self, number: int) -> int:
        """Every block of a namespace, pinned ones too; how many. Raises KvpoolError."""
        blocks = self.node.drop(number)
        self.pins.forget(number)
        return blocks

    def stats(self) -> dict[str, Any]:
        """Of this tenant as it may know itself."""
        limits = self.limits
        return {
            "name": self.name,
            "clients": len(self.clients),
            "max_clients": limits.max_clients,
            "dram_min": limits.dram_min,
            "dram_max": limits.dram_max,
            "put_bytes_per_s": limits.put_bytes_per_s,
            "get_bytes_per_s": limits.get_bytes_per_s,
            "refused": dict(self.refused),
        }
