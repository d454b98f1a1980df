"""A connector that moves nothing: it writes down what a real engine hands to a connector.

For kv_connector_module_path; extra config `path`: a JSON file, written again at every step. Numbers
of blocks are left out, for they follow from the machine's memory.
"""

import json
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

# Of a request: what kvpool reads.
REQUEST = (
    "request_id",
    "block_hashes",
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_preemptions",
    "prompt_token_ids",
    "kv_transfer_params",
    "cache_salt",
    "lora_request",
    "mm_features",
    "status",
)


class Recorder(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._path = Path(extra["path"])
        self._config = kv_cache_config

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._write("layout", str(self._config.kv_cache_layout))
        for name, tensor in kv_caches.items():
            assert tensor.shape[0] == self._config.num_blocks
            self._write(
                f"tensor {name}",
                f"{tensor.dtype} shape blocks,{_list(tensor.shape[1:])}"
                f" strides {_list(tensor.stride())}",
            )
        for number, group in enumerate(self._config.kv_cache_groups):
            spec = group.kv_cache_spec
            self._write(
                f"group {number}",
                f"{type(spec).__name__} block {spec.block_size} page {spec.page_size_bytes}"
                f" window {getattr(spec, 'sliding_window', None)} of {' '.join(group.layer_names)}",
            )
        for number, each in enumerate(self._config.kv_cache_tensors):
            self._write(
                f"allocation {number}",
                f"{len(each.layers)} layers, {each.size // self._config.num_blocks} bytes a block,"
                f" {each.layer_stride // self._config.num_blocks} between layers,"
                f" {each.block_stride} between blocks",
            )

    def get_num_new_matched_tokens(self, request: Any, _: int) -> tuple[int, bool]:
        for name in REQUEST:
            self._write(f"request {name}", type(getattr(request, name)).__name__)
        self._write(
            "hashes", f"{len(request.block_hashes)} of {len(request.block_hashes[0])} bytes"
        )
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for each in scheduler_output.scheduled_new_reqs:
            kinds = [[type(block).__name__ for block in group[:1]] for group in each.block_ids]
            self._write("new request block_ids", f"{type(each.block_ids).__name__} of {kinds}")
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_layer_load(self, *_: Any) -> None:
        pass

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def _write(self, name: str, text: str) -> None:
        told = json.loads(self._path.read_text()) if self._path.exists() else {}
        told[name] = text
        self._path.write_text(json.dumps(told))


def _list(numbers: Any) -> str:
    return ",".join(str(each) for each in numbers)
