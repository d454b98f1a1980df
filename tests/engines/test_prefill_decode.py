"""A prefill engine and a decode engine on one pool: two live servers, and what each computes.

The prefill server computes a prompt and answers with how many blocks of it the pool will have
(kvpool_blocks); the decode server, told so, waits until they are there, and computes what is left.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engines.connectors import kvpool_connector
from tests.engines.rig import Engine, Model, engines
from tests.engines.servers import Server
from tests.engines.tokens import page_prompts
from tests.served import Served, served, wait_for

MAX_TOKENS = 24
CHARACTERS = 900


@dataclass
class Pair:
    model: Model
    daemon: Served
    prefill: Server
    decode: Server
    alone: Engine

    def answer(self, prompt: str) -> tuple[list[int], Any]:
        """As a router does it: the tokens, and what the prefill server said of the pool."""
        first = self.prefill.complete(prompt, 1)
        params = first["kv_transfer_params"]
        second = self.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=params)
        return second["choices"][0]["token_ids"], params


@pytest.fixture(scope="module")
def pair(model: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    smollm = model("smollm")
    folder = tmp_path_factory.mktemp("pd")
    with served(folder, dram="512MiB") as daemon:
        servers = [
            Server(smollm, folder, role, connector=kvpool_connector(daemon.unix_address, role))
            for role in ("kv_producer", "kv_consumer")
        ]
        try:
            with engines(Engine(smollm, folder, "alone")) as (alone,):
                yield Pair(smollm, daemon, *servers, alone)
        finally:
            for server in servers:
                server.close()


def test_two_servers_say_what_one_engine_says(pair: Pair) -> None:
    for prompt in page_prompts(2, CHARACTERS):
        (right,) = pair.alone.generate([prompt], MAX_TOKENS)
        before = pair.decode.metrics()
        tokens, params = pair.answer(prompt)
        counted = pair.decode.metrics() - before
        whole = right.prompt_tokens // pair.model.block_tokens
        assert params["kvpool_blocks"] == right.prompt_tokens // pair.model.block_tokens
        assert counted.external_tokens == whole * pair.model.block_tokens
        assert counted.computed_tokens == right.prompt_tokens - counted.external_tokens
        assert tokens == right.tokens


def test_the_decode_server_waits_for_blocks_that_are_on_their_way(pair: Pair) -> None:
    """It is asked first. Nothing but the prefill server's blocks lets it go on."""
    prompt = page_prompts(3, CHARACTERS)[2]
    (right,) = pair.alone.generate([prompt], MAX_TOKENS)
    params = {"kvpool_blocks": right.prompt_tokens // pair.model.block_tokens}
    answers: list[Any] = []
    before = pair.decode.metrics()

    def ask() -> None:
        answers.append(pair.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=params))

    asking = threading.Thread(target=ask)
    asking.start()
    with pair.daemon.connect() as pool:
        wait_for(lambda: pool.stats()["clients_waiting"] > 0, what="the decode server waits")
    pair.prefill.complete(prompt, 1)
    asking.join()
    counted = pair.decode.metrics() - before
    assert answers[0]["choices"][0]["token_ids"] == right.tokens
    assert counted.external_tokens == params["kvpool_blocks"] * pair.model.block_tokens
