"""Paged KV tensors in, paged KV tensors out: save and load, between engines with different pages.

    python examples/02_paged_tensors.py

Engine A keeps KV as vLLM does, K and V in front: (2, pages, 16 tokens, heads, head_dim). Engine B
keeps smaller pages, heads before tokens: (pages, 2, heads, 8 tokens, head_dim). The pool holds each
block in one canonical order, so what A saved, B loads; neither copies anything itself.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 8, 4, 64, 16
PAGES_A, PAGES_B, PAGE_TOKENS_B = 512, 1024, 8
MANIFEST = kvpool.Manifest(
    model="toy-1b",
    dtype="bfloat16",  # numpy has no bfloat16: uint16 stands in, and the pool only moves bytes
    layers=LAYERS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    block_tokens=BLOCK_TOKENS,
)
Tensor = npt.NDArray[np.uint16]


def tokens_of_a(layers: list[Tensor], table: npt.NDArray[Any]) -> Tensor:
    """KV in token order (layer, kv, token, head, element), read from A's pages."""
    stacked = np.stack([layer[:, table] for layer in layers])
    return stacked.reshape(LAYERS, 2, -1, KV_HEADS, HEAD_DIM)


def tokens_of_b(layers: list[Tensor], table: npt.NDArray[Any]) -> Tensor:
    """The same, read from B's pages."""
    stacked = np.stack([layer[table] for layer in layers])  # layer, page, kv, head, token, element
    return stacked.transpose(0, 2, 1, 4, 3, 5).reshape(LAYERS, 2, -1, KV_HEADS, HEAD_DIM)


def main() -> None:
    rng = np.random.default_rng(11)
    a = [
        rng.integers(0, 2**16, (2, PAGES_A, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), np.uint16)
        for _ in range(LAYERS)
    ]
    b = [np.ones((PAGES_B, 2, KV_HEADS, PAGE_TOKENS_B, HEAD_DIM), np.uint16) for _ in range(LAYERS)]
    tokens = rng.integers(0, 32_000, 128 * BLOCK_TOKENS)
    table_a = rng.permutation(PAGES_A)[:128]  # one page per block
    table_b = rng.permutation(PAGES_B)[:256]  # two pages per block

    with kvpool.open(dram="128MiB") as pool:
        space = pool.namespace(MANIFEST)
        keys = space.keys(tokens)
        # Registered once: shapes and strides are looked at here, and never again.
        layers_a = space.layers(a, dims="kv page token head element")
        layers_b = space.layers(b, dims="page kv head token element")

        result = space.save(layers_a, table_a, keys)
        print(f"engine A saved {result.stored} blocks of {space.block_bytes >> 10} KiB: {result}")

        count = space.load(layers_b, table_b, keys)
        print(f"engine B loaded {count} blocks into pages of {PAGE_TOKENS_B} tokens")

        assert np.array_equal(tokens_of_a(a, table_a), tokens_of_b(b, table_b))
        print("every token's K and V are the same in both engines")


if __name__ == "__main__":
    main()
