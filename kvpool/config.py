"""What people set: sizes as they write them, and the limits of every option. Touches no file.

Promises:  1. a unit is never guessed: "K" alone could mean 1000 or 1024, so it is refused;
           2. a parsed size is whole bytes or an error, never rounded;
           3. an option that cannot be meant is named, with its value and its limit, before
              anything is opened; one that would have no effect is refused, not ignored.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from numbers import Real
from typing import Any

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

_DURATION = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)")
_UNIT_SECONDS = {
    "": Fraction(1),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}


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


def parse_duration(duration: float | str) -> float:
    """Seconds in a duration such as 5, 0.5, "200ms", "5s", "1.5 min" or "2h"; no unit is seconds.

    Raises BadArgument that names the text and what is wrong with it; BadType for other types.
    """
    if isinstance(duration, Real) and not isinstance(duration, bool):
        return float(duration)
    if not isinstance(duration, str):
        raise BadType(f"a duration is seconds or text such as '200ms', not {shown(duration)}")
    match = _DURATION.fullmatch(duration.strip()[:_TEXT_LENGTH_MAX])
    if match is None:
        raise BadArgument(f"{shown(duration)} is not a duration; write seconds or a unit: 200ms")
    number, unit = match.groups()
    if unit.lower() not in _UNIT_SECONDS:
        raise BadArgument(
            f"{shown(duration)} has the unknown unit {unit!r}; known units: us, ms, s, min, h, d"
        )
    return float(Fraction(number) * _UNIT_SECONDS[unit.lower()])


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


# --- options -------------------------------------------------------------------------------------

DURABILITIES = ("async", "durable", "relaxed")
ADMISSIONS = ("second_use", "all")
SSD_BYTES_MAX = 1 << 50
SSD_FREE_FLOOR = "1GiB"
SSD_IO_THREADS = 8
SSD_TIMEOUT_S = 5.0
_IO_THREADS_MAX = 64


def ssd_options(
    path: object,
    *,
    ssd_capacity: Any = None,
    durability: Any = "async",
    ssd_admit: Any = None,
    ssd_free_floor: Any = None,
    ssd_io_threads: Any = None,
    ssd_direct: Any = None,
    ssd_timeout: Any = None,
) -> dict[str, Any]:
    """The options of an SSD tier as the core takes them, from those of kvpool.open().

    None is what the caller did not say. A None path is no tier: then nothing may be said but the
    default durability. Raises BadArgument, BadType.
    """
    check_choice("durability", durability, DURABILITIES)
    if path is None:
        _refuse_without_tier(
            ssd_capacity=ssd_capacity,
            durability=None if durability == "async" else durability,
            ssd_admit=ssd_admit,
            ssd_free_floor=ssd_free_floor,
            ssd_io_threads=ssd_io_threads,
            ssd_direct=ssd_direct,
            ssd_timeout=ssd_timeout,
        )
    admit = _default(ssd_admit, "all" if durability == "durable" else "second_use")
    check_choice("ssd_admit", admit, ADMISSIONS)
    if durability == "durable" and admit != "all":
        raise BadArgument(
            f"ssd_admit is {admit!r}, but durable writes every block; leave it out, or choose"
            " another durability"
        )
    direct = _default(ssd_direct, True)
    check_type("ssd_direct", direct, bool)
    floor = _default(ssd_free_floor, SSD_FREE_FLOOR)
    threads = _default(ssd_io_threads, SSD_IO_THREADS)
    timeout = _default(ssd_timeout, SSD_TIMEOUT_S)
    return {
        "ssd": "" if path is None else check_folder("ssd", path),
        "ssd_capacity": 0 if ssd_capacity is None else check_ssd_capacity(ssd_capacity),
        "durability": durability,
        "ssd_admit": admit,
        "ssd_free_floor": check_size("ssd_free_floor", floor, 0, SSD_BYTES_MAX),
        "ssd_io_threads": check_count("ssd_io_threads", threads, 1, _IO_THREADS_MAX),
        "ssd_direct": direct,
        "ssd_timeout_s": check_number("ssd_timeout", timeout, 0.001, 3600),
    }


def _refuse_without_tier(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise BadArgument(f"{name} is {shown(value)}, but there is no SSD tier; set ssd")


def check_ssd_capacity(value: str | int) -> int:
    """Bytes of all files of an SSD tier; how few are too few is for the core to say."""
    return check_size("ssd_capacity", value, 1, SSD_BYTES_MAX)


def check_folder(name: str, path: object) -> str:
    """The absolute path of a folder, which need not exist. `~` is not expanded."""
    if not isinstance(path, str | os.PathLike):
        raise BadType(f"{name} is {type(path).__name__}; it must be a path (str or os.PathLike)")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise BadType(f"{name} is a path of bytes; it must be one of text")
    if not text:
        raise BadArgument(f"{name} is an empty path; name a directory")
    if "\0" in text:
        raise BadArgument(f"{name} has a NUL byte in its path")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadArgument(f"{name} is a path that is not UTF-8") from None
    return os.path.abspath(text)


def check_size(name: str, value: str | int, least: int, most: int) -> int:
    """Bytes of a size as people write it, within limits."""
    size = parse_size(value)
    if not least <= size <= most:
        raise BadArgument(f"{name} is {size} bytes; it must be {least}..{most}")
    return size


def check_count(name: str, value: object, least: int, most: int) -> int:
    """An int within limits; bool and float are none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadType(f"{name} is {type(value).__name__}; it must be int")
    if not least <= value <= most:
        raise BadArgument(f"{name} is {shown(value)}; it must be {least}..{most}")
    return value


def check_number(name: str, value: object, least: float, most: float) -> float:
    """A real number within limits, of whatever class; NaN is within none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise BadType(f"{name} is {type(value).__name__}; it must be a number")
    number: Any = value
    if not least <= number <= most:
        raise BadArgument(f"{name} is {shown(value)}; it must be {least}..{most}")
    return float(number)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    check_type(name, value, str)
    if value not in choices:
        raise BadArgument(f"{name} is {shown(value)}; it can be {', '.join(choices)}")


def check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise BadType(f"{name} is {type(value).__name__}; it must be {kind.__name__}")


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value
