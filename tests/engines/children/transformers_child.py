"""A Hugging Face model with a prefix cache, told what to do by lines of JSON: see engine.py."""

import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import kvpool  # noqa: E402
from kvpool.connectors.transformers import with_prefix_cache  # noqa: E402

WAIT_S = 30.0

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


class Cached:
    """The operations, by their names."""

    def use(self, folder: str, dtype: str, pool: dict[str, Any], options: dict[str, Any]) -> None:
        """Begin anew: a model of that folder, a pool, counters from zero.

        pool: arguments of kvpool.connect(), or with `dram` of kvpool.open(). options: of
        with_prefix_cache().
        """
        if hasattr(self, "pool"):
            self.pool.close()
        self.pool = kvpool.open(**pool) if "dram" in pool else kvpool.connect(**pool)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=getattr(torch, dtype))
        self.options = options
        self.cached = with_prefix_cache(self.model, self.pool, **options)

    def generate(self, tokens: list[int], new: int, **more: Any) -> dict[str, Any]:
        """Greedy, and never ended by a token; with the digest of K and V of `digest` tokens."""
        return run(self.cached, tokens, new, **more)

    def plain(self, tokens: list[int], new: int, **more: Any) -> dict[str, Any]:
        return run(self.cached.model, tokens, new, **more)

    def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self.cached.stats)

    def tokenize(self, folder: str, text: str) -> list[int]:
        return list(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])

    def wrap(self, **options: Any) -> None:
        """Anew, with other options, and counters from zero."""
        self.cached = with_prefix_cache(self.model, self.pool, **{**self.options, **options})

    def refused(self, **options: Any) -> str:
        """What is said to these options; empty if they are taken."""
        try:
            self.wrap(**options)
        except kvpool.BadArgument as error:
            return str(error)
        return ""

    def refresh(self) -> None:
        self.cached.refresh()

    def sample(self, tokens: list[int], new: int, with_cache: bool) -> list[int]:
        torch.manual_seed(1)
        model = self.cached if with_cache else self.model
        output = model.generate(torch.tensor([tokens]), max_new_tokens=new, do_sample=True)
        return list(output[0].tolist())

    def close_pool(self) -> None:
        self.pool.close()

    def wait_connected(self, connected: bool = True) -> None:
        """Until this process knows it; of shared memory, blocks can be read until then."""
        end = time.monotonic() + WAIT_S
        while self.pool.stats()["client"]["connected"] is not connected:
            assert time.monotonic() < end, self.pool.stats()
            time.sleep(0.01)

    def end(self) -> None:
        with self.cached as same:
            assert same is self.cached

    def change(self, way: str, factor: float) -> None:
        """Scale one matrix of the model in place."""
        weight = self.model.model.layers[0].mlp.up_proj.weight
        if way == "data":
            weight.data.mul_(factor)
        elif way == "in_place":
            with torch.no_grad():
                weight.mul_(factor)
        else:
            self.model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight * factor)

    def change_one(self) -> None:
        """One element, where no sample is taken, by the way that no count sees."""
        self.model.model.layers[0].self_attn.v_proj.weight.data[1, 1] += 8.0

    def poison(self, tokens: list[int]) -> int:
        """Put wrong bytes for the blocks of these tokens; returns how many."""
        space, _ = self.cached._spaces.current()
        keys = space.keys(tokens)
        wrong = np.full((len(keys), space.block_bytes), 0x3F, np.uint8)
        return int(space.put(keys, wrong).stored)

    def around(self, tokens: list[int], new: int, way: str) -> dict[str, Any]:
        """One call that the cache leaves alone, in both ways; whether they answered the same."""
        torch.manual_seed(0)
        wanted = WAYS[way](self.model, torch.tensor([tokens]), new)
        torch.manual_seed(0)
        got = WAYS[way](self.cached, torch.tensor([tokens]), new)
        return {"same": torch.equal(wanted, got), "passed": self.stats()["passed"]}

    def refusal(self, kind: str) -> str:
        """What with_prefix_cache() says about a model; empty if it takes it."""
        torch.manual_seed(0)
        model = KINDS[kind]()
        try:
            cached = with_prefix_cache(model, self.pool)
        except kvpool.BadArgument as error:
            return str(error)
        tokens = [5 + n % 50 for n in range(40)]
        first, again = run(cached, tokens, 8), run(cached, tokens, 8)
        assert first["tokens"] == again["tokens"] == run(model, tokens, 8)["tokens"]
        assert cached.stats.hits == 1, cached.stats
        return ""


def run(model: Any, tokens: list[int], new: int, digest: int = 0, **more: Any) -> dict[str, Any]:
    output = model.generate(
        torch.tensor([tokens]),
        # Without a mask, a token that is the padding token would be none; answers may have it.
        attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        **more,
    )
    made = hashlib.sha256()
    for layer in output.past_key_values.layers:
        for tensor in (layer.keys, layer.values):
            made.update(tensor[:, :, :digest].contiguous().view(torch.uint8).numpy().data)
    return {"tokens": output.sequences[0, len(tokens) :].tolist(), "digest": made.hexdigest()}


# --- calls that are left alone -------------------------------------------------------------------


def call(**more: Any) -> Callable[[Any, Any, int], Any]:
    def way(model: Any, ids: Any, new: int) -> Any:
        given = {
            name: value(model, ids) if callable(value) else value for name, value in more.items()
        }
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **given}
        inputs = options.pop("inputs", ids)
        output = model.generate(inputs, **options)
        return output if isinstance(output, torch.Tensor) else output.sequences

    return way


def left_padded(model: Any, ids: Any) -> Any:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return mask


def with_padding(ids: Any) -> Any:
    """From which transformers takes a mask of its own."""
    padded = ids.clone()
    padded[0, :4] = 0
    return padded


WAYS = {
    "batch": call(inputs=lambda model, ids: torch.cat([ids, ids.flip(1)])),
    "own_cache": call(past_key_values=lambda model, ids: transformers.DynamicCache()),
    "beams": call(num_beams=2),
    "sequences": call(num_return_sequences=2, do_sample=True),
    "lookup": call(prompt_lookup_num_tokens=3),
    "inputs_embeds": call(
        inputs=None, inputs_embeds=lambda model, ids: model.get_input_embeddings()(ids)
    ),
    "padding": call(attention_mask=left_padded),
    "pad_token": call(inputs=lambda model, ids: with_padding(ids), pad_token_id=0),
    "prefill_chunk_size": call(prefill_chunk_size=8),
    "no_cache": call(use_cache=False),
    "cache_implementation": call(cache_implementation="static", disable_compile=True),
    "outputs": call(output_hidden_states=True, return_dict_in_generate=True),
    "other_inputs": call(position_ids=lambda model, ids: torch.arange(3, 3 + ids.shape[1])[None]),
}


# --- models --------------------------------------------------------------------------------------


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **more})).eval()


def windowed() -> Any:
    config = transformers.MistralConfig(**SMALL, sliding_window=16)
    return transformers.MistralForCausalLM(config).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1,
        eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    config = transformers.T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=64, num_layers=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config).eval()


def jagged() -> Any:
    """Multi-head latent attention: K is wider than V."""
    config = transformers.DeepseekV2Config(
        **SMALL | {"num_key_value_heads": 4},
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
    )
    return transformers.DeepseekV2ForCausalLM(config).eval()


def both_ways() -> Any:
    """A decoder whose attention sees what follows: its configuration says nothing of it."""
    model = llama(attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
    return model


def without_mask(module: Any, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "attention_mask": None}


def rope(kind: str) -> Callable[[], Any]:
    more = {"factor": 2.0, "rope_theta": 1e4, "rope_type": kind}
    if kind == "longrope":
        more |= {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        }
    return lambda: llama(max_position_embeddings=128, rope_parameters=more)


KINDS = {
    "llama": llama,
    "linear rope": rope("linear"),
    "gpt2": gpt2,
    "window": windowed,
    "encoder": t5,
    "state": mamba,
    "jagged": jagged,
    "both ways": both_ways,
    "dynamic rope": rope("dynamic"),
    "long rope": rope("longrope"),
    "training": lambda: llama().train(),
    "no model": lambda: torch.nn.Linear(2, 2),
}


def main() -> None:
    def say(message: dict[str, Any]) -> None:
        ANSWERS.write(json.dumps(message) + "\n")

    cached = Cached()
    say({"ok": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(cached, request.pop("op"))
        try:
            say({"ok": operation(**request)})
        except Exception:
            say({"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
