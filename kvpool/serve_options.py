"""The options of `kvpool serve`: their names, types, defaults and what each is.

An option has one name everywhere: `capacity` of the table [ssd] is the flag --ssd-capacity and the
variable KVPOOL_SERVE_SSD_CAPACITY; the options of [pool] and [server] go without their table's name
(docs/operating.md). A tenant has a table of its own, [tenants.NAME], in the file alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

ENVIRONMENT_PREFIX = "KVPOOL_SERVE_"
TENANTS = "tenants"

Size = str | int
Duration = float | str
Hosts = str | list[str]  # a flag and a variable have them with commas between


def _says(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[pool]: as the parameters of kvpool.open()."""

    dram: Annotated[Size, _says("Payload memory.")] = "1GiB"
    dram_max: Annotated[Size | None, _says("The most that a resize may ask for (4 x dram).")] = None
    policy: Annotated[str, _says("Who is evicted.")] = "temperature"
    tau_s: Annotated[Duration | None, _says("Half-life of heat (follows the workload).")] = None
    max_blocks: Annotated[int | None, _says("Limit of blocks in DRAM (as many as fit).")] = None
    prefault: Annotated[str, _says("Memory made ready early: off, ahead, all.")] = "ahead"
    evict_ahead: Annotated[float, _says("Share of a full pool that is kept free.")] = 1 / 128
    huge_pages: Annotated[bool, _says("Use them where they come quickly.")] = True
    arena: Annotated[
        str, _says("elastic, or sealed: fixed in size, and no process can write to it.")
    ] = "elastic"


class SsdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[ssd]: as the parameters of kvpool.open() that begin with ssd_."""

    path: Annotated[str | None, _says("Folder of an SSD tier (none).")] = None
    capacity: Annotated[Size | None, _says("Bytes of its files together (as it was).")] = None
    durability: Annotated[str, _says("async, durable or relaxed.")] = "async"
    admit: Annotated[str | None, _says("Blocks worth writing: second_use or all.")] = None
    free_floor: Annotated[Size | None, _says("Left free on the filesystem (1GiB).")] = None
    io_threads: Annotated[int | None, _says("Reads and writes in flight (8).")] = None
    direct: Annotated[bool | None, _says("Go past the page cache (yes).")] = None
    timeout: Annotated[Duration | None, _says("Seconds until a read is a miss (5).")] = None


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[server]: how clients reach the node, and how much each may take."""

    socket: Annotated[str | None, _says("Unix socket (the one that connect() looks for).")] = None
    socket_mode: Annotated[str, _says("Who may connect to it, as for chmod.")] = "0600"
    listen: Annotated[str | None, _says("HOST:PORT for TCP (none).")] = None
    token_file: Annotated[str | None, _says("Holds the token that a TCP client proves (none).")] = (
        None
    )
    max_clients: Annotated[int, _says("Clients at a time.")] = 512
    max_connections: Annotated[int, _says("Connections and lanes at a time.")] = 2048
    lanes: Annotated[int, _says("Puts under way at a time per client with shared memory.")] = 4
    staging: Annotated[Size, _says("Memory per such client for payload on its way.")] = "64MiB"
    pin_share: Annotated[float, _says("Share of the pool that one client may pin.")] = 0.25
    drain_timeout: Annotated[Duration, _says("Seconds for ending well after SIGTERM.")] = 4.0


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[log]: what goes to stderr."""

    format: Annotated[str, _says("text (key=value) or json, a line each.")] = "text"
    level: Annotated[str, _says("debug, info, warning or error.")] = "info"


class AdminOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[admin]: who may resize, reload and see all tenants."""

    token_file: Annotated[str | None, _says("Holds the token of administrators (none).")] = None
    same_uid: Annotated[bool, _says("The daemon's own user is one, not root alone.")] = True


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[http]: metrics and the status page."""

    listen: Annotated[str | None, _says("HOST:PORT for HTTP (none).")] = None
    token_file: Annotated[str | None, _says("Holds what a reader must say (nothing).")] = None
    open: Annotated[bool, _says("Everybody who reaches it sees all, without a token.")] = False


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[cluster]: where the other members are found, and what this one is to them."""

    name: Annotated[str | None, _says("Of the cluster (default).")] = None
    etcd: Annotated[
        Hosts | None, _says("HOST:PORT of each etcd that knows the members (none).")
    ] = None
    static: Annotated[Hosts | None, _says("HOST:PORT of each member, without etcd (none).")] = None
    prefix: Annotated[str, _says("What its keys in etcd begin with.")] = "/kvpool"
    advertise: Annotated[str | None, _says("HOST:PORT that members connect to (listen).")] = None
    weight: Annotated[int, _says("Share of the directory, beside those of others.")] = 1
    token_file: Annotated[str | None, _says("Holds the token that members prove (none).")] = None
    ttl: Annotated[Duration, _says("Seconds of silence until a member is gone.")] = 10.0
    user: Annotated[str | None, _says("Of etcd (none).")] = None
    password_file: Annotated[str | None, _says("Holds that user's password (none).")] = None
    ca_file: Annotated[str | None, _says("Who signs for etcd, in PEM (the system's).")] = None
    cert_file: Annotated[str | None, _says("Certificate to show to etcd (none).")] = None
    key_file: Annotated[str | None, _says("Its key (none).")] = None
    state_dir: Annotated[str | None, _says("Keeps the id of the node (in /var/lib).")] = None
    directory_bytes: Annotated[Size, _says("Of this node's part of the directory.")] = "64MiB"
    max_replicas: Annotated[int, _says("Members that a hot block is to be at; 1: no copies.")] = 2
    replica_bytes_per_s: Annotated[Size, _says("Copies asked for, and fetched, a second.")] = (
        "64MiB"
    )
    ucx: Annotated[str, _says("Read members' memory over RDMA: auto, off, or on.")] = "auto"


class TenantOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[tenants.NAME]: who it is, and what it may take."""

    uids: Annotated[list[int] | None, _says("Users of this machine that are it.")] = None
    token_file: Annotated[str | None, _says("Holds its token.")] = None
    http_token_file: Annotated[str | None, _says("Shows its part of [http] (none).")] = None
    dram_min: Annotated[Size | None, _says("Payload memory that it always has (2MiB).")] = None
    dram_max: Annotated[Size | None, _says("The most that it gets (all there is).")] = None
    ssd_capacity: Annotated[Size | None, _says("Of its SSD tier (an equal share).")] = None
    max_clients: Annotated[int | None, _says("Clients at a time (those of the server).")] = None
    put_rate: Annotated[Size | None, _says("Bytes it may put in a second (no limit).")] = None
    get_rate: Annotated[Size | None, _says("Bytes it may get in a second (no limit).")] = None
    pin_share: Annotated[float | None, _says("Share of its memory that a client may pin.")] = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every option; a field is a table of the file, and `tenants` one of tables."""

    pool: PoolOptions = PoolOptions()
    ssd: SsdOptions = SsdOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()
    admin: AdminOptions = AdminOptions()
    http: HttpOptions = HttpOptions()
    cluster: ClusterOptions = ClusterOptions()
    tenants: dict[str, TenantOptions] = {}


TABLES: dict[str, type[msgspec.Struct]] = {
    "pool": PoolOptions,
    "ssd": SsdOptions,
    "server": ServerOptions,
    "log": LogOptions,
    "admin": AdminOptions,
    "http": HttpOptions,
    "cluster": ClusterOptions,
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its place in the file, its name elsewhere (with _), its type and what it is."""

    table: str
    key: str
    name: str
    kind: Any
    default: Any
    description: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration; for each option where its value came from and how it was called there."""

    config: Config
    origins: dict[tuple[str, str], str]
    labels: dict[tuple[str, str], str]

    def label(self, table: str, key: str) -> str:
        """How an error should name the option: as its user wrote it."""
        return self.labels.get((table, key), f"{table}.{key}")


def options() -> Iterator[Option]:
    """Every option but those of tenants, in the order of the tables."""
    for table in TABLES:
        yield from options_of(table)


def options_of(table: str) -> Iterator[Option]:
    """Those of a table: one of TABLES, or tenants.NAME."""
    struct = TenantOptions if is_tenant(table) else TABLES[table]
    for field in msgspec.structs.fields(struct):
        kind, (meta,) = field.type.__origin__, field.type.__metadata__
        name = _name_of(table, field.name)
        yield Option(table, field.name, name, kind, field.default, meta.description)


def is_tenant(table: str) -> bool:
    return table.startswith(f"{TENANTS}.")


def _name_of(table: str, key: str) -> str:
    if table in ("pool", "server") or key == "durability":  # kvpool.open() calls it that
        return key
    return table if (table, key) in (("ssd", "path"), ("http", "listen")) else f"{table}_{key}"
