"""with_prefix_cache() on real models: the same tokens as without it, and fewer of them computed."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.rig import CHILDREN, Asked, Child, engines, environment, model_folder
from tests.pools import ROOT
from tests.served import served

BLOCK_TOKENS = 16  # what with_prefix_cache() has by itself
VOCABULARY = 2048
NEW_TOKENS = 24
EMBEDDED = {"dram": "64MiB"}


class Process(Asked):
    """A process with Hugging Face's library in it. What it has in memory ends with use()."""

    def __init__(self, folder: Path, name: str) -> None:
        command = [str(CHILDREN / "transformers_child.py")]
        super().__init__(Child(command, folder, name, env=environment()))

    def use(
        self, model: Path, pool: Mapping[str, Any], *, dtype: str = "float32", **options: Any
    ) -> "Process":
        """The model from its folder, with a prefix cache in that pool, counters from zero."""
        self.ask("use", folder=str(model), dtype=dtype, pool=dict(pool), options=options)
        return self

    def both(self, tokens: list[int]) -> list[int]:
        """Tokens with the cache; they must be those without it."""
        cached = self.ask("generate", tokens=tokens, new=NEW_TOKENS)
        plain = self.ask("plain", tokens=tokens, new=NEW_TOKENS)
        assert cached["tokens"] == plain["tokens"], self.stats()
        return list(cached["tokens"])

    def stats(self) -> dict[str, Any]:
        return dict(self.ask("stats"))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process]]:
    """Two, of which neither has what the other one computed."""
    folder = tmp_path_factory.mktemp("transformers")
    with engines(Process(folder, "one"), Process(folder, "other")) as (one, other):
        yield one, other


@pytest.fixture(scope="module")
def llama() -> Path:
    return model_folder("llama")


@pytest.fixture
def embedded(processes: tuple[Process, Process], llama: Path) -> Process:
    """With an empty pool of its own."""
    return processes[0].use(llama, EMBEDDED)


def some_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(3, VOCABULARY, count)]


def blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS


# --- the same tokens, and fewer computed ----------------------------------------------------------


@pytest.mark.parametrize("channel", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_takes_up_what_one_computed(
    processes: tuple[Process, Process],
    tmp_path: Path,
    llama: Path,
    rng: np.random.Generator,
    channel: str,
    dtype: str,
) -> None:
    one, other = processes
    prompt = some_tokens(rng, 300)
    whole = blocks(len(prompt) - 1) * BLOCK_TOKENS
    with served(tmp_path, dram="256MiB") as daemon:
        pool = {"address": daemon.address(channel)}
        made = one.use(llama, pool, dtype=dtype).ask(
            "generate", tokens=prompt, new=NEW_TOKENS, digest=whole
        )
        stats = one.stats()
        assert (stats["served"], stats["hits"]) == (1, 0)
        # Of the last token that comes out, nobody computed K and V.
        assert stats["stored_blocks"] == blocks(len(prompt) + NEW_TOKENS - 1)

        taken = other.use(llama, pool, dtype=dtype).ask(
            "generate", tokens=prompt, new=NEW_TOKENS, digest=whole
        )
        assert taken["digest"] == made["digest"]  # every byte of K and V of the prompt's blocks
        stats = other.stats()
        assert (stats["hits"], stats["loaded_tokens"]) == (1, whole)
        assert stats["failed"] == {}
        if dtype == "float32":  # half the bits leave ties that another order of sums decides
            assert taken["tokens"] == made["tokens"]
            assert other.both(prompt) == made["tokens"]


def test_real_model_on_real_text(processes: tuple[Process, Process], tmp_path: Path) -> None:
    one, other = processes
    folder = model_folder("smollm")
    text = (ROOT / "docs" / "architecture.md").read_text()[:1500]
    with served(tmp_path, dram="256MiB") as daemon:
        pool = {"address": daemon.unix_address}
        tokens = one.use(folder, pool).ask("tokenize", folder=str(folder), text=text)
        said = one.both(tokens)
        assert other.use(folder, pool).both(tokens) == said
        assert other.stats()["loaded_tokens"] == blocks(len(tokens) - 1) * BLOCK_TOKENS


def test_each_turn_takes_up_the_turns_before(embedded: Process, rng: np.random.Generator) -> None:
    history: list[int] = []
    loaded = 0
    for turn in range(4):
        before = len(history)
        history += some_tokens(rng, 40)
        history += embedded.both(history)
        found = embedded.stats()["loaded_tokens"] - loaded
        loaded += found
        # All of the turn before but its last token: its answer too, not only its prompt.
        assert found == (blocks(before - 1) * BLOCK_TOKENS if turn else 0)


def test_prompt_of_whole_blocks_leaves_a_token_to_compute(
    embedded: Process, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 4 * BLOCK_TOKENS)
    assert embedded.both(prompt) == embedded.both(prompt)
    assert embedded.stats()["loaded_tokens"] == 3 * BLOCK_TOKENS


def test_blocks_that_were_loaded_are_what_is_continued(
    embedded: Process, rng: np.random.Generator
) -> None:
    """The other tests could not fail if the model computed the prompt all the same."""
    prompt = some_tokens(rng, 100)
    assert embedded.ask("poison", tokens=prompt) == blocks(len(prompt))
    got = embedded.ask("generate", tokens=prompt, new=NEW_TOKENS)
    assert got["tokens"] != embedded.ask("plain", tokens=prompt, new=NEW_TOKENS)["tokens"]


def test_sampling_is_served_too(embedded: Process, rng: np.random.Generator) -> None:
    prompt = some_tokens(rng, 100)
    wanted = embedded.ask("sample", tokens=prompt, new=NEW_TOKENS, with_cache=False)
    for hits in range(2):
        assert embedded.ask("sample", tokens=prompt, new=NEW_TOKENS, with_cache=True) == wanted
        assert embedded.stats()["hits"] == hits


# --- what must not be shared ----------------------------------------------------------------------


def test_salts_and_block_sizes_do_not_share(embedded: Process, rng: np.random.Generator) -> None:
    prompt = some_tokens(rng, 100)
    embedded.ask("wrap", salt="one")
    embedded.both(prompt)
    for other in ({"salt": "two"}, {"salt": "one", "block_tokens": 32}, {"salt": ""}):
        embedded.ask("wrap", **other)
        embedded.both(prompt)
        assert embedded.stats()["hits"] == 0, other
    embedded.ask("wrap", salt="one")
    embedded.both(prompt)
    assert embedded.stats()["hits"] == 1


@pytest.mark.parametrize("way", ["in_place", "data", "parameter"])
def test_changed_weights_take_nothing_up(
    embedded: Process, rng: np.random.Generator, way: str
) -> None:
    prompt = some_tokens(rng, 100)
    before = embedded.both(prompt)
    embedded.ask("change", way=way, factor=-2.0)
    assert embedded.both(prompt) != before
    assert embedded.stats()["hits"] == 0
    embedded.ask("change", way=way, factor=-0.5)  # the same bits again: powers of two
    assert embedded.both(prompt) == before
    assert embedded.stats()["hits"] == 1


def test_one_element_that_is_written_behind_the_counts_needs_a_refresh(
    embedded: Process, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 100)
    embedded.both(prompt)
    embedded.ask("change_one")
    embedded.ask("refresh")
    embedded.both(prompt)
    stats = embedded.stats()
    assert (stats["served"], stats["hits"]) == (2, 0)


def test_name_that_another_model_has_is_told(embedded: Process) -> None:
    embedded.ask("wrap", name="mine")
    assert embedded.ask("refused", name="mine") == ""
    assert "block_tokens" in embedded.ask("refused", name="mine", block_tokens=32)


# --- a pool that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_dead_daemon_costs_hits_only(
    processes: tuple[Process, Process],
    tmp_path: Path,
    llama: Path,
    rng: np.random.Generator,
    channel: str,
) -> None:
    prompt = some_tokens(rng, 100)
    with served(tmp_path) as daemon:
        model = processes[0].use(llama, {"address": daemon.address(channel), "timeout": 2.0})
        said = model.both(prompt)
        daemon.kill()
        model.ask("wait_connected", connected=False)
        assert model.both(prompt) == said
        stats = model.stats()
        assert (stats["served"], stats["hits"]) == (2, 0)
        assert stats["failed"] == {"DISCONNECTED": 1}
        daemon.start()
        model.ask("wait_connected")
        assert model.both(prompt) == said  # stored anew
        assert model.both(prompt) == said
        assert model.stats()["hits"] == 1
        daemon.stop()


def test_daemon_that_is_away_at_the_start_is_asked_later(
    processes: tuple[Process, Process], tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 100)
    with served(tmp_path) as daemon:
        model = processes[0].use(llama, {"address": daemon.unix_address, "timeout": 2.0})
        daemon.kill()
        model.ask("wrap", salt="new")  # whose namespace cannot be had
        model.both(prompt)
        assert model.stats()["passed"] == {"no_namespace": 1}
        daemon.start()
        model.ask("wait_connected")
        model.ask("refresh")  # not after some seconds, but now
        assert model.both(prompt) == model.both(prompt)
        assert model.stats()["hits"] == 1
        daemon.stop()


def test_stopped_daemon_costs_time_only(
    processes: tuple[Process, Process], tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 100)
    with served(tmp_path) as daemon:
        model = processes[0].use(llama, {"address": daemon.tcp_address, "timeout": 1.0})
        said = model.both(prompt)
        daemon.signal(signal.SIGSTOP)
        assert model.both(prompt) == said
        assert model.stats()["hits"] == 0
        daemon.signal(signal.SIGCONT)


def test_pool_that_was_closed_is_a_miss(embedded: Process, rng: np.random.Generator) -> None:
    prompt = some_tokens(rng, 40)
    said = embedded.both(prompt)
    embedded.ask("close_pool")
    assert embedded.both(prompt) == said
    assert embedded.stats()["failed"].keys() == {"PoolClosed"}


# --- what is left alone, and what is refused ------------------------------------------------------

REASONS = {
    "batch": "batch",
    "own_cache": "own_cache",
    "beams": "mode",
    "sequences": "sequences",
    "lookup": "mode",
    "inputs_embeds": "inputs_embeds",
    "padding": "padding",
    "pad_token": "padding",
    "prefill_chunk_size": "prefill_chunk_size",
    "no_cache": "no_cache",
    "cache_implementation": "cache_implementation",
    "outputs": "outputs",
    "other_inputs": "other_inputs",
}


@pytest.mark.parametrize(("way", "reason"), REASONS.items())
def test_call_that_is_left_alone_answers_as_without(
    embedded: Process, rng: np.random.Generator, way: str, reason: str
) -> None:
    answer = embedded.ask("around", tokens=some_tokens(rng, 40), new=4, way=way)
    assert answer == {"same": True, "passed": {reason: 1}}


def test_end_of_with_leaves_the_plain_model(embedded: Process, rng: np.random.Generator) -> None:
    prompt = some_tokens(rng, 40)
    embedded.both(prompt)
    embedded.ask("end")
    embedded.both(prompt)
    stats = embedded.stats()
    assert (stats["served"], stats["passed"]) == (1, {"closed": 1})


REFUSALS = {
    "llama": "",
    "linear rope": "",
    "gpt2": "",
    "window": "DynamicSlidingWindowLayer",
    "encoder": "an encoder's output decides its KV",
    "state": "LinearAttentionLayer",
    "jagged": "K and V differ in shape",
    "both ways": "K and V of a prefix change with the rest",
    "dynamic rope": "rope is dynamic",
    "long rope": "rope is longrope",
    "training": "training mode",
    "no model": "Linear; it must be a transformers model",
}


@pytest.mark.parametrize(("kind", "reason"), REFUSALS.items())
def test_model_without_prefixes_is_refused(embedded: Process, kind: str, reason: str) -> None:
    """By its configuration; `both ways` only by trying it. Of one that is taken, a prompt is."""
    said = embedded.ask("refusal", kind=kind)
    assert (reason in said) if reason else not said
