"""From the table [cluster] to what a node joins, every value checked.

Promises:  1. a node never tells the others an address at which they would meet somebody else, or
              nobody: unspecified, multicast, or of its own loopback where others are not on it;
           2. nobody beyond this host is a member without a token;
           3. an option that would have no effect is refused.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool.address import host_and_port, parse_host_and_port
from kvpool.cluster import core
from kvpool.cluster.access import Access, tls_context
from kvpool.cluster.core import CoreLimits
from kvpool.cluster.http_post import Endpoint
from kvpool.cluster.lanes import LanePlan, lane_plan
from kvpool.cluster.member import WEIGHT_MAX
from kvpool.cluster.names import Names, check_cluster, check_prefix
from kvpool.config import check_folder
from kvpool.errors import BadArgument
from kvpool.serve_options import ClusterOptions, Settings
from kvpool.tenants.plans import AdminPlan, Checked, TenantPlan

TABLE = "cluster"
DEFAULT_NAME = "default"
TTL_S_MIN, TTL_S_MAX = 2, 300  # etcd gives no lease of less than 2 s
ENDPOINTS_MAX = 16
STATIC_MAX = 256
SYSTEM_STATE = "/var/lib"
_BOTH_WAYS = ("user", "password_file", "ca_file", "cert_file", "key_file", "prefix", "ttl")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """etcd or static has something, never both. advertise: port 0 is for whatever port is bound."""

    name: str
    prefix: str
    etcd: tuple[Endpoint, ...]
    static: tuple[str, ...]
    advertise: tuple[str, int]
    weight: int
    token: str | None = field(repr=False)
    ttl_s: int
    access: Access
    state_dir: str
    limits: CoreLimits
    lane: LanePlan | None = None

    @property
    def names(self) -> Names:
        return Names(self.prefix, self.name)


def cluster_plan(
    settings: Settings, environment: Mapping[str, str], listen: tuple[Any, ...]
) -> ClusterPlan | None:
    """None: the node is alone. listen: (family, address) of each TCP socket of the node.

    Raises BadArgument, which begins with the option as it was written. Reads files, asks for hosts.
    """
    told = settings.config.cluster
    if told == ClusterOptions():
        return None
    checked = _CheckedCluster(settings, environment)
    etcd, is_tls = checked.etcd()
    static = checked.static()
    checked.check_choice(etcd, static)
    name = check_cluster(checked.label("name"), told.name or DEFAULT_NAME)
    advertise = checked.advertise(listen, _hosts_of(etcd, static))
    own = host_and_port(*advertise)
    if static and own not in static:
        raise BadArgument(
            f"{checked.label('static')} does not have {own}, which is this node; every member has"
            " the same list, with itself in it: add it, or say by advertise which one it is"
        )
    return ClusterPlan(
        name=name,
        prefix=check_prefix(checked.label("prefix"), told.prefix),
        etcd=etcd,
        static=static,
        advertise=advertise,
        weight=checked.count("weight", told.weight, WEIGHT_MAX),
        token=checked.token(advertise),
        ttl_s=checked.ttl(),
        access=checked.access(is_tls),
        state_dir=checked.state_dir(name),
        limits=checked.limits(),
        lane=checked.lane(),
    )


def check_token_apart(
    settings: Settings,
    plan: ClusterPlan | None,
    tenants: Mapping[str, TenantPlan],
    admin: AdminPlan,
) -> None:
    """Who proves the token of members may ask for every tenant's blocks: it is nobody else's."""
    if plan is None or plan.token is None:
        return
    owners = [(each.token, f"the tenant {name!r}") for name, each in tenants.items()]
    owners += [(each.http_token, "a reader of HTTP") for each in tenants.values()]
    owners += [(admin.token, "administrators")]
    for token, owner in owners:
        if token == plan.token:
            label = settings.label(TABLE, "token_file")
            raise BadArgument(f"{label} holds the token of {owner}; members need one of their own")


class _CheckedCluster:
    """The checks of one option each."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._environment = environment
        self._told = settings.config.cluster
        self._checked = Checked(settings)

    def label(self, key: str) -> str:
        return self._settings.label(TABLE, key)

    def count(self, key: str, value: int, most: int) -> int:
        return self._checked.count(TABLE, key, value, 1, most)

    def etcd(self) -> tuple[tuple[Endpoint, ...], bool]:
        """The endpoints, and whether they speak TLS."""
        label, told = self.label("etcd"), self._told
        found: list[Endpoint] = []
        schemes = set()
        for text in _listed(label, told.etcd, ENDPOINTS_MAX):
            scheme, mark, rest = text.partition("://")
            schemes.add(scheme if mark else "")
            if mark and scheme not in ("http", "https"):
                raise BadArgument(f"{label} has {text!r}; write host:port, or https://host:port")
            endpoint = Endpoint(*parse_host_and_port(label, (rest if mark else text).rstrip("/")))
            if endpoint in found:
                raise BadArgument(f"{label} has {text!r} twice")
            found.append(endpoint)
        if {"http", "https"} <= schemes:
            raise BadArgument(
                f"{label} has http:// beside https://; all of one etcd speak the same"
            )
        has_files = told.ca_file is not None or told.cert_file is not None
        if "http" in schemes and has_files:
            raise BadArgument(
                f"{label} says http://, but there is a ca_file or cert_file; leave out one of them"
            )
        return tuple(found), "https" in schemes or has_files

    def static(self) -> tuple[str, ...]:
        label = self.label("static")
        found: list[str] = []
        for text in _listed(label, self._told.static, STATIC_MAX):
            host, port = parse_host_and_port(label, text)
            _check_host(label, text, host)
            address = host_and_port(host, port)
            if address in found:
                raise BadArgument(f"{label} has {text!r} twice")
            found.append(address)
        return tuple(found)

    def check_choice(self, etcd: tuple[Endpoint, ...], static: tuple[str, ...]) -> None:
        """etcd or a list; and nothing is said that the choice has no use for."""
        told = self._told
        if etcd and static:
            raise BadArgument(
                f"{self.label('static')} is {told.static!r}, but there is an etcd, too; members"
                " come from one of them: leave one out"
            )
        said = [
            key for key in told.__struct_fields__
            if getattr(told, key) != getattr(ClusterOptions(), key)
        ]  # fmt: skip
        if not etcd and not static:
            raise BadArgument(
                f"{self.label(said[0])} is {getattr(told, said[0])!r}, but there is no cluster; set"
                " etcd (where members are found), or static (a list of them)"
            )
        idle = (*_BOTH_WAYS, "weight") if static else ()
        for key in said:
            if key in idle:
                raise BadArgument(
                    f"{self.label(key)} is {getattr(told, key)!r}, but members come from a list;"
                    " leave it out, or set etcd instead of static"
                )

    def advertise(self, listen: tuple[Any, ...], others: list[str]) -> tuple[str, int]:
        """Where others reach this node: as it says, else where it listens."""
        if not listen:
            raise BadArgument(
                f"{self.label('static' if self._told.static else 'etcd')} makes this node a member,"
                " but members reach it by TCP; set listen (--listen HOST:PORT)"
            )
        text, label = self._told.advertise, self.label("advertise")
        if text is None:
            text, label = str(self._settings.config.server.listen), self.label_of_listen()
        host, port = parse_host_and_port(label, text, port_min=0)
        bound = {address[1] for _, address in listen}
        if port == 0 and bound != {0}:
            raise BadArgument(f"{label} has the port 0; write the one that others can connect to")
        hint = "; set advertise to an address at which the other members reach this node"
        _check_host(label, text, host, hint)
        if is_loopback(host, label) and not all(is_loopback(each, label) for each in others):
            raise BadArgument(
                f"{label} is {text!r}, which is on every machine that machine itself{hint}"
            )
        return host, port

    def label_of_listen(self) -> str:
        return self._settings.label("server", "listen")

    def token(self, advertise: tuple[str, int]) -> str | None:
        token = self._checked.token(TABLE, self._told.token_file)
        label = self.label("advertise") if self._told.advertise else self.label_of_listen()
        if token is None and not is_loopback(advertise[0], label):
            raise BadArgument(
                f"{label} is {host_and_port(*advertise)!r}, which other machines can reach: a"
                " member reads every block; set [cluster] token_file, the same for all members"
                " (openssl rand -hex 32 makes a token)"
            )
        return token

    def ttl(self) -> int:
        """etcd counts whole seconds."""
        seconds = self._checked.duration(TABLE, "ttl", self._told.ttl, TTL_S_MIN, TTL_S_MAX)
        return math.ceil(seconds)

    def access(self, is_tls: bool) -> Access:
        told = self._told
        if (told.user is None) != (told.password_file is None):
            there, missing = "user", "password_file"
            if told.user is None:
                there, missing = missing, there
            value = getattr(told, there)
            raise BadArgument(f"{self.label(there)} is {value!r}; set {missing}, too")
        if (told.cert_file is None) != (told.key_file is None):
            there, missing = "cert_file", "key_file"
            if told.cert_file is None:
                there, missing = missing, there
            value = getattr(told, there)
            raise BadArgument(f"{self.label(there)} is {value!r}; set {missing}, too")
        password = self._checked.token(TABLE, told.password_file, "password_file")
        if not is_tls:
            return Access(None, told.user, password)
        try:
            tls = tls_context(told.ca_file, told.cert_file, told.key_file)
        except BadArgument as error:
            key, _, rest = str(error).partition(" ")
            raise BadArgument(f"{self.label(key)} {rest}") from None
        return Access(tls, told.user, password)

    def lane(self) -> LanePlan | None:
        is_sealed = self._settings.config.pool.arena == "sealed"
        return lane_plan(self.label("ucx"), self._told.ucx, self._environment, is_sealed=is_sealed)

    def state_dir(self, name: str) -> str:
        told = self._told.state_dir
        if told is not None:
            return check_folder(self.label("state_dir"), told)
        return os.path.join(_state_home(self._environment), "kvpool", "cluster", name)

    def limits(self) -> CoreLimits:
        told = self._told
        rate = told.replica_bytes_per_s
        if isinstance(rate, str):
            rate = rate.removesuffix("/s").rstrip()
        return CoreLimits(
            directory_bytes=self._checked.size(
                TABLE,
                "directory_bytes",
                told.directory_bytes,
                core.DIRECTORY_BYTES_MIN,
                core.DIRECTORY_BYTES_MAX,
            ),
            max_replicas=self.count("max_replicas", told.max_replicas, core.REPLICAS_MAX),
            replica_bytes_per_s=self._checked.size(
                TABLE,
                "replica_bytes_per_s",
                rate,
                core.REPLICA_BYTES_PER_S_MIN,
                core.REPLICA_BYTES_PER_S_MAX,
            ),
        )


def is_loopback(host: str, label: str = "host") -> bool:
    """Whether all addresses of a host are of its own loopback. Raises BadArgument: no such host."""
    return all(address.is_loopback for address in _addresses(label, host))


def _check_host(label: str, text: str, host: str, hint: str = "") -> None:
    """Refuses what nobody can connect to. A name is looked at when it has to be."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return
    what = ""
    if address.is_unspecified:
        what = "every address of a machine, and none that another one can connect to"
    elif address.is_multicast or address == ipaddress.ip_address("255.255.255.255"):
        what = "an address of many machines at a time"
    if what:
        raise BadArgument(f"{label} is {text!r}, which is {what}{hint}")


def _addresses(label: str, host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host.partition("%")[0])]
    except ValueError:
        pass
    if host == "localhost":
        return [ipaddress.ip_address("127.0.0.1")]
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadArgument(f"{label} is {host!r}: no such host: {error}") from None
    return [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows]


def _hosts_of(etcd: tuple[Endpoint, ...], static: tuple[str, ...]) -> list[str]:
    """Of etcd and of the listed members: who is on another machine shows where members are."""
    return [each.host for each in etcd] + [
        parse_host_and_port("static", each)[0] for each in static
    ]


def _listed(label: str, told: str | list[str] | None, most: int) -> list[str]:
    """A flag and a variable have them with commas between."""
    if told is None:
        return []
    found = told.split(",") if isinstance(told, str) else told
    texts = [each.strip() for each in found]
    if not 1 <= len(texts) <= most or not all(texts):
        raise BadArgument(f"{label} is {told!r}; write 1..{most} of host:port, with commas between")
    return texts


def _state_home(environment: Mapping[str, str]) -> str:
    if os.access(SYSTEM_STATE, os.W_OK):
        return SYSTEM_STATE
    home = environment.get("XDG_STATE_HOME", "")
    return home or os.path.join(environment.get("HOME") or "/", ".local", "state")
