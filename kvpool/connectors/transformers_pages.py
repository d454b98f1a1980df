"""Whole blocks of tokens, between a DynamicCache and a namespace.

A cache layer has K and V as (1, heads, tokens, head_dim). Seen as pages of `block_tokens` tokens
those are (page, head, token, element) in strides that the pool takes as they are, so that on the
CPU a block is copied once, between the tensor and the pool. Tensors of a device go through the
host: one more copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvpool.connectors.transformers_model import Shape, empty_cache
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace
from kvpool.types import Keys, PutResult

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def pages(tensor: Any, block_tokens: int) -> Any:
    """(1, heads, tokens, head_dim) as (page, head, token, element). A view, whatever the strides.

    tokens: a multiple of block_tokens.
    """
    return tensor[0].unflatten(1, (-1, block_tokens)).permute(1, 0, 2, 3)


def load_prefix(space: Namespace, keys: Keys, model: Any, shape: Shape) -> tuple[Any, int]:
    """A cache with the leading blocks that the pool delivers, and how many those are.

    Two passes over the index, and one copy of the bytes. No blocks: an empty cache.
    """
    cache = empty_cache(model)
    found = space.lookup(keys).blocks if len(keys) else 0
    if found == 0:
        return cache, 0
    pairs = _room(space.manifest, found, shape)
    block_tokens = space.manifest.block_tokens
    layers = space.layers([(pages(k, block_tokens), pages(v, block_tokens)) for k, v in pairs])
    loaded = space.load(layers, np.arange(found, dtype=np.int32), keys[:found])
    if loaded:
        _fill(cache, pairs, loaded * block_tokens, shape)
    return cache, loaded


def _room(manifest: Manifest, blocks: int, shape: Shape) -> list[tuple[Any, Any]]:
    size = (1, shape.kv_heads, blocks * manifest.block_tokens, shape.head_dim)
    dtype = TORCH_DTYPES[shape.dtype]
    return [(torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)) for _ in shape.devices]


def _fill(cache: Any, pairs: list[tuple[Any, Any]], tokens: int, shape: Shape) -> None:
    """Without update(): it would copy the tensors once more, behind those that it has not."""
    for layer, (keys, values), device in zip(cache.layers, pairs, shape.devices, strict=True):
        keys = keys[:, :, :tokens].to(device)
        values = values[:, :, :tokens].to(device)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values


def save_blocks(space: Namespace, keys: Keys, first: int, cache: Any) -> PutResult:
    """Put the blocks keys[first:] of a cache that has the tokens of all the keys.

    One copy of the bytes of blocks that the pool has not, none of the others.
    """
    block_tokens = space.manifest.block_tokens
    begin, end = first * block_tokens, len(keys) * block_tokens
    # .cpu() is the tensor itself where it is there already.
    pairs = [
        (layer.keys[:, :, begin:end].cpu(), layer.values[:, :, begin:end].cpu())
        for layer in cache.layers
    ]
    layers = space.layers([(pages(k, block_tokens), pages(v, block_tokens)) for k, v in pairs])
    table = np.arange(len(keys) - first, dtype=np.int32)
    parent = keys[first - 1] if first else None
    return space.save(layers, table, keys[first:], parent=parent)
