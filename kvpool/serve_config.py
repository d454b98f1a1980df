"""What `kvpool serve` is told: by flags, the environment and a TOML file, in this order of weight.

An option has one name everywhere: `capacity` of the table [ssd] is the flag --ssd-capacity and the
variable KVPOOL_SERVE_SSD_CAPACITY; the options of [pool] and [server] go without their table's name
(docs/operating.md).

Promises:  1. a name that no option has is an error which says where it stands and what was likely
              meant;
           2. a value that cannot be meant is an error which names it as it was written;
           3. every effective value knows where it came from.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvpool.errors import BadArgument

ENVIRONMENT_PREFIX = "KVPOOL_SERVE_"
CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
FILE_BYTES_MAX = 1 << 20

Size = str | int


def _says(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[pool]: as the parameters of kvpool.open()."""

    dram: Annotated[Size, _says("Payload memory.")] = "1GiB"
    dram_max: Annotated[Size | None, _says("The most that a resize may ask for (4 x dram).")] = None
    policy: Annotated[str, _says("Who is evicted.")] = "temperature"
    tau_s: Annotated[float | None, _says("Half-life of heat (follows the workload).")] = None
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
    timeout: Annotated[float | None, _says("Seconds until a read is a miss (5).")] = None


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[server]: how clients reach the node, and how much each may take."""

    socket: Annotated[str | None, _says("Unix socket (the one that connect() looks for).")] = None
    socket_mode: Annotated[str, _says("Who may connect to it, as for chmod.")] = "0600"
    listen: Annotated[str | None, _says("HOST:PORT for TCP on this machine (none).")] = None
    token_file: Annotated[str | None, _says("Holds what a TCP client must say (nothing).")] = None
    max_clients: Annotated[int, _says("Clients at a time.")] = 512
    max_connections: Annotated[int, _says("Connections and lanes at a time.")] = 2048
    lanes: Annotated[int, _says("Puts under way at a time per client with shared memory.")] = 4
    staging: Annotated[Size, _says("Memory per such client for payload on its way.")] = "64MiB"
    pin_share: Annotated[float, _says("Share of the pool that one client may pin.")] = 0.25
    drain_timeout: Annotated[float, _says("Seconds for ending well after SIGTERM.")] = 4.0


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """[log]: what goes to stderr."""

    format: Annotated[str, _says("text (key=value) or json, a line each.")] = "text"
    level: Annotated[str, _says("debug, info, warning or error.")] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every option; a field is a table of the file."""

    pool: PoolOptions = PoolOptions()
    ssd: SsdOptions = SsdOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()


TABLES: dict[str, type[msgspec.Struct]] = {
    "pool": PoolOptions,
    "ssd": SsdOptions,
    "server": ServerOptions,
    "log": LogOptions,
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
    """Every option, in the order of the tables."""
    for table, struct in TABLES.items():
        for field in msgspec.structs.fields(struct):
            kind, (meta,) = field.type.__origin__, field.type.__metadata__
            name = _name_of(table, field.name)
            yield Option(table, field.name, name, kind, field.default, meta.description)


def load(
    path: str | None, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> Settings:
    """Reads what there is to read. Raises BadArgument; opens nothing but the file.

    path: a TOML file; by default the one that $KVPOOL_SERVE_CONFIG names, or none. flags: by
    Option.name, None where a flag was not given.
    """
    path = path or environment.get(CONFIG_VARIABLE) or None
    values: dict[tuple[str, str], Any] = {}
    origins = {(each.table, each.key): "default" for each in options()}
    labels: dict[tuple[str, str], str] = {}
    for option, value, origin in _given(path, environment, flags or {}):
        at = (option.table, option.key)
        is_typed = origin == path  # a variable or a flag is text, whatever its option's type is
        labels[at] = f"{path}: [{option.table}] {option.key}" if is_typed else origin
        values[at] = _converted(option, value, labels[at], is_typed=is_typed)
        origins[at] = origin
    tables = {
        name: struct(**{key: value for (table, key), value in values.items() if table == name})
        for name, struct in TABLES.items()
    }
    return Settings(Config(**tables), origins, labels)  # type: ignore[arg-type]  # by TABLES


def as_toml(settings: Settings) -> str:
    """The configuration as a file that would give it again, with where each value came from."""
    lines: list[str] = []
    for table in TABLES:
        lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        for key, value, origin in _shown(settings, table):
            text = f"# {key} =" if value is None else f"{key} = {_toml(value)}"
            lines.append(f"{text:<40} # {origin}")
    return "\n".join(lines)


def as_json(settings: Settings) -> str:
    """{table: {key: {"value": ..., "from": ...}}} on one line."""
    return json.dumps(
        {
            table: {
                key: {"value": value, "from": origin}
                for key, value, origin in _shown(settings, table)
            }
            for table in TABLES
        }
    )


def _name_of(table: str, key: str) -> str:
    if table in ("pool", "server") or key == "durability":  # kvpool.open() calls it that
        return key
    return table if (table, key) == ("ssd", "path") else f"{table}_{key}"


# --- reading -------------------------------------------------------------------------------------


def _given(
    path: str | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Iterator[tuple[Option, Any, str]]:
    """What was said, the weightiest last: option, value, origin."""
    if path is not None:
        yield from _from_file(path)
    yield from _from_environment(environment)
    by_name = {each.name: each for each in options()}
    for name, value in flags.items():
        if value is not None:
            yield by_name[name], value, by_name[name].flag


def _from_file(path: str) -> Iterator[tuple[Option, Any, str]]:
    known = {(each.table, each.key): each for each in options()}
    for table, content in _tables_of(path).items():
        if table not in TABLES:
            homes = [f"[{t}] {key}" for t, key in known if key == table]
            hint = f"it belongs into {homes[0]}" if homes else _nearest(table, TABLES)
            raise BadArgument(f"{path}: there is no table [{table}]; {hint}")
        if not isinstance(content, dict):
            raise BadArgument(f"{path}: {table} is a table; write [{table}] above its options")
        for key, value in content.items():
            if (table, key) not in known:
                hint = _nearest(key, [k for t, k in known if t == table])
                homes = [f"[{t}]" for t, k in known if k == key]
                hint = f"it belongs into {homes[0]}" if homes else hint
                raise BadArgument(f"{path}: [{table}] has no option {key!r}; {hint}")
            yield known[table, key], value, path


def _tables_of(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadArgument(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise BadArgument(f"{path}: more than {FILE_BYTES_MAX} bytes; this is no configuration")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise BadArgument(f"{path}: is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadArgument(f"{path}: is not TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[Option, Any, str]]:
    known = {each.variable: each for each in options()}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in known:
            hint = _nearest(variable, [*known, CONFIG_VARIABLE])
            raise BadArgument(f"${variable} is no option; {hint}")
        yield known[variable], environment[variable], f"${variable}"


def _converted(option: Option, value: Any, label: str, *, is_typed: bool) -> Any:
    try:
        return msgspec.convert(value, option.kind, strict=is_typed)
    except msgspec.ValidationError as error:
        raise BadArgument(f"{label} is {value!r}: {error}") from None


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


# --- showing -------------------------------------------------------------------------------------


def _shown(settings: Settings, table: str) -> Iterator[tuple[str, Any, str]]:
    for key, value in msgspec.structs.asdict(getattr(settings.config, table)).items():
        yield key, value, settings.origins[table, key]


def _toml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)  # of text, numbers and booleans TOML says the same
