"""How much KV a model makes, from its Hugging Face config.json: bytes per token, tokens per GiB.

A block of kvpool has the KV of all layers that attend, so a token costs the sum over them. Layers
with a window or a chunk count in full, as their part of a block is stored like the others'; how
much of it they are is said. Layers that keep a state of fixed size (Mamba, linear attention) make
no KV per token and count for nothing.

Promises:  1. a number is computed from fields that the file has, never from a model's name; a file
              that lacks one is refused with the field's name;
           2. pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kvpool.errors import BadArgument

BLOCK_TOKENS = 16
GIB = 1 << 30

# As configs write them, and as engines call the format of a KV cache.
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")

# Words that configs have for a kind of layer -> what it keeps.
_FULL, _WINDOW, _STATE = "full", "window", "state"
_KIND_OF_WORD = {
    "full_attention": _FULL,
    "attention": _FULL,
    "global": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _WINDOW,
    "local": _WINDOW,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "recurrent": _STATE,
    "conv": _STATE,
    "moe": _STATE,
    "mlp": _STATE,
}


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a model's KV takes. Bytes are of one rank where tensor parallelism is asked for."""

    model: str
    kind: str  # mha, gqa, mqa, mla
    layers_full: int
    layers_window: int
    layers_state: int
    window_tokens: int  # 0: none
    kv_heads: int  # of one rank; 1 for mla
    head_dim: int  # the latent's width for mla
    dtype: str
    tensor_parallel: int
    bytes_per_token: int
    window_bytes_per_token: int  # the part of it that layers with a window make
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_gib(self) -> int:
        return GIB // self.bytes_per_token

    def block_bytes(self, block_tokens: int = BLOCK_TOKENS) -> int:
        return self.bytes_per_token * block_tokens


def sizing(
    config: Mapping[str, Any], *, kv_dtype: str | None = None, tensor_parallel: int = 1
) -> Sizing:
    """Of a config.json, decoded. kv_dtype: of the KV where it is not the weights', such as fp8.

    Raises BadArgument: a field that is needed is missing or cannot be meant.
    """
    text = _text_part(config)
    notes: list[str] = []
    layers = _layers(text, notes)
    dtype = _dtype(config, text, kv_dtype, notes)
    kind, kv_heads, head_dim, per_layer = _per_layer(text, tensor_parallel, notes)
    each = per_layer * DTYPE_BYTES[dtype]
    attending = layers.count(_FULL) + layers.count(_WINDOW)
    if not attending:
        raise BadArgument("no layer of this model attends: it makes no KV that a pool could keep")
    if "index_head_dim" in text:
        notes.append("keys of the indexer (index_head_dim) are not counted")
    return Sizing(
        model=str(config.get("_name_or_path") or text.get("model_type") or "unknown"),
        kind=kind,
        layers_full=layers.count(_FULL),
        layers_window=layers.count(_WINDOW),
        layers_state=layers.count(_STATE),
        window_tokens=_window(text) if _WINDOW in layers else 0,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        bytes_per_token=attending * each,
        window_bytes_per_token=layers.count(_WINDOW) * each,
        notes=notes,
    )


# --- the fields ----------------------------------------------------------------------------------


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Models that also see keep the language model's fields in a table of their own."""
    for name in ("text_config", "llm_config", "language_config"):
        part = config.get(name)
        if isinstance(part, Mapping) and _find(part, _LAYERS) is not None:
            return part
    return config


def _find(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _count(config: Mapping[str, Any], names: tuple[str, ...], what: str) -> int:
    value = _find(config, names)
    if value is None:
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise BadArgument(f"the config has no {names[0]}{others}: {what} is not known")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadArgument(f"{names[0]} is {value!r:.64}; it must be a number from 1 on")
    return value


def _dtype(
    config: Mapping[str, Any], text: Mapping[str, Any], asked: str | None, notes: list[str]
) -> str:
    names = ("torch_dtype", "dtype")
    said = asked or _find(text, names) or _find(config, names)
    if said is None:
        notes.append("the config names no dtype; 2 bytes per number are assumed (--kv-dtype)")
        return "bfloat16"
    dtype = str(said).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise BadArgument(f"dtype is {dtype!r:.64}; it can be {', '.join(DTYPE_BYTES)}")
    return dtype


def _per_layer(
    config: Mapping[str, Any], tensor_parallel: int, notes: list[str]
) -> tuple[str, int, int, int]:
    """Kind, KV heads of a rank, width of a head, and numbers per token and layer of a rank."""
    if tensor_parallel < 1:
        raise BadArgument(f"tensor_parallel is {tensor_parallel}; it must be 1 or more")
    if config.get("kv_lora_rank") is not None:
        rank = _count(config, ("kv_lora_rank",), "the latent's width")
        rope = _count(config, ("qk_rope_head_dim",), "the width of the rotary part")
        if tensor_parallel > 1:
            notes.append("the latent is one for all heads: every rank keeps all of it")
        return "mla", 1, rank + rope, rank + rope
    heads = _count(config, _HEADS, "the number of heads")
    kv_heads = _kv_heads(config, heads)
    head_dim = _head_dim(config, heads)
    kind = "mqa" if kv_heads == 1 else "mha" if kv_heads == heads else "gqa"
    of_rank = _shared(kv_heads, tensor_parallel)
    if kv_heads < tensor_parallel:
        notes.append(
            f"{tensor_parallel} ranks share {kv_heads} KV heads: each head is kept more than once"
        )
    return kind, of_rank, head_dim, 2 * of_rank * head_dim


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    inner = config.get("attn_config")
    if isinstance(inner, Mapping) and inner.get("kv_n_heads") is not None:
        return _count(inner, ("kv_n_heads",), "the number of KV heads")
    is_grouped = config.get("new_decoder_architecture") or not config.get("multi_query")
    if not is_grouped and config.get("multi_query_group_num") is None:
        return 1
    if _find(config, _KV_HEADS) is None:
        return heads  # configs from before grouped heads have no field for them
    return _count(config, _KV_HEADS, "the number of KV heads")


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    if _find(config, _HEAD_DIM) is not None:
        return _count(config, _HEAD_DIM, "the width of a head")
    width = _count(config, _WIDTH, "the width of a head (head_dim, or hidden_size by heads)")
    whole, rest = divmod(width, heads)
    if rest:
        raise BadArgument(
            f"hidden_size {width} is no multiple of {heads} heads, and the config has no head_dim"
        )
    return whole


def _shared(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank: a part of them, or one that several ranks have."""
    share = Fraction(kv_heads, tensor_parallel)
    if share.denominator == 1:
        return int(share)
    if share.numerator == 1:
        return 1
    raise BadArgument(f"{kv_heads} KV heads cannot be shared among {tensor_parallel} ranks evenly")


# --- what kind each layer is ---------------------------------------------------------------------


def _layers(config: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The kind of each layer that has KV of its own, and of those that keep a state."""
    layers = _count(config, _LAYERS, "the number of layers")
    kinds = _said_by_name(config, layers)
    if kinds is None:
        kinds = _said_by_period(config, layers)
    shared = config.get("num_kv_shared_layers")
    if isinstance(shared, int) and 0 < shared < len(kinds):
        notes.append(f"the last {shared} layers use the KV of earlier ones")
        kinds = kinds[: len(kinds) - shared]
    return kinds


def _said_by_name(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Configs that name the kind of each layer, in whatever field."""
    words = _find(config, ("layer_types", "layers_block_type"))
    if isinstance(words, list):
        if len(words) != layers:
            raise BadArgument(f"layer_types names {len(words)} layers; there are {layers}")
        return [_kind_of(word) for word in words]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # a letter per layer; only * attends
        return [_FULL if letter == "*" else _STATE for letter in pattern]
    numbers = config.get("attn_type_list")
    if isinstance(numbers, list):
        return [_FULL if number == 1 else _STATE for number in numbers]
    places = config.get("attn_layer_indices")
    if isinstance(places, list):
        return [_FULL if place in places else _STATE for place in range(layers)]
    no_rope = config.get("no_rope_layers")
    if isinstance(no_rope, list) and len(no_rope) == layers and config.get("attention_chunk_size"):
        return [_WINDOW if has_rope else _FULL for has_rope in no_rope]
    return None


def _kind_of(word: object) -> str:
    if word not in _KIND_OF_WORD:
        known = ", ".join(_KIND_OF_WORD)
        raise BadArgument(f"layer_types has {word!r:.64}, whose KV is not known here; {known}")
    return _KIND_OF_WORD[str(word)]


def _said_by_period(config: Mapping[str, Any], layers: int) -> list[str]:
    """Configs that say every how many layers one attends, or attends to everything."""
    if (every := config.get("attn_layer_period")) is not None:
        offset = config.get("attn_layer_offset", 0)
        return [_FULL if at % every == offset else _STATE for at in range(layers)]
    if (every := config.get("full_attention_interval")) is not None:
        return [_FULL if (at + 1) % every == 0 else _STATE for at in range(layers)]
    if not _window(config):
        return [_FULL] * layers
    every = _find(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    if isinstance(every, int) and every > 1:
        return [_FULL if (at + 1) % every == 0 else _WINDOW for at in range(layers)]
    if config.get("model_type") == "gemma2":  # its configs say the window and not which layers
        return [_WINDOW if at % 2 == 0 else _FULL for at in range(layers)]
    if config.get("attention_chunk_size"):
        return [_FULL if (at + 1) % 4 == 0 else _WINDOW for at in range(layers)]
    from_layer = config.get("max_window_layers")
    if config.get("use_sliding_window") and isinstance(from_layer, int):
        return [_FULL if at < from_layer else _WINDOW for at in range(layers)]
    return [_WINDOW] * layers


def _window(config: Mapping[str, Any]) -> int:
    """Tokens that a layer with a window or a chunk sees; 0: the config has none in use."""
    if config.get("use_sliding_window") is False:
        return 0
    value = _find(config, ("sliding_window", "sliding_window_size", "attention_chunk_size"))
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
