"""From what `kvpool serve` was told to what it opens: every value checked, and whole.

Promises:  1. after plan() nothing is left to be refused but what the machine refuses;
           2. nobody beyond this host is listened for: tenants, which would keep users apart, do not
              exist yet.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool import config
from kvpool.address import check_socket_path, default_socket, parse_host_and_port
from kvpool.errors import BadArgument
from kvpool.local import memory_options
from kvpool.serve_config import PoolOptions, ServerOptions, Settings, SsdOptions, options
from kvpool.wire import TOKEN_BYTES_MAX

SIZES = (("pool", "dram"), ("pool", "dram_max"), ("ssd", "capacity"), ("ssd", "free_floor"))
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
CLIENTS_MAX = 16_384
CONNECTIONS_MAX = 65_536
LANES_MAX = 16
STAGING_BYTES_MIN = 1 << 20
STAGING_BYTES_MAX = 16 << 30
DRAIN_S_MAX = 4.5  # within the 5 s that SIGTERM is given

Struct = TypeVar("Struct")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a daemon opens. node, server: arguments of the core's Node.open and Server.create."""

    node: dict[str, Any]
    server: dict[str, Any]
    socket_path: str
    is_default_socket: bool
    socket_mode: int
    tcp: tuple[Any, ...]  # (family, address) of each socket to listen on
    token: str | None
    clients_max: int
    drain_s: float
    log_format: str
    log_level: str


def plan(settings: Settings, environment: Mapping[str, str]) -> Plan:
    """Raises BadArgument, which names the option as it was written. Reads the token's file."""
    checked = _Checked(settings)
    server = settings.config.server
    node = _node(checked, settings.config.pool, settings.config.ssd)
    log = settings.config.log
    checked.choice("log", "format", log.format, LOG_FORMATS)
    checked.choice("log", "level", log.level, LOG_LEVELS)
    return Plan(
        node=node,
        server=_server(checked, server, node["dram"]),
        socket_path=_socket_path(checked, server, environment),
        is_default_socket=server.socket is None,
        socket_mode=_socket_mode(checked, server),
        tcp=_tcp(checked, server),
        token=_token(checked, server),
        clients_max=checked.count("server", "max_clients", server.max_clients, 1, CLIENTS_MAX),
        drain_s=checked.number("server", "drain_timeout", server.drain_timeout, 0, DRAIN_S_MAX),
        log_format=log.format,
        log_level=log.level,
    )


class _Checked:
    """The checks of kvpool.config, with the option's name as its user wrote it."""

    def __init__(self, settings: Settings) -> None:
        self.label = settings.label
        self._labels = {each.name: settings.label(each.table, each.key) for each in options()}

    def labelled(self, text: str) -> str:
        """A message that begins with the name of an option, beginning as its user wrote it."""
        name, _, rest = text.partition(" ")
        return f"{self._labels[name]} {rest}" if name in self._labels else text

    def size(self, table: str, key: str, value: str | int, least: int, most: int) -> int:
        label = self.label(table, key)
        try:
            return config.check_size(label, value, least, most)
        except BadArgument as error:
            text = str(error)
            raise BadArgument(text if text.startswith(label) else f"{label}: {text}") from None

    def count(self, table: str, key: str, value: int, least: int, most: int) -> int:
        return config.check_count(self.label(table, key), value, least, most)

    def number(self, table: str, key: str, value: float, least: float, most: float) -> float:
        return config.check_number(self.label(table, key), value, least, most)

    def choice(self, table: str, key: str, value: str, choices: tuple[str, ...]) -> None:
        config.check_choice(self.label(table, key), value, choices)


def _node(checked: _Checked, pool: PoolOptions, ssd: SsdOptions) -> dict[str, Any]:
    """By the checks of kvpool.open(), whose errors begin with the option's name."""
    for table, key in SIZES:
        value = getattr(pool if table == "pool" else ssd, key)
        if value is not None:
            checked.size(table, key, value, 0, config.SIZE_BYTES_MAX)
    try:
        memory = memory_options(
            pool.dram,
            dram_max=pool.dram_max,
            policy=pool.policy,
            tau_s=pool.tau_s,
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
            ssd_timeout=ssd.timeout,
        )
    except BadArgument as error:
        raise BadArgument(checked.labelled(str(error))) from None
    return {**memory, **tier, "salt": secrets.randbits(64), "clock": None}


def _server(checked: _Checked, server: ServerOptions, dram: int) -> dict[str, Any]:
    most = CONNECTIONS_MAX
    return {
        "max_sources": checked.count("server", "max_connections", server.max_connections, 1, most),
        "lanes": checked.count("server", "lanes", server.lanes, 1, LANES_MAX),
        "staging_bytes": checked.size(
            "server", "staging", server.staging, STAGING_BYTES_MIN, STAGING_BYTES_MAX
        ),
        "pin_bytes": int(dram * checked.number("server", "pin_share", server.pin_share, 0.001, 1)),
    }


def _socket_path(checked: _Checked, server: ServerOptions, environment: Mapping[str, str]) -> str:
    path = default_socket(environment) if server.socket is None else server.socket
    return check_socket_path(checked.label("server", "socket"), path)


def _socket_mode(checked: _Checked, server: ServerOptions) -> int:
    if re.fullmatch("0?[0-7]{3}", server.socket_mode) is None:
        label = checked.label("server", "socket_mode")
        raise BadArgument(f"{label} is {server.socket_mode!r}; write it as for chmod, such as 0660")
    return int(server.socket_mode, 8)


def _tcp(checked: _Checked, server: ServerOptions) -> tuple[Any, ...]:
    if server.listen is None:
        return ()
    label = checked.label("server", "listen")
    host, port = parse_host_and_port(label, server.listen, port_min=0)
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (OSError, UnicodeError) as error:
        raise BadArgument(f"{label} is {server.listen!r}: no such host: {error}") from None
    for _, _, _, _, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise BadArgument(
                f"{label} is {server.listen!r}, which is {address[0]}: other machines could"
                " connect, and who connects can read and replace every block, as nothing keeps"
                " users apart yet; listen on 127.0.0.1 or [::1], and carry it further with a"
                " tunnel that knows its users, such as ssh -L"
            )
    return tuple(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _token(checked: _Checked, server: ServerOptions) -> str | None:
    if server.token_file is None:
        return None
    label = checked.label("server", "token_file")
    if server.listen is None:
        raise BadArgument(
            f"{label} is {server.token_file!r}, but nothing is listened for on TCP; set listen"
            " (who may use the unix socket is for socket_mode to say)"
        )
    try:
        with open(server.token_file, encoding="utf-8") as file:
            token = file.read(TOKEN_BYTES_MAX + 2).strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise BadArgument(f"{label} is {server.token_file!r}: cannot be read: {reason}") from None
    if not token or len(token.encode()) > TOKEN_BYTES_MAX:
        raise BadArgument(
            f"{label} is {server.token_file!r}: a token is text of 1..{TOKEN_BYTES_MAX} bytes"
        )
    return token
