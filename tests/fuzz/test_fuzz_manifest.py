"""Bytes that claim to be a manifest: BadArgument, or a manifest that packs to just these bytes."""

from typing import Any

import msgpack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool import BadArgument, Manifest
from kvpool.manifest import FORMAT_VERSION, unpack

VALID = [
    Manifest(model="m").pack(),
    Manifest(model="模型", layout="opaque", block_bytes=4096, salt="s" * 40).pack(),
    Manifest(model="m", engine="attention=A; block=32").pack(),
    Manifest(model="x" * 300, layers=(3, 9), kv_heads=8, head_dim=128, tp=(1, 4)).pack(),
]
FIELDS = [name for name, _ in msgpack.unpackb(VALID[2])[1:]]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["float16", "nhd", "opaque", "sha256", "xxh3", "m"])
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


def refused_or_canonical(packed: bytes) -> None:
    try:
        manifest = unpack(packed)
    except BadArgument:
        return
    assert manifest.pack() == packed


@settings(max_examples=300)
@given(packed=st.binary(max_size=300))
@example(packed=b"\xdd\xff\xff\xff\xff")  # an array that says it has 2^32 - 1 items
@example(packed=b"\xc9\xff\xff\xff\xff\x01")
@example(packed=b"\x91" * 4000)
@example(packed=b"\x81\x90\x01")  # a map with a list as key
def test_random_bytes(packed: bytes) -> None:
    refused_or_canonical(packed)


@settings(max_examples=300)
@given(
    packed=st.sampled_from(VALID),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 400),
    tail=st.binary(max_size=4),
)
def test_damaged_manifests(
    packed: bytes, edits: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    damaged = bytearray(packed)
    for at, value in edits:
        damaged[at % len(damaged)] = value
    refused_or_canonical(bytes(damaged))
    refused_or_canonical(bytes(damaged[:cut]))
    refused_or_canonical(packed + tail)


@settings(max_examples=300)
@given(
    version=st.just(FORMAT_VERSION) | values,
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
    shape=st.sampled_from(["list", "list", "list", "map", "short", "long", "swapped"]),
)
def test_well_formed_msgpack_with_other_contents(
    version: Any, changes: dict[str, Any], shape: str
) -> None:
    content = msgpack.unpackb(VALID[2])
    pairs = [[name, changes.get(name, value)] for name, value in content[1:]]
    if shape == "map":
        refused_or_canonical(msgpack.packb(dict(pairs)))
    if shape == "short":
        pairs.pop()
    elif shape == "long":
        pairs.append(["more", 1])
    elif shape == "swapped":
        pairs[0], pairs[1] = pairs[1], pairs[0]
    refused_or_canonical(msgpack.packb([version, *pairs]))


def test_a_valid_manifest_is_read() -> None:
    for packed in VALID:  # else the tests above could pass by refusing everything
        assert unpack(packed).pack() == packed
