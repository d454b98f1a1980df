"""plan_layers: what it takes for an engine's pages, and what it refuses before a byte moves."""

from typing import Any

import numpy as np
import pytest

from kvpool import BadArgument, BadType, Manifest
from kvpool.layers import plan_layers
from tests.pools import shown

TOKENS, HEADS, DIM, PAGES, LAYERS = 4, 2, 8, 6, 3
FIELDS: dict[str, Any] = {
    "model": "m",
    "dtype": "float16",
    "layers": LAYERS,
    "kv_heads": HEADS,
    "head_dim": DIM,
    "block_tokens": TOKENS,
}
NHD = Manifest(**FIELDS)
HND = Manifest(**FIELDS, layout="hnd")
MLA = Manifest(**{**FIELDS, "kv_heads": 1}, layout="mla")
OPAQUE = Manifest(model="m", layout="opaque", block_bytes=3 * 640, block_tokens=TOKENS)


def nhd_layers(count: int = LAYERS, *, tokens: int = TOKENS, dtype: Any = np.float16) -> list[Any]:
    return [np.zeros((PAGES, 2, tokens, HEADS, DIM), dtype) for _ in range(count)]


def pairs() -> list[Any]:
    return [tuple(np.zeros((PAGES, TOKENS, HEADS, DIM), np.float16) for _ in "kv")] * LAYERS


@pytest.mark.parametrize(
    ("manifest", "tensors", "dims"),
    [
        (NHD, nhd_layers(), None),
        (NHD, tuple(nhd_layers()), None),
        (NHD, np.zeros((LAYERS, PAGES, 2, TOKENS, HEADS, DIM), np.float16), None),
        (NHD, nhd_layers(dtype=np.uint16), None),
        (NHD, pairs(), None),
        (NHD, [list(pair) for pair in pairs()], None),
        (HND, [np.zeros((PAGES, 2, HEADS, TOKENS, DIM), np.float16)] * LAYERS, None),
        (MLA, [np.zeros((PAGES, TOKENS, DIM), np.float16)] * LAYERS, None),
        (OPAQUE, [np.zeros((PAGES, 640), np.uint8)] * 3, None),
        (OPAQUE, [np.zeros((PAGES, 3, 640), np.uint8)], None),
        (
            NHD,
            [np.zeros((2, PAGES, TOKENS, HEADS, DIM), np.float16)] * LAYERS,
            "kv page token head element",
        ),
        (
            NHD,
            [np.zeros((PAGES, 2, HEADS, TOKENS, DIM), np.float16)] * LAYERS,
            "page, kv, head, token, element",
        ),
        (
            HND,
            [np.zeros((PAGES, TOKENS, HEADS, 2, DIM), np.float16)] * LAYERS,
            "page token head kv element",
        ),
    ],
)
def test_pages_are_counted(manifest: Manifest, tensors: Any, dims: str | None) -> None:
    layers = plan_layers(manifest, tensors, dims)
    assert layers.block_bytes == manifest.block_bytes
    assert (layers.page_count, layers.pages_per_block) == (PAGES, 1)
    assert layers.layout == manifest.layout


@pytest.mark.parametrize(("tokens", "pages_per_block"), [(4, 1), (2, 2), (1, 4)])
def test_a_block_may_take_several_pages(tokens: int, pages_per_block: int) -> None:
    assert plan_layers(NHD, nhd_layers(tokens=tokens)).pages_per_block == pages_per_block


@pytest.mark.parametrize(
    ("manifest", "tensors", "dims", "complaint"),
    [
        (NHD, [], None, "got 0 layers; the manifest has 3"),
        (OPAQUE, [], None, "no layers"),
        (NHD, nhd_layers(2), None, "got 2 layers"),
        (NHD, nhd_layers(4), None, "got 4 layers"),
        (NHD, [*nhd_layers(2), pairs()[0]], None, "every layer is a"),
        (NHD, [(each,) for each in nhd_layers()], None, "must be \\(K, V\\)"),
        (NHD, [(each,) * 3 for each in nhd_layers()], None, "must be \\(K, V\\)"),
        (NHD, [each[0] for each in nhd_layers()], None, "layer tensor 0 has shape"),
        (NHD, nhd_layers(), "page kv token head", "dims names 4"),
        (NHD, nhd_layers(), "page kv token head", "page kv token head"),
        (NHD, nhd_layers(), "page kv token head thing", "dims has 'thing'"),
        (NHD, nhd_layers(), "page kv token page element", "2 page dimensions"),
        (NHD, nhd_layers(), "head kv token head element", "0 page dimensions|'head' is 6"),
        (NHD, nhd_layers(), "", "dims names 0"),
        (NHD, nhd_layers(dtype=np.float32), None, "items of 4 bytes; float16 has 2"),
        (NHD, nhd_layers(dtype=np.uint8), None, "items of 1 bytes"),
        (NHD, nhd_layers(tokens=3), None, "multiple of page_tokens"),
        (NHD, nhd_layers(tokens=8), None, "multiple of page_tokens"),
        (NHD, [*nhd_layers(2), *nhd_layers(1, tokens=2)], None, "tokens in a page"),
        (NHD, [each[:, :, :, :1] for each in nhd_layers()], None, "'head' is 1"),
        (NHD, [each[..., :4] for each in nhd_layers()], None, "'element' is 4"),
        (NHD, [each[:, :1] for each in nhd_layers()], None, "'kv' is 1"),
        (NHD, [each[:0] for each in nhd_layers()], None, "empty shape"),
        (NHD, [*nhd_layers(2), nhd_layers(1)[0][:5]], None, "5 pages"),
        (NHD, [each[::-1] for each in nhd_layers()], None, "must be positive"),
        (NHD, [np.broadcast_to(each[:1], each.shape) for each in nhd_layers()], None, "positive"),
        (
            NHD,
            [np.zeros((PAGES, TOKENS, HEADS, DIM), np.float16)] * LAYERS,
            "page token head element",
            "takes 384 bytes; the manifest says 768",
        ),
        (MLA, [np.zeros((PAGES, TOKENS, 2 * DIM), np.float16)] * LAYERS, None, "'element' is 16"),
        (
            OPAQUE,
            [np.zeros((PAGES, 640), np.uint8)] * 2,
            None,
            "1280 bytes; the manifest says 1920",
        ),
        (OPAQUE, [np.zeros(PAGES, np.uint8)] * 3, None, "takes 3 bytes"),
        (
            Manifest(model="m", dtype="int4", head_dim=2),
            [np.zeros((PAGES, 2, 16, 1, 1), np.uint8)],
            None,
            "use layout opaque",
        ),
    ],
)
def test_what_is_not_of_the_manifest_is_named(
    manifest: Manifest, tensors: Any, dims: str | None, complaint: str
) -> None:
    with pytest.raises(BadArgument, match=complaint):
        plan_layers(manifest, tensors, dims)


@pytest.mark.parametrize(
    "tensors",
    [
        None,
        5,
        "abc",
        b"abc",
        {0: nhd_layers()},
        (each for each in nhd_layers()),
        [1, 2, 3],
        ["a", "b", "c"],
        [None] * 3,
        [b"bytes"] * 3,
        [bytearray(768)] * 3,
        [np.zeros((PAGES, 2, TOKENS, HEADS, DIM), object)] * 3,
        [(nhd_layers()[0], None)] * 3,
        [[[1]]] * 3,
    ],
    ids=lambda tensors: repr(tensors)[:20],
)
def test_what_is_no_list_of_tensors_is_a_bad_type(tensors: Any) -> None:
    with pytest.raises((BadType, BadArgument)):
        plan_layers(NHD, tensors)


def test_objects_are_refused_as_opaque_pages_too() -> None:
    with pytest.raises(BadType, match="Python objects"):
        plan_layers(OPAQUE, [np.zeros((PAGES, 240), object)])


@pytest.mark.parametrize("dims", [5, b"page", ["page"]], ids=shown)
def test_dims_are_text(dims: Any) -> None:
    with pytest.raises(BadType, match="dims is"):
        plan_layers(NHD, nhd_layers(), dims)


def test_the_tensors_are_kept() -> None:
    import gc
    import weakref

    class Pages(np.ndarray[Any, Any]):
        pass

    tensors = [each.view(Pages) for each in nhd_layers()]
    watched = weakref.ref(tensors[0])
    layers = plan_layers(NHD, tensors)
    del tensors
    gc.collect()
    assert watched() is not None
    del layers
    gc.collect()
    assert watched() is None
