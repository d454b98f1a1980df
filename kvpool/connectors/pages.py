"""An engine's paged KV caches, as groups of pages that together are blocks.

vLLM gives every layer a view [blocks, heads, states, content]; in which order these lie in memory
is the attention backend's business, and so is what the bytes of a page mean. A block of the pool
is, for one KV cache group, the pages of all its layers for one engine block, each page in the order
of its bytes in memory: one run where the page is one.

Promises:  1. nothing is guessed: shapes that are not explained by the engine's own configuration,
              strides that overlap, kinds of KV that are not plain pages are refused, with a reason;
           2. what is written down as `layout` is the same for two engines exactly when their pages
              have the same order of bytes, however many blocks they have.
Pure, but for the tensors it is given. Reads no payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.connectors.facts import Group
from kvpool.errors import BadArgument

# Kinds whose blocks are pages that do not change once they are full, and which say by themselves
# which of them a continuation needs. State-space models keep a state, not pages.
WHOLE_PREFIX = ("full_attention", "mla_attention")
WINDOW = ("sliding_window", "sliding_window_mla")
_RANKS = (3, 4)
_DIMENSIONS = {3: "BNC", 4: "BHNC"}


@dataclass(frozen=True)
class PagedGroup:
    """One KV cache group: what it is, and the pages of its layers.

    tensors: one per layer, [blocks, ...]; the dimensions after the first in the order of memory.
    views: the same memory as the engine sees it, for a check that takes nothing from here.
    """

    facts: Group
    tensors: tuple[Any, ...]
    views: tuple[Any, ...]
    blocks: int

    @property
    def on_host(self) -> bool:
        return all(tensor.device.type == "cpu" for tensor in self.tensors)


def read_groups(caches: Mapping[str, Any], config: Any) -> list[PagedGroup]:
    """The groups of a worker's caches, as its KVCacheConfig names them.

    Raises BadArgument where a cache cannot be read as pages. O(layers).
    """
    groups = list(config.kv_cache_groups)
    if not groups:
        raise BadArgument("the engine has no KV cache groups: there is nothing to keep in a pool")
    transferred = set(config.transfer_group_ids)
    left_out = [at for at in range(len(groups)) if at not in transferred]
    if left_out:
        raise BadArgument(
            f"KV cache groups {left_out} are not to be transferred, so that no prefix could be "
            "taken from a pool as a whole"
        )
    return [_read_group(at, group, caches, config) for at, group in enumerate(groups)]


def _read_group(at: int, group: Any, caches: Mapping[str, Any], config: Any) -> PagedGroup:
    kind, window = kind_of(at, group.kv_cache_spec)
    missing = [name for name in group.layer_names if name not in caches]
    if missing:
        raise BadArgument(f"KV cache group {at}: the engine registered no cache for {missing[0]!r}")
    names, views = _distinct(group.layer_names, caches)
    ordered = [
        _in_memory_order(name, view, config.num_blocks)
        for name, view in zip(names, views, strict=True)
    ]
    tensors = tuple(tensor for tensor, _ in ordered)
    page_bytes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
    layouts = [text for _, text in ordered]
    layout = layouts[0] if len(set(layouts)) == 1 else ", ".join(layouts)
    facts = Group(
        index=at,
        kind=kind,
        window=window,
        block_tokens=int(group.kv_cache_spec.block_size),
        block_bytes=sum(page_bytes),
        layout=layout,
        layers=tuple(names),
    )
    return PagedGroup(facts, tensors, tuple(views), int(config.num_blocks))


def kind_of(at: int, spec: Any) -> tuple[str, int | None]:
    """The kind of a group's KV and its window in tokens. Raises BadArgument: no pages."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kind = str(get_kv_cache_spec_kind(spec).value)
    if kind in WHOLE_PREFIX:
        return kind, None
    if kind in WINDOW:
        first = getattr(spec, "first_spec", spec)  # of several layers alike in one group
        return kind, int(first.sliding_window)
    raise BadArgument(
        f"KV cache group {at} is of kind {kind} ({type(spec).__name__}); kvpool keeps "
        f"{', '.join(WHOLE_PREFIX + WINDOW)}"
    )


def _distinct(names: Sequence[str], caches: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Without the layers that use the cache of another one of the group."""
    kept: dict[tuple[int, tuple[int, ...]], tuple[str, Any]] = {}
    for name in names:
        view = caches[name]
        if not hasattr(view, "data_ptr"):
            raise BadArgument(
                f"the cache of {name!r} is a {type(view).__name__}, not one tensor: kvpool keeps "
                "attention KV only"
            )
        kept.setdefault((view.data_ptr(), tuple(view.stride())), (name, view))
    return [name for name, _ in kept.values()], [view for _, view in kept.values()]


def _in_memory_order(name: str, view: Any, blocks: int) -> tuple[Any, str]:
    """A view with one engine block per row, and the order of the bytes of such a row as text."""
    if view.dim() not in _RANKS:
        raise BadArgument(
            f"the cache of {name!r} has shape {tuple(view.shape)}; kvpool knows [blocks, heads, "
            "states, content] and [blocks, states, content]"
        )
    rows = view.shape[0]
    if blocks <= 0 or rows % blocks:
        raise BadArgument(f"the cache of {name!r} has {rows} rows for {blocks} blocks")
    # A backend may cut an engine's block into several of its own; they follow each other.
    letters = list(_DIMENSIONS[view.dim()][1:])
    if rows != blocks:
        view = view.unflatten(0, (blocks, rows // blocks))
        letters.insert(0, "P")
    rest = sorted(range(1, view.dim()), key=lambda axis: -view.stride(axis))
    _refuse_overlap(name, view)
    order = "".join(
        f"{letters[axis - 1]}{view.shape[axis]}" for axis in rest if view.shape[axis] > 1
    )
    return view.permute(0, *rest), f"{order}:{str(view.dtype).removeprefix('torch.')}"


def _refuse_overlap(name: str, view: Any) -> None:
    """Two elements in one place would make a block depend on the order of copying."""
    steps = sorted(
        (stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1
    )
    reach = 1  # elements below it are taken
    for stride, size in steps:
        if stride < reach:
            raise BadArgument(
                f"the cache of {name!r} has strides {tuple(view.stride())} for shape "
                f"{tuple(view.shape)}: elements overlap"
            )
        reach = stride * (size - 1) + reach
