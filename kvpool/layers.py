"""Paged KV tensors of an engine, as facts for the core: addresses, shapes, strides, roles.

Never guesses: what the manifest's layout does not say, `dims` must.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from kvpool import _core
from kvpool.errors import BadArgument, BadType
from kvpool.manifest import DTYPE_BITS, Manifest

DEFAULT_DIMS = {
    "nhd": "page kv token head element",
    "hnd": "page kv head token element",
    "mla": "page token element",
}

LAYERS_MAX = 1 << 16

TensorFacts = tuple[int, int, int, list[int], list[int]]


def plan_layers(
    manifest: Manifest, kv_layers: Sequence[Any], dims: str | None = None
) -> _core.Layers:
    """Check the tensors against the manifest and plan their copies. O(layers)."""
    layers = _listed(kv_layers)
    start, stop = manifest.layers  # type: ignore[misc]  # a pair since the manifest was made
    if len(layers) != stop - start and manifest.layout != "opaque":
        raise BadArgument(f"got {len(layers)} layers; the manifest has {stop - start}")
    if not layers:
        raise BadArgument("no layers given")
    pairs = [isinstance(layer, (tuple, list)) for layer in layers]
    if any(pairs) and not all(pairs):
        raise BadArgument("either every layer is a (K, V) pair or none is")
    if all(pairs) and any(len(layer) != 2 for layer in layers):
        raise BadArgument("a layer given as a pair must be (K, V)")
    tensors = [tensor for layer in layers for tensor in layer] if all(pairs) else layers
    facts = [_facts(tensor) for tensor in tensors]
    words = _dims(manifest, dims, rank=len(facts[0][3]), split=all(pairs))
    page_tokens = _check_shapes(manifest, facts, words)
    planned = _core.Layers.make(
        manifest.layout,
        manifest.block_tokens,
        page_tokens,
        all(pairs),
        facts,
        words,
        tensors,
        all(_writable(tensor) for tensor in tensors),
    )
    if planned.block_bytes != manifest.block_bytes:
        raise BadArgument(
            f"a block of these layers takes {planned.block_bytes} bytes; the manifest says "
            f"{manifest.block_bytes}"
        )
    return planned


def _listed(kv_layers: Sequence[Any]) -> list[Any]:
    kind = type(kv_layers).__name__
    if not hasattr(kv_layers, "__len__") or isinstance(kv_layers, (str, bytes, dict)):
        raise BadType(f"kv_layers is {kind}; it must be a list of tensors")
    try:
        layers = list(islice(kv_layers, LAYERS_MAX + 1))
    except Exception as error:  # whatever a foreign sequence raises
        raise BadType(f"kv_layers is {kind} and cannot be read as a list: {error}") from error
    if len(layers) > LAYERS_MAX:
        raise BadArgument(f"got more than {LAYERS_MAX} layers")
    return layers


def _dims(manifest: Manifest, dims: str | None, *, rank: int, split: bool) -> list[str]:
    if dims is not None:
        if not isinstance(dims, str):
            raise BadType(f"dims is {type(dims).__name__}; it must be str")
        return dims.replace(",", " ").split()
    if manifest.layout == "opaque":
        return ["page"] + ["element"] * (rank - 1)
    words = DEFAULT_DIMS[manifest.layout].split()
    return [word for word in words if word != "kv"] if split else words


def _check_shapes(manifest: Manifest, facts: list[TensorFacts], words: list[str]) -> int:
    """Compare named dimensions and item sizes with the manifest; returns the tokens of a page."""
    page_tokens = manifest.block_tokens
    for number, (_, _, item, shape, _) in enumerate(facts):
        if len(shape) != len(words):
            raise BadArgument(
                f"layer tensor {number} has shape {tuple(shape)}; dims names {len(words)}: "
                f"{' '.join(words)}"
            )
        if manifest.layout == "opaque":
            continue
        if _item_bits(manifest) % 8 != 0:
            raise BadArgument(
                f"{manifest.dtype} has no items of whole bytes, so tensors of it cannot be "
                "described; use layout opaque"
            )
        if item * 8 != _item_bits(manifest):
            raise BadArgument(
                f"layer tensor {number} has items of {item} bytes; {manifest.dtype} has "
                f"{_item_bits(manifest) // 8}"
            )
        wanted = {"head": manifest.kv_heads, "element": manifest.head_dim, "kv": 2}
        for word, size in zip(words, shape, strict=True):
            if word in wanted and size != wanted[word]:
                raise BadArgument(
                    f"layer tensor {number}: dimension {word!r} is {size}; the manifest says "
                    f"{wanted[word]}"
                )
            if word == "token":
                page_tokens = size
    return page_tokens


def _item_bits(manifest: Manifest) -> int:
    return DTYPE_BITS[manifest.dtype]


def _facts(tensor: Any) -> TensorFacts:
    """Address, extent in bytes, item bytes, shape and byte strides of a numpy or torch tensor."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise BadType("a layer is an array of Python objects; it must hold plain bytes")
        address = tensor.__array_interface__["data"][0]
        item, shape, strides = tensor.itemsize, list(tensor.shape), list(tensor.strides)
    elif hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):
        if tensor.device.type != "cpu":
            raise BadArgument(f"a layer is on {tensor.device}; only CPU tensors can be used here")
        address, item = tensor.data_ptr(), tensor.element_size()
        shape = list(tensor.shape)
        strides = [step * item for step in tensor.stride()]
    else:
        raise BadType(f"a layer is {type(tensor).__name__}; it must be a numpy or torch tensor")
    if any(size == 0 for size in shape):
        raise BadArgument(f"a layer has the empty shape {tuple(shape)}")
    extent = item + sum(
        (size - 1) * step for size, step in zip(shape, strides, strict=True) if step > 0
    )
    return address, extent, item, shape, strides


def _writable(tensor: Any) -> bool:
    return bool(tensor.flags.writeable) if isinstance(tensor, np.ndarray) else True
