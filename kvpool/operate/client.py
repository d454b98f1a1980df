"""A daemon as a command sees it: operations over one control connection, no shared memory.

Promises:  1. every call ends by its time limit, with an answer or a KvpoolError that says why;
           2. nothing is looked for twice: a command that finds no daemon says so at once, and where
              it looked;
           3. what the daemon answers is checked before a command uses it.
Thread rule: one call at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from kvpool.address import ADDRESS_VARIABLE, parse_address
from kvpool.errors import BadArgument, KvpoolError, Refused, Unreachable
from kvpool.keys import KEY_BYTES
from kvpool.manifest import Manifest, unpack
from kvpool.observe import cluster, report
from kvpool.observe.cluster import Cluster
from kvpool.pool import Pool
from kvpool.remote import caller_of, candidates, connect
from kvpool.remote_link import Link, dial
from kvpool.wire import Map

_NAME = "kvpool command"  # in the daemon's log
ANSWER_S = 10.0  # that a daemon may take to answer what needs no waiting
KEYS_AT_ONCE = 32_768  # of one request
_LOOKED_UP_AT_ONCE = 4096  # where the first that is missing ends it
_WORK_S = 60.0  # where it reads from an SSD


@dataclass(frozen=True, slots=True)
class Reach:
    """How to get to a daemon, as a command was told; None: as the environment says."""

    address: str | None = None
    token_file: str | None = None
    tenant: str | None = None


class Hot(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a prefix in use."""

    tenant: str
    namespace: str  # its name, else its id; "" when its manifest is not known
    key: str  # hexadecimal; of the last block
    depth: int  # blocks up to and with it
    tokens: int  # in them; 0: not known
    heat: float
    idle_s: float | None
    tiers: int
    children: int


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that an operator keeps."""

    tenant: str
    name: str
    namespace: str
    asked: int
    blocks: int  # of those, were there when they were pinned, and stay
    bytes: int


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace of a tenant."""

    tenant: str
    manifest: Manifest

    @property
    def label(self) -> str:
        """Its name, else its id: what the daemon knows it by."""
        return self.manifest.name or self.manifest.namespace_id.hex()


@dataclass(frozen=True, slots=True)
class Explained:
    """What a node says of a prefix."""

    entries: list[Map]  # one per block: of all its tiers, and more of those around the missing one
    coldest: float | None  # heat of the coldest block that stays


@dataclass(frozen=True, slots=True)
class Located:
    """Where one block is. tiers: of the daemon that was asked; nodes: the others, hexadecimal."""

    tiers: int
    nodes: list[str]


class Operator:
    """One connection to one daemon. A context manager."""

    def __init__(self, link: Link, where: str, tenant: str) -> None:
        """For Operator.connect()."""
        self._link = link
        self._tenant = tenant
        self.where = where
        self.version = link.version

    @classmethod
    def connect(cls, reach: Reach, timeout_s: float = ANSWER_S) -> Self:
        """One try at each address. Raises Unreachable, Refused, BadArgument."""
        caller = caller_of(
            _NAME, None, reach.token_file, reach.tenant, connections=0, wants_shm=False
        )
        reasons = []
        for address in candidates(reach.address, os.environ):
            try:
                link = dial(address, caller, time.monotonic() + timeout_s)
            except Refused:
                raise
            except Unreachable as error:
                reasons.append(str(error))
                continue
            return cls(link, str(address), caller.tenant)
        raise Unreachable(_nobody(reach, reasons))

    def ask(self, op: str, wait_s: float = ANSWER_S, **fields: Any) -> Map:
        """One request, about the tenant that was named if one was.

        Raises Unreachable, or what the daemon said.
        """
        if self._tenant:
            fields = {"tenant": self._tenant, **fields}
        try:
            return self._link.control.ask(op, time.monotonic() + wait_s, **fields)
        except BadArgument as error:
            if f"there is no operation {op!r}" not in str(error):
                raise
            raise KvpoolError(
                f"{self.where}: this daemon (version {self.version or 'unknown'}) knows no {op!r}: "
                "restart it with a newer kvpool"
            ) from None

    def report(self) -> report.Report:
        """What it knows of itself: all of it for an admin who names no tenant, else one's part."""
        with self._checked("report"):
            return report.from_json(self.ask("report")["report"])

    def raw(self, op: str, **fields: Any) -> Any:
        """The JSON that `history` and `reuse` answer with, decoded."""
        with self._checked(op):
            return msgspec.json.decode(self.ask(op, **fields)[op])

    def hottest(self, count: int) -> list[Hot]:
        """The prefixes in use, hottest first."""
        with self._checked("hottest"):
            return msgspec.convert(self.ask("hottest", count=count)["hottest"], list[Hot])

    def spaces(self) -> list[Space]:
        """Every namespace that somebody opened since the daemon began, and the caller may see."""
        with self._checked("manifests"):
            told = msgspec.convert(self.ask("manifests")["manifests"], list[dict[str, Any]])
            return [Space(each["tenant"], unpack(each["manifest"])) for each in told]

    def explain(self, space: Space, keys: bytes) -> Explained:
        """What the node knows about each key; nothing is asked about none."""
        entries: list[Map] = []
        coldest: float | None = None
        with self._checked("explain"):
            for part in _parts(keys, KEYS_AT_ONCE):
                answer = self.ask("explain", **_named(space), keys=part)
                told = [{"tiers": tiers} for tiers in msgspec.convert(answer["tiers"], bytes)]
                if len(told) != len(part) // KEY_BYTES:
                    raise KvpoolError(
                        f"{self.where}: explained {len(told)} blocks of another count"
                    )
                first = answer["first"]
                for at, entry in enumerate(msgspec.convert(answer["explained"], list[Map])):
                    told[first + at] = entry
                entries += told
                coldest = answer.get("coldest")
        return Explained(entries, coldest)

    def nodes(self) -> Cluster | None:
        """The members of its cluster, as the daemon sees them; None: it is in none."""
        with self._checked("nodes"):
            told = self.ask("nodes")["nodes"]
            return None if told is None else cluster.from_json(told)

    def locate(self, space: Space, keys: bytes) -> list[Located]:
        """Where each key is, by the directory of the cluster and by the daemon's own index."""
        found: list[Located] = []
        with self._checked("locate"):
            for part in _parts(keys, KEYS_AT_ONCE):
                answer = self.ask("locate", **_named(space), keys=part)
                nodes = msgspec.convert(answer["nodes"], list[bytes])
                tiers = msgspec.convert(answer["tiers"], bytes)
                own = msgspec.convert(answer["own"], bytes)
                rows = cluster.unpacked_holders(nodes, msgspec.convert(answer["holders"], bytes))
                found += [
                    Located(here, [id.hex() for id in row if id != own])
                    for row, here in zip(rows, tiers, strict=True)
                ]
        return found

    def leading(self, space: Space, keys: bytes) -> int:
        """How many blocks are present from the start on. Asks no further than it must."""
        found = 0
        with self._checked("lookup"):
            for part in _parts(keys, _LOOKED_UP_AT_ONCE):
                tiers = msgspec.convert(
                    self.ask("lookup", **_named(space), keys=part)["tiers"], bytes
                )
                present = (tiers + b"\0").index(0)
                found += present
                if present < len(part) // KEY_BYTES:
                    break
        return found

    def pin(self, space: Space, keys: bytes, name: str) -> int:
        """Keeps the leading blocks that are there until unpin; how many. Raises BadArgument,
        NoResource."""
        if len(keys) > KEYS_AT_ONCE * KEY_BYTES:
            raise BadArgument(f"{len(keys) // KEY_BYTES} blocks; at most {KEYS_AT_ONCE} in one pin")
        with self._checked("pin"):
            answer = self.ask("pin", _WORK_S, **_named(space), keys=keys, name=name)
            return msgspec.convert(answer["blocks"], int)

    def pins(self) -> list[Pin]:
        """All that this caller may see."""
        with self._checked("pins"):
            return msgspec.convert(self.ask("pins")["pins"], list[Pin])

    def close(self) -> None:
        """Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _checked(self, op: str) -> Iterator[None]:
        try:
            yield
        except KvpoolError:  # what the daemon said; some of them are ValueErrors too
            raise
        except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise KvpoolError(
                f"{self.where}: the answer to {op!r} is none that this version reads"
                f" ({type(error).__name__}: {error}); the daemon is version"
                f" {self.version or 'unknown'}"
            ) from None


def open_pool(reach: Reach, timeout_s: float = ANSWER_S) -> Pool:
    """A pool at the daemon, for commands that move blocks. Raises as kvpool.connect()."""
    with Operator.connect(
        reach, timeout_s
    ) as found:  # says at once, and better, that none is there
        where = found.where
    return connect(
        where, token_file=reach.token_file, tenant=reach.tenant, timeout=timeout_s, name=_NAME
    )


def _parts(keys: bytes, count: int) -> Iterator[bytes]:
    """Packed keys, so many at a time."""
    for start in range(0, len(keys), count * KEY_BYTES):
        yield keys[start : start + count * KEY_BYTES]


def _named(space: Space) -> Map:
    return {"tenant": space.tenant, "namespace": space.label}


def _nobody(reach: Reach, reasons: list[str]) -> str:
    tried = "\n  ".join(reasons) or "nowhere: no folder is safe to look in"
    if reach.address is not None or os.environ.get(ADDRESS_VARIABLE):
        given = reach.address or os.environ[ADDRESS_VARIABLE]
        hint = f"is `kvpool serve` running there? ({parse_address(given)})"
    else:
        hint = (
            "start one with `kvpool serve`, or say where it is with --address or "
            f"${ADDRESS_VARIABLE}"
        )
    return f"no daemon answers; looked at\n  {tried}\n{hint}"
