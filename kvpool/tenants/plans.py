"""From the tables of tenants and administrators to who they are and what they may take.

Promises:  two tenants share neither a user nor a token: who comes is one of them or nobody.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool import config
from kvpool.address import read_token
from kvpool.errors import BadArgument
from kvpool.serve_options import TENANTS, Config, Settings, TenantOptions, options
from kvpool.tenants.budget import UNIT_BYTES, first_limits

DEFAULT_TENANT = "default"
CLIENTS_MAX = 16_384
RATE_MAX = 1 << 50
UID_MAX = (1 << 32) - 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may take. Bytes; rates are bytes per second, 0 for as fast as it goes."""

    dram_min: int
    dram_max: int
    ssd_capacity: int
    max_clients: int
    put_bytes_per_s: int
    get_bytes_per_s: int
    pin_bytes: int  # of one client


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """One tenant. uids None: every user who can reach the socket. node, server: as in Plan."""

    name: str
    uids: frozenset[int] | None
    token: str | None = field(repr=False)
    http_token: str | None = field(repr=False)
    limits: Limits
    node: dict[str, Any]
    server: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdminPlan:
    """Who may do what concerns all tenants, beside root."""

    token: str | None = field(repr=False)
    same_uid: bool


class Checked:
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

    def duration(
        self, table: str, key: str, value: float | str, least: float, most: float
    ) -> float:
        label = self.label(table, key)
        try:
            seconds = config.parse_duration(value)
        except BadArgument as error:
            raise BadArgument(f"{label}: {error}") from None
        return config.check_number(label, seconds, least, most)

    def rate(self, table: str, key: str, value: str | int | None) -> int:
        """Bytes per second; 0 is no limit."""
        if value is None:
            return 0
        size = value.removesuffix("/s").rstrip() if isinstance(value, str) else value
        return self.size(table, key, size, 1, RATE_MAX)

    def token(self, table: str, path: str | None, key: str = "token_file") -> str | None:
        return None if path is None else read_token(self.label(table, key), path)

    def choice(self, table: str, key: str, value: str, choices: tuple[str, ...]) -> None:
        config.check_choice(self.label(table, key), value, choices)


class Tenants:
    """From the tables of tenants to their plans; without any there is one, for everybody."""

    def __init__(
        self, checked: Checked, told: Config, node: dict[str, Any], server: dict[str, Any]
    ) -> None:
        self._checked = checked
        self._told = told
        self._node = node
        self._server = server
        self._options = told.tenants or {DEFAULT_TENANT: TenantOptions()}
        self._check_default_token()

    def plans(self, clients_max: int) -> dict[str, TenantPlan]:
        if not self._told.tenants:  # its node has all there is, and grows as the pool does
            ranges = {DEFAULT_TENANT: (UNIT_BYTES, self._node["dram_max"])}
            shares = {DEFAULT_TENANT: self._node["dram"]}
        else:
            ranges = {name: self._range(name, each) for name, each in self._options.items()}
            budget = self._node["dram"] // UNIT_BYTES * UNIT_BYTES
            least = sum(low for low, _ in ranges.values())
            if least > budget:
                raise BadArgument(
                    f"{self._checked.label('pool', 'dram')} is {self._node['dram']} bytes, but the"
                    f" dram_min of all tenants together is {least}; give more, or ask for less"
                )
            split = first_limits(budget, list(ranges.values()))
            shares = dict(zip(ranges, split, strict=True))
        capacities = self._capacities()
        return {
            name: self._plan(name, (shares[name], *ranges[name]), capacities[name], clients_max)
            for name in self._options
        }

    def _plan(
        self, name: str, dram: tuple[int, int, int], capacity: int, clients_max: int
    ) -> TenantPlan:
        checked, table, told = self._checked, f"{TENANTS}.{name}", self._options[name]
        share, least, most = dram
        pin_share = self._told.server.pin_share
        if told.pin_share is not None:
            pin_share = checked.number(table, "pin_share", told.pin_share, 0.001, 1)
        clients = clients_max
        if told.max_clients is not None:
            clients = checked.count(table, "max_clients", told.max_clients, 1, CLIENTS_MAX)
        limits = Limits(
            dram_min=least,
            dram_max=most,
            ssd_capacity=capacity,
            max_clients=clients,
            put_bytes_per_s=checked.rate(table, "put_rate", told.put_rate),
            get_bytes_per_s=checked.rate(table, "get_rate", told.get_rate),
            pin_bytes=int(share * pin_share),
        )
        return TenantPlan(
            name=name,
            uids=self._uids(table, told),
            token=self._token(name, told),
            http_token=self._checked.token(table, told.http_token_file, "http_token_file"),
            limits=limits,
            node=self._node_of(name, share, most, capacity),
            server={**self._server, "pin_bytes": limits.pin_bytes},
        )

    def _range(self, name: str, told: TenantOptions) -> tuple[int, int]:
        """The least and the most memory, in whole units."""
        table, most = f"{TENANTS}.{name}", self._node["dram_max"]
        least = UNIT_BYTES
        if told.dram_max is not None:
            most = self._checked.size(table, "dram_max", told.dram_max, UNIT_BYTES, most)
        if told.dram_min is not None:
            least = self._checked.size(table, "dram_min", told.dram_min, UNIT_BYTES, most)
        return -(-least // UNIT_BYTES) * UNIT_BYTES, most // UNIT_BYTES * UNIT_BYTES

    def _node_of(self, name: str, share: int, most: int, capacity: int) -> dict[str, Any]:
        node = {**self._node, "dram": share, "dram_max": most, "ssd_capacity": capacity}
        if node["sealed"]:  # of one size: the shares stay what they are
            node["dram_max"] = share
        node["salt"] = secrets.randbits(64)
        if name != DEFAULT_TENANT and node["ssd"]:
            node["ssd"] = os.path.join(node["ssd"], TENANTS, name)
        return node

    def _capacities(self) -> dict[str, int]:
        """Of each tenant's SSD tier: what its table says, else an equal share of what is left."""
        said = {}
        for name, told in self._options.items():
            if told.ssd_capacity is not None:
                table = f"{TENANTS}.{name}"
                if not self._node["ssd"]:
                    label = self._checked.label(table, "ssd_capacity")
                    raise BadArgument(
                        f"{label} is {told.ssd_capacity!r}, but there is no SSD tier; set path"
                    )
                most = config.SSD_BYTES_MAX
                said[name] = self._checked.size(table, "ssd_capacity", told.ssd_capacity, 1, most)
        left = max(0, self._node["ssd_capacity"] - sum(said.values()))
        others = len(self._options) - len(said)
        return {name: said.get(name, left // max(1, others)) for name in self._options}

    def _uids(self, table: str, told: TenantOptions) -> frozenset[int] | None:
        if told.uids is None:
            return None if set(self._options) == {DEFAULT_TENANT} else frozenset()
        label = self._checked.label(table, "uids")
        return frozenset(config.check_count(label, uid, 0, UID_MAX) for uid in told.uids)

    def _token(self, name: str, told: TenantOptions) -> str | None:
        if name == DEFAULT_TENANT and told.token_file is None:
            return self._checked.token("server", self._told.server.token_file)
        return self._checked.token(f"{TENANTS}.{name}", told.token_file)

    def _check_default_token(self) -> None:
        server = self._told.server
        if server.token_file is None:
            return
        label = self._checked.label("server", "token_file")
        if server.listen is None:
            raise BadArgument(
                f"{label} is {server.token_file!r}, but nothing is listened for on TCP; set listen"
                " (who may use the unix socket is for socket_mode to say)"
            )
        if DEFAULT_TENANT not in self._options:
            raise BadArgument(
                f"{label} is the token of the tenant {DEFAULT_TENANT!r}, which has no table; give"
                f" each tenant a token_file, or write [{TENANTS}.{DEFAULT_TENANT}]"
            )
        if self._options[DEFAULT_TENANT].token_file is not None:
            raise BadArgument(
                f"{label} and [{TENANTS}.{DEFAULT_TENANT}] token_file are the same thing; leave one"
                " of them out"
            )


def check_apart(checked: Checked, tenants: Mapping[str, TenantPlan], admin: AdminPlan) -> None:
    owner_of_uid: dict[int, str] = {}
    owner_of_token: dict[str, str] = {}
    for name, each in tenants.items():
        for uid in each.uids or ():
            if uid in owner_of_uid:
                label = checked.label(f"{TENANTS}.{name}", "uids")
                raise BadArgument(
                    f"{label} has {uid}, which is the tenant {owner_of_uid[uid]!r} already; a user"
                    " is one tenant: give the others a token"
                )
            owner_of_uid[uid] = name
        if each.token is not None:
            if each.token in owner_of_token:
                label = checked.label(f"{TENANTS}.{name}", "token_file")
                raise BadArgument(
                    f"{label} holds the token of the tenant {owner_of_token[each.token]!r}; each"
                    " needs one of its own"
                )
            owner_of_token[each.token] = name
    if admin.token in owner_of_token:
        label = checked.label("admin", "token_file")
        raise BadArgument(
            f"{label} holds the token of the tenant {owner_of_token[admin.token]!r}; administrators"
            " need one of their own"
        )
