"""save and load: paged tensors in, paged tensors out, in one canonical order of bytes.

The order is written out here a second time, as loops over tokens: nothing is shared with the code.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool import BadArgument, BadType, Put
from tests.pools import opaque, opened, shown

LAYERS, TOKENS, HEADS, DIM, PAGES = 3, 8, 2, 4, 12
FIELDS: dict[str, Any] = {
    "model": "m",
    "dtype": "float16",
    "layers": LAYERS,
    "kv_heads": HEADS,
    "head_dim": DIM,
    "block_tokens": TOKENS,
}
BLOCKS = 3


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with opened("16MiB") as pool:
        yield pool


def random_pages(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, 2**16, shape, np.uint16)


def block_bytes_nhd(layers: list[Any], table: list[int], page_tokens: int) -> bytes:
    """[layer][kv][token][head][element] of NHD pages (page, kv, token, head, element)."""
    out = b""
    for layer in layers:
        for kv in range(2):
            for token in range(TOKENS):
                page = table[token // page_tokens]
                out += layer[page, kv, token % page_tokens].tobytes()
    return out


def stored(space: kvpool.Namespace, chain: Any) -> list[bytes]:
    with space.view(chain) as blocks:
        return [bytes(block) for block in blocks]


@pytest.mark.parametrize("page_tokens", [8, 4, 2, 1])
def test_blocks_have_one_order_of_bytes_whatever_the_page_size(
    pool: kvpool.Pool, rng: np.random.Generator, page_tokens: int
) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    chain = space.keys(range(BLOCKS * TOKENS))
    layers = [random_pages(rng, PAGES * 8, 2, page_tokens, HEADS, DIM) for _ in range(LAYERS)]
    per_block = TOKENS // page_tokens
    table = rng.permutation(PAGES * 8)[: BLOCKS * per_block].tolist()
    assert space.save(layers, table, chain).stored == BLOCKS
    assert stored(space, chain) == [
        block_bytes_nhd(layers, table[at : at + per_block], page_tokens)
        for at in range(0, len(table), per_block)
    ]
    # An engine with pages of another size reads the same blocks.
    back = [np.zeros((PAGES, 2, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    assert space.load(back, [7, 0, 3], chain) == BLOCKS
    for number, page in enumerate((7, 0, 3)):
        pages = table[number * per_block : (number + 1) * per_block]
        assert block_bytes_nhd(back, [page], TOKENS) == block_bytes_nhd(layers, pages, page_tokens)


SHAPES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    # name: (layout, dims, shape of a layer)
    "nhd": ("nhd", "page kv token head element", (PAGES, 2, TOKENS, HEADS, DIM)),
    "hnd": ("hnd", "page kv head token element", (PAGES, 2, HEADS, TOKENS, DIM)),
    "mla": ("mla", "page token element", (PAGES, TOKENS, DIM)),
    "kv first, as vLLM has it": (
        "nhd",
        "kv page token head element",
        (2, PAGES, TOKENS, HEADS, DIM),
    ),
    "heads before tokens": ("nhd", "page kv head token element", (PAGES, 2, HEADS, TOKENS, DIM)),
    "K and V in the last place but one": (
        "hnd",
        "page token head kv element",
        (PAGES, TOKENS, HEADS, 2, DIM),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_layouts_come_back_as_they_went(
    pool: kvpool.Pool, rng: np.random.Generator, name: str, strided: bool
) -> None:
    layout, dims, shape = SHAPES[name]
    fields = {**FIELDS, "layout": layout, **({"kv_heads": 1} if layout == "mla" else {})}
    space = pool.namespace(kvpool.Manifest(**fields))
    chain = space.keys(range(BLOCKS * TOKENS))

    def made(fill: bool) -> list[Any]:
        # Strided: every other item of the last dimension but one, and a part of a wider row.
        wide = (*shape[:-2], 2 * shape[-2], DIM + 3) if strided else shape
        arrays = [random_pages(rng, *wide) if fill else np.zeros(wide, np.uint16) for _ in range(3)]
        return [each[..., ::2, :DIM] for each in arrays] if strided else arrays

    layers, back = made(True), made(False)
    assert space.save(space.layers(layers, dims), [2, 5, 0], chain).stored == BLOCKS
    assert space.load(space.layers(back, dims), [1, 4, 11], chain) == BLOCKS
    page_axis = dims.split().index("page")
    for layer, other in zip(layers, back, strict=True):
        for source, target in ((2, 1), (5, 4), (0, 11)):
            assert (layer.take(source, page_axis) == other.take(target, page_axis)).all()
        untouched = sorted(set(range(PAGES)) - {1, 4, 11})
        assert not other.take(untouched, page_axis).any()


def test_layouts_with_other_strides_make_the_same_block(
    pool: kvpool.Pool, rng: np.random.Generator
) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    layers = [random_pages(rng, PAGES, 2, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
    variants = {
        "page kv token head element": layers,
        "kv page token head element": [each.swapaxes(0, 1).copy() for each in layers],
        "page head token kv element": [each.transpose(0, 3, 2, 1, 4).copy() for each in layers],
    }
    blocks = set()
    for number, (dims, tensors) in enumerate(variants.items()):
        chain = space.keys([number] * TOKENS)
        assert space.save(space.layers(tensors, dims), [3], chain).stored == 1
        blocks.update(stored(space, chain))
    assert blocks == {block_bytes_nhd(layers, [3], TOKENS)}


def test_k_and_v_apart_make_the_same_block(pool: kvpool.Pool, rng: np.random.Generator) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    layers = [random_pages(rng, PAGES, 2, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
    pairs = [(layer[:, 0].copy(), layer[:, 1]) for layer in layers]
    chain = space.keys(range(TOKENS))
    assert space.save(pairs, [9], chain).stored == 1
    assert stored(space, chain) == [block_bytes_nhd(layers, [9], TOKENS)]
    back = [np.zeros_like(layer) for layer in layers]
    assert space.load([(layer[:, 0], layer[:, 1]) for layer in back], [2], chain) == 1
    assert all((one[9] == other[2]).all() for one, other in zip(layers, back, strict=True))


def test_opaque_pages_are_bytes(pool: kvpool.Pool, rng: np.random.Generator) -> None:
    space = pool.namespace(opaque(block_bytes=3 * 640, block_tokens=TOKENS))
    layers = [rng.integers(0, 256, (PAGES, 640), np.uint8) for _ in range(3)]
    chain = space.keys(range(2 * TOKENS))
    assert space.save(layers, [4, 1], chain).stored == 2
    expected = [b"".join(layer[page].tobytes() for layer in layers) for page in (4, 1)]
    assert stored(space, chain) == expected
    back = [np.zeros_like(layer) for layer in layers]
    assert space.load(back, [0, 2], chain) == 2
    assert [layer[[0, 2]].tolist() for layer in back] == [
        layer[[4, 1]].tolist() for layer in layers
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3", "int8"])
def test_items_of_every_width(pool: kvpool.Pool, rng: np.random.Generator, dtype: str) -> None:
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    space = pool.namespace(kvpool.Manifest(**{**FIELDS, "dtype": dtype}))
    kind = np.dtype(f"u{width}")
    layers = [
        rng.integers(0, np.iinfo(kind).max, (PAGES, 2, TOKENS, HEADS, DIM), kind)
        for _ in range(LAYERS)
    ]
    chain = space.keys(range(TOKENS))
    assert space.save(layers, [1], chain).stored == 1
    back = [np.zeros_like(layer) for layer in layers]
    assert space.load(back, [0], chain) == 1
    assert all((one[1] == other[0]).all() for one, other in zip(layers, back, strict=True))


def test_what_was_put_can_be_loaded_and_what_was_saved_can_be_got(pool: kvpool.Pool) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    size = space.block_bytes
    chain = space.keys(range(2 * TOKENS))
    data = np.arange(2 * size // 2, dtype=np.uint16)
    space.put(chain, data)
    back = [np.zeros((PAGES, 2, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    assert space.load(back, [6, 2], chain) == 2
    assert block_bytes_nhd(back, [6], TOKENS) == data.tobytes()[:size]
    other = pool.namespace(kvpool.Manifest(**FIELDS, salt="other"))
    assert other.save(back, [6, 2], chain).stored == 2
    out = bytearray(2 * size)
    assert other.get_into(chain, out) == 2
    assert out == data.tobytes()


def test_registered_layers_serve_many_calls(pool: kvpool.Pool, rng: np.random.Generator) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    tensors = [random_pages(rng, PAGES, 2, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
    layers = space.layers(tensors)
    for number in range(20):
        tensors[0][5, 0, 0, 0, 0] = number  # what is there at the time of the call counts
        chain = space.keys([number] * TOKENS)
        assert space.save(layers, [5], chain).stored == 1
        assert stored(space, chain) == [block_bytes_nhd(tensors, [5], TOKENS)]


def test_only_leading_blocks_are_loaded(pool: kvpool.Pool) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    layers = [np.ones((PAGES, 2, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    chain = space.keys(range(3 * TOKENS))
    space.save(layers, [0, 1, 2], chain)
    space.remove(chain[1:2])
    back = [np.zeros_like(layer) for layer in layers]
    assert space.load(back, [4, 5, 6], chain) == 1
    assert all(layer[4].all() for layer in back)
    assert space.save(layers, [0, 1, 2], chain)[1] is Put.STORED


TABLES: list[tuple[Any, type[Exception], str]] = [
    ([0, 1], BadArgument, "block_table has 2 items; there must be 3"),
    ([0, 1, 2, 3], BadArgument, "block_table has 4 items"),
    ([], BadArgument, "block_table has 0 items"),
    ([0, 1, PAGES], BadArgument, "page 2 of the table is 12; there are 12 pages"),
    ([0, -1, 1], BadArgument, "page 1 of the table is -1"),
    (np.array([0, 1, 2**63], np.uint64), BadArgument, "page 2"),
    ([0, 1, 2**63], BadType, "block_table must hold integers"),
    ([0, 1, 2.0], BadType, "block_table must hold integers"),
    ([0, 1, "2"], BadType, "block_table must hold integers"),
    (np.array([0.0, 1, 2]), BadType, "32- or 64-bit"),
    (np.array([0, 1, 2], np.int16), BadType, "32- or 64-bit"),
    (np.arange(6)[::2], BadArgument, "contiguous"),
    (None, BadType, "block_table is NoneType"),
    (5, BadType, "block_table is int"),
    ("012", BadType, "block_table is str"),
    ({0, 1, 2}, BadType, "block_table is set"),
]


@pytest.mark.parametrize(("table", "kind", "complaint"), TABLES, ids=lambda value: repr(value)[:20])
def test_a_bad_block_table_touches_nothing(
    pool: kvpool.Pool, table: Any, kind: type[Exception], complaint: str
) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    layers = [np.ones((PAGES, 2, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    chain = space.keys(range(3 * TOKENS))
    for call in (space.save, space.load):
        with pytest.raises(kind, match=complaint):
            call(layers, table, chain)
    assert pool.stats()["puts"] == 0
    assert all(layer.all() for layer in layers)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_block_tables_of_every_integer(pool: kvpool.Pool, dtype: Any) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    layers = [np.ones((PAGES, 2, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    chain = space.keys(range(3 * TOKENS))
    table = np.array([3, 1, 2], dtype)
    assert space.save(layers, table, chain).stored == 3
    assert space.load(layers, table[np.newaxis, :], chain) == 3


def test_read_only_pages_can_be_saved_only(pool: kvpool.Pool) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    layers = [np.ones((PAGES, 2, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    layers[1].flags.writeable = False
    chain = space.keys(range(TOKENS))
    assert space.save(layers, [0], chain).stored == 1
    with pytest.raises(BadArgument, match="read-only"):
        space.load(layers, [1], chain)


def test_layers_of_another_kind_are_refused(pool: kvpool.Pool) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    other = pool.namespace(kvpool.Manifest(**{**FIELDS, "layers": 2}))
    heads_first = pool.namespace(kvpool.Manifest(**FIELDS, layout="hnd"))
    layers = space.layers([np.ones((PAGES, 2, TOKENS, HEADS, DIM), np.uint16)] * LAYERS)
    for call, complaint in ((other, "768 bytes|bytes"), (heads_first, "registered as nhd")):
        chain = call.keys(range(TOKENS))
        for method in (call.save, call.load):
            with pytest.raises(BadArgument, match=complaint):
                method(layers, [0], chain)


@pytest.mark.parametrize("given", [None, 5, "layers", object()], ids=shown)
def test_what_are_no_layers_is_refused(pool: kvpool.Pool, given: Any) -> None:
    space = pool.namespace(kvpool.Manifest(**FIELDS))
    for call in (space.save, space.load):
        with pytest.raises(BadType, match="kv_layers"):
            call(given, [0], space.keys(range(TOKENS)))
