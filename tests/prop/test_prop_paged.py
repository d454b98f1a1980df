"""save and load as properties: any shape, any strides, any pages come back byte for byte."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool

DIMS = {
    "nhd": ["page", "kv", "token", "head", "element"],
    "hnd": ["page", "kv", "token", "head", "element"],
    "mla": ["page", "token", "element"],
    "opaque": ["page", "element"],
}


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """One way in which an engine may keep its pages."""
    layout = draw(st.sampled_from(sorted(DIMS)))
    page_tokens = draw(st.sampled_from([1, 2, 4]))
    sizes = {
        "page": draw(st.integers(4, 8)),
        "kv": 2,
        "token": page_tokens,
        "head": draw(st.integers(1, 3)),
        "element": draw(st.sampled_from([1, 3, 8])),
    }
    words = DIMS[layout]
    split = layout in ("nhd", "hnd") and draw(st.booleans())
    if split:
        words = [word for word in words if word != "kv"]
    if layout != "opaque":
        words = draw(st.permutations(words))
    return {
        "layout": layout,
        "block_tokens": page_tokens * (1 if layout == "opaque" else draw(st.sampled_from([1, 2]))),
        "sizes": sizes,
        "words": words,
        "split": split,
        "layers": draw(st.integers(1, 3)),
        "padding": draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)),
        "steps": draw(st.lists(st.integers(1, 2), min_size=5, max_size=5)),
    }


def manifest_of(engine: dict[str, Any]) -> kvpool.Manifest:
    sizes = engine["sizes"]
    common = {"model": "m", "dtype": "float16", "block_tokens": engine["block_tokens"]}
    if engine["layout"] == "opaque":
        block_bytes = 2 * sizes["element"] * engine["layers"]
        return kvpool.Manifest(**common, layout="opaque", block_bytes=block_bytes)
    return kvpool.Manifest(
        **common,
        layout=engine["layout"],
        layers=engine["layers"],
        kv_heads=1 if engine["layout"] == "mla" else sizes["head"],
        head_dim=sizes["element"],
    )


def tensor(engine: dict[str, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A view of those sizes into something larger: every dimension padded, some with steps."""
    shape = [engine["sizes"][word] for word in engine["words"]]
    wide = [
        size * step + pad
        for size, step, pad in zip(shape, engine["steps"], engine["padding"], strict=False)
    ]
    whole = rng.integers(0, 2**16, wide, np.uint16)
    cut = tuple(
        slice(0, size * step, step) for size, step in zip(shape, engine["steps"], strict=False)
    )
    return whole[cut]


def layers_of(engine: dict[str, Any], rng: np.random.Generator) -> list[Any]:
    if engine["split"]:
        return [(tensor(engine, rng), tensor(engine, rng)) for _ in range(engine["layers"])]
    return [tensor(engine, rng) for _ in range(engine["layers"])]


def flat(layers: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [each for layer in layers for each in (layer if isinstance(layer, tuple) else [layer])]


@settings(max_examples=80)
@given(engine=engines(), seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 2))
def test_pages_come_back_whatever_their_shape(
    engine: dict[str, Any], seed: int, blocks: int
) -> None:
    rng = np.random.default_rng(seed)
    with kvpool.open("4MiB", prefault="off", huge_pages=False) as pool:
        space = pool.namespace(manifest_of(engine))
        dims = None if engine["layout"] == "opaque" else " ".join(engine["words"])
        source, target = layers_of(engine, rng), layers_of(engine, rng)
        saved, loaded = space.layers(source, dims), space.layers(target, dims)
        pages = saved.pages_per_block * blocks
        if pages > engine["sizes"]["page"]:
            blocks, pages = 1, saved.pages_per_block
        read, written = (rng.permutation(engine["sizes"]["page"])[:pages] for _ in range(2))
        chain = space.keys(rng.integers(0, 100, blocks * engine["block_tokens"]))

        untouched = [each.copy() for each in flat(target)]
        assert space.save(saved, read, chain).stored == blocks
        assert space.load(loaded, written, chain) == blocks
        axis = engine["words"].index("page")
        for one, other, before in zip(flat(source), flat(target), untouched, strict=True):
            assert (one.take(read, axis) == other.take(written, axis)).all()
            rest = sorted(set(range(engine["sizes"]["page"])) - set(written.tolist()))
            assert (other.take(rest, axis) == before.take(rest, axis)).all()
        pool.check()


@settings(max_examples=40)
@given(engine=engines(), seed=st.integers(0, 2**32 - 1))
def test_the_padding_between_is_never_written(engine: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with kvpool.open("4MiB", prefault="off", huge_pages=False) as pool:
        space = pool.namespace(manifest_of(engine))
        dims = None if engine["layout"] == "opaque" else " ".join(engine["words"])
        target = layers_of(engine, rng)
        planned = space.layers(target, dims)
        chain = space.keys(range(engine["block_tokens"]))
        space.put(chain, rng.bytes(space.block_bytes))
        wholes = [each.base for each in flat(target)]
        marks = [np.ones_like(whole, dtype=bool) for whole in wholes]
        for each, mark in zip(flat(target), marks, strict=True):
            cut = tuple(
                slice(0, size * step, step)
                for size, step in zip(each.shape, engine["steps"], strict=False)
            )
            mark[cut] = False
        before = [whole.copy() for whole in wholes]
        assert space.load(planned, list(range(planned.pages_per_block)), chain) == 1
        for whole, mark, old in zip(wholes, marks, before, strict=True):
            assert (whole[mark] == old[mark]).all()
