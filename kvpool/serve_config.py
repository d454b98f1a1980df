"""What `kvpool serve` is told: by flags, the environment and a TOML file, in this order of weight.

Promises:  1. a name that no option has is an error which says where it stands and what was likely
              meant;
           2. a value that cannot be meant is an error which names it as it was written;
           3. every effective value knows where it came from;
           4. faults() finds in one go everything that load() and plan() would refuse in a file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvpool import serve_plan
from kvpool.address import TENANT
from kvpool.errors import BadArgument
from kvpool.serve_options import (
    ENVIRONMENT_PREFIX,
    TABLES,
    TENANTS,
    Config,
    Option,
    Settings,
    TenantOptions,
    is_tenant,
    options,
    options_of,
)
from kvpool.serve_toml import lines_of

__all__ = ["Fault", "as_json", "as_toml", "faults", "load", "options"]

CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
FILE_BYTES_MAX = 1 << 20
TENANTS_MAX = 64
_TOML_LINE = re.compile(r"\(at line (\d+), column \d+\)")

At = tuple[str, str]  # table and key; "" is the table itself
Given = tuple[Option, Any, str]  # its value, and where that came from


class Fault(NamedTuple):
    """One thing that is wrong with a file. line: None where it is not sure."""

    line: int | None
    where: str  # as it would be written: [pool] dram
    message: str
    suggestion: str  # "" if there is none


class _Wrong(BadArgument):
    """One thing that is wrong, and where."""

    def __init__(self, at: At, text: str) -> None:
        super().__init__(text)
        self.at = at


def load(
    path: str | None, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> Settings:
    """Reads what there is to read. Raises BadArgument; opens nothing but the file.

    path: a TOML file; by default the one that $KVPOOL_SERVE_CONFIG names, or none. flags: by
    Option.name, None where a flag was not given.
    """
    path = path or environment.get(CONFIG_VARIABLE) or None
    given: list[Given] = []
    if path is not None:
        given, wrong = _from_tables(path, _content_of(path))
        if wrong:
            raise wrong[0]
    given += _from_environment(environment)
    by_name = {each.name: each for each in options()}
    for name, value in (flags or {}).items():
        if value is not None:
            given.append((by_name[name], value, by_name[name].flag))
    return _settings(path, given)


def faults(path: str, environment: Mapping[str, str] | None = None) -> list[Fault]:
    """Everything that is wrong with a file, in the order of its lines. Raises nothing.

    Reads what the file names: token files, hosts. environment: that of the daemon.
    """
    try:
        text = _text_of(path)
        lines = lines_of(text)
        given, wrong = _from_tables(path, _parsed(path, text))
    except BadArgument as error:
        return [_fault(path, error, {}, ("", ""))]
    found = [_fault(path, each, lines, each.at) for each in wrong]
    while True:
        try:
            settings = _settings(path, given)
            serve_plan.plan(settings, os.environ if environment is None else environment)
        except BadArgument as error:
            at = error.at if isinstance(error, _Wrong) else _place_of(error, settings)
            found.append(_fault(path, error, lines, at))
        else:
            break
        left = [each for each in given if (each[0].table, each[0].key) != at]
        if len(left) == len(given):  # not a value of the file's, so nothing else can be seen
            break
        given = left
    return sorted(found, key=lambda fault: (fault.line is None, fault.line or 0))


def as_toml(settings: Settings) -> str:
    """The configuration as a file that would give it again, with where each value came from."""
    lines: list[str] = []
    for table in _tables_of(settings):
        lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        for key, value, origin in _shown(settings, table):
            text = f"# {key} =" if value is None else f"{key} = {_toml(value)}"
            lines.append(f"{text:<40} # {origin}")
    return "\n".join(lines)


def as_json(settings: Settings) -> str:
    """{table: {key: {"value": ..., "from": ...}}} on one line; a tenant's table is tenants.NAME."""
    return json.dumps(
        {
            table: {
                key: {"value": value, "from": origin}
                for key, value, origin in _shown(settings, table)
            }
            for table in _tables_of(settings)
        }
    )


# --- reading -------------------------------------------------------------------------------------


def _settings(path: str | None, given: list[Given]) -> Settings:
    """given: the weightiest last."""
    values: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    labels: dict[At, str] = {}
    origins: dict[At, str] = {(each.table, each.key): "default" for each in options()}
    for option, value, origin in given:
        at = (option.table, option.key)
        is_typed = origin == path  # a variable or a flag is text, whatever its option's type is
        labels[at] = f"{path}: [{option.table}] {option.key}" if is_typed else origin
        table = values.setdefault(option.table, {})
        if option.table not in TABLES:
            origins |= {(option.table, key): "default" for key in _keys(option.table) - {*table}}
        if option.key:
            table[option.key] = _converted(option, value, labels[at], is_typed=is_typed)
            origins[at] = origin
    parts: dict[str, Any] = {name: struct(**values[name]) for name, struct in TABLES.items()}
    parts[TENANTS] = {
        table.partition(".")[2]: TenantOptions(**found)
        for table, found in values.items()
        if is_tenant(table)
    }
    return Settings(Config(**parts), origins, labels)


def _keys(table: str) -> set[str]:
    return {each.key for each in options_of(table)}


def _from_tables(path: str, content: Mapping[str, Any]) -> tuple[list[Given], list[_Wrong]]:
    """What a file says, and the names in it that nothing has."""
    given: list[Given] = []
    wrong: list[_Wrong] = []
    for table, options_given in _flat(path, content, wrong):
        known = {each.key: each for each in options_of(table)}
        if is_tenant(table):  # it is there, whatever it says
            given.append((Option(table, "", table, Any, None, ""), None, path))
        for key, value in options_given.items():
            if key in known:
                given.append((known[key], value, path))
            else:
                hint = _home_of(key, table) or _nearest(key, known)
                text = f"{path}: [{table}] has no option {key!r}; {hint}"
                wrong.append(_Wrong((table, key), text))
    return given, wrong


def _flat(
    path: str, content: Mapping[str, Any], wrong: list[_Wrong]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables by their whole names; what is none goes to `wrong`."""
    for name, value in content.items():
        if name not in TABLES and name != TENANTS:
            hint = _home_of(name, "") or _nearest(name, [*TABLES, TENANTS])
            wrong.append(_Wrong((name, ""), f"{path}: there is no table [{name}]; {hint}"))
        elif not isinstance(value, dict):
            text = f"{path}: {name} is a table; write [{name}] above its options"
            wrong.append(_Wrong(("", name), text))
        elif name in TABLES:
            yield name, value
        else:
            yield from _flat_tenants(path, value, wrong)


def _flat_tenants(
    path: str, tenants: Mapping[str, Any], wrong: list[_Wrong]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, (name, value) in enumerate(tenants.items()):
        at = (f"{TENANTS}.{name}", "")
        if not isinstance(value, dict):
            text = f"{path}: [{TENANTS}] has no option {name!r}; a tenant has a table of its own:"
            wrong.append(_Wrong((TENANTS, name), f"{text} [{TENANTS}.NAME]"))
        elif TENANT.fullmatch(name) is None:
            text = f"{path}: {name!r} is no name of a tenant; use 1..64 of A-Z, a-z, 0-9, _ and -"
            wrong.append(_Wrong(at, text))
        elif number >= TENANTS_MAX:
            wrong.append(_Wrong(at, f"{path}: [{at[0]}] is one more than {TENANTS_MAX} tenants"))
        else:
            yield at[0], value


def _content_of(path: str) -> dict[str, Any]:
    return _parsed(path, _text_of(path))


def _text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadArgument(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise BadArgument(f"{path}: more than {FILE_BYTES_MAX} bytes; this is no configuration")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadArgument(f"{path}: is not UTF-8 text") from None


def _parsed(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadArgument(f"{path}: is not TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
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
        raise _Wrong((option.table, option.key), f"{label} is {value!r}: {error}") from None


def _home_of(key: str, table: str) -> str:
    """Where an option stands that was written elsewhere; "" if there is none of that name."""
    if not table:
        homes = [f"[{each.table}] {key}" for each in options() if each.key == key]
    else:
        homes = [f"[{each.table}]" for each in options() if each.key == key]
    if not homes and key in {each.key for each in options_of(f"{TENANTS}.NAME")}:
        homes = [f"[{TENANTS}.NAME]"]
    return f"it belongs into {homes[0]}" if homes else ""


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


# --- telling -------------------------------------------------------------------------------------


def _place_of(error: BadArgument, settings: Settings) -> At:
    """Of an error of plan(), which begins with an option as its user wrote it."""
    text = str(error)
    begins = [at for at, label in settings.labels.items() if text.startswith(label)]
    return max(begins, key=lambda at: len(settings.labels[at]), default=("", ""))


def _fault(path: str, error: BadArgument, lines: Mapping[At, int], at: At) -> Fault:
    message, _, suggestion = str(error).removeprefix(f"{path}: ").partition("; ")
    table, key = at
    line = lines.get(at)
    if (syntax := _TOML_LINE.search(message)) is not None and not table:
        line = int(syntax[1])
    return Fault(line, f"[{table}] {key}".strip() if table else key, message, suggestion)


def _tables_of(settings: Settings) -> list[str]:
    return [*TABLES, *(f"{TENANTS}.{name}" for name in settings.config.tenants)]


def _shown(settings: Settings, table: str) -> Iterator[tuple[str, Any, str]]:
    config = settings.config
    found = config.tenants[table.partition(".")[2]] if is_tenant(table) else getattr(config, table)
    for key, value in msgspec.structs.asdict(found).items():
        yield key, value, settings.origins[table, key]


def _toml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False)  # of text, numbers and booleans TOML says the same
