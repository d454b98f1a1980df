"""Writes one model as a folder that engines load: make_models.py NAME FOLDER.

llama, mla and hybrid are a few small layers with random weights, the same ones every time; smollm
is the real SmolLM2-135M-Instruct, whose weights a Python package carries. Run by the engine's
Python: it needs torch and transformers.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from kvpool.bench import vllm_smollm

SEED = 20231105
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that what comes next depends on what came before: greedy tokens vary.
    "initializer_range": 0.2,
}


def llama(folder: str) -> None:
    """Heads in groups: two KV heads for four query heads."""
    save_random(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMALL, num_hidden_layers=4, num_key_value_heads=2, head_dim=32),
        folder,
    )


def mla(folder: str) -> None:
    """One latent vector a token in place of K and V.

    With positions scaled as in the models that are published. Without that, vLLM 0.32 for CPUs
    rotates by a kernel that is wrong for MLA: what it says depends on how many tokens it computes
    at once.
    """
    config = transformers.DeepseekV2Config(
        **SMALL,
        num_hidden_layers=3,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=3,  # no layer has experts
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    save_random(transformers.DeepseekV2ForCausalLM, config, folder)


def hybrid(folder: str) -> None:
    """Layers that see the last 64 tokens between layers that see all: two KV cache groups."""
    config = transformers.Gemma3TextConfig(
        **SMALL,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    save_random(transformers.Gemma3ForCausalLM, config, folder, embedding_scale=0.05)


def save_random(
    model: Callable[[Any], Any], config: Any, folder: str, embedding_scale: float = 1.0
) -> None:
    """embedding_scale: small where the embedding is also what tokens are chosen by, for a model of
    random weights says the last token again and again then."""
    torch.manual_seed(SEED)
    made = model(config).to(torch.float32)
    with torch.no_grad():
        made.get_input_embeddings().weight.mul_(embedding_scale)
    made.save_pretrained(folder)


def smollm(folder: str) -> None:
    """As `kvpool bench vllm` makes it."""
    vllm_smollm.make(Path(folder))


if __name__ == "__main__":
    {"llama": llama, "mla": mla, "hybrid": hybrid, "smollm": smollm}[sys.argv[1]](sys.argv[2])
