"""What an engine's operator tells the connector, in `kv_connector_extra_config`. Touches no file.

Promises:  1. a key that no option has is an error which says what was likely meant;
           2. a value that cannot be meant, or that would have no effect, is an error which names
              the key, the value and the limit; the token itself is in no message and no repr;
           3. what is read here needs no second look: sizes are bytes, the address has a form.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvpool.address import TOKEN_BYTES_MAX, UnixAddress, check_tenant, parse_address
from kvpool.config import (
    SSD_BYTES_MAX,
    check_choice,
    check_count,
    check_folder,
    check_number,
    check_size,
    check_type,
)
from kvpool.errors import BadArgument, BadType
from kvpool.local import DRAM_BYTES_MAX, DRAM_BYTES_MIN
from kvpool.manifest import TEXT_BYTES_MAX

WHERE = "kv_connector_extra_config"
SAVES = ("all", "prompt", "none")
RESETS = ("private", "keep")
MIN_BLOCKS_MAX = 1 << 20
TIMEOUT_S_MIN = 0.001  # of a load and of connecting: less is no time at all
TIMEOUT_S_MAX = 3600.0
SAVE_BUFFER_BYTES_MIN = 1 << 20
SAVE_BUFFER_BYTES_MAX = 1 << 40

_SAVED_BY_ROLE = {"kv_producer": "prompt", "kv_consumer": "none"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of one connector. See docs/engines.md for what each is for.

    address, token, token_file, tenant: as for kvpool.connect(). save: `all` (prompt and decode),
    `prompt`, `none`, or "" where nothing was said: see saves(). min_blocks: fewer are not worth a
    load. load_timeout_s: a load that takes longer is a miss. connect_timeout_s: how long the start
    of an engine waits for a node. spawn: start a node if none answers, with spawn_dram bytes and an
    SSD tier in spawn_ssd. save_buffer: bytes of blocks on their way to the pool. salt: separates
    engines that must not share. weights: the operator's own name of the weights, instead of a
    digest of their files. recompute_estimate: skip loads that would take longer than to compute.
    wait_s: how long a decode engine waits for what a prefill engine stores. on_reset: what a reset
    of the connector's cache means: `private`, that the weights changed, and that blocks are this
    engine's alone from then on; `keep`, nothing. self_test: write, read back and compare a block at
    the start.
    """

    address: str | None = None
    token: str | None = None
    token_file: str | None = None
    tenant: str | None = None
    save: str = ""
    min_blocks: int = 1
    load_timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    spawn: bool = False
    spawn_dram: int = 4 << 30
    spawn_ssd: str | None = None
    spawn_ssd_capacity: int | None = None
    save_buffer: int = 256 << 20
    salt: str = ""
    weights: str = ""
    recompute_estimate: bool = True
    wait_s: float = 10.0
    on_reset: str = "private"
    self_test: bool = True

    def saves(self, role: str | None) -> str:
        """What an engine of this kv_role saves: what was said, else what the role is for."""
        return self.save or _SAVED_BY_ROLE.get(role or "", "all")

    def __repr__(self) -> str:
        shown = (
            f"{name}={'...' if name == 'token' and value is not None else repr(value)}"
            for name, value in msgspec.structs.asdict(self).items()
        )
        return f"Options({', '.join(shown)})"


def read_options(extra: Mapping[str, Any], where: str = WHERE) -> Options:
    """The options that a mapping of JSON values says; None is the default of an option.

    where: the mapping's name, in messages. Raises BadArgument, BadType for a wrong type.
    """
    if not isinstance(extra, Mapping):
        raise BadType(f"{where}: is {type(extra).__name__}; it must be a JSON object")
    values: dict[str, Any] = {}
    try:
        for key, value in extra.items():
            check = _CHECKS.get(key)
            if check is None:
                raise BadArgument(f"{key!r} is no option; {_nearest(str(key))}")
            if value is not None:
                values[key] = check(key, value)
        _check_together(values)
    except BadArgument as error:
        raise type(error)(f"{where}: {error}") from None
    return Options(**values)


def _check_together(given: Mapping[str, Any]) -> None:
    """What one option alone cannot show."""
    if "token" in given and "token_file" in given:
        raise BadArgument("token and token_file are both given; one of them is the token")
    if not given.get("spawn", False):
        for key in ("spawn_dram", "spawn_ssd", "spawn_ssd_capacity"):
            if key in given:
                raise BadArgument(f"{key} is {given[key]!r}, but spawn is false; set spawn to true")
        return
    if "spawn_ssd_capacity" in given and "spawn_ssd" not in given:
        raise BadArgument(
            f"spawn_ssd_capacity is {given['spawn_ssd_capacity']}, but there is no folder for it;"
            " set spawn_ssd"
        )
    address = given.get("address")
    if address is not None and not isinstance(parse_address(address), UnixAddress):
        raise BadArgument(
            f"address is {address!r}, but spawn is true: a node that is started here is reached by"
            " a unix socket; write unix:/path/to/node.sock, or leave it out"
        )


# --- one option ----------------------------------------------------------------------------------

_Check = Callable[[str, Any], Any]


def _address(key: str, value: Any) -> str:
    check_type(key, value, str)
    parse_address(value)
    return str(value)


def _token(key: str, value: Any) -> str:
    check_type(key, value, str)
    size = len(value.encode(errors="replace"))
    if not 0 < size <= TOKEN_BYTES_MAX:
        raise BadArgument(f"{key} has {size} bytes; a token has 1..{TOKEN_BYTES_MAX}")
    return str(value)


def _text(key: str, value: Any) -> str:
    check_type(key, value, str)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadArgument(f"{key} has a lone surrogate; it must be valid Unicode") from None
    if size > TEXT_BYTES_MAX:
        raise BadArgument(f"{key} has {size} bytes; at most {TEXT_BYTES_MAX}")
    return str(value)


def _save(key: str, value: Any) -> str:
    check_choice(key, value, SAVES)
    return str(value)


def _on_reset(key: str, value: Any) -> str:
    check_choice(key, value, RESETS)
    return str(value)


def _flag(key: str, value: Any) -> bool:
    check_type(key, value, bool)
    return bool(value)


def _seconds(least: float) -> _Check:
    return lambda key, value: check_number(key, value, least, TIMEOUT_S_MAX)


def _size(least: int, most: int) -> _Check:
    def check(key: str, value: Any) -> int:
        try:
            return check_size(key, value, least, most)
        except BadArgument as error:  # a size that is none is told without the option's name
            text = str(error)
            raise type(error)(text if text.startswith(key) else f"{key}: {text}") from None

    return check


_CHECKS: dict[str, _Check] = {
    "address": _address,
    "token": _token,
    "token_file": check_folder,
    "tenant": check_tenant,
    "save": _save,
    "min_blocks": lambda key, value: check_count(key, value, 1, MIN_BLOCKS_MAX),
    "load_timeout_s": _seconds(TIMEOUT_S_MIN),
    "connect_timeout_s": _seconds(TIMEOUT_S_MIN),
    "spawn": _flag,
    "spawn_dram": _size(DRAM_BYTES_MIN, DRAM_BYTES_MAX),
    "spawn_ssd": check_folder,
    "spawn_ssd_capacity": _size(1, SSD_BYTES_MAX),
    "save_buffer": _size(SAVE_BUFFER_BYTES_MIN, SAVE_BUFFER_BYTES_MAX),
    "salt": _text,
    "weights": _text,
    "recompute_estimate": _flag,
    "wait_s": _seconds(0),
    "on_reset": _on_reset,
    "self_test": _flag,
}


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, list(_CHECKS), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_CHECKS)}"
