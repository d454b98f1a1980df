"""A conversation between a prefill and a decode engine: what each computes again, and what moves.

The ladder of MemServe (arXiv 2406.17565), three ways to keep what was computed:
  1. the decode engine keeps nothing for the next turn; the prefill engine has what it computed;
  2. the decode engine keeps its blocks, too: less has to move to it;
  3. the decode engine's blocks go to the pool, where the prefill engine finds the answers, which
     otherwise it computes again as part of the next prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.engines.connectors import kvpool_connector
from tests.engines.rig import Engine, Metrics, Model, Output, engines
from tests.engines.tokens import assert_same, random_prompts
from tests.served import served

TURNS = 3
QUESTION_TOKENS = 150
ANSWER_TOKENS = 80  # two whole blocks, at least


@dataclass
class Rig:
    model: Model
    alone: Engine
    prefill: Engine
    decode: Engine
    saving_decode: Engine


@dataclass
class Way:
    """What was counted, and said, in one conversation."""

    computed_in_prefill: int
    computed_in_decode: int
    moved_to_decode: int
    answers: list[Output]


@pytest.fixture(scope="module")
def rig(model: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    llama = model("llama")
    folder = tmp_path_factory.mktemp("turns")
    with served(folder, dram="256MiB") as daemon:
        at = daemon.unix_address
        saving = kvpool_connector(at, "kv_consumer", save="all")
        with engines(
            Engine(llama, folder, "alone"),
            Engine(llama, folder, "prefill", connector=kvpool_connector(at, "kv_producer")),
            Engine(llama, folder, "decode", connector=kvpool_connector(at, "kv_consumer")),
            Engine(llama, folder, "saving", connector=saving),
        ) as started:
            yield Rig(llama, *started)


def test_each_step_of_the_ladder_spares_work(rig: Rig, rng: np.random.Generator) -> None:
    questions = random_prompts(rng, TURNS, QUESTION_TOKENS)
    one = conversation(rig, rig.decode, questions, salt="one", keeps=False)
    two = conversation(rig, rig.decode, questions, salt="two", keeps=True)
    three = conversation(rig, rig.saving_decode, questions, salt="three", keeps=True)
    for name, way in (("1", one), ("2", two), ("3", three)):
        print(
            f"{name}. {way.computed_in_prefill=} {way.computed_in_decode=} {way.moved_to_decode=}"
        )
    right = [
        rig.alone.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts_of(questions, one)
    ]
    for way in (one, two, three):
        assert_same(rig.model, right, way.answers)
    assert two.moved_to_decode < one.moved_to_decode
    assert two.computed_in_prefill == one.computed_in_prefill
    assert two.computed_in_decode <= one.computed_in_decode
    # All whole blocks of the answers but the last one's, which no prompt follows.
    answers = (TURNS - 1) * (ANSWER_TOKENS // rig.model.block_tokens) * rig.model.block_tokens
    assert three.computed_in_prefill <= two.computed_in_prefill - answers
    assert three.computed_in_decode <= two.computed_in_decode
    assert three.moved_to_decode <= two.moved_to_decode


def conversation(
    rig: Rig, decode: Engine, questions: list[list[int]], *, salt: str, keeps: bool
) -> Way:
    """Salts keep conversations apart, so that all of them may say the same."""
    history: list[int] = []
    answers: list[Output] = []
    with rig.prefill.counting() as in_prefill, decode.counting() as in_decode:
        for question in questions:
            prompt = history + question
            (first,) = rig.prefill.generate([prompt], 1, salts=[salt])
            if not keeps:
                decode.reset_prefix_cache()
            told = [first.kv_transfer_params]
            (answer,) = decode.generate(
                [prompt], ANSWER_TOKENS, salts=[salt], kv_transfer_params=told
            )
            decode.wait_saved()
            answers.append(answer)
            history = prompt + answer.tokens
    return way_of(in_prefill, in_decode, answers)


def way_of(prefill: Metrics, decode: Metrics, answers: list[Output]) -> Way:
    return Way(prefill.computed_tokens, decode.computed_tokens, decode.external_tokens, answers)


def prompts_of(questions: list[list[int]], way: Way) -> Iterator[list[int]]:
    history: list[int] = []
    for question, answer in zip(questions, way.answers, strict=True):
        yield history + question
        history = history + question + answer.tokens
