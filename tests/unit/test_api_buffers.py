"""Every kind of memory that put and get_into take, and every kind that they refuse."""

import array
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType, Put
from tests.pools import BLOCK_BYTES, got, key, keys, opaque, opened, payload, payloads, shown

N = 3
KEYS = keys(range(N))
DATA = payloads(KEYS)
SIZE = N * BLOCK_BYTES


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened() as pool:
        yield pool.namespace(opaque())


@pytest.fixture
def filled(space: kvpool.Namespace) -> kvpool.Namespace:
    assert space.put(KEYS, DATA).stored == N
    return space


def anonymous_map(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memory


# Everything that offers contiguous bytes.
BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda content: memoryview(bytearray(content)),
    "memoryview of words": lambda content: memoryview(bytearray(content)).cast("I"),
    "array": lambda content: array.array("H", content),
    "mmap": anonymous_map,
    "ctypes": lambda content: (ctypes.c_char * len(content)).from_buffer(bytearray(content)),
    "uint8": lambda content: np.frombuffer(content, np.uint8).copy(),
    "float16": lambda content: np.frombuffer(content, np.float16).copy(),
    "complex": lambda content: np.frombuffer(content, np.complex128).copy(),
    "V16": lambda content: np.frombuffer(content, "V16").copy(),
    "records": lambda content: np.frombuffer(content, [("Old", "i4"), ("b", "f4")]).copy(),
    "2-D": lambda content: np.frombuffer(content, np.int64).copy().reshape(N, -1),
    "Fortran column": lambda content: np.frombuffer(content, np.uint8).copy().reshape(-1, 1).T[0],
    "unaligned": lambda content: np.frombuffer(b"\0" + content, np.uint8).copy()[1:],
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_one_buffer_of_any_kind_goes_in_and_out(space: kvpool.Namespace, kind: str) -> None:
    make = BUFFERS[kind]
    assert space.put(KEYS, make(DATA)).stored == N
    out = make(bytes(SIZE))
    assert space.get_into(KEYS, out) == N
    assert memoryview(out).tobytes() == DATA


@pytest.mark.parametrize("kind", sorted(BUFFERS.keys() - {"2-D"}))
def test_a_list_of_buffers_of_any_kind(space: kvpool.Namespace, kind: str) -> None:
    make = BUFFERS[kind]
    assert space.put(KEYS, [make(payload(each)) for each in KEYS]).stored == N
    out = tuple(make(bytes(BLOCK_BYTES)) for _ in KEYS)
    assert space.get_into(KEYS, out) == N
    assert b"".join(memoryview(each).tobytes() for each in out) == DATA


def test_read_only_memory_can_be_put() -> None:
    for data in (DATA, memoryview(DATA), np.frombuffer(DATA, np.uint8)):
        with opened() as pool:
            assert pool.namespace(opaque()).put(KEYS, data).stored == N


def test_a_block_can_be_put_from_where_the_pool_holds_it(filled: kvpool.Namespace) -> None:
    other = filled.pool.namespace(opaque(salt="copy"))
    with filled.view(KEYS) as blocks:
        assert other.put(KEYS, blocks).stored == N
    assert got(other, KEYS) == N


# --- keys -----------------------------------------------------------------------------------------

PACKED = b"".join(KEYS)
KEY_KINDS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: PACKED,
    "bytearray": lambda: bytearray(PACKED),
    "memoryview": lambda: memoryview(PACKED),
    "array": lambda: array.array("B", PACKED),
    "V16": lambda: np.frombuffer(PACKED, "V16"),
    "S16": lambda: np.frombuffer(PACKED, "S16"),
    "uint8": lambda: np.frombuffer(PACKED, np.uint8),
    "uint8 (n, 16)": lambda: np.frombuffer(PACKED, np.uint8).reshape(N, 16),
    "unaligned": lambda: memoryview(b"\0" + PACKED)[1:],
    "list of bytes": lambda: list(KEYS),
    "tuple of bytes": lambda: tuple(KEYS),
    "list of bytearray": lambda: [bytearray(each) for each in KEYS],
    "list of memoryview": lambda: [memoryview(each) for each in KEYS],
    "list of V16": lambda: list(np.frombuffer(PACKED, "V16")),
    "list of slices": lambda: [np.frombuffer(PACKED, "V16")[i : i + 1] for i in range(N)],
    "mixed": lambda: [KEYS[0], bytearray(KEYS[1]), np.frombuffer(KEYS[2], np.uint8)],
}


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_keys_of_any_kind_are_the_same_keys(space: kvpool.Namespace, kind: str) -> None:
    given = KEY_KINDS[kind]()
    assert space.put(given, DATA).stored == N
    assert space.lookup(given).blocks == N
    assert got(space, KEYS) == N
    out = bytearray(SIZE)
    assert space.get_into(given, out) == N
    assert out == DATA
    with space.view(given) as blocks:
        assert [bytes(block) for block in blocks] == [payload(each) for each in KEYS]
    assert space.remove(given) == N


def every_use_of_keys(space: kvpool.Namespace, given: Any) -> dict[str, Callable[[], Any]]:
    layers = space.layers([np.zeros((4, BLOCK_BYTES), np.uint8)])
    return {
        "lookup": lambda: space.lookup(given),
        "put": lambda: space.put(given, bytearray(SIZE)),
        "get_into": lambda: space.get_into(given, bytearray(SIZE)),
        "view": lambda: space.view(given).__enter__(),
        "remove": lambda: space.remove(given),
        "save": lambda: space.save(layers, [0, 1, 2], given),
        "load": lambda: space.load(layers, [0, 1, 2], given),
    }


@pytest.mark.parametrize(
    ("given", "kind", "complaint"),
    [
        (b"short", BadArgument, "16 bytes each; got 5"),
        (PACKED[:-1], BadArgument, "got 47"),
        (np.frombuffer(PACKED, "V16")[::2], BadArgument, "contiguous"),
        ([KEYS[0], b"short"], BadArgument, "key 1 has 5 bytes"),
        ([KEYS[0], b""], BadArgument, "key 1 has 0 bytes"),
        ([PACKED], BadArgument, "key 0 has 48 bytes"),
        ([KEYS[0], "x" * 16], BadType, "a key is str"),
        ([KEYS[0], 7], BadType, "a key is int"),
        ([KEYS[0], None], BadType, "a key is NoneType"),
        ([list(KEYS)], BadType, "a key is list"),
        ("x" * 48, BadType, "keys are str|keys is str"),
        (None, BadType, "NoneType"),
        (7, BadType, "int"),
        (iter(KEYS), BadType, "iterator"),
        (set(KEYS), BadType, "set"),
        (dict.fromkeys(KEYS), BadType, "dict"),
        (np.array(KEYS, object), BadType, "Python objects|items of 8"),
        (np.arange(6), BadType, "token ids"),
        (np.arange(12, dtype=np.int32), BadType, "token ids"),
    ],
    ids=lambda value: shown(value)[:24],
)
def test_keys_that_are_none_are_refused_everywhere(
    space: kvpool.Namespace, given: Any, kind: type[Exception], complaint: str
) -> None:
    for name, call in every_use_of_keys(space, given).items():
        with pytest.raises(kind, match=complaint) as caught:
            call()
        assert caught.value, name
    assert space.pool.stats()["puts"] == 0


def test_no_keys_are_no_blocks(space: kvpool.Namespace) -> None:
    for given in ([], (), b"", np.empty(0, "V16")):
        assert len(space.put(given, b"")) == 0
        assert space.get_into(given, bytearray()) == 0
        assert space.get_into(given, bytearray(10)) == 0
        assert space.lookup(given).blocks == 0
        assert space.remove(given) == 0
        with space.view(given) as blocks:
            assert blocks == []
        with pytest.raises(BadArgument, match="0 blocks"):
            space.put(given, DATA)


def test_a_key_twice_in_one_call_is_stored_once(space: kvpool.Namespace) -> None:
    result = space.put([KEYS[0]] * 2, [payload(KEYS[0])] * 2)
    assert list(result) == [Put.STORED, Put.PRESENT]
    out = bytearray(2 * BLOCK_BYTES)
    assert space.get_into([KEYS[0]] * 2, out) == 2
    assert out == payload(KEYS[0]) * 2


# --- sizes and strides ----------------------------------------------------------------------------


def test_blocks_at_a_stride(space: kvpool.Namespace) -> None:
    stride = BLOCK_BYTES + 100
    data = bytearray(b"\xee" * (2 * stride + BLOCK_BYTES))
    for i, each in enumerate(KEYS):
        data[i * stride : i * stride + BLOCK_BYTES] = payload(each)
    assert space.put(KEYS, data, stride).stored == N
    out = bytearray(b"\xdd" * len(data))
    assert space.get_into(KEYS, out, stride) == N
    for i, each in enumerate(KEYS):
        assert out[i * stride : i * stride + BLOCK_BYTES] == payload(each)
    for i in range(N - 1):  # what lies between the blocks is left alone
        assert out[i * stride + BLOCK_BYTES : (i + 1) * stride] == b"\xdd" * 100


def test_a_stride_may_be_any_integer_kind_and_the_buffer_larger(filled: kvpool.Namespace) -> None:
    for stride in (BLOCK_BYTES, np.int64(BLOCK_BYTES), np.uint16(BLOCK_BYTES)):
        out = bytearray(SIZE + 7)
        assert filled.get_into(KEYS, out, stride) == N
        assert out[:SIZE] == DATA
        assert out[SIZE:] == bytes(7)


@pytest.mark.parametrize(
    ("stride", "kind", "complaint"),
    [
        (BLOCK_BYTES - 1, BadArgument, "at least the block"),
        (0, BadArgument, "stride is 0"),
        (-BLOCK_BYTES, BadArgument, "stride is -4096"),
        (BLOCK_BYTES + 1, BadArgument, "take 12290"),
        (1 << 62, BadArgument, "stride of 4611686018427387904"),
        ((1 << 63) - 1, BadArgument, "take 18446744073709551615"),
        (1 << 63, BadType, "below 2\\^63"),
        (1 << 80, BadType, "below 2\\^63"),
        (4096.0, BadType, "stride is of type"),
        ("4096", BadType, "stride is of type"),
        (np.float64(4096), BadType, "stride is of type"),
        ([4096], BadType, "stride is of type"),
    ],
    ids=shown,
)
def test_a_stride_that_does_not_fit(
    filled: kvpool.Namespace, stride: Any, kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind, match=complaint):
        filled.get_into(KEYS, bytearray(SIZE), stride)
    with pytest.raises(kind, match=complaint):
        filled.put(KEYS, DATA, stride)


@pytest.mark.parametrize("size", [0, 1, SIZE - 1])
def test_too_small_a_buffer_is_refused(filled: kvpool.Namespace, size: int) -> None:
    for call in (filled.put, filled.get_into):
        with pytest.raises(BadArgument, match=f"{size} bytes; 3 blocks of 4096 bytes take {SIZE}"):
            call(KEYS, bytearray(size))


def test_more_data_than_the_keys_take_is_refused_and_more_room_is_not(
    space: kvpool.Namespace,
) -> None:
    with pytest.raises(BadArgument, match="take 12288"):
        space.put(KEYS, DATA + b"\0")
    assert space.put(KEYS, DATA).stored == N
    assert space.get_into(KEYS, bytearray(SIZE + 1)) == N


@pytest.mark.parametrize(
    ("buffers", "complaint"),
    [
        ([bytearray(BLOCK_BYTES)] * 2, "list of 2 buffers for 3 keys"),
        ([bytearray(BLOCK_BYTES)] * 4, "list of 4 buffers for 3 keys"),
        ([], "list of 0 buffers"),
        ([bytearray(BLOCK_BYTES)] * 2 + [bytearray(BLOCK_BYTES - 1)], "buffer 2 has 4095 bytes"),
        ([bytearray(BLOCK_BYTES + 1)] * 3, "buffer 0 has 4097 bytes"),
    ],
)
def test_a_list_has_one_buffer_of_the_right_size_per_key(
    filled: kvpool.Namespace, buffers: list[Any], complaint: str
) -> None:
    for call in (filled.put, filled.get_into):
        with pytest.raises(BadArgument, match=complaint):
            call(KEYS, buffers)


def test_stride_and_list_exclude_each_other(filled: kvpool.Namespace) -> None:
    with pytest.raises(BadArgument, match="not with a list"):
        filled.get_into(KEYS, [bytearray(BLOCK_BYTES) for _ in KEYS], BLOCK_BYTES)


def test_read_only_memory_cannot_be_got_into(filled: kvpool.Namespace) -> None:
    frozen = np.zeros(SIZE, np.uint8)
    frozen.flags.writeable = False
    with filled.view(KEYS[:1]) as blocks:
        for out in (bytes(SIZE), memoryview(bytes(SIZE)), frozen, blocks[0]):
            wanted = KEYS[:1] if out is blocks[0] else KEYS
            with pytest.raises(BadArgument, match="writable"):
                filled.get_into(wanted, out)
    assert got(filled, KEYS) == N


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros((SIZE, 2), np.uint8)[:, 0],
        np.zeros((2, SIZE // 2), np.uint8).T,
        np.zeros(SIZE, np.uint8)[::-1],
        memoryview(bytearray(2 * SIZE))[::2],
    ],
    ids=["column", "Fortran", "reversed", "sliced"],
)
def test_memory_that_is_not_contiguous_is_refused(filled: kvpool.Namespace, memory: Any) -> None:
    for call in (filled.put, filled.get_into):
        with pytest.raises(BadArgument, match="contiguous"):
            call(KEYS, memory)


@pytest.mark.parametrize("memory", [None, 5, "text", object(), {}, set(), range(3)], ids=shown)
def test_what_is_no_memory_is_refused(filled: kvpool.Namespace, memory: Any) -> None:
    for call in (filled.put, filled.get_into):
        with pytest.raises(BadType, match="buffer protocol"):
            call(KEYS, memory)
    with pytest.raises(BadType, match="buffer protocol"):
        filled.get_into(KEYS, [memory] * N)


def test_arrays_of_python_objects_are_neither_stored_nor_overwritten(
    filled: kvpool.Namespace,
) -> None:
    # Their items are addresses; the next use of one after a get would end the process.
    for objects in (
        np.full(SIZE // 8, "an object", object),
        np.zeros(SIZE // 16, [("number", "i8"), ("object", object)]),
    ):
        for call in (filled.put, filled.get_into):
            with pytest.raises(BadType, match="Python objects"):
                call(KEYS, objects)
        with pytest.raises(BadType, match="Python objects"):
            filled.pool.register(objects)
        assert objects[0] is not None


def test_a_released_memoryview_is_refused(filled: kvpool.Namespace) -> None:
    memory = memoryview(bytearray(SIZE))
    memory.release()
    with pytest.raises(BadArgument, match="released"):
        filled.get_into(KEYS, memory)


def test_a_refused_call_changes_nothing(filled: kvpool.Namespace) -> None:
    before = filled.pool.stats()
    out = bytearray(b"\x77" * (SIZE - 1))
    with pytest.raises(BadArgument):
        filled.get_into(KEYS, out)
    with pytest.raises(BadArgument):
        filled.put([*KEYS, key(9)], DATA)
    assert out == b"\x77" * (SIZE - 1)
    assert filled.pool.stats() == before


# --- regions --------------------------------------------------------------------------------------

OFFSET_KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int64": lambda at: np.array(at, np.int64),
    "uint64": lambda at: np.array(at, np.uint64),
    "int32": lambda at: np.array(at, np.int32),
    "uint32": lambda at: np.array(at, np.uint32),
    "array": lambda at: array.array("L", at),
    "range": lambda at: range(at[0], at[-1] + 1, at[1] - at[0]),
    "numpy ints": lambda at: [np.int32(each) for each in at],
}


@pytest.mark.parametrize("kind", OFFSET_KINDS)
def test_a_region_takes_blocks_at_byte_offsets(space: kvpool.Namespace, kind: str) -> None:
    at = [0, 5000, 10000]
    memory = bytearray(b"\xee" * (3 * 5000))
    region = space.pool.register(memory)
    assert (region.nbytes, region.writable) == (15000, True)
    for i, each in enumerate(KEYS):
        memory[at[i] : at[i] + BLOCK_BYTES] = payload(each)
    offsets = OFFSET_KINDS[kind](at)
    assert space.put(KEYS, region, offsets=offsets).stored == N
    memory[:] = bytes(15000)
    assert space.get_into(KEYS, region, offsets=offsets) == N
    for i, each in enumerate(KEYS):
        assert memory[at[i] : at[i] + BLOCK_BYTES] == payload(each)
    assert memory[BLOCK_BYTES:5000] == bytes(5000 - BLOCK_BYTES)


def test_offsets_may_repeat_and_go_anywhere_inside(filled: kvpool.Namespace) -> None:
    memory = np.zeros(2 * BLOCK_BYTES, np.uint8)
    region = filled.pool.register(memory)
    assert filled.get_into(KEYS, region, offsets=[BLOCK_BYTES, 0, 0]) == N
    assert memory.tobytes() == payload(KEYS[2]) + payload(KEYS[0])
    assert filled.get_into(KEYS[:1], region, offsets=[1]) == 1
    assert memory.tobytes()[1 : 1 + BLOCK_BYTES] == payload(KEYS[0])


@pytest.mark.parametrize(
    ("offsets", "kind", "complaint"),
    [
        ([0, 1], BadArgument, "offsets has 2 items; there must be 3"),
        ([0, 1, 2, 3], BadArgument, "offsets has 4 items"),
        ([], BadArgument, "offsets has 0 items"),
        ([0, 1, SIZE - BLOCK_BYTES + 1], BadArgument, "offset 2 is 8193"),
        ([0, -1, 2], BadArgument, "offset 1 is -1"),
        ([0, 1, (1 << 63) - 1], BadArgument, "offset 2"),
        (np.array([0, 1, 2**64 - 1], np.uint64), BadArgument, "offset 2"),
        ([0, 1, 1 << 63], BadType, "below 2\\^63"),
        ([0, 1.0, 2], BadType, "integers"),
        ([0, "1", 2], BadType, "integers"),
        ([0, None, 2], BadType, "integers"),
        ([0, np.float32(1), 2], BadType, "integers"),
        ([[0, 1, 2]], BadArgument, "1 items"),
        ([[0], [1], [2]], BadType, "integers"),
        (np.array([0, 1, 2], np.int16), BadType, "32- or 64-bit"),
        (np.array([0.0, 1, 2]), BadType, "32- or 64-bit"),
        (np.array([0, 1, 2], object), BadType, "32- or 64-bit"),
        (np.array([0, 1, 2], ">i8"), BadType, "32- or 64-bit"),
        (np.arange(6)[::2], BadArgument, "contiguous"),
        ("012", BadType, "integer array"),
        (b"012", BadType, "32- or 64-bit"),
        (7, BadType, "integer array"),
        (None, BadArgument, "say where with offsets"),
        ({0, 1, 2}, BadType, "integer array"),
        (iter([0, 1, 2]), BadType, "integer array"),
        (range(1 << 62), BadArgument, "offsets has 4611686018427387904 items"),
    ],
    ids=lambda value: shown(value)[:24],
)
def test_offsets_that_do_not_fit(
    filled: kvpool.Namespace, offsets: Any, kind: type[Exception], complaint: str
) -> None:
    region = filled.pool.register(bytearray(SIZE))
    for call in (filled.put, filled.get_into):
        with pytest.raises(kind, match=complaint):
            call(KEYS, region, offsets=offsets)


class ListOfItself:
    """What an endless nesting of lists looks like to a caller of tolist()."""

    def tolist(self) -> "ListOfItself":
        return self


def test_offsets_of_hostile_objects_end(filled: kvpool.Namespace) -> None:
    class Shrinking(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 5

    class Index:
        def __index__(self) -> int:
            offsets.clear()
            return 0

    offsets: list[Any] = [Index(), 1, 2]
    region = filled.pool.register(bytearray(SIZE))
    with pytest.raises(BadType):
        filled.get_into(KEYS, region, offsets=ListOfItself())
    with pytest.raises(BadArgument):
        filled.get_into(KEYS, region, offsets=Shrinking([0, 1]))
    with pytest.raises(BadArgument):
        filled.get_into(KEYS, region, offsets=offsets)


def test_offsets_and_stride_go_with_their_own_kind(filled: kvpool.Namespace) -> None:
    region = filled.pool.register(bytearray(SIZE))
    with pytest.raises(BadArgument, match="offsets go with a registered region"):
        filled.get_into(KEYS, bytearray(SIZE), offsets=[0, 1, 2])
    with pytest.raises(BadArgument, match="stride goes with one buffer"):
        filled.get_into(KEYS, region, BLOCK_BYTES, offsets=[0, 0, 0])


def test_a_region_over_read_only_memory_can_be_put_only(space: kvpool.Namespace) -> None:
    region = space.pool.register(DATA)
    assert not region.writable
    offsets = [i * BLOCK_BYTES for i in range(N)]
    assert space.put(KEYS, region, offsets=offsets).stored == N
    with pytest.raises(BadArgument, match="read-only"):
        space.get_into(KEYS, region, offsets=offsets)


def test_a_region_keeps_its_memory(filled: kvpool.Namespace) -> None:
    memory = bytearray(SIZE)
    region = filled.pool.register(memory)
    with pytest.raises(BufferError):
        memory.clear()
    del memory
    assert filled.get_into(KEYS, region, offsets=[0, 0, 0]) == N
    temporary = filled.pool.register(np.zeros(SIZE, np.uint8))
    assert filled.get_into(KEYS, temporary, offsets=[0, 0, 0]) == N


@pytest.mark.parametrize("memory", [None, 5, "text", [bytearray(8)], object()], ids=shown)
def test_what_is_no_memory_cannot_be_registered(space: kvpool.Namespace, memory: Any) -> None:
    with pytest.raises(BadType, match="the region is"):
        space.pool.register(memory)


@pytest.mark.filterwarnings("ignore:nanobind")
def test_a_region_that_was_never_made_is_refused(filled: kvpool.Namespace) -> None:
    with pytest.raises(BadType, match="never made"):
        filled.get_into(KEYS, kvpool.Region.__new__(kvpool.Region), offsets=[0, 0, 0])


def test_a_region_of_another_pool_is_just_memory(filled: kvpool.Namespace) -> None:
    memory = bytearray(SIZE)
    with opened() as other:
        region = other.register(memory)
    assert filled.get_into(KEYS, region, offsets=[0, BLOCK_BYTES, 2 * BLOCK_BYTES]) == N
    assert memory == DATA
