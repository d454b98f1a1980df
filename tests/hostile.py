"""Objects that no honest caller passes, and every public call that has to survive them.

Used in two ways: hypothesis mixes them at random, and a sweep puts each of them into each argument
of each call, in a process of its own, so that a crash is seen as one.

    python -m tests.hostile     the sweep; prints the case it is at, and how many there were
"""

import array
import contextlib
import ctypes
import decimal
import enum
import fractions
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvpool
from kvpool import KvpoolError, _core
from kvpool.manifest import unpack

BLOCK_BYTES = 64
KEY = b"\x01" * 16


class HostileError(Exception):
    """Raised by the objects below: it may come out, as it is the caller's own."""


class RaisesEverywhere:
    """Each thing that may be asked of an object raises."""

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise HostileError

    __len__ = __iter__ = __getitem__ = __index__ = __int__ = __float__ = __bool__ = _raise
    __eq__ = __hash__ = __contains__ = __array__ = __bytes__ = __str__ = __repr__ = _raise
    tolist = shape = strides = dtype = _raise


class LiesAboutItsLength(list):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1 << 40


class TupleThatLies(tuple):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter([KEY] * 7)


class IndexOf:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class ClearsTheList:
    """An integer that empties the list it is in while the list is being read."""

    def __init__(self, owner: list[Any]) -> None:
        self.owner = owner

    def __index__(self) -> int:
        self.owner.clear()
        return 0

    def __buffer__(self) -> bytes:
        self.owner.clear()
        return KEY


class IsItsOwnList:
    def tolist(self) -> "IsItsOwnList":
        return self


class Colour(enum.IntEnum):
    RED = 1


class NotATensor:
    device = types.SimpleNamespace(type="cpu")

    def data_ptr(self) -> str:
        return "nowhere"

    def is_contiguous(self) -> bool:
        return True

    def stride(self) -> tuple[int, ...]:
        return ()


def self_clearing() -> list[Any]:
    made: list[Any] = []
    made.extend([ClearsTheList(made), 1, 2])
    return made


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def endless_nesting() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def released() -> memoryview:
    memory = memoryview(bytearray(BLOCK_BYTES))
    memory.release()
    return memory


def frozen(size: int) -> np.ndarray[Any, Any]:
    made = np.zeros(size, np.uint8)
    made.flags.writeable = False
    return made


def exhausted() -> Iterator[int]:
    made = iter([1])
    next(made)
    return made


# Each is made anew for each call, for some of them do not survive one.
OBJECTS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "2^31": lambda: 1 << 31,
    "2^63 - 1": lambda: (1 << 63) - 1,
    "2^63": lambda: 1 << 63,
    "-2^63": lambda: -(1 << 63),
    "2^64": lambda: 1 << 64,
    "10^400": lambda: 10**400,
    "-10^400": lambda: -(10**400),
    "0.0": lambda: 0.0,
    "0.5": lambda: 0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "complex": lambda: 1j,
    "10^5000": lambda: 10**5000,  # more digits than Python turns into text
    "Decimal": lambda: decimal.Decimal("0.1"),
    "Decimal NaN": lambda: decimal.Decimal("sNaN"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "IntEnum": lambda: Colour.RED,
    "np.int8": lambda: np.int8(-3),
    "np.uint64": lambda: np.uint64(2**64 - 1),
    "np.float16": lambda: np.float16(1.5),
    "np.bool": lambda: np.bool_(True),
    "np.str": lambda: np.str_("x"),
    "np.void": lambda: np.void(KEY),
    "np.datetime64": lambda: np.datetime64("2020-01-01"),
    "empty str": lambda: "",
    "str": lambda: "text",
    "16 letters": lambda: "x" * 16,
    "surrogate": lambda: "\ud800" * 16,
    "NUL": lambda: "a\x00b",
    "emoji": lambda: "🗝️" * 4,
    "long str": lambda: "9" * 5000,
    "empty bytes": lambda: b"",
    "15 bytes": lambda: bytes(15),
    "16 bytes": lambda: KEY,
    "17 bytes": lambda: bytes(17),
    "bytes of a block": lambda: bytes(BLOCK_BYTES),
    "bytes of three blocks": lambda: bytes(3 * BLOCK_BYTES),
    "bytearray": lambda: bytearray(3 * BLOCK_BYTES),
    "empty bytearray": bytearray,
    "memoryview": lambda: memoryview(bytearray(48)),
    "memoryview of 2-D": lambda: memoryview(bytearray(48)).cast("B", (3, 16)),
    "memoryview backwards": lambda: memoryview(bytearray(48))[::-1],
    "released memoryview": released,
    "array of doubles": lambda: array.array("d", [1.0, 2.0]),
    "array of longs": lambda: array.array("q", [1, 2, 3]),
    "ctypes": lambda: (ctypes.c_char * 48)(),
    "ctypes struct": lambda: ctypes.c_void_p(0),
    "ctypes objects": lambda: (ctypes.py_object * 6)(),
    "empty list": list,
    "list of None": lambda: [None] * 3,
    "list of keys": lambda: [KEY, bytes(16), b"\x02" * 16],
    "list of blocks": lambda: [bytearray(BLOCK_BYTES) for _ in range(3)],
    "list of ints": lambda: [0, 1, 2],
    "list of huge ints": lambda: [1 << 70, 1 << 70, 1 << 70],
    "list of negative ints": lambda: [-1, -2, -3],
    "list of floats": lambda: [0.0, 1.0, 2.0],
    "list of text": lambda: ["0", "1", "2"],
    "list of lists": lambda: [[0], [1], [2]],
    "mixed list": lambda: [KEY, 1, "x", None, 2.5],
    "list of IndexOf": lambda: [IndexOf(0), IndexOf(1 << 80), IndexOf(-1)],
    "list that clears itself": self_clearing,
    "list that lies": lambda: LiesAboutItsLength([KEY, KEY]),
    "tuple that lies": lambda: TupleThatLies([KEY, KEY]),
    "deep list": lambda: nested(5000),
    "list of itself": endless_nesting,
    "tuple": lambda: (1, 2),
    "tuple of three": lambda: (0, 1, 2),
    "own list": IsItsOwnList,
    "range": lambda: range(3),
    "huge range": lambda: range(1 << 62),
    "enormous range": lambda: range(10**30),
    "generator": lambda: (number for number in range(3)),
    "exhausted iterator": exhausted,
    "set": lambda: {KEY},
    "dict": lambda: {KEY: KEY},
    "dict view": lambda: {0: 0, 1: 1, 2: 2}.keys(),
    "object": object,
    "type": lambda: int,
    "function": lambda: len,
    "module": lambda: math,
    "exception": lambda: ValueError("x"),
    "raises everywhere": RaisesEverywhere,
    "IndexOf": lambda: IndexOf(5),
    "not a tensor": NotATensor,
    "uint8": lambda: np.zeros(3 * BLOCK_BYTES, np.uint8),
    "frozen uint8": lambda: frozen(3 * BLOCK_BYTES),
    "int64": lambda: np.arange(3),
    "int64 of minimum": lambda: np.full(3, -(1 << 63)),
    "uint64 of maximum": lambda: np.full(3, (1 << 64) - 1, np.uint64),
    "float": lambda: np.zeros(24),
    "float of nan": lambda: np.full(3, math.nan),
    "object array": lambda: np.array([KEY, None, 3], object),
    "object block": lambda: np.full(BLOCK_BYTES // 8 * 3, None, object),
    "text array": lambda: np.array(["a", "b", "c"]),
    "date array": lambda: np.array(["2020-01-01"] * 3, "M8[D]"),
    "records": lambda: np.zeros(3, [("a", "i4"), ("b", "O")]),
    "0-d": lambda: np.array(3),
    "empty array": lambda: np.empty(0),
    "empty 2-D": lambda: np.empty((0, 16), np.uint8),
    "2-D keys": lambda: np.zeros((3, 16), np.uint8),
    "every other": lambda: np.zeros(96, np.uint8)[::2],
    "Fortran": lambda: np.zeros((16, 3), np.uint8, order="F"),
    "big-endian": lambda: np.arange(3, dtype=">i8"),
    "broadcast": lambda: np.broadcast_to(np.uint8(0), (3 * BLOCK_BYTES,)),
    "masked": lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    "5-D": lambda: np.zeros((3, 2, 1, 1, 1), np.float16),
    "6-D": lambda: np.zeros((1, 3, 2, 1, 1, 1), np.float16),
    "manifest": lambda: kvpool.Manifest(model="m"),
    "clock": kvpool.ManualClock,
    "region": lambda: kvpool.Region(bytearray(3 * BLOCK_BYTES)),
    "region of nothing": lambda: kvpool.Region(b""),
    "region never made": lambda: kvpool.Region.__new__(kvpool.Region),
    "layers never made": lambda: kvpool.Layers.__new__(kvpool.Layers),
    "node never made": lambda: _core.Node.__new__(_core.Node),
    "put result": lambda: kvpool.PutResult(b"\x00\x01"),
}

Call = Callable[..., Any]
Case = tuple[Call, dict[str, Any]]


def enter_and_leave(view: Any) -> Any:
    with view as inside:
        return inside


def calls(pool: kvpool.Pool) -> dict[str, Case]:
    """Every public call with arguments that are right, by name so that each can be replaced."""
    space = pool.namespace(
        kvpool.Manifest(model="m", layout="opaque", block_bytes=BLOCK_BYTES, block_tokens=1)
    )
    paged = pool.namespace(kvpool.Manifest(model="m", dtype="float16", block_tokens=1))
    chain = [KEY, b"\x02" * 16, b"\x03" * 16]
    data = bytes(3 * BLOCK_BYTES)
    page = [np.zeros((4, BLOCK_BYTES), np.uint8)]
    layers = space.layers(page)
    region = pool.register(bytearray(3 * BLOCK_BYTES))
    pages = [np.zeros((4, 2, 1, 1, 1), np.float16)]
    return {
        "open": (lambda **given: kvpool.open(**given).close(), open_arguments()),
        "namespace": (pool.namespace, {"manifest": kvpool.Manifest(model="m")}),
        "register": (pool.register, {"memory": bytearray(4)}),
        "resize": (pool.resize, {"dram": "4MiB", "max_blocks": 10, "timeout": 1}),
        "keys": (space.keys, {"token_ids": [1, 2, 3], "extra": b"e", "after": KEY}),
        "fold": (space.fold, {"hashes": chain, "hash_bytes": 16}),
        "lookup": (space.lookup, {"keys": chain}),
        "put": (
            space.put,
            {"keys": chain, "data": data, "stride": None, "parent": KEY, "timeout": 0},
        ),
        "put region": (space.put, {"keys": chain, "data": region, "offsets": [0, 64, 128]}),
        "get_into": (space.get_into, {"keys": chain, "out": bytearray(200), "stride": 64}),
        "get_into region": (space.get_into, {"keys": chain, "out": region, "offsets": [0, 1, 2]}),
        "view": (lambda keys: enter_and_leave(space.view(keys)), {"keys": chain}),
        "reserve": (
            lambda **given: space.reserve(**given).abort(),
            {"key": b"\x09" * 16, "parent": KEY, "timeout": 0},
        ),
        "layers": (paged.layers, {"kv_layers": pages, "dims": "page kv token head element"}),
        "save": (
            space.save,
            {
                "kv_layers": layers,
                "block_table": [0, 1, 2],
                "keys": chain,
                "parent": KEY,
                "timeout": 0,
            },
        ),
        "load": (space.load, {"kv_layers": layers, "block_table": [0, 1, 2], "keys": chain}),
        "remove": (space.remove, {"keys": chain}),
        "temperature": (space.temperature, {"key": KEY}),
        "clock": (kvpool.ManualClock().set, {"seconds": 1.0}),
        "Region": (kvpool.Region, {"memory": bytearray(4)}),
        "parse_size": (kvpool.parse_size, {"size": "4MiB"}),
        "unpack": (unpack, {"packed": kvpool.Manifest(model="m").pack()}),
        "Manifest": (kvpool.Manifest, manifest_arguments()),
    }


def open_arguments() -> dict[str, Any]:
    return {
        "dram": "2MiB",
        "dram_max": "4MiB",
        "policy": "lru",
        "tau_s": 1.0,
        "max_blocks": 10,
        "prefault": "off",
        "evict_ahead": 0.1,
        "huge_pages": False,
        "clock": kvpool.ManualClock(),
    }


def manifest_arguments() -> dict[str, Any]:
    return {
        "model": "m",
        "name": "",
        "revision": "",
        "weights": "",
        "dtype": "float16",
        "layout": "opaque",
        "block_tokens": 1,
        "layers": (0, 1),
        "kv_heads": 1,
        "head_dim": 1,
        "tp": (0, 1),
        "pp": (0, 1),
        "adapter": "",
        "salt": "",
        "engine": "",
        "epoch": 0,
        "hash": "sha256",
        "block_bytes": 64,
    }


def attempt(call: Call, arguments: dict[str, Any]) -> None:
    """The call works, or raises what the API says: anything else comes out of here."""
    with contextlib.suppress(KvpoolError, TypeError, HostileError):
        call(**arguments)


def still_works(pool: kvpool.Pool) -> None:
    """Nothing was left behind: the books add up, and a block goes in and comes out."""
    pool.check()
    stats = pool.stats()
    assert (stats["blocks_pinned"], stats["blocks_reserved"]) == (0, 0)
    pool.resize("4MiB", max_blocks=0)
    space = pool.namespace(kvpool.Manifest(model="w", layout="opaque", block_bytes=5))
    space.remove([KEY])
    assert space.put([KEY], b"bytes").stored == 1
    out = bytearray(5)
    assert space.get_into([KEY], out) == 1
    assert out == b"bytes"


def sweep() -> int:
    """Each object in each argument of each call, one at a time."""
    count = 0
    with kvpool.open("4MiB", dram_max="64MiB", prefault="off") as pool:
        for name, (call, arguments) in calls(pool).items():
            call(**arguments)  # the arguments are right as they stand
            for argument in arguments:
                for what, make in OBJECTS.items():
                    os.write(1, f"{name}({argument}={what})\n".encode())
                    attempt(call, {**arguments, argument: make()})
                    count += 1
            still_works(pool)
    return count


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # nanobind warns of objects that were never made
    total = sweep()
    sys.stdout.write(f"{total} calls\n")
