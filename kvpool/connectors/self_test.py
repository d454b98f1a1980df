"""Before an engine serves: a pattern goes through its real pages and the pool and comes back.

Two pages of every layer are written by the engine's own views, one goes out and comes in as the
other, and every byte of both is compared by those views again; a third page must not have changed.
A wrong idea of strides, of the page of a block, or of two layers in one place shows here, at the
start, and not as garbled text.

Runs before the engine's first request; what was in the pages is put back. Cost: some copies of one
block, and an embedded pool for a moment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kvpool
from kvpool.connectors.moving import Mover
from kvpool.connectors.pages import PagedGroup
from kvpool.errors import KvpoolError
from kvpool.manifest import Manifest

_POOL_BYTES_MIN = 64 << 20
_SEED = 0x6B76706F6F6C


class SelfTestFailed(KvpoolError, RuntimeError):
    """An engine's pages do not come back from the pool as they went in: it must not be used."""


def check_round_trip(group: PagedGroup, manifest: Manifest, mover: Mover) -> None:
    """Raises SelfTestFailed naming the layer. Engines of fewer than 4 blocks are not tried."""
    if group.blocks < 4:
        return
    source, target, beside = group.blocks - 1, group.blocks - 2, group.blocks - 3
    kept = {page: _read(group, page) for page in (source, target, beside)}
    try:
        _fill(group, source, np.random.default_rng(_SEED))
        before = _read(group, beside)
        _through_pool(manifest, mover, source, target, group)
        wanted, found = _read(group, source), _read(group, target)
        _compare(group, wanted, found, "came back changed")
        _compare(group, before, _read(group, beside), "changed although another page was written")
    finally:
        for page, content in kept.items():
            _write(group, page, content)


def _through_pool(
    manifest: Manifest, mover: Mover, source: int, target: int, group: PagedGroup
) -> None:
    block_bytes = int(manifest.block_bytes or 0)
    key = bytes(range(16))
    with kvpool.open(dram=max(_POOL_BYTES_MIN, 4 * block_bytes)) as pool:
        space = pool.namespace(manifest)
        block = np.empty(block_bytes, np.uint8)
        mover.gather([source], [block]).wait()
        stored = space.put([key], block).stored
        loaded = mover.load(space, [target], [key])
    if (stored, loaded) != (1, 1):
        raise SelfTestFailed(
            f"KV cache group {group.facts.index}: a block of {block_bytes} bytes was stored "
            f"{stored} times and loaded {loaded} times"
        )


def _rows(group: PagedGroup, page: int) -> list[Any]:
    """What the engine itself calls this block, one tensor per layer."""
    in_block = group.views[0].shape[0] // group.blocks
    return [view[page * in_block : (page + 1) * in_block] for view in group.views]


def _read(group: PagedGroup, page: int) -> list[Any]:
    return [row.clone() for row in _rows(group, page)]


def _write(group: PagedGroup, page: int, content: list[Any]) -> None:
    for row, kept in zip(_rows(group, page), content, strict=True):
        row.copy_(kept)


def _fill(group: PagedGroup, page: int, random: np.random.Generator) -> None:
    import torch

    for row in _rows(group, page):
        raw = random.integers(0, 256, row.numel() * row.element_size(), np.uint8)
        row.copy_(torch.from_numpy(raw).view(row.dtype).view(row.shape))


def _compare(group: PagedGroup, wanted: list[Any], found: list[Any], what: str) -> None:
    for name, one, other in zip(group.facts.layers, wanted, found, strict=True):
        if _bytes(one) != _bytes(other):  # bytes: a pattern may be a NaN, which equals nothing
            raise SelfTestFailed(
                f"the pages of layer {name!r} {what}: layout {group.facts.layout} is not what "
                "this engine has; kvpool will not be used with it"
            )


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.contiguous().cpu().flatten().view(torch.uint8)
    return bytes(flat.numpy().tobytes())
