"""vLLM's tiers of KV cache on a machine whose engine itself runs on the CPU, for tests only.

vLLM offers its CPU tier to engines on accelerators, and refuses others. Here the part that moves
pages between the accelerator and the CPU tier is one that copies within the host, at once; all else
is vLLM's own: the manager, the memory that scheduler and workers share, the tiers behind it.

For kv_connector_extra_config: "spec_name": "HostTieringSpec", "spec_module_path": "cpu_tiers".
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class HostWorker(OffloadingWorker):
    """Every transfer is finished when it is submitted."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._pages = []  # of each tensor: the engine's, and the tier's
        for each in kv_caches.tensors:
            size = each.page_size_bytes
            engine = each.tensor.view(torch.int8).view(-1, size)
            host = region.create_next_worker_view(size * blocks_per_chunk)
            self._pages.append((engine, host.unflatten(1, (blocks_per_chunk, size))))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, is_store=False)

    def _move(self, job_id: int, engine_spec: Any, host_spec: Any, *, is_store: bool) -> bool:
        begin, moved = time.perf_counter(), 0
        for group, block, chunk, place in self._places(engine_spec, host_spec):
            for reference in self._groups[group]:
                engine, host = self._pages[reference.tensor_idx]
                if is_store:
                    host[chunk, place] = engine[block]
                else:
                    engine[block] = host[chunk, place]
                moved += reference.page_size_bytes
        seconds = time.perf_counter() - begin
        self._finished.append(TransferResult(job_id, True, moved, seconds))
        return True

    def _places(self, engine_spec: Any, host_spec: Any) -> Iterator[tuple[int, int, int, int]]:
        """(group, engine's block, chunk, place in the chunk) of every block that is moved."""
        blocks, chunks = iter(engine_spec.block_ids), iter(host_spec.chunk_ids)
        sizes = zip(engine_spec.group_sizes, engine_spec.block_indices, strict=True)
        for group, (count, first) in enumerate(sizes):
            chunk = -1
            for position in range(first, first + count):
                place = position % self._blocks_per_chunk
                if place == 0 or position == first:
                    chunk = int(next(chunks))
                yield group, int(next(blocks)), chunk, place

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return None

    def shutdown(self) -> None:
        self._pages.clear()
        self._region.cleanup()
