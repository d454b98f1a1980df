"""Whatever comes from the pool, an engine says what it says without one.

Each model has an engine without a pool, one that fills the pool, and one that never computed what
it is asked: whatever it does not compute then is the pool's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.engines.connectors import kvpool_connector
from tests.engines.rig import Engine, Model, Output, Prompt, engines
from tests.engines.tokens import (
    assert_same,
    first_difference,
    loadable_tokens,
    page_prompts,
    random_prompts,
)
from tests.served import Served, served

MODELS = ("llama", "llama-bfloat16", "mla", "hybrid", "smollm")
PROMPTS = 4
TOKENS = 300
PAGE_CHARACTERS = 1200
MAX_TOKENS = 24
SEED = 7  # of the prompts: the same ones in every run, as the weights are


@dataclass
class Case:
    """One model with its engines; what is asked, and what is right."""

    model: Model
    daemon: Served
    plain: Engine
    filling: Engine
    fresh: Engine
    prompts: Sequence[Prompt] = field(default_factory=list)
    right: Sequence[Output] = field(default_factory=list)

    def fill(self) -> None:
        """The pool gets all blocks of the prompts."""
        rng = np.random.default_rng(SEED)
        if self.model.has_tokenizer:
            self.prompts = page_prompts(PROMPTS, PAGE_CHARACTERS)
        else:
            self.prompts = random_prompts(rng, PROMPTS, TOKENS)
        self.right = self.plain.generate(self.prompts, MAX_TOKENS)
        with self.filling.counting() as counted:
            outputs = self.filling.generate(self.prompts, MAX_TOKENS)
        assert_same(self.model, self.right, outputs)
        assert counted.external_tokens == 0
        self.filling.wait_saved()

    def assert_loads(self) -> None:
        """The prompts again: the same tokens, every whole block from the pool."""
        with self.fresh.counting() as counted:
            outputs = self.fresh.generate(self.prompts, MAX_TOKENS)
        assert_same(self.model, self.right, outputs)
        assert counted.local_tokens == 0
        loadable = loadable_tokens(self.model, outputs)
        assert counted.external_tokens == loadable, counted.named("kvpool")


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest,
    model: Callable[[str], Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    chosen = model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    ssd = {"ssd": str(folder / "tier"), "ssd_capacity": "512MiB", "ssd_free_floor": "0"}
    with served(folder, dram="256MiB", durability="durable", **ssd) as daemon:
        connector = kvpool_connector(daemon.unix_address)
        with engines(
            Engine(chosen, folder, "plain"),
            Engine(chosen, folder, "filling", connector=connector),
            Engine(chosen, folder, "fresh", connector=connector),
        ) as started:
            found = Case(chosen, daemon, *started)
            found.fill()
            yield found


def test_a_fresh_engine_says_the_same(case: Case) -> None:
    case.assert_loads()


def test_an_engine_that_lost_its_own_cache_says_the_same(case: Case) -> None:
    case.fresh.reset_prefix_cache()
    case.assert_loads()


def test_a_daemon_that_died_has_the_blocks_on_its_ssd(case: Case) -> None:
    case.fresh.reset_prefix_cache()
    case.daemon.kill()
    case.daemon.start()
    case.fresh.wait_connected()
    case.assert_loads()
    with case.daemon.connect() as pool:
        assert pool.stats()["ssd_hits"] > 0


def test_tokens_depend_on_the_first_block(case: Case) -> None:
    """Else wrong bytes in it would not be seen by the other tests. Of real text it is the end that
    decides most."""
    changed = [other_beginning(each, case.model.block_tokens) for each in case.prompts]
    outputs = case.plain.generate(changed, MAX_TOKENS)
    differ = [
        first_difference(right.tokens, other.tokens) is not None
        for right, other in zip(case.right, outputs, strict=True)
    ]
    assert any(differ) if case.model.has_tokenizer else all(differ), differ


def other_beginning(prompt: Prompt, tokens: int) -> Prompt:
    if isinstance(prompt, str):
        return prompt[: 2 * tokens][::-1] + prompt[2 * tokens :]
    return [*reversed(prompt[:tokens]), *prompt[tokens:]]
