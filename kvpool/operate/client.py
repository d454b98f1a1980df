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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec

from kvpool.address import ADDRESS_VARIABLE, parse_address
from kvpool.errors import BadArgument, KvpoolError, Refused, Unreachable
from kvpool.manifest import Manifest, unpack
from kvpool.observe import report
from kvpool.pool import Pool
from kvpool.remote import _candidates, connect
from kvpool.remote_link import Caller, Link, dial
from kvpool.wire import Map

TOKEN_VARIABLE = "KVPOOL_TOKEN"
TENANT_VARIABLE = "KVPOOL_TENANT"
TOKEN_BYTES_MAX = 4096
ANSWER_S = 10.0  # that a daemon may take to answer what needs no waiting
KEYS_AT_ONCE = 1024  # of one explain: its answer has a map for each
_PIN_KEYS_MAX = 60_000  # of one request of a MiB

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Reach:
    """How to get to a daemon, as a command was told."""

    address: str | None = None
    token: str | None = None
    tenant: str | None = None


class Hot(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a prefix in use."""

    number: int = 0
    key: bytes = b""
    depth: int = 0  # blocks up to and with it
    heat: float = 0.0
    idle_s: float = 0.0
    tiers: int = 0
    children: int = 0
    tenant: str = ""
    namespace: str = ""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that an operator keeps."""

    name: str
    namespace: str = ""
    tenant: str = ""
    blocks: int = 0
    held: int = 0  # of those, present and pinned now
    bytes: int = 0


class Operator:
    """One connection to one daemon. A context manager."""

    def __init__(self, link: Link, where: str, tenant: str | None) -> None:
        """For Operator.connect()."""
        self._link = link
        self._tenant = tenant
        self.where = where
        self.version = link.version

    @classmethod
    def connect(cls, reach: Reach, timeout_s: float = ANSWER_S) -> Self:
        """One try at each address. Raises Unreachable, Refused, BadArgument."""
        caller = Caller(name="kvpool command", token=reach.token, connections=0)
        if reach.tenant is not None:
            caller = _of_tenant(caller, reach.tenant)
        reasons = []
        for address in _candidates(reach.address, os.environ):
            try:
                link = dial(address, caller, time.monotonic() + timeout_s)
            except Refused:
                raise
            except Unreachable as error:
                reasons.append(str(error))
                continue
            link.forgo_shm()
            return cls(link, str(address), reach.tenant)
        raise Unreachable(_nobody(reach, reasons))

    def ask(self, op: str, wait_s: float = ANSWER_S, **fields: Any) -> Map:
        """One request. Raises Unreachable, or what the daemon said."""
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
            found = report.from_json(self.ask("report")["report"])
        if self._tenant is None:
            return found
        named = [each for each in found.tenants if each.name == self._tenant]
        return msgspec.structs.replace(found, tenants=named)

    def raw(self, op: str, **fields: Any) -> Any:
        """The JSON that `history` and `reuse` answer with, decoded."""
        with self._checked(op):
            return msgspec.json.decode(self.ask(op, **fields)[op])

    def hottest(self, count: int) -> list[Hot]:
        """The prefixes in use, hottest first."""
        with self._checked("hottest"):
            return msgspec.convert(self.ask("hottest", count=count)["hottest"], list[Hot])

    def manifests(self) -> list[Manifest]:
        """Of every namespace that somebody opened since the daemon began."""
        with self._checked("manifests"):
            return [unpack(packed) for packed in self.ask("manifests")["manifests"]]

    def explain(self, namespace: str, keys: bytes) -> tuple[list[Map], list[Map]]:
        """What the node knows about each key, and other places that could have been meant."""
        explained: list[Map] = []
        elsewhere: list[Map] = []
        step = KEYS_AT_ONCE * 16
        with self._checked("explain"):
            for start in range(0, len(keys), step):
                part = keys[start : start + step]
                answer = self.ask("explain", namespace=namespace, keys=part)
                explained += msgspec.convert(answer["explained"], list[dict[str, Any]])
                if start == 0:
                    elsewhere = msgspec.convert(answer.get("elsewhere", []), list[dict[str, Any]])
        if len(explained) != len(keys) // 16:
            raise KvpoolError(f"{self.where}: explain answered about {len(explained)} blocks")
        return explained, elsewhere

    def leading(self, namespace: str, keys: bytes) -> int:
        """How many blocks are present from the start on. Asks no further than it must."""
        step = KEYS_AT_ONCE * 16
        for start in range(0, len(keys), step):
            told, _ = self.explain(namespace, keys[start : start + step])
            for at, entry in enumerate(told):
                if not entry.get("tiers"):
                    return start // 16 + at
        return len(keys) // 16

    def pin(self, namespace: str, keys: bytes, name: str) -> Map:
        """Keeps these blocks until unpin(). Raises BadArgument, NoResource."""
        if len(keys) > _PIN_KEYS_MAX * 16:
            raise BadArgument(f"a prefix of {len(keys) // 16} blocks; at most {_PIN_KEYS_MAX}")
        return self.ask("pin", namespace=namespace, keys=keys, name=name)

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
        except (KeyError, TypeError, msgspec.MsgspecError) as error:
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
    more: dict[str, Any] = {} if reach.tenant is None else {"tenant": reach.tenant}
    return connect(where, token=reach.token, timeout=timeout_s, name="kvpool command", **more)


def read_token(path: str | None, environment: Mapping[str, str]) -> str | None:
    """What the file holds, else what the variable says. Raises BadArgument."""
    if path is None:
        return environment.get(TOKEN_VARIABLE) or None
    try:
        with open(path, "rb") as file:
            content = file.read(TOKEN_BYTES_MAX + 2)
        token = content.decode().strip()
    except OSError as error:
        raise BadArgument(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadArgument(f"{path}: a token is UTF-8 text") from None
    if not 0 < len(token.encode()) <= TOKEN_BYTES_MAX:
        raise BadArgument(f"{path}: a token has 1 to {TOKEN_BYTES_MAX} bytes")
    return token


def _of_tenant(caller: Caller, tenant: str) -> Caller:
    import dataclasses

    if "tenant" not in {field.name for field in dataclasses.fields(caller)}:
        raise BadArgument("--tenant: this version connects to no tenant but the default one")
    more: dict[str, Any] = {"tenant": tenant}
    return dataclasses.replace(caller, **more)


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
