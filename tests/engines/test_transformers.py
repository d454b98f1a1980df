"""with_prefix_cache() on real models: the same tokens as without it, and fewer of them computed."""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.rig import CHILDREN, Child, Engine, environment, model_folder
from tests.pools import ROOT
from tests.served import Served, served

BLOCK_TOKENS = 16  # what with_prefix_cache() has by itself
VOCABULARY = 2048
NEW_TOKENS = 24


class Cached(Engine):
    """A Hugging Face model with a prefix cache, in a process of its own."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        pool: dict[str, Any],
        *,
        dtype: str = "float32",
        **more: Any,
    ) -> None:
        """more: options of with_prefix_cache()."""
        arguments = {"folder": str(model), "dtype": dtype, "pool": pool, "options": more}
        command = [str(CHILDREN / "transformers_child.py"), json.dumps(arguments)]
        self.child = Child(command, folder, "transformers", env=environment())
        self._unread = b""
        self._is_ready = False

    def both(self, tokens: list[int], **more: Any) -> list[int]:
        """Tokens with the cache; they must be those without it."""
        cached = self.ask("generate", tokens=tokens, new=NEW_TOKENS, **more)
        plain = self.ask("plain", tokens=tokens, new=NEW_TOKENS, **more)
        assert cached["tokens"] == plain["tokens"], self.stats()
        return list(cached["tokens"])

    def stats(self) -> dict[str, Any]:
        return dict(self.ask("stats"))


@contextlib.contextmanager
def cached(folder: Path, model: Path, pool: dict[str, Any], **more: Any) -> Iterator[Cached]:
    child = Cached(folder, model, pool, **more)
    try:
        yield child
    finally:
        child.close()


@pytest.fixture(scope="module")
def llama() -> Path:
    return model_folder("llama")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, dram="256MiB") as node:
        yield node


def some_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(3, VOCABULARY, count)]


def blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS


@pytest.mark.parametrize("channel", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_process_takes_up_what_another_one_computed(
    tmp_path: Path, daemon: Served, llama: Path, rng: np.random.Generator, channel: str, dtype: str
) -> None:
    prompt = some_tokens(rng, 300)
    whole = blocks(len(prompt) - 1) * BLOCK_TOKENS
    pool = {"address": daemon.address(channel)}
    with cached(tmp_path, llama, pool, dtype=dtype) as first:
        made = first.ask("generate", tokens=prompt, new=NEW_TOKENS, digest=whole)
        stats = first.stats()
        assert (stats["served"], stats["hits"]) == (1, 0)
        # Of the last token that comes out, nobody computed K and V.
        assert stats["stored_blocks"] == blocks(len(prompt) + NEW_TOKENS - 1)
    with cached(tmp_path, llama, pool, dtype=dtype) as second:
        taken = second.ask("generate", tokens=prompt, new=NEW_TOKENS, digest=whole)
        assert taken["digest"] == made["digest"]  # every byte of K and V of the prompt's blocks
        stats = second.stats()
        assert (stats["hits"], stats["loaded_tokens"]) == (1, whole)
        assert stats["failed"] == {}
        if dtype == "float32":  # half the bits leave ties that another order of sums decides
            assert taken["tokens"] == made["tokens"]
            second.both(prompt)


def test_real_model_on_real_text(tmp_path: Path, daemon: Served) -> None:
    folder = model_folder("smollm")
    text = (ROOT / "docs" / "architecture.md").read_text()[:1500]
    pool = {"address": daemon.unix_address}
    with cached(tmp_path, folder, pool) as first:
        tokens = first.ask("tokenize", folder=str(folder), text=text)
        said = first.both(tokens)
    with cached(tmp_path, folder, pool) as second:
        assert second.both(tokens) == said
        assert second.stats()["loaded_tokens"] == blocks(len(tokens) - 1) * BLOCK_TOKENS


def test_each_turn_takes_up_the_turns_before(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        history: list[int] = []
        loaded = 0
        for turn in range(4):
            known = blocks(len(history) + NEW_TOKENS - 1) if history else 0
            history += some_tokens(rng, 40)
            history += model.both(history)
            found = model.stats()["loaded_tokens"] - loaded
            loaded += found
            # The answer of the turn before is taken up too, not only its prompt.
            assert found == (
                blocks(len(history) - NEW_TOKENS - 40 - 1) * BLOCK_TOKENS if turn else 0
            )
            assert not known or found > 0


def test_prompt_that_is_whole_blocks_leaves_a_token_to_compute(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 4 * BLOCK_TOKENS)
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        assert model.both(prompt) == model.both(prompt)
        assert model.stats()["loaded_tokens"] == 3 * BLOCK_TOKENS


def test_salts_and_block_sizes_do_not_share(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 100)
    with cached(tmp_path, llama, {"dram": "64MiB"}, salt="one") as model:
        model.both(prompt)
        for other in ({"salt": "two"}, {"salt": "one", "block_tokens": 32}):
            model.ask("wrap", **other)
            model.both(prompt)
            assert model.stats()["hits"] == 0, other
        model.ask("wrap", salt="one")
        model.both(prompt)
        assert model.stats()["hits"] == 1


@pytest.mark.parametrize("way", ["in_place", "data", "parameter"])
def test_changed_weights_take_nothing_up(
    tmp_path: Path, llama: Path, rng: np.random.Generator, way: str
) -> None:
    prompt = some_tokens(rng, 100)
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        before = model.both(prompt)
        model.ask("change", way=way, factor=-2.0)
        assert model.both(prompt) != before
        assert model.stats()["hits"] == 0
        model.ask("change", way=way, factor=-0.5)  # the same bits again: powers of two
        assert model.both(prompt) == before
        assert model.stats()["hits"] == 1


def test_blocks_that_were_loaded_are_what_is_continued(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    """The other tests could not fail if the model computed the prompt all the same."""
    prompt = some_tokens(rng, 100)
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        assert model.ask("poison", tokens=prompt) == blocks(len(prompt))
        got = model.ask("generate", tokens=prompt, new=NEW_TOKENS)
        assert got["tokens"] != model.ask("plain", tokens=prompt, new=NEW_TOKENS)["tokens"]


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_dead_daemon_costs_hits_only(
    tmp_path: Path, llama: Path, rng: np.random.Generator, channel: str
) -> None:
    prompt = some_tokens(rng, 100)
    with served(tmp_path) as daemon:
        pool = {"address": daemon.address(channel), "timeout": 1.0}
        with cached(tmp_path, llama, pool) as model:
            said = model.both(prompt)
            daemon.kill()
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


def test_stopped_daemon_costs_time_only(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 100)
    with served(tmp_path) as daemon:
        pool = {"address": daemon.tcp_address, "timeout": 0.5}
        with cached(tmp_path, llama, pool) as model:
            said = model.both(prompt)
            daemon.signal(signal.SIGSTOP)
            assert model.both(prompt) == said
            assert model.stats()["hits"] == 0
            daemon.signal(signal.SIGCONT)


def test_calls_that_are_left_alone_answer_as_without(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    reasons = {
        "batch": "batch",
        "own_cache": "own_cache",
        "beams": "mode",
        "lookup": "mode",
        "inputs_embeds": "inputs_embeds",
        "padding": "padding",
        "prefill_chunk_size": "prefill_chunk_size",
        "no_cache": "no_cache",
        "cache_implementation": "cache_implementation",
        "outputs": "outputs",
        "other_inputs": "other_inputs",
    }
    prompt = some_tokens(rng, 40)
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        for way, reason in reasons.items():
            model.ask("wrap")
            assert model.ask("around", tokens=prompt, new=4, way=way) == {
                "same": True,
                "passed": {reason: 1},
            }, way


def test_end_of_with_leaves_the_plain_model(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 40)
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        model.both(prompt)
        model.ask("end")
        model.both(prompt)
        stats = model.stats()
        assert (stats["served"], stats["passed"]) == (1, {"closed": 1})


def test_pool_that_was_closed_is_a_miss(
    tmp_path: Path, llama: Path, rng: np.random.Generator
) -> None:
    prompt = some_tokens(rng, 40)
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        model.both(prompt)
        model.ask("close_pool")
        model.both(prompt)
        assert model.stats()["failed"].keys() == {"PoolClosed"}


def test_models_without_prefixes_are_refused(tmp_path: Path, llama: Path) -> None:
    """By their configuration; `both ways` only by trying it."""
    reasons = {
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
    with cached(tmp_path, llama, {"dram": "64MiB"}) as model:
        for kind, reason in reasons.items():
            said = model.ask("refusal", kind=kind)
            assert (reason in said) if reason else not said, (kind, said)


def test_name_that_another_model_has_is_told(tmp_path: Path, llama: Path) -> None:
    with cached(tmp_path, llama, {"dram": "64MiB"}, name="mine") as model:
        model.ask("wrap")
        assert "block_tokens" in model.ask("mismatch", block_tokens=32)
