"""KvpoolTier behind vLLM's own CPU tier: what comes from the pool is what the engine computed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.rig import Engine, Model, Output, engines
from tests.engines.tokens import assert_same, loadable_tokens, random_prompts
from tests.served import Served, served, wait_for

MAX_TOKENS = 16
PROMPTS = 3
TOKENS = 300
CPU_BYTES = 64 << 20
LOAD_TIMEOUT_S = 2.0

Named = Callable[[str], Model]


def tiered(address: str, *, cpu_bytes: int = CPU_BYTES, chunk: int = 1, **options: Any) -> Any:
    """A kv_transfer_config: vLLM's CPU tier, and the pool behind it."""
    tier = {
        "type": "KvpoolTier",
        "module_path": "kvpool.connectors.vllm_tier",
        "address": address,
        "load_timeout_s": LOAD_TIMEOUT_S,
        **options,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "cpu_tiers",
            "cpu_bytes_to_use": cpu_bytes,
            "blocks_per_chunk": chunk,
            "secondary_tiers": [tier],
        },
    }


class Tiered(Engine):
    """An engine with the pool behind its CPU tier."""

    def __init__(
        self, model: Model, folder: Path, name: str, connector: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(model, folder, name, connector=connector, **options)
        self._fillers = iter(range(10, 2000))

    def step(self) -> None:
        """Something else: what was computed goes on, to both tiers, in later steps."""
        self.generate([[next(self._fillers)] * 3], 1)

    def chunks(self, what: str, **labels: str) -> int:
        """loaded, stored, not_loaded, not_stored. As of the last step."""
        return self.metrics().value(f"kvpool_tier_{what}_chunks_total", **labels)

    def wait_stored(self, chunks: int) -> None:
        def are_stored() -> bool:
            self.step()
            return self.chunks("stored") >= chunks

        wait_for(are_stored, 60.0, f"{chunks} chunks are stored")
        assert self.chunks("stored") == chunks


def whole_blocks(model: Model, outputs: Sequence[Output]) -> int:
    return sum(each.prompt_tokens // model.block_tokens for each in outputs)


def prompts_of(rng: np.random.Generator) -> list[list[int]]:
    return random_prompts(rng, PROMPTS, TOKENS)


@contextlib.contextmanager
def filled(
    model: Model,
    daemon: Served,
    folder: Path,
    prompts: list[list[int]],
    *,
    groups: int = 1,
    **options: Any,
) -> Iterator[list[Output]]:
    """The pool has the blocks of the prompts; what is given is what was said without it."""
    with engines(
        Engine(model, folder, "plain"),
        Tiered(model, folder, "filling", tiered(daemon.unix_address, **options)),
    ) as (plain, filling):
        right = plain.generate(prompts, MAX_TOKENS)
        assert_same(model, right, filling.generate(prompts, MAX_TOKENS))
        chunk = options.get("chunk", 1)
        filling.wait_stored(
            groups * sum(each.prompt_tokens // (model.block_tokens * chunk) for each in right)
        )
    yield right


@pytest.mark.parametrize("name", ["llama", "llama-bfloat16", "mla"])
def test_fresh_engine_takes_up_what_another_one_computed(
    tmp_path: Path, model: Named, rng: np.random.Generator, name: str
) -> None:
    chosen, prompts = model(name), prompts_of(rng)
    with (
        served(tmp_path, dram="256MiB") as daemon,
        filled(chosen, daemon, tmp_path, prompts) as right,
    ):
        for number, address in enumerate((daemon.unix_address, daemon.tcp_address)):
            with engines(Tiered(chosen, tmp_path, f"fresh {number}", tiered(address))) as (fresh,):
                with fresh.counting() as counted:
                    outputs = fresh.generate(prompts, MAX_TOKENS)
                assert_same(chosen, right, outputs)
                assert counted.external_tokens == loadable_tokens(chosen, outputs)
                wanted = loadable_tokens(chosen, outputs) // chosen.block_tokens
                assert fresh.chunks("loaded") == wanted
                assert fresh.chunks("not_loaded") == 0
