"""Manifests as properties: packing loses nothing, and no two of them share bytes or an id."""

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import Manifest
from kvpool.manifest import DTYPE_BITS, HASHES, unpack

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ranks = st.integers(1, 8).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))
layer_ranges = st.tuples(st.integers(0, 5), st.integers(1, 5)).map(
    lambda pair: (pair[0], sum(pair))
)

common: dict[str, st.SearchStrategy[Any]] = {
    "model": text.filter(bool),
    "name": text,
    "revision": text,
    "weights": text,
    "adapter": text,
    "salt": text,
    "engine": text,
    "dtype": st.sampled_from(sorted(DTYPE_BITS)),
    "hash": st.sampled_from(HASHES),
    "block_tokens": st.sampled_from([2, 16, 64]),
    "layers": st.integers(1, 5) | layer_ranges,
    "epoch": st.integers(0, 3),
    "tp": ranks,
    "pp": ranks,
}
manifests = st.one_of(
    st.builds(
        Manifest,
        **common,
        layout=st.sampled_from(["nhd", "hnd"]),
        kv_heads=st.integers(1, 9),
        head_dim=st.integers(1, 300),
    ),
    st.builds(Manifest, **common, layout=st.just("mla"), head_dim=st.integers(1, 300)),
    st.builds(Manifest, **common, layout=st.just("opaque"), block_bytes=st.integers(1, 2**31)),
)


@settings(max_examples=150)
@given(manifest=manifests)
def test_unpack_gives_back_what_was_packed(manifest: Manifest) -> None:
    packed = manifest.pack()
    again = unpack(packed)
    assert again == manifest
    assert again.pack() == packed
    assert again.namespace_id == manifest.namespace_id
    assert manifest.differing(again) == {}


@settings(max_examples=150)
@given(one=manifests, other=manifests)
def test_two_manifests_share_bytes_only_when_they_are_equal(one: Manifest, other: Manifest) -> None:
    assert (one == other) == (one.pack() == other.pack())
    assert (one == other) == (one.namespace_id == other.namespace_id)
    assert (one == other) == (one.differing(other) == {})


@settings(max_examples=150)
@given(one=manifests, other=manifests, data=st.data())
def test_one_field_taken_from_another_is_the_one_that_differs(
    one: Manifest, other: Manifest, data: st.DataObject
) -> None:
    fields = [
        "model",
        "name",
        "revision",
        "weights",
        "adapter",
        "salt",
        "engine",
        "hash",
        "epoch",
        "tp",
        "pp",
    ]
    name = data.draw(st.sampled_from(fields))
    changed = dataclasses.replace(one, **{name: getattr(other, name)})
    expected = set() if getattr(one, name) == getattr(other, name) else {name}
    assert set(one.differing(changed)) == expected
    assert (one.namespace_id == changed.namespace_id) == (not expected)
