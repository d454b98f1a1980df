"""KvpoolTier behind vLLM's own CPU tier: what comes from the pool is what the engine computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.rig import Engine, Model, Output, engines
from tests.engines.tokens import assert_same, loadable_tokens, random_prompts
from tests.served import Served, clients, served, wait_for

MAX_TOKENS = 16
PROMPTS = 3
TOKENS = 300
SEED = 7  # of the prompts: the same ones in every run, as the weights are
CPU_BYTES = 64 << 20
LOAD_TIMEOUT_S = 2.0
STORED_S = 60.0

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

    def __init__(self, model: Model, folder: Path, name: str, address: str, **options: Any) -> None:
        super().__init__(model, folder, name, connector=tiered(address, **options))
        self._fillers = iter(range(10, 2000))

    def step(self) -> None:
        """Something else: what was computed goes on, to both tiers, in later steps."""
        self.generate([[next(self._fillers)] * 3], 1)

    def chunks(self, what: str) -> int:
        """loaded, stored, not_loaded, not_stored. As of the last step."""
        return self.metrics().value(f"kvpool_tier_{what}_chunks_total")

    def wait_counted(self, what: str, chunks: int) -> None:
        def are_counted() -> bool:
            self.step()
            return self.chunks(what) >= chunks

        wait_for(are_counted, STORED_S, f"{chunks} chunks are {what}")
        assert self.chunks(what) == chunks


@dataclass
class Case:
    """One model with its engines. The pool has all whole blocks of the prompts."""

    model: Model
    daemon: Served
    plain: Engine
    filling: Tiered
    near: Tiered
    far: Tiered
    prompts: Sequence[Sequence[int]]
    right: Sequence[Output]

    def assert_loads(self, engine: Tiered) -> None:
        """The prompts in an engine: the same tokens, and every chunk once from the pool."""
        with engine.counting() as counted:
            outputs = engine.generate(self.prompts, MAX_TOKENS)
        assert_same(self.model, self.right, outputs)
        assert counted.external_tokens == loadable_tokens(self.model, outputs)
        assert counted.local_tokens == 0
        engine.wait_counted("loaded", PROMPTS * chunks_of(self.model))
        assert engine.chunks("not_loaded") == 0


def chunks_of(model: Model) -> int:
    """Of one prompt: all whole blocks; and of layers with a window, those in it at the end."""
    return TOKENS // model.block_tokens + (2 if model.name == "hybrid" else 0)


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def case(
    request: pytest.FixtureRequest, model: Named, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    chosen = model(request.param)
    folder = tmp_path_factory.mktemp(f"tier-{request.param}")
    with (
        served(folder, dram="256MiB") as daemon,
        engines(
            Engine(chosen, folder, "plain"),
            Tiered(chosen, folder, "filling", daemon.unix_address),
            Tiered(chosen, folder, "near", daemon.unix_address),
            Tiered(chosen, folder, "far", daemon.tcp_address),
        ) as started,
    ):
        prompts = random_prompts(np.random.default_rng(SEED), PROMPTS, TOKENS)
        right = started[0].generate(prompts, MAX_TOKENS)
        found = Case(chosen, daemon, *started, prompts, right)  # type: ignore[arg-type]
        assert_same(chosen, right, found.filling.generate(prompts, MAX_TOKENS))
        found.filling.wait_counted("stored", PROMPTS * chunks_of(chosen))
        yield found


def test_fresh_engine_takes_up_what_another_one_computed(case: Case) -> None:
    case.assert_loads(case.near)


def test_so_it_does_over_sockets(case: Case) -> None:
    case.assert_loads(case.far)


def test_what_the_cpu_tier_has_is_not_loaded_again(case: Case) -> None:
    case.near.reset_prefix_cache()
    case.assert_loads(case.near)


def test_engines_go_on_when_the_daemon_dies(case: Case) -> None:
    """The last one of a case: the pool is empty afterwards."""
    for engine in (case.near, case.far):
        engine.wait_ready()
    rng = np.random.default_rng(SEED + 1)
    prompts = random_prompts(rng, PROMPTS, TOKENS)
    right = case.plain.generate(prompts, MAX_TOKENS)
    case.daemon.kill()
    for engine in (case.near, case.far):
        assert_same(case.model, right, engine.generate(prompts, MAX_TOKENS))
        engine.wait_counted("not_stored", PROMPTS * chunks_of(case.model))
    case.daemon.start()
    with case.daemon.connect() as pool:  # and the three engines
        wait_for(lambda: clients(pool) == 4, what="the engines are connected again")
    more = random_prompts(rng, 1, TOKENS)
    right = case.plain.generate(more, MAX_TOKENS)
    stored = case.near.chunks("stored")
    assert_same(case.model, right, case.near.generate(more, MAX_TOKENS))
    case.near.wait_counted("stored", stored + chunks_of(case.model))


def test_daemon_that_dies_between_lookup_and_load(
    tmp_path: Path, model: Named, rng: np.random.Generator
) -> None:
    """Over sockets: of shared memory, blocks can be read until it is known that the node died."""
    chosen, prompts = model("llama"), random_prompts(rng, 1, TOKENS)
    chunks = TOKENS // chosen.block_tokens
    with (
        served(tmp_path) as daemon,
        engines(
            Tiered(chosen, tmp_path, "filling", daemon.unix_address),
            Tiered(chosen, tmp_path, "other", daemon.tcp_address),
        ) as (filling, other),
    ):
        right = filling.generate(prompts, MAX_TOKENS)
        filling.wait_counted("stored", chunks)
        other.hold("kvpool.connectors.vllm_tier_rows:Rows.load")
        other.begin(prompts, MAX_TOKENS)
        other.wait_held()
        daemon.kill()
        other.go()
        assert_same(chosen, right, other.outputs())
        assert (other.chunks("loaded"), other.chunks("not_loaded")) == (0, chunks)


def test_chunks_that_the_cpu_tier_has_no_room_for_come_from_the_pool(
    tmp_path: Path, model: Named, rng: np.random.Generator
) -> None:
    """One engine, whose CPU tier holds one prompt and no two, in chunks of several blocks."""
    chunk = 3
    chosen, prompts = model("llama"), random_prompts(rng, 3, TOKENS)
    chunks = TOKENS // (chosen.block_tokens * chunk)
    with served(tmp_path) as daemon:
        cpu_bytes = (chunks + 1) * chunk * (64 << 10)  # a block of this model has 64 KiB
        options = {"cpu_bytes": cpu_bytes, "chunk": chunk}
        with engines(Tiered(chosen, tmp_path, "small", daemon.unix_address, **options)) as (
            engine,
        ):
            right = []
            for number, prompt in enumerate(prompts, 1):
                right += engine.generate([prompt], MAX_TOKENS)
                engine.wait_counted("stored", number * chunks)
            engine.reset_prefix_cache()
            with engine.counting() as counted:
                again = engine.generate([prompts[0]], MAX_TOKENS)
            assert_same(chosen, right[:1], again)
            assert counted.external_tokens == chunks * chunk * chosen.block_tokens
            assert engine.chunks("loaded") == chunks
