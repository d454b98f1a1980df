"""Configuration as text that is the same in every process: for comparing, not for reading back.

Promises:  1. equal values give equal text whatever object they come from, in whatever order;
           2. what has no such text (an object without fields of its own) is refused: a guess could
              make two configurations look alike.
Pure.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvpool.errors import BadArgument

DEPTH_MAX = 32
VALUE_BYTES_MAX = 400  # of one part of a text; a longer one is told by its digest
_DIGEST_DIGITS = 32


def text_of(parts: Iterable[tuple[str, str]]) -> str:
    """ "name=value; name=value", in the order given. No value can be taken for the next part."""
    return "; ".join(f"{name}={_short(_escaped(value))}" for name, value in parts)


def digest_of(value: Any, where: str) -> str:
    """32 hexadecimal digits that name the value. where: what it is, for messages.

    Raises BadArgument for what has no canonical form.
    """
    text = json.dumps(plain(value, where), sort_keys=True, separators=(",", ":"))
    return _digest(text)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value as JSON has it, without the fields that say where a configuration came from."""
    if depth > DEPTH_MAX:
        raise BadArgument(f"{where} is nested more than {DEPTH_MAX} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {
            str(key): plain(each, f"{where}.{key}", depth + 1)
            for key, each in value.items()
            if key not in VOLATILE
        }
    if isinstance(value, list | tuple):
        return [plain(each, where, depth + 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(each, where, depth + 1) for each in value), key=json.dumps)
    return _plain_object(value, where, depth)


def _plain_object(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return plain(value.to_dict(), where, depth + 1)
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return plain(fields, where, depth + 1)
    if str(value).startswith("torch."):  # a dtype
        return str(value).removeprefix("torch.")
    raise BadArgument(
        f"{where} holds a {type(value).__name__}, of which it cannot be said whether it is the"
        " same in another engine"
    )


# Where a configuration was read from and by what; that the bytes of KV do not depend on.
VOLATILE = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "name_or_path",
        "transformers_version",
    }
)


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace(";", "%3B")


def _short(value: str) -> str:
    if len(value.encode()) <= VALUE_BYTES_MAX:
        return value
    return f"{value[:60]}...{_digest(value)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
