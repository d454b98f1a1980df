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

    def order_loads(self) -> None:
        """Order loads that begin now behind what the engine was given to do until now."""


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

    def order_loads(self) -> None:
        """On the host a step is over when it returns."""


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
        self._gathered: Any = None  # event: the last gather is over
        self._free_pages: Any = None  # event: nothing that was under way writes a page any more
        self._staged = self._pinned(max(1, STAGED_BYTES // max(1, self._block_bytes)))
        self._loading = threading.Lock()  # the staging memory of loads has one user at a time

    def _pinned(self, blocks: int) -> Any:
        return self._torch.empty(
            (blocks, self._block_bytes), dtype=self._torch.uint8, pin_memory=self._on_device
        )

    def gather(self, pages: Sequence[int], out: Sequence[np.ndarray[Any, Any]]) -> Ticket:
        torch = self._torch
        if self._out_stream is None:
            self._copy_out(pages, out)
            return _Done()
        self._out_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out_stream):
            self._copy_out(pages, out)
            event = torch.cuda.Event()
            event.record()
        self._gathered = event
        return _Event(event)

    def _index(self, pages: Sequence[int]) -> Any:
        """Made on the stream that uses it, whose memory it is; nothing waits for it."""
        index = self._torch.tensor(list(pages), pin_memory=self._on_device)
        return index.to(self._device, non_blocking=True)

    def _copy_out(self, pages: Sequence[int], out: Sequence[np.ndarray[Any, Any]]) -> None:
        """One gather per layer on the device, then one copy per block to the host."""
        torch = self._torch
        index = self._index(pages)
        blocks = torch.empty(
            (len(pages), self._block_bytes), dtype=torch.uint8, device=self._device
        )
        at = 0
        for tensor, page_bytes in zip(self._tensors, self._page_bytes, strict=True):
            rows = tensor.index_select(0, index).contiguous().view(torch.uint8)
            blocks[:, at : at + page_bytes] = rows.view(len(pages), page_bytes)
            at += page_bytes
        for block, host in zip(blocks, out, strict=True):
            torch.from_numpy(host).copy_(block, non_blocking=self._on_device)

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
            if self._free_pages is not None:
                self._in_stream.wait_event(self._free_pages)
            self._scatter(pages)
        self._in_stream.synchronize()  # the staging memory is filled again next

    def _scatter(self, pages: Sequence[int]) -> None:
        index = self._index(pages)
        blocks = self._staged[: len(pages)].to(self._device, non_blocking=True)
        at = 0
        for tensor, page_bytes in zip(self._tensors, self._page_bytes, strict=True):
            rows = blocks[:, at : at + page_bytes].contiguous().view(tensor.dtype)
            tensor.index_copy_(0, index, rows.view(len(pages), *tensor.shape[1:]))
            at += page_bytes

    def fence(self) -> None:
        if self._gathered is not None:
            self._torch.cuda.current_stream(self._device).wait_event(self._gathered)
            self._gathered = None

    def order_loads(self) -> None:
        """A page may have had an owner whose last step, or whose save, is still under way."""
        if self._in_stream is None:
            return
        self.fence()
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        self._free_pages = event


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def mover_for(group: PagedGroup, manifest: Manifest) -> Mover:
    """The quickest that reaches the group's caches."""
    return HostMover(group, manifest) if group.on_host else StagedMover(group, manifest)
