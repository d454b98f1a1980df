"""Blocks between an engine's pages and the pool: directly on the host, through pinned memory else.

A mover copies pages into memory of ours and blocks of the pool into pages. On the host both are one
copy by the core, straight from and to the pages. Caches on a device are gathered there, copied on a
stream of our own and fenced against the engine's stream by events, so that nothing waits on the
host but our own threads. The second way was never run on a device; tests run it on host tensors.

Thread rule: gather() and fence() on the engine's thread; wait() and load() on any other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvpool.connectors.pages import PagedGroup
from kvpool.layers import plan_layers
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace

STAGED_BYTES = 64 << 20  # of pinned memory for the blocks of one load at a time


class Ticket(Protocol):
    """Bytes on their way into memory of the host."""

    def wait(self) -> None:
        """Returns once they are there."""


class Mover(Protocol):
    """How the blocks of one KV cache group move."""

    def gather(self, pages: Sequence[int], out: Sequence[np.ndarray[Any, Any]]) -> Ticket:
        """Start copying one block per page into `out`. The pages may change once fence() ran."""

    def load(self, space: Namespace, pages: Sequence[int], keys: Any) -> int:
        """Deliver the leading present blocks into pages; returns how many. Blocks the caller."""

    def fence(self) -> None:
        """Order what the engine does next behind the copies that were started."""


class _Done:
    def wait(self) -> None:
        """The copy is over when gather() returns."""


class HostMover:
    """Pages in memory of this process: one pass of the core, without the GIL."""

    def __init__(self, group: PagedGroup, manifest: Manifest) -> None:
        self._layers = plan_layers(manifest, list(group.tensors))

    def gather(self, pages: Sequence[int], out: Sequence[np.ndarray[Any, Any]]) -> Ticket:
        self._layers.gather(len(pages), list(pages), list(out))
        return _Done()

    def load(self, space: Namespace, pages: Sequence[int], keys: Any) -> int:
        return space.load(self._layers, list(pages), keys)

    def fence(self) -> None:
        """Nothing is left under way."""


class StagedMover:
    """Pages on a device, or anywhere that torch reaches: through pinned memory of the host."""

    def __init__(self, group: PagedGroup, manifest: Manifest) -> None:
        import torch

        self._torch = torch
        self._tensors = group.tensors
        self._device = group.tensors[0].device
        self._block_bytes = int(manifest.block_bytes or 0)
        self._page_bytes = [t[0].numel() * t.element_size() for t in group.tensors]
        self._on_device = self._device.type != "cpu"
        self._out_stream = torch.cuda.Stream(self._device) if self._on_device else None
        self._in_stream = torch.cuda.Stream(self._device) if self._on_device else None
        self._last: Any = None
        self._staged = self._pinned(max(1, STAGED_BYTES // max(1, self._block_bytes)))
        self._loading = threading.Lock()  # the staging memory of loads has one user at a time

    def _pinned(self, blocks: int) -> Any:
        return self._torch.empty(
            (blocks, self._block_bytes), dtype=self._torch.uint8, pin_memory=self._on_device
        )

    def gather(self, pages: Sequence[int], out: Sequence[np.ndarray[Any, Any]]) -> Ticket:
        torch = self._torch
        index = torch.tensor(list(pages), device=self._device)
        if self._out_stream is None:
            self._copy_out(index, out)
            return _Done()
        self._out_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out_stream):
            self._copy_out(index, out)
            event = torch.cuda.Event()
            event.record()
        self._last = event
        return _Event(event)

    def _copy_out(self, index: Any, out: Sequence[np.ndarray[Any, Any]]) -> None:
        """One gather per layer on the device, then one copy per block and layer to the host."""
        torch = self._torch
        at = 0
        for tensor, page_bytes in zip(self._tensors, self._page_bytes, strict=True):
            rows = tensor.index_select(0, index).contiguous().view(torch.uint8)
            rows = rows.view(len(out), page_bytes)
            for row, block in zip(rows, out, strict=True):
                host = torch.from_numpy(block[at : at + page_bytes])
                host.copy_(row, non_blocking=self._on_device)
            at += page_bytes

    def load(self, space: Namespace, pages: Sequence[int], keys: Any) -> int:
        done = 0
        with self._loading:
            step = self._staged.shape[0]
            for start in range(0, len(pages), step):
                part = list(pages[start : start + step])
                got = space.get_into(keys[start : start + step], self._staged.numpy())
                self._copy_in(part[:got])
                done += got
                if got < len(part):
                    break
        return done

    def _copy_in(self, pages: Sequence[int]) -> None:
        torch = self._torch
        if not pages:
            return
        if self._in_stream is None:
            self._scatter(pages)
            return
        with torch.cuda.stream(self._in_stream):
            self._scatter(pages)
        self._in_stream.synchronize()  # the staging memory is filled again next

    def _scatter(self, pages: Sequence[int]) -> None:
        torch = self._torch
        index = torch.tensor(list(pages), device=self._device)
        at = 0
        for tensor, page_bytes in zip(self._tensors, self._page_bytes, strict=True):
            part = self._staged[: len(pages), at : at + page_bytes].contiguous()
            rows = part.to(self._device, non_blocking=True).view(tensor.dtype)
            tensor.index_copy_(0, index, rows.view(len(pages), *tensor.shape[1:]))
            at += page_bytes

    def fence(self) -> None:
        if self._last is not None:
            self._torch.cuda.current_stream(self._device).wait_event(self._last)
            self._last = None


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def mover_for(group: PagedGroup, manifest: Manifest) -> Mover:
    """The quickest that reaches the group's caches."""
    return HostMover(group, manifest) if group.on_host else StagedMover(group, manifest)
