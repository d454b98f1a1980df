"""From what `kvpool serve` was told to what it opens: every value checked, and whole.

Promises:  1. after plan() nothing is left to be refused but what the machine refuses;
           2. nobody beyond this host is listened for without a token.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool import config
from kvpool.address import check_socket_path, default_socket, parse_host_and_port
from kvpool.cluster.plans import ClusterPlan, check_token_apart, cluster_plan
from kvpool.errors import BadArgument
from kvpool.events.plans import EventsPlan, events_plan
from kvpool.local import memory_options
from kvpool.serve_options import (
    TENANTS,
    Config,
    PoolOptions,
    ServerOptions,
    Settings,
    SsdOptions,
    options,
)
from kvpool.tenants.plans import (
    CLIENTS_MAX,
    AdminPlan,
    Checked,
    TenantPlan,
    Tenants,
    check_apart,
)

SIZES = (("pool", "dram"), ("pool", "dram_max"), ("ssd", "capacity"), ("ssd", "free_floor"))
DURATIONS = (("pool", "tau_s"), ("ssd", "timeout"))
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
CONNECTIONS_MAX = 65_536
LANES_MAX = 16
STAGING_BYTES_MIN = 1 << 20
STAGING_BYTES_MAX = 16 << 30
HTTP_TOKEN_BYTES_MAX = 512  # as observe/http_access.py reads them
DRAIN_S_MAX = 4.5  # within the 5 s that SIGTERM is given

# What another file changes in a daemon that runs; everything else needs a restart.
RELOADED = frozenset(
    {
        ("pool", "dram"),
        ("pool", "max_blocks"),
        ("ssd", "capacity"),
        ("server", "token_file"),
        ("server", "max_clients"),
        ("http", "token_file"),
        ("log", "format"),
        ("log", "level"),
        ("admin", "token_file"),
        ("admin", "same_uid"),
    }
)
RELOADED_OF_TENANTS = frozenset(
    {
        "uids",
        "token_file",
        "http_token_file",
        "dram_min",
        "dram_max",
        "ssd_capacity",
        "max_clients",
        "put_rate",
        "get_rate",
    }
)


@dataclass(frozen=True, slots=True)
class HttpPlan:
    """Where HTTP is served. token: what a reader may say to see everything. is_open: who says
    none sees everything, too."""

    host: str
    port: int  # 0: any
    is_loopback: bool
    token: str | None = field(repr=False)
    is_open: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a daemon opens. node, server: arguments of the core's Node.open and Server.create, as
    they would be for one tenant alone."""

    node: dict[str, Any]
    server: dict[str, Any]
    tenants: dict[str, TenantPlan]
    admin: AdminPlan
    http: HttpPlan | None
    cluster: ClusterPlan | None
    events: EventsPlan | None
    socket_path: str
    is_default_socket: bool
    socket_mode: int
    tcp: tuple[Any, ...]  # (family, address) of each socket to listen on
    clients_max: int
    drain_s: float
    log_format: str
    log_level: str
    config: Config

    @property
    def budget(self) -> int:
        """Bytes of payload memory, for all tenants together."""
        return int(self.node["dram"])

    @property
    def has_tokens(self) -> bool:
        return self.admin.token is not None or any(each.token for each in self.tenants.values())


def plan(settings: Settings, environment: Mapping[str, str]) -> Plan:
    """Raises BadArgument, which names the option as it was written. Reads the tokens' files."""
    checked = Checked(settings)
    told = settings.config
    server = told.server
    node = _node(checked, told.pool, told.ssd)
    checked.choice("log", "format", told.log.format, LOG_FORMATS)
    checked.choice("log", "level", told.log.level, LOG_LEVELS)
    clients_max = checked.count("server", "max_clients", server.max_clients, 1, CLIENTS_MAX)
    core = _server(checked, server, node["dram"])
    tenants = Tenants(checked, told, node, core).plans(clients_max)
    admin = AdminPlan(checked.token("admin", told.admin.token_file), told.admin.same_uid)
    check_apart(checked, tenants, admin)
    has_tokens = admin.token is not None or any(each.token for each in tenants.values())
    tcp = _tcp(checked, told, has_tokens)
    cluster = cluster_plan(settings, environment, tcp)
    check_token_apart(settings, cluster, tenants, admin)
    return Plan(
        node=node,
        server=core,
        tenants=tenants,
        admin=admin,
        http=_http(checked, told, tenants, admin),
        cluster=cluster,
        events=events_plan(settings),
        socket_path=_socket_path(checked, server, environment),
        is_default_socket=server.socket is None,
        socket_mode=_socket_mode(checked, server),
        tcp=tcp,
        clients_max=clients_max,
        drain_s=checked.duration("server", "drain_timeout", server.drain_timeout, 0, DRAIN_S_MAX),
        log_format=told.log.format,
        log_level=told.log.level,
        config=told,
    )


def needs_restart(old: Config, new: Config) -> list[str]:
    """The options that differ and that a daemon which runs cannot change, as "[table] key"."""
    return [label for label, is_reloaded in _differing(old, new) if not is_reloaded]


def changed(old: Config, new: Config) -> list[str]:
    """The other ones that differ."""
    return [label for label, is_reloaded in _differing(old, new) if is_reloaded]


def _differing(old: Config, new: Config) -> Iterator[tuple[str, bool]]:
    for each in options():
        before, after = getattr(old, each.table), getattr(new, each.table)
        if getattr(before, each.key) != getattr(after, each.key):
            yield f"[{each.table}] {each.key}", (each.table, each.key) in RELOADED
    for name in sorted({*old.tenants, *new.tenants}):
        told, told_now = old.tenants.get(name), new.tenants.get(name)
        if told is None or told_now is None:
            yield f"[{TENANTS}.{name}]", False
            continue
        for key in told.__struct_fields__:
            if getattr(told, key) != getattr(told_now, key):
                yield f"[{TENANTS}.{name}] {key}", key in RELOADED_OF_TENANTS


def _node(checked: Checked, pool: PoolOptions, ssd: SsdOptions) -> dict[str, Any]:
    """By the checks of kvpool.open(), whose errors begin with the option's name."""
    for table, key in SIZES:
        value = getattr(pool if table == "pool" else ssd, key)
        if value is not None:
            checked.size(table, key, value, 0, config.SIZE_BYTES_MAX)
    tau_s, timeout_s = (
        None if value is None else checked.duration(table, key, value, -1e300, 1e300)
        for (table, key), value in zip(DURATIONS, (pool.tau_s, ssd.timeout), strict=True)
    )
    try:
        memory = memory_options(
            pool.dram,
            dram_max=pool.dram_max,
            policy=pool.policy,
            tau_s=tau_s,
            max_blocks=pool.max_blocks,
            prefault=pool.prefault,
            evict_ahead=pool.evict_ahead,
            huge_pages=pool.huge_pages,
            arena=pool.arena,
        )
        tier = config.ssd_options(
            ssd.path,
            ssd_capacity=ssd.capacity,
            durability=ssd.durability,
            ssd_admit=ssd.admit,
            ssd_free_floor=ssd.free_floor,
            ssd_io_threads=ssd.io_threads,
            ssd_direct=ssd.direct,
            ssd_timeout=timeout_s,
        )
    except BadArgument as error:
        raise BadArgument(checked.labelled(str(error))) from None
    return {**memory, **tier, "salt": secrets.randbits(64), "clock": None}


def _server(checked: Checked, server: ServerOptions, dram: int) -> dict[str, Any]:
    most = CONNECTIONS_MAX
    return {
        "max_sources": checked.count("server", "max_connections", server.max_connections, 1, most),
        "lanes": checked.count("server", "lanes", server.lanes, 1, LANES_MAX),
        "staging_bytes": checked.size(
            "server", "staging", server.staging, STAGING_BYTES_MIN, STAGING_BYTES_MAX
        ),
        "pin_bytes": int(dram * checked.number("server", "pin_share", server.pin_share, 0.001, 1)),
    }


def _socket_path(checked: Checked, server: ServerOptions, environment: Mapping[str, str]) -> str:
    path = default_socket(environment) if server.socket is None else server.socket
    return check_socket_path(checked.label("server", "socket"), path)


def _socket_mode(checked: Checked, server: ServerOptions) -> int:
    if re.fullmatch("0?[0-7]{3}", server.socket_mode) is None:
        label = checked.label("server", "socket_mode")
        raise BadArgument(f"{label} is {server.socket_mode!r}; write it as for chmod, such as 0660")
    return int(server.socket_mode, 8)


def _tcp(checked: Checked, told: Config, has_tokens: bool) -> tuple[Any, ...]:
    server = told.server
    if server.listen is None:
        return ()
    label = checked.label("server", "listen")
    if told.tenants and not has_tokens:
        raise BadArgument(
            f"{label} is {server.listen!r}, but nobody could connect; over TCP a tenant is known by"
            " its token: set token_file for one of them"
        )
    addresses, beyond = _addresses(label, server.listen)
    if beyond is not None and not has_tokens:
        raise BadArgument(
            f"{label} is {server.listen!r}, which is {beyond}: other machines could connect, and"
            " who connects can read and replace every block; set token_file (openssl rand -hex 32"
            " makes a token), or listen on 127.0.0.1 or [::1]"
        )
    return addresses


def _http(
    checked: Checked, told: Config, tenants: Mapping[str, TenantPlan], admin: AdminPlan
) -> HttpPlan | None:
    http = told.http
    token = checked.token("http", http.token_file)
    _check_http_tokens(checked, token, tenants, admin)
    if http.listen is None:
        return None
    label = checked.label("http", "listen")
    _, beyond = _addresses(label, http.listen)
    has_token = token is not None or any(each.http_token for each in tenants.values())
    if beyond is not None and not has_token and not http.open:
        raise BadArgument(
            f"{label} is {http.listen!r}, which is {beyond}: other machines could read what this"
            " node does; set its token_file, or open = true if they may, or listen on 127.0.0.1 or"
            " [::1]"
        )
    if told.tenants and not has_token and not http.open:
        raise BadArgument(
            f"{label} is {http.listen!r}, but nobody could read it: where there are tenants a token"
            " says who reads; set [http] token_file for all of it, http_token_file of a tenant for"
            " its part, or open = true"
        )
    host, port = parse_host_and_port(label, http.listen, port_min=0)
    return HttpPlan(host, port, beyond is None, token, http.open)


def _check_http_tokens(
    checked: Checked,
    token: str | None,
    tenants: Mapping[str, TenantPlan],
    admin: AdminPlan,
) -> None:
    """HTTP sends them readable: one that is heard there must open nothing else."""
    closed = {each.token: f"tenant {name!r}" for name, each in tenants.items() if each.token}
    if admin.token is not None:
        closed[admin.token] = "administrators"
    shown = [("http", "token_file", token)]
    shown += [
        (f"{TENANTS}.{name}", "http_token_file", each.http_token) for name, each in tenants.items()
    ]
    seen: set[str] = set()
    for table, key, each in shown:
        if each is None:
            continue
        if len(each) > HTTP_TOKEN_BYTES_MAX or not (each.isascii() and each.isprintable()):
            raise BadArgument(
                f"{checked.label(table, key)} holds what no header of HTTP can carry; use up to"
                f" {HTTP_TOKEN_BYTES_MAX} letters, digits and signs of ASCII"
            )
        if each in closed or each in seen:
            whose = closed.get(each, "another reader")
            raise BadArgument(
                f"{checked.label(table, key)} holds the token of {whose}; HTTP sends tokens as they"
                " are, so it needs one of its own"
            )
        seen.add(each)


def _addresses(label: str, listen: str) -> tuple[tuple[Any, ...], str | None]:
    """(family, address) of each socket, and the first one that is not of this machine alone."""
    host, port = parse_host_and_port(label, listen, port_min=0)
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (OSError, UnicodeError) as error:
        raise BadArgument(f"{label} is {listen!r}: no such host: {error}") from None
    hosts = [str(address[0]) for _, _, _, _, address in found]
    far = [each for each in hosts if not ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    return (
        tuple(dict.fromkeys((family, address) for family, _, _, _, address in found)),
        far[0] if far else None,
    )
