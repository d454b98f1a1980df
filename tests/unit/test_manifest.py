"""The manifest: every field counts, and one manifest has one spelling."""

import dataclasses
import pickle
import random
from typing import Any

import msgpack
import pytest

from kvpool import BadArgument, BadType, Manifest, ManifestMismatch
from kvpool.errors import told_apart
from kvpool.manifest import FORMAT_VERSION, unpack
from tests.pools import shown

FULL: dict[str, Any] = {
    "model": "llama-3-8b",
    "name": "prod",
    "revision": "main@1a2b",
    "weights": "sha256:00ff",
    "dtype": "float16",
    "layout": "hnd",
    "block_tokens": 32,
    "layers": (4, 8),
    "kv_heads": 2,
    "head_dim": 64,
    "tp": (1, 4),
    "pp": (0, 2),
    "adapter": "lora:77",
    "salt": "tenant-a",
    "engine": "attention=A; strides=1,2",
    "epoch": 3,
    "hash": "xxh3",
}
OTHER: dict[str, Any] = {
    "model": "llama-3-70b",
    "name": "test",
    "revision": "",
    "weights": "sha256:00fe",
    "dtype": "bfloat16",
    "layout": "nhd",
    "block_tokens": 16,
    "layers": (4, 9),
    "kv_heads": 4,
    "head_dim": 128,
    "tp": (0, 4),
    "pp": (1, 2),
    "adapter": "",
    "salt": "tenant-b",
    "engine": "",
    "epoch": 4,
    "hash": "sha256",
}

# Ids that must never change, for blocks are found by them across versions and machines.
GOLDEN = [
    ({"model": "m"}, "4dc08c2f67ed6be46ddcadbd45ef0299"),
    (
        {"model": "llama-3-8b", "layers": 32, "kv_heads": 8, "head_dim": 128},
        "ca145571a05e44f63bb18684cb9bc0bc",
    ),
    (
        {"model": "模型 é", "layout": "opaque", "block_bytes": 4096, "salt": "s"},
        "7af1cc3c5938db482732181134a8ddaf",
    ),
    (
        {"model": "d", "layout": "mla", "layers": (2, 4), "head_dim": 576, "epoch": 7},
        "d985b361715b0f9e20aaed926cb50617",
    ),
    ({**FULL, "engine": ""}, "a727d640ca2f899503bfeffc75d91d26"),
    (FULL, "bc308841e2371653928d8296879b7578"),
]


@pytest.mark.parametrize(("fields", "golden"), GOLDEN, ids=[golden for _, golden in GOLDEN])
def test_ids_are_golden(fields: dict[str, Any], golden: str) -> None:
    assert Manifest(**fields).namespace_id.hex() == golden


def test_the_id_is_the_digest_of_what_the_format_says() -> None:
    import hashlib

    manifest = Manifest(**FULL)
    by_hand = [
        FORMAT_VERSION,
        ["model", "llama-3-8b"],
        ["name", "prod"],
        ["revision", "main@1a2b"],
        ["weights", "sha256:00ff"],
        ["dtype", "float16"],
        ["layout", "hnd"],
        ["block_tokens", 32],
        ["layers", [4, 8]],
        ["kv_heads", 2],
        ["head_dim", 64],
        ["tp", [1, 4]],
        ["pp", [0, 2]],
        ["adapter", "lora:77"],
        ["salt", "tenant-a"],
        ["engine", "attention=A; strides=1,2"],
        ["epoch", 3],
        ["hash", "xxh3"],
        ["block_bytes", 4 * 2 * 2 * 64 * 32 * 2],
    ]
    packed = msgpack.packb(by_hand)
    assert manifest.pack() == packed
    assert manifest.namespace_id == hashlib.sha256(packed).digest()[:16]


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_the_id(field: str) -> None:
    assert set(OTHER) == {each.name for each in dataclasses.fields(Manifest)} - {"block_bytes"}
    one, other = Manifest(**FULL), Manifest(**{**FULL, field: OTHER[field]})
    assert one.namespace_id != other.namespace_id
    assert set(one.differing(other)) - {"block_bytes"} == {field}
    assert one.differing(other)[field] == (FULL[field], OTHER[field])


def test_block_bytes_changes_the_id_of_opaque_blocks() -> None:
    one, other = (Manifest(model="m", layout="opaque", block_bytes=size) for size in (4096, 4097))
    assert one.namespace_id != other.namespace_id
    assert one.differing(other) == {"block_bytes": (4096, 4097)}


def test_text_cannot_slip_from_one_field_into_the_next() -> None:
    ids = {
        Manifest(model=model, revision=revision).namespace_id
        for model, revision in (("ab", "c"), ("a", "bc"), ("abc", ""), ("a\x00b", "c"))
    }
    assert len(ids) == 4


def test_equal_manifests_are_equal_whatever_they_were_written_as() -> None:
    one = Manifest(model="m", layers=4, tp=(0, 1))
    other = Manifest(model="m", layers=[0, 4], tp=[0, 1])  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
    assert one.namespace_id == other.namespace_id
    assert one.differing(other) == {}
    assert Manifest(model="m", block_bytes=one.block_bytes, layers=4) == one


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"layers": 32, "kv_heads": 8, "head_dim": 128}, 32 * 2 * 16 * 8 * 128 * 2),
        ({"layers": (8, 16), "kv_heads": 8, "head_dim": 128}, 8 * 2 * 16 * 8 * 128 * 2),
        ({"layout": "mla", "layers": 61, "head_dim": 576, "block_tokens": 64}, 61 * 576 * 64 * 2),
        ({"dtype": "float8_e4m3", "head_dim": 64}, 2 * 16 * 64),
        ({"dtype": "float32"}, 2 * 16 * 4),
        ({"dtype": "int4", "head_dim": 3, "block_tokens": 1}, 3),
        ({"layout": "opaque", "block_bytes": 1}, 1),
        ({"layout": "opaque", "block_bytes": 1 << 31}, 1 << 31),
    ],
)
def test_block_bytes_are_computed(fields: dict[str, Any], size: int) -> None:
    assert Manifest(model="m", **fields).block_bytes == size


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": "x" * 4097}, "model has 4097 bytes; at most 4096"),
        ({"salt": "é" * 2049}, "salt has 4098 bytes"),
        ({"engine": "x" * 4097}, "engine has 4097 bytes; at most 4096"),
        ({"model": "\ud800"}, "lone surrogate"),
        ({"dtype": "fp16"}, "dtype is 'fp16'; it can be float32"),
        ({"layout": "NHD"}, "layout is 'NHD'"),
        ({"hash": "md5"}, "hash is 'md5'"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"head_dim": 1 << 32}, "head_dim is 4294967296"),
        ({"epoch": -1}, "epoch is -1"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": (4, 4)}, "a range needs start < stop"),
        ({"layers": (5, 4)}, "a range needs start < stop"),
        ({"tp": (1, 1)}, "0 <= rank < size"),
        ({"pp": (-1, 1)}, "pp is -1"),
        ({"layout": "mla", "kv_heads": 2}, "mla has one latent"),
        ({"layout": "opaque"}, "opaque needs block_bytes"),
        ({"layout": "opaque", "block_bytes": 0}, "block_bytes is 0"),
        ({"layout": "opaque", "block_bytes": (1 << 31) + 1}, "block_bytes is 2147483649"),
        ({"block_bytes": 5}, "make blocks of 64 bytes"),
        ({"dtype": "int4", "layout": "mla", "block_tokens": 1}, "not whole bytes"),
        ({"head_dim": 1 << 20, "kv_heads": 1 << 20}, "fewer block_tokens"),
    ],
)
def test_a_field_that_cannot_be_meant_is_named(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        Manifest(**{"model": "m", **fields})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest)])
@pytest.mark.parametrize("value", [None, 1.5, True, b"x", object(), [1, 2, 3], {"a": 1}], ids=shown)
def test_a_field_of_a_wrong_type_is_named(field: str, value: Any) -> None:
    fields = {"model": "m", field: value}
    if field == "block_bytes":
        if value is None:
            return  # computed
        fields["layout"] = "opaque"
    with pytest.raises(BadType, match=field):
        Manifest(**fields)


def test_a_field_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="modle"):
        Manifest(modle="m")  # type: ignore[call-arg]


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Manifest(model="m").model = "n"  # type: ignore[misc]


def test_replace_varies_a_manifest() -> None:
    one = Manifest(**FULL)
    assert dataclasses.replace(one, salt="x") == Manifest(**{**FULL, "salt": "x"})
    # A size that was computed is a field like others: it has to be computed anew.
    with pytest.raises(BadArgument, match="block_bytes"):
        dataclasses.replace(one, head_dim=128)
    larger = dataclasses.replace(one, head_dim=128, block_bytes=None)
    assert larger == Manifest(**{**FULL, "head_dim": 128})


def test_pickle_keeps_it() -> None:
    one = Manifest(**FULL)
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("fields", [fields for fields, _ in GOLDEN], ids=lambda f: f["model"])
def test_unpack_reads_what_pack_wrote(fields: dict[str, Any]) -> None:
    manifest = Manifest(**fields)
    assert unpack(manifest.pack()) == manifest


def test_an_empty_engine_is_left_out_and_has_no_other_spelling() -> None:
    content = msgpack.unpackb(Manifest(model="m").pack())
    assert "engine" not in [name for name, _ in content[1:]]
    place = [name for name, _ in content[1:]].index("epoch") + 1
    content.insert(place, ["engine", "e"])
    assert unpack(msgpack.packb(content)) == Manifest(model="m", engine="e")
    content[place] = ["engine", ""]
    with pytest.raises(BadArgument, match="canonical"):
        unpack(msgpack.packb(content))


@pytest.mark.parametrize("place", [1, 14, 16])
def test_an_engine_in_another_place_is_refused(place: int) -> None:
    content = msgpack.unpackb(Manifest(model="m").pack())
    content.insert(place, ["engine", "e"])
    with pytest.raises(BadArgument, match="in that order"):
        unpack(msgpack.packb(content))


def test_two_engines_are_refused() -> None:
    content = msgpack.unpackb(Manifest(model="m", engine="e").pack())
    content.insert(15, ["engine", "e"])
    with pytest.raises(BadArgument, match="in that order"):
        unpack(msgpack.packb(content))


def test_engines_that_differ_are_told_by_the_parts_that_do() -> None:
    one, other = (
        Manifest(model="m", engine=f"vllm=1; attention={name}; block=32") for name in ("A", "B")
    )
    told = str(ManifestMismatch("prod", one.differing(other)))
    assert "engine: stored 'attention=A', given 'attention=B'" in told
    assert "block=32" not in told
    assert one.differing(other) == {"engine": (one.engine, other.engine)}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ("a=1", "a=1; b=2", ("", "b=2")),
        ("", "a=1; b=2", ("", "a=1; b=2")),
        ("a=1; b=2", "b=2; a=1", ("a=1; b=2", "b=2; a=1")),
        ("whole text", "other text", ("whole text", "other text")),
        (None, "a=1", (None, "a=1")),  # what a node of another version may tell
    ],
)
def test_parts_of_engines(one: Any, other: Any, told: tuple[Any, Any]) -> None:
    assert told_apart("engine", one, other) == told
    assert told_apart("salt", "a; b", "a; c") == ("a; b", "a; c")


def repacked(change: Any) -> bytes:
    content = msgpack.unpackb(Manifest(model="m", layers=4).pack())
    change(content)
    return bytes(msgpack.packb(content))


def set_field(name: str, value: object) -> Any:
    def change(content: list[Any]) -> None:
        for pair in content[1:]:
            if pair[0] == name:
                pair[1] = value

    return change


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x90",
        msgpack.packb({}),
        msgpack.packb([FORMAT_VERSION]),
        msgpack.packb([FORMAT_VERSION + 1]),
        repacked(lambda content: content.__setitem__(0, FORMAT_VERSION + 1)),
        repacked(lambda content: content.__setitem__(0, float(FORMAT_VERSION))),
        repacked(lambda content: content.__setitem__(0, True)),
        repacked(lambda content: content.pop()),
        repacked(lambda content: content.append(["more", 1])),
        repacked(lambda content: random.Random(1).shuffle(content)),
        repacked(lambda content: content[1].append(1)),
        repacked(lambda content: content.__setitem__(1, "model")),
        repacked(set_field("layers", 4)),
        repacked(set_field("block_bytes", None)),
        repacked(set_field("model", b"m")),
        repacked(set_field("model", 1)),
        repacked(set_field("kv_heads", 0)),
        repacked(set_field("tp", [1, 1])),
        repacked(set_field("block_bytes", 63)),
        Manifest(model="m").pack() + b"\x00",
        Manifest(model="m").pack()[:-1],
        Manifest(model="m").pack().replace(b"\xa1m", b"\xd9\x01m"),  # one string, another spelling
    ],
)
def test_unpack_refuses_everything_else(packed: bytes) -> None:
    with pytest.raises(BadArgument):
        unpack(packed)


@pytest.mark.parametrize("packed", [None, 5, "text", [1], object()], ids=shown)
def test_unpack_refuses_what_is_not_bytes(packed: Any) -> None:
    with pytest.raises(BadArgument):
        unpack(packed)
