"""What the bytes of an engine's KV blocks depend on, as a manifest.

Two engines share a namespace exactly when a block of one is, byte for byte, what the other would
have computed or could go on from. What can change them without a trace is looked for here; where it
cannot be known, the engine is refused with a reason, for a guess would be wrong output.

Left out are things that change how numbers are computed and not what they mean: compilation, CUDA
graphs, batch invariance, expert and data parallelism, scheduling. They vary results as much as
another batch does. What happens after the start (weights that are replaced in place) is not seen.

Pure, but for the files of weights. vLLM's objects are taken as they come: nothing is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from kvpool.connectors.canonical import text_of
from kvpool.connectors.engine_text import Part, engine_parts, hf_digest, kv_dtype_of, need
from kvpool.connectors.options import Options
from kvpool.connectors.weights import ModelFolder, model_folder, weights_identity
from kvpool.errors import BadArgument
from kvpool.manifest import Manifest

# Of vLLM's load formats those that read the files in the model's own folder.
FOLDER_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
# Speculation whose drafts come from no KV of their own.
WITHOUT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})
_NAME_IT = 'name the weights yourself: "weights" in kv_connector_extra_config'
_NUMBERED = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.|$)")
_ANY_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Shard:
    """Which part of the model a worker holds, each as (rank, size)."""

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Group:
    """One KV cache group of an engine, whose layers are allocated together.

    kind: of its KV (full_attention, sliding_window, mla_attention, ...). window: in tokens.
    block_tokens, block_bytes: of one block, all its layers. layout: text that is the same exactly
    where bytes lie in the same order (dtype, shape and order of strides of a page).
    """

    index: int
    kind: str
    window: int | None
    block_tokens: int
    block_bytes: int
    layout: str
    layers: tuple[str, ...]


def manifest_of(
    config: Any,
    group: Group,
    shard: Shard,
    options: Options,
    environment: Mapping[str, str] | None = None,
) -> Manifest:
    """The namespace of one group of one worker. config: vLLM's VllmConfig, in that worker.

    Raises BadArgument where something that changes the bytes cannot be known. The first call reads
    samples of the weights (connectors/weights.py): seconds for hundreds of gigabytes.
    """
    environment = os.environ if environment is None else environment
    folder = _folder(config, environment)
    parts = engine_parts(config, group, shard.dcp, environment)
    parts += _draft_parts(config, options, environment)
    return Manifest(
        model=folder.name,
        revision=folder.revision,
        weights=options.weights or _weights(config, folder),
        dtype=kv_dtype_of(config),
        layout="opaque",
        block_tokens=group.block_tokens,
        layers=_layer_range(group.layers),
        tp=shard.tp,
        pp=shard.pp,
        salt=options.salt,
        engine=text_of(parts),
        block_bytes=group.block_bytes,
    )


def with_adapter(manifest: Manifest, digest: str) -> Manifest:
    """The namespace of the same KV computed with a LoRA adapter; see adapter_identity()."""
    return replace(manifest, adapter=digest)


# --- which weights -------------------------------------------------------------------------------


def _folder(config: Any, environment: Mapping[str, str]) -> ModelFolder:
    model = need(config, "model_config")
    cache = getattr(need(config, "load_config"), "download_dir", None)
    asked = (str(need(model, "model")), need(model, "revision"))
    found = model_folder(*asked, environment, cache)
    return found if found.path or not cache else model_folder(*asked, environment)


def _weights(config: Any, folder: ModelFolder) -> str:
    if getattr(config, "weight_transfer_config", None) is not None:
        raise BadArgument(
            "weight_transfer_config is set: weights are replaced while the engine runs, and KV in"
            " a pool would outlive them; use no pool, or bring each generation of weights its own"
            f" engine and {_NAME_IT}"
        )
    model = need(config, "model_config")
    format = str(need(config, "load_config.load_format"))
    if format == "dummy":
        if need(model, "quantization") is not None:
            raise BadArgument(
                f"load_format is 'dummy' and quantization {model.quantization!r}: its integer"
                f" weights are whatever lies in memory, other in every process; {_NAME_IT}"
            )
        return f"dummy:{need(model, 'seed')}"
    if format not in FOLDER_FORMATS:
        raise BadArgument(
            f"load_format is {format!r}: where its weights are is unknown; {_NAME_IT}"
        )
    if getattr(model, "model_weights", ""):
        raise BadArgument(
            f"the weights come from {model.model_weights!r}, which cannot be looked at; {_NAME_IT}"
        )
    if folder.path is None:
        raise BadArgument(
            f"the files of model {folder.name!r} (revision {folder.revision or 'main'!r}) are"
            f" neither a folder nor in Hugging Face's cache; {_NAME_IT}"
        )
    return weights_identity(folder.path)


def _draft_parts(config: Any, options: Options, environment: Mapping[str, str]) -> list[Part]:
    """A draft model's layers stand in the groups beside the model's own: its weights count too."""
    speculative = need(config, "speculative_config")
    if speculative is None or (method := need(speculative, "method")) in WITHOUT_KV:
        return []
    draft = need(speculative, "draft_model_config")
    if draft is None:
        raise BadArgument(f"speculative method {method!r} has no draft model that could be named")
    loading = getattr(speculative, "draft_load_config", None) or need(config, "load_config")
    as_target = SimpleNamespace(model_config=draft, load_config=loading)
    folder = _folder(as_target, environment)
    return [
        ("draft", f"{method} {folder.name}@{folder.revision}"),
        ("draft_weights", options.weights or _weights(as_target, folder)),
        ("draft_model", hf_digest(draft)),
        ("draft_tokens", str(need(speculative, "num_speculative_tokens"))),
        ("draft_parallel", str(need(speculative, "parallel_drafting"))),
    ]


# --- which layers --------------------------------------------------------------------------------


def _layer_range(names: tuple[str, ...]) -> tuple[int, int]:
    """From the first to the last layer by the numbers in their names, else as many as there are.

    Of several numbers in a name the one of the layer. The names themselves are in `engine`.
    """
    found = [_NUMBERED.search(name) or _ANY_NUMBER.search(name) for name in names]
    numbers = [int(match[1]) for match in found if match is not None]
    if len(numbers) < len(names):
        return 0, len(names)
    return min(numbers), max(numbers) + 1
