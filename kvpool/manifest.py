"""What defines a namespace: every field that changes the bytes of a block, or who may see them.

The namespace id is SHA-256, cut to 16 bytes, of the manifest as msgpack: an array of
[format version, [field name, value], ...] in the order of the fields below (docs/formats.md).
Two manifests that differ in any field are different namespaces and can never meet. Pure.

A field that came later is left out while it is empty, so that the ids of manifests that do not use
it stay what they were.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from kvpool.errors import BadArgument, BadType, shown

FORMAT_VERSION = 1
TEXT_BYTES_MAX = 4096
COUNT_MAX = 1 << 31
BLOCK_BYTES_MAX = 1 << 31

DTYPE_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
}
LAYOUTS = ("nhd", "hnd", "mla", "opaque")
HASHES = ("sha256", "xxh3")
LEFT_OUT_WHEN_EMPTY = frozenset({"engine"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The fields that define one kind of KV.

    model, revision, weights: which weights computed it (name, revision, digest).
    dtype: of the KV items. layout: order of a block's bytes; `nhd`, `hnd` (K and V), `mla` (one
    latent per token), or `opaque` (bytes only your engine understands; give block_bytes).
    layers: how many, or the half-open range of them that this shard holds.
    kv_heads, head_dim: per shard; mla: head_dim is the latent's width and kv_heads is 1.
    block_tokens: tokens per block. tp, pp: (rank, size) of tensor and pipeline parallelism.
    adapter: digest of a LoRA adapter. salt: separates users who must not share.
    engine: whatever else an engine's bytes depend on and no other field says (its attention kernel,
    strides, quantisation), as text that has one spelling; parts between "; " are told apart in
    messages.
    epoch: bump it to begin anew. hash: how prefixes are hashed; `xxh3` is faster and for a single
    tenant only, as whoever chooses tokens can make two prefixes collide.
    name: optional; two manifests of one name must be equal, so a misconfigured engine is told.
    block_bytes: computed, but for opaque.
    Raises BadArgument or BadType for a field that cannot be meant.
    """

    model: str
    name: str = ""
    revision: str = ""
    weights: str = ""
    dtype: str = "bfloat16"
    layout: str = "nhd"
    block_tokens: int = 16
    layers: int | tuple[int, int] = 1
    kv_heads: int = 1
    head_dim: int = 1
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    adapter: str = ""
    salt: str = ""
    engine: str = ""
    epoch: int = 0
    hash: str = "sha256"
    block_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("model", "name", "revision", "weights", "adapter", "salt", "engine"):
            _check_text(field, getattr(self, field))
        if not self.model:
            raise BadArgument("model is empty; it names the weights that computed the KV")
        _check_choice("dtype", self.dtype, tuple(DTYPE_BITS))
        _check_choice("layout", self.layout, LAYOUTS)
        _check_choice("hash", self.hash, HASHES)
        for field in ("block_tokens", "kv_heads", "head_dim"):
            _check_count(field, getattr(self, field), least=1)
        _check_count("epoch", self.epoch, least=0)
        for field in ("tp", "pp"):
            rank, size = _pair(field, getattr(self, field))
            if not 0 <= rank < size:
                raise BadArgument(f"{field} is {(rank, size)}; (rank, size) needs 0 <= rank < size")
            object.__setattr__(self, field, (rank, size))
        if self.layout == "mla" and self.kv_heads != 1:
            raise BadArgument(f"kv_heads is {self.kv_heads}; mla has one latent per token, so 1")
        object.__setattr__(self, "layers", _layer_range(self.layers))
        object.__setattr__(self, "block_bytes", self._block_bytes())

    def _block_bytes(self) -> int:
        if self.layout == "opaque":
            if self.block_bytes is None:
                raise BadArgument("layout opaque needs block_bytes: only you know its size")
            _check_count("block_bytes", self.block_bytes, least=1, most=BLOCK_BYTES_MAX)
            return self.block_bytes
        start, stop = self.layers  # type: ignore[misc]  # a pair since __post_init__
        per_token = self.kv_heads * self.head_dim * (1 if self.layout == "mla" else 2)
        bits = (stop - start) * per_token * self.block_tokens * DTYPE_BITS[self.dtype]
        computed, rest = divmod(bits, 8)
        if rest:
            raise BadArgument(f"a block of {bits} bits is not whole bytes")
        if computed > BLOCK_BYTES_MAX:
            raise BadArgument(
                f"a block takes {computed} bytes; at most {BLOCK_BYTES_MAX} (fewer block_tokens?)"
            )
        if self.block_bytes is not None and self.block_bytes != computed:
            raise BadArgument(
                f"block_bytes is {shown(self.block_bytes)}; these fields make blocks of "
                f"{computed} bytes"
            )
        return computed

    def pack(self) -> bytes:
        """The manifest as canonical msgpack: the same bytes in every process and version."""
        items = [
            [field.name, _plain(value)]
            for field in fields(self)
            if (value := getattr(self, field.name)) != "" or field.name not in LEFT_OUT_WHEN_EMPTY
        ]
        return bytes(msgpack.packb([FORMAT_VERSION, *items], use_bin_type=True))

    @property
    def namespace_id(self) -> bytes:
        """16 bytes that name this namespace; the seed of its prefix hashes."""
        return hashlib.sha256(self.pack()).digest()[:16]

    def differing(self, other: Manifest) -> dict[str, tuple[object, object]]:
        """Fields in which `other` differs, each as (ours, theirs)."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def unpack(packed: bytes) -> Manifest:
    """Read a manifest that pack() wrote. Raises BadArgument for anything else. O(len)."""
    try:
        content = msgpack.unpackb(packed, strict_map_key=True, max_array_len=64)
    except Exception as error:  # msgpack raises a dozen kinds, all of them "not a manifest"
        raise BadArgument(f"not a manifest: {error}") from None
    if not isinstance(content, list) or not content or content[0] != FORMAT_VERSION:
        raise BadArgument(f"not a manifest of format version {FORMAT_VERSION}")
    pairs = content[1:]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadArgument("a manifest is a list of [field, value] pairs")
    names = [name for name, _ in pairs]
    known = [field.name for field in fields(Manifest)]
    if names != [each for each in known if each in names or each not in LEFT_OUT_WHEN_EMPTY]:
        raise BadArgument(f"a manifest has the fields {', '.join(known)}, in that order")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in pairs
    }
    manifest = Manifest(**values)
    # The id is a digest of the bytes: one manifest must not come in two spellings.
    if manifest.pack() != packed:
        raise BadArgument("not a manifest: its bytes are not in the canonical form")
    return manifest


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise BadType(f"{field} is {type(value).__name__}; it must be str")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadArgument(f"{field} has a lone surrogate; it must be valid Unicode") from None
    if size > TEXT_BYTES_MAX:
        raise BadArgument(f"{field} has {size} bytes; at most {TEXT_BYTES_MAX}")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise BadType(f"{field} is {type(value).__name__}; it must be str")
    if value not in choices:
        raise BadArgument(f"{field} is {shown(value)}; it can be {', '.join(choices)}")


def _check_count(field: str, value: object, *, least: int, most: int = COUNT_MAX) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadType(f"{field} is {type(value).__name__}; it must be int")
    if not least <= value <= most:
        raise BadArgument(f"{field} is {shown(value)}; it must be {least}..{most}")


def _pair(field: str, value: object) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise BadType(f"{field} is {shown(value)}; it must be a pair of ints")
    for part in value:
        _check_count(field, part, least=0)
    return value[0], value[1]


def _layer_range(value: object) -> tuple[int, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        _check_count("layers", value, least=1)
        return 0, value
    start, stop = _pair("layers", value)
    if start >= stop:
        raise BadArgument(f"layers is {(start, stop)}; a range needs start < stop")
    return start, stop
