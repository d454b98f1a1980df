"""Many requests, little room, prompts in pieces, salts: the same tokens, never a stranger's block.

One small model in single precision; an engine that has room for everything says what is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.engines.connectors import kvpool_connector
from tests.engines.rig import Engine, Model, engines
from tests.engines.tokens import assert_same, loadable_tokens, random_prompts
from tests.served import served

# Room for 24 blocks, and 64 tokens a step: a prompt of 300 tokens takes five steps, and six
# requests of 6 blocks each cannot all stay.
TIGHT = {"num_gpu_blocks_override": 25, "max_num_batched_tokens": 64, "max_model_len": 512}


@dataclass
class Rig:
    model: Model
    plain: Engine
    filling: Engine
    fresh: Engine
    tight: Engine


@pytest.fixture(scope="module")
def rig(model: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    llama = model("llama")
    folder = tmp_path_factory.mktemp("pressure")
    with served(folder, dram="256MiB") as daemon:
        connector = kvpool_connector(daemon.unix_address)
        with engines(
            Engine(llama, folder, "plain"),
            Engine(llama, folder, "filling", connector=connector),
            Engine(llama, folder, "fresh", connector=connector),
            Engine(llama, folder, "tight", connector=connector, **TIGHT),
        ) as started:
            yield Rig(llama, *started)


def test_another_salt_never_hits_and_the_same_one_does(rig: Rig, rng: np.random.Generator) -> None:
    prompts = random_prompts(rng, 2, 200)
    right = rig.plain.generate(prompts, 8)
    loadable = loadable_tokens(rig.model, right)
    rig.filling.generate(prompts, 8, salts=["one", "one"])
    rig.filling.wait_saved()
    for salts, hits in ((["two", "two"], 0), (None, 0), (["one", "one"], loadable)):
        with rig.fresh.counting() as counted:
            outputs = rig.fresh.generate(prompts, 8, salts=salts)
        assert counted.external_tokens == hits, salts
        assert counted.local_tokens == 0
        assert_same(rig.model, right, outputs)


def test_requests_that_share_beginnings_all_at_once(rig: Rig, rng: np.random.Generator) -> None:
    beginnings, endings = random_prompts(rng, 4, 160), random_prompts(rng, 32, 40)
    prompts = [beginnings[number % 4] + ending for number, ending in enumerate(endings)]
    right = rig.plain.generate(prompts, 16)
    assert_same(rig.model, right, rig.filling.generate(prompts, 16))
    rig.filling.wait_saved()
    with rig.fresh.counting() as counted:
        outputs = rig.fresh.generate(prompts, 16)
    assert_same(rig.model, right, outputs)
    # Of no whole block that was in the pool anything is computed again.
    prompt_tokens = sum(len(each) for each in prompts)
    assert counted.computed_tokens == prompt_tokens - loadable_tokens(rig.model, outputs)
    assert counted.external_tokens >= 4 * 160


def test_prompts_that_are_computed_in_pieces(rig: Rig, rng: np.random.Generator) -> None:
    prompts = random_prompts(rng, 2, 300)
    right = rig.plain.generate(prompts, 16)
    with rig.tight.counting() as counted:
        outputs = rig.tight.generate(prompts, 16)
    assert_same(rig.model, right, outputs)
    assert counted.value("iteration_tokens_total_count") >= 600 // TIGHT["max_num_batched_tokens"]
    rig.tight.wait_saved()
    for engine in (rig.fresh, rig.tight):
        engine.reset_prefix_cache()
        with engine.counting() as counted:
            outputs = engine.generate(prompts, 16)
        assert_same(rig.model, right, outputs)
        assert counted.external_tokens == loadable_tokens(rig.model, outputs)


def test_requests_that_are_preempted(rig: Rig, rng: np.random.Generator) -> None:
    """First while they are computed and saved, then while their blocks are loaded."""
    prompts = random_prompts(rng, 6, 64)
    right = rig.plain.generate(prompts, 128)
    for turn in range(2):
        rig.tight.reset_prefix_cache()
        with rig.tight.counting() as counted:
            outputs = rig.tight.generate(prompts, 128)
        assert_same(rig.model, right, outputs)
        assert counted.preemptions > 0
        assert turn == 0 or counted.external_tokens > 0
        rig.tight.wait_saved()
