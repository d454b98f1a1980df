"""Bytes of KV per token: well-known models against values worked out by hand from their fields."""

from typing import Any

import pytest

from kvpool.errors import BadArgument
from kvpool.observe.sizing import DTYPE_BYTES, sizing

BF16 = {"torch_dtype": "bfloat16"}
LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    **BF16,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    **BF16,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    **BF16,
}


def made(layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        **BF16,
        **more,
    }


GOLDEN = {
    # 2 (K and V) x 8 heads x 128 x 2 bytes x 32 layers
    "llama-3-8b": (LLAMA_3_8B, "gqa", 131_072),
    "llama-3-70b": (made(80, 64, 8, 8192), "gqa", 327_680),
    # 2 x 32 x 128 x 2 x 32, from before there were KV heads
    "llama-2-7b": (made(32, 32, 32, 4096, torch_dtype="float16"), "mha", 524_288),
    "mistral-7b-v0.1": (made(32, 32, 8, 4096, sliding_window=4096), "gqa", 131_072),
    "mixtral-8x7b": (made(32, 32, 8, 4096, sliding_window=None), "gqa", 131_072),
    "qwen2.5-7b": (
        made(28, 28, 4, 3584, sliding_window=131_072, use_sliding_window=False),
        "gqa",
        57_344,
    ),
    # head_dim is said, and is not hidden_size / heads: 2 x 4 x 128 x 2 x 94
    "qwen3-235b-a22b": (made(94, 64, 4, 4096, head_dim=128), "gqa", 192_512),
    # (512 + 64) x 2 x 61
    "deepseek-v3": (DEEPSEEK_V3, "mla", 70_272),
    "deepseek-v2-lite": (
        made(27, 16, 16, 2048, kv_lora_rank=512, qk_rope_head_dim=64),
        "mla",
        31_104,
    ),
    # 2 x 8 x 256 x 2 x 42
    "gemma-2-9b": (
        made(42, 16, 8, 3584, head_dim=256, sliding_window=4096, model_type="gemma2"),
        "gqa",
        344_064,
    ),
    # 2 x 16 x 128 x 2 x 62, inside text_config
    "gemma-3-27b": (
        {
            "model_type": "gemma3",
            **BF16,
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "hidden_size": 5376,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
            },
        },
        "gqa",
        507_904,
    ),
    # 2 x 8 x 64 x 2 x 36
    "gpt-oss-120b": (GPT_OSS_120B, "gqa", 73_728),
    # 2 x 32 x 96 x 2 x 32
    "phi-3-mini": (made(32, 32, 32, 3072), "mha", 393_216),
    # one KV head: 2 x 64 x 2 x 32
    "falcon-7b": (
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
            **BF16,
        },
        "mqa",
        8_192,
    ),
    # 2 x 2 x 128 x 2 x 40
    "glm-4-9b": (
        {
            "num_layers": 40,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            **BF16,
        },
        "gqa",
        40_960,
    ),
    # 2 x 12 x 64 x 4 x 12
    "gpt2": (
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"},
        "mha",
        73_728,
    ),
    # only every fourth of 48 layers attends: 2 x 2 x 256 x 2 x 12
    "qwen3-next-80b-a3b": (
        made(48, 16, 2, 2048, head_dim=256, full_attention_interval=4),
        "gqa",
        24_576,
    ),
    # 4 of 32 layers attend: 2 x 8 x 128 x 2 x 4
    "jamba-v0.1": (
        made(32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4),
        "gqa",
        16_384,
    ),
    # 2 x 8 x 128 x 2 x 40, in tables inside
    "dbrx": (
        {
            "n_layers": 40,
            "n_heads": 48,
            "d_model": 6144,
            "attn_config": {"kv_n_heads": 8},
            **BF16,
        },
        "gqa",
        163_840,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_per_token_of_a_known_model(name: str) -> None:
    config, kind, expected = GOLDEN[name]
    found = sizing(config)
    assert (found.kind, found.bytes_per_token) == (kind, expected)
    assert found.block_bytes() == 16 * expected
    assert found.tokens_per_gib == 1_073_741_824 // expected


@pytest.mark.parametrize(
    ("name", "full", "window", "state", "tokens"),
    [
        ("llama-3-8b", 32, 0, 0, 0),
        ("mistral-7b-v0.1", 0, 32, 0, 4096),
        ("mixtral-8x7b", 32, 0, 0, 0),
        ("qwen2.5-7b", 28, 0, 0, 0),
        ("gemma-2-9b", 21, 21, 0, 4096),
        ("gemma-3-27b", 10, 52, 0, 1024),
        ("gpt-oss-120b", 18, 18, 0, 128),
        ("qwen3-next-80b-a3b", 12, 0, 36, 0),
        ("jamba-v0.1", 4, 0, 28, 0),
    ],
)
def test_layers_by_kind(name: str, full: int, window: int, state: int, tokens: int) -> None:
    found = sizing(GOLDEN[name][0])
    assert (found.layers_full, found.layers_window, found.layers_state) == (full, window, state)
    assert found.window_tokens == tokens
    each = found.bytes_per_token // (full + window)
    assert found.window_bytes_per_token == window * each


@pytest.mark.parametrize(
    ("more", "attending"),
    [
        ({"hybrid_override_pattern": "M-M*-M*"}, 2),
        ({"layers_block_type": ["mamba", "mamba", "attention", "mamba"] * 8}, 8),
        ({"attn_type_list": [0, 0, 0, 1] * 8}, 8),
        ({"attn_layer_indices": [9, 18, 27]}, 3),
        ({"layer_types": ["conv", "full_attention"] * 16}, 16),
        ({"num_kv_shared_layers": 10}, 22),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 8}, 32),
    ],
)
def test_only_layers_that_attend_count(more: dict[str, Any], attending: int) -> None:
    found = sizing({**LLAMA_3_8B, **more})
    assert found.bytes_per_token == attending * 4096
    assert found.layers_full + found.layers_window == attending


def test_a_window_from_some_layer_on() -> None:
    config = {
        **LLAMA_3_8B,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 20,
    }
    found = sizing(config)
    assert (found.layers_full, found.layers_window) == (20, 12)


@pytest.mark.parametrize(
    ("tensor_parallel", "expected", "note"),
    [(1, 131_072, ""), (2, 65_536, ""), (8, 16_384, ""), (16, 16_384, "16 ranks share 8 KV heads")],
)
def test_ranks_share_heads(tensor_parallel: int, expected: int, note: str) -> None:
    found = sizing(LLAMA_3_8B, tensor_parallel=tensor_parallel)
    assert found.bytes_per_token == expected
    assert note in " ".join(found.notes)


def test_every_rank_keeps_the_whole_latent() -> None:
    found = sizing(DEEPSEEK_V3, tensor_parallel=8)
    assert found.bytes_per_token == 70_272
    assert "every rank keeps all of it" in found.notes[0]


@pytest.mark.parametrize(("dtype", "expected"), [("fp8", 65_536), ("float32", 262_144)])
def test_the_kv_may_have_a_type_of_its_own(dtype: str, expected: int) -> None:
    assert sizing(LLAMA_3_8B, kv_dtype=dtype).bytes_per_token == expected


def test_a_config_without_a_type_says_what_is_assumed() -> None:
    bare = {name: value for name, value in LLAMA_3_8B.items() if name != "torch_dtype"}
    found = sizing(bare)
    assert found.bytes_per_token == 131_072
    assert "assumed" in found.notes[0]


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(name: str) -> None:
    bare = {field: value for field, value in LLAMA_3_8B.items() if field != name}
    with pytest.raises(BadArgument, match=name):
        sizing(bare)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 33}, "no multiple of 33 heads"),
        ({"torch_dtype": "float64"}, "dtype is 'float64'"),
        ({"layer_types": ["full_attention"]}, "names 1 layers; there are 32"),
        ({"layer_types": ["telepathy"] * 32}, "'telepathy'"),
        ({"layer_types": ["mamba"] * 32}, "makes no KV"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
)
def test_what_cannot_be_meant_is_refused(more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        sizing({**LLAMA_3_8B, **more})


@pytest.mark.parametrize("tensor_parallel", [0, 3, 12])
def test_ranks_that_heads_do_not_fit(tensor_parallel: int) -> None:
    with pytest.raises(BadArgument, match=r"rank|tensor_parallel"):
        sizing(LLAMA_3_8B, tensor_parallel=tensor_parallel)


def test_types_have_whole_bytes() -> None:
    assert set(DTYPE_BYTES.values()) == {1, 2, 4}
