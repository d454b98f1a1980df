"""A pool that lives in a daemon, as a Pool of this process sees it.

Blocks move by the core's channel (shared memory or sockets); what is asked seldom goes by a control
connection; a thread connects again when the node went away (remote_session).

Promises:  1. while there is no node every block is a miss, at once: nothing waits for it;
           2. what needs an answer gets it by its deadline, or Unreachable;
           3. no stranger's node is taken for one's own: a folder that anybody could have made is
              looked at first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from kvpool import _core
from kvpool.address import (
    ADDRESS_VARIABLE,
    TENANT_VARIABLE,
    TOKEN_BYTES_MAX,
    TOKEN_VARIABLE,
    Address,
    UnixAddress,
    check_tenant,
    default_sockets,
    is_own_folder,
    own_temporary_folder,
    parse_address,
    read_token,
)
from kvpool.config import check_count, check_number, check_type, parse_size
from kvpool.errors import BadArgument, ForkedProcess, PoolClosed, Refused, Unreachable
from kvpool.manifest import Manifest
from kvpool.namespace import TIMEOUT_S_MAX, _one_key
from kvpool.pool import Pool
from kvpool.remote_link import Caller, Link, dial
from kvpool.remote_session import BACKOFF_S_MAX, BACKOFF_S_MIN, Channel, Session
from kvpool.wire import NAME_BYTES_MAX, Map

TIMEOUT_S = 5.0
CONNECTIONS_MAX = 16
_SLICE_S = 0.5  # of a long wait: what else is asked meanwhile comes in between
_GRACE_S = 0.5  # for the answer to a wait that took all its time
_WORK_S = 30.0  # that a node may work for one request, beside its waits

# Refusals that pass: the node starts, ends, or has no room at the moment.
_PASSING = frozenset({"client", "descriptors", "failed", "full", "late"})


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tenant: str | None = None,
    timeout: float = TIMEOUT_S,
    connect_timeout: float | None = None,
    name: str | None = None,
    connections: int = 2,
) -> Pool:
    """A pool that `kvpool serve` has, here or elsewhere; the same object as kvpool.open() gives.

    address: "unix:/path/node.sock" (shared memory: reads need no request) or "tcp://host:port"; by
    default $KVPOOL_ADDRESS, or where `kvpool serve` of this user listens by itself. token: what the
    node knows the tenant by (default: $KVPOOL_TOKEN); it is proved, never sent, and the node proves
    that it has it. token_file: holds the token, and is read again whenever the node is looked for.
    tenant: whose pool at a node that has several (default: $KVPOOL_TENANT, or what the token or
    this user is known as). timeout: seconds until a later call on blocks ends as a miss.
    connect_timeout: seconds until there must be a node (default: timeout). name: of this client, in
    the node's log. connections: for blocks.

    Afterwards a node that goes away is no error of get, put or lookup: those are misses until it is
    back, and it is looked for in the background. Calls that need an answer raise Unreachable.
    Raises Unreachable: no node answered in time; Refused: one did, and said no, or was full or out
    of descriptors all the time; BadArgument.
    Do not fork while connected: the child gets ForkedProcess.
    """
    timeout_s = check_number("timeout", timeout, 0.001, TIMEOUT_S_MAX)
    connect_s = timeout_s
    if connect_timeout is not None:
        connect_s = check_number("connect_timeout", connect_timeout, 0.001, TIMEOUT_S_MAX)
    check_count("connections", connections, 1, CONNECTIONS_MAX)
    caller = caller_of(name, token, token_file, tenant, connections=connections)
    found, link = find(candidates(address, os.environ), caller, time.monotonic() + connect_s)
    channel: Channel = _core.Remote.create(timeout_s, link.shm is not None)
    session = Session(channel, found, caller, timeout_s)
    session.begin(link)
    return Pool(RemoteBackend(session))


def caller_of(
    name: str | None,
    token: str | None,
    token_file: str | os.PathLike[str] | None,
    tenant: str | None,
    *,
    connections: int = 2,
    wants_shm: bool = True,
) -> Caller:
    """Who connects, by the arguments of connect() and the environment. Raises BadArgument."""
    if token is not None and token_file is not None:
        raise BadArgument("token and token_file are both given; one of them is the token")
    if token is None and token_file is None:
        token = os.environ.get(TOKEN_VARIABLE) or None
    path = None if token_file is None else os.fspath(token_file)
    if path is not None:
        read_token("token_file", path)  # a mistake is told at once, not as a node that is missing
    tenant = tenant if tenant is not None else os.environ.get(TENANT_VARIABLE) or None
    return Caller(
        name=_checked_name(name),
        token=_checked_token(token),
        connections=check_count("connections", connections, 0, CONNECTIONS_MAX),
        tenant="" if tenant is None else check_tenant("tenant", tenant),
        wants_shm=wants_shm,
        token_file=path,
    )


def find(addresses: list[Address], caller: Caller, deadline: float) -> tuple[Address, Link]:
    """The first node that answers, in the order of the addresses, again and again until then.

    So long, too, where a node says no to what it may say yes to a moment later.
    """
    pause_s = BACKOFF_S_MIN
    while True:
        reasons, refused = [], None
        for address in addresses:
            try:
                return address, dial(address, caller, deadline)
            except Refused as error:
                if error.code not in _PASSING:
                    raise
                refused = refused or error
            except Unreachable as error:
                reasons.append(str(error))
        if time.monotonic() + pause_s >= deadline:
            if refused is not None:
                raise refused
            tried = "; ".join(reasons)
            raise Unreachable(f"no node answers ({tried}); is `kvpool serve` running?")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, BACKOFF_S_MAX)


class RemoteBackend:
    """What a Pool needs, from a node elsewhere. All methods are thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        weakref.finalize(self, session.close)

    @property
    def is_forked(self) -> bool:
        return self._session.pid != os.getpid()

    @property
    def is_closed(self) -> bool:
        return self._session.closed.is_set()

    @property
    def shares_memory(self) -> bool:
        """See Pool.shares_memory."""
        return bool(self._session.shares_memory)

    def require_usable(self) -> None:
        """Raises PoolClosed or ForkedProcess where no call can be made."""
        if self.is_forked:
            raise ForkedProcess("the pool was opened by the parent process; connect here again")
        if self.is_closed:
            raise PoolClosed("the pool is closed")

    def open_space(self, manifest: Manifest) -> Any:
        """Raises ManifestMismatch, Unreachable. One request, at the first use of a manifest."""
        self.require_usable()
        return self._session.open_space(manifest)

    def resize(
        self,
        dram: str | int | None,
        max_blocks: int | None,
        ssd_capacity: str | int | None,
        timeout: float,
    ) -> int:
        """Of the node, for all its clients; it waits 10 s at most. Raises as Pool.resize()."""
        timeout_s = check_number("timeout", timeout, 0, TIMEOUT_S_MAX)
        answer = self._ask(
            "resize",
            timeout_s + _WORK_S,
            dram=None if dram is None else parse_size(dram),
            max_blocks=max_blocks,
            ssd_capacity=None if ssd_capacity is None else parse_size(ssd_capacity),
            timeout=timeout_s,
        )
        return int(answer["bytes"])

    def flush(self, timeout: float) -> bool:
        """See Pool.flush(). False without a node: nobody says that anything was committed."""
        with contextlib.suppress(Unreachable):
            return self._ask_until("flush", timeout)
        return False

    def trim(self) -> None:
        """See Pool.trim()."""
        self._ask("trim", _WORK_S)

    def stats(self) -> dict[str, Any]:
        """The node's, those of its server as "server", of this tenant as "tenant", and of this side
        as "client".

        Without a node "client" is there alone.
        """
        self.require_usable()
        answer: Map = {"node": {}, "server": {}}
        with contextlib.suppress(Unreachable):
            answer = self._ask("stats")
        more = {name: answer[name] for name in ("tenant", "tenants") if name in answer}
        return {
            **answer["node"],
            "server": answer["server"],
            **more,
            "client": self._session.facts(),
        }

    def drop(self, space: Any) -> int:
        """See Namespace.drop()."""
        self.require_usable()
        return int(self._session.ask_about(space, "drop", _WORK_S)["blocks"])

    def temperature(self, space: Any, key: bytes) -> float | None:
        """None without a node, as for a block that it does not have."""
        packed = _one_key("key", key)
        self.require_usable()
        try:
            answer = self._session.ask_about(space, "temperature", key=packed)
        except Unreachable:
            return None
        found = answer["temperature"]
        return None if found is None else float(found)

    def wait(self, space: Any, keys: Any, timeout_s: float) -> int:
        """See Namespace.wait(). A node that does not answer in that time has no block for us."""
        self.require_usable()
        with self._session.waiting(timeout_s) as left_s:
            if left_s is not None:
                return int(space.wait_present(keys, left_s))
        return int(space.count_present(keys)[0]) if self._session.shares_memory else 0

    def check(self) -> None:
        """The books are the node's, and in its process: nothing to be checked from here."""
        self.require_usable()

    def close(self, flush_timeout_s: float = 0.0) -> None:
        """Leaves the node, which goes on. Idempotent; does nothing in a forked child."""
        self._session.close()

    def _ask(self, op: str, wait_s: float | None = None, **fields: Any) -> Map:
        self.require_usable()
        return self._session.ask(op, wait_s, **fields)

    def _ask_until(self, op: str, timeout_s: float) -> bool:
        """In slices, so that other requests of this pool come in between."""
        end = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, end - time.monotonic())
            slice_s = min(left_s, _SLICE_S)
            wait_s = min(slice_s + self._session.timeout_s, left_s + _GRACE_S)
            if self._ask(op, wait_s, timeout=slice_s)["done"]:
                return True
            if left_s <= slice_s:
                return False


def candidates(address: str | None, environment: Mapping[str, str]) -> list[Address]:
    """Where connect() looks for a node, in this order. Raises BadArgument for a malformed address.

    Not in a folder for temporary files that is somebody else's: promise 3.
    """
    given = address if address is not None else environment.get(ADDRESS_VARIABLE) or None
    if given is not None:
        return [parse_address(given)]
    paths = default_sockets(environment)
    temporary = own_temporary_folder()
    if not is_own_folder(temporary):
        paths = [path for path in paths if os.path.dirname(path) != temporary]
    return [UnixAddress(path) for path in paths]


def _checked_name(name: str | None) -> str:
    if name is None:
        return os.path.basename(sys.argv[0] if sys.argv else "")[:64] or "python"
    check_type("name", name, str)
    if len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        raise BadArgument(f"name has {len(name)} characters; at most {NAME_BYTES_MAX} bytes")
    return name


def _checked_token(token: str | None) -> str | None:
    if token is not None:
        check_type("token", token, str)
        if not 0 < len(token.encode(errors="replace")) <= TOKEN_BYTES_MAX:
            raise BadArgument(f"token must have 1..{TOKEN_BYTES_MAX} bytes")
    return token
