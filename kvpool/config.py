"""Sizes as people write them. Pure.

Promises:  1. a unit is never guessed: "K" alone could mean 1000 or 1024, so it is refused;
           2. a parsed size is whole bytes or an error, never rounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

from kvpool.errors import BadArgument, BadType, shown

SIZE_BYTES_MAX = 2**63 - 1
_TEXT_LENGTH_MAX = 64

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_UNIT_BYTES = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)},
}
_SIZE = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(size: str | int) -> int:
    """Bytes in a size such as 65536, "64KiB", "1.5 GiB" or "64KB".

    KiB, MiB, GiB, TiB, PiB count in 1024s, KB, MB, GB, TB, PB in 1000s, upper or lower case; no
    unit means bytes. Result: 0 to 2**63 - 1. Raises BadArgument that names the text and what
    is wrong with it; BadType for anything but str and int.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise BadType(f"a size is a number of bytes or text such as '64KiB', not {shown(size)}")
    if isinstance(size, str):
        return _parse_text(size)
    if not 0 <= size <= SIZE_BYTES_MAX:
        raise BadArgument(f"size {shown(size)} is outside 0 to 2**63 - 1 bytes")
    return size


def _parse_text(text: str) -> int:
    if len(text) > _TEXT_LENGTH_MAX:
        raise BadArgument(f"size text has {len(text)} characters; at most {_TEXT_LENGTH_MAX}")
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadArgument(f"{text!r} is not a size; write bytes or a unit, such as 65536 or 64KiB")
    number, unit = match.groups()
    if unit.lower() not in _UNIT_BYTES:
        raise BadArgument(f"{text!r} has the unknown unit {unit!r}; {_advice(unit)}")
    size = Fraction(number.replace("_", "")) * _UNIT_BYTES[unit.lower()]
    if size.denominator != 1:
        raise BadArgument(f"{text!r} is not a whole number of bytes")
    if size > SIZE_BYTES_MAX:
        raise BadArgument(f"{text!r} is more than 2**63 - 1 bytes")
    return int(size)


def _advice(unit: str) -> str:
    letter = unit.upper()
    if f"{letter}B".lower() in _UNIT_BYTES:
        return f"write {letter}iB (1024s) or {letter}B (1000s)"
    return "known units: " + ", ".join(_BINARY_UNITS + _DECIMAL_UNITS[1:])


def format_size(size_bytes: int) -> str:
    """The size in the largest unit of 1024s that keeps it at 1 or more, with one decimal at most.

    For people: 1536 is "1.5 KiB", 1000000 is "976.6 KiB". Not exact, so never parse it for work.
    """
    for power, unit in enumerate(_BINARY_UNITS):
        rounded = round(size_bytes / 1024**power, 1)
        if rounded < 1024 or unit == _BINARY_UNITS[-1]:
            break
    return f"{rounded:.1f}".removesuffix(".0") + f" {unit}"
