"""Which calls of generate() a prefix cache can serve, and why it leaves the others alone.

Whatever is not known to leave K and V of the prompt a function of its tokens is left alone. What a
call means is asked of transformers itself: its own merge of arguments, configuration and defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers.generation.configuration_utils import GenerationMode

# Arguments of generate() that make it run otherwise than token by token over one cache.
_OTHER_WAYS = ("assistant_model", "custom_generate", "negative_prompt_ids", "synced_gpus")
# Arguments for the model, beside the configuration, that leave KV what it is.
_HARMLESS = frozenset({"input_ids", "attention_mask", "tokenizer", "use_cache"})
_PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_PLAIN_CACHES = (None, "dynamic")


class Prompt(NamedTuple):
    """The tokens of a call that can be served, or the reason why it cannot be."""

    tokens: Any  # (tokens,) of torch, or None
    reason: str = ""


def prompt_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prompt:
    """What generate(*args, **kwargs) of this model is about. Calls nothing that has effects."""
    if model.training:
        return Prompt(None, "training")
    if getattr(model, "_hf_peft_config_loaded", False):
        return Prompt(None, "adapter")  # on or off without a change of any weight
    try:
        bound = inspect.signature(model.generate).bind(*args, **kwargs).arguments
        others = dict(bound.pop("kwargs", {}))
        config, extras = model._prepare_generation_config(bound.get("generation_config"), **others)
    except (TypeError, ValueError):
        return Prompt(None, "arguments")  # generate() will say what is wrong with them
    reason = _other_way(bound, config, extras)
    if reason:
        return Prompt(None, reason)
    inputs = bound.get("inputs")
    return _tokens(extras.get("input_ids") if inputs is None else inputs, extras, config)


def _other_way(bound: Mapping[str, Any], config: Any, extras: Mapping[str, Any]) -> str:
    if extras.get("past_key_values") is not None:
        return "own_cache"
    if extras.get("inputs_embeds") is not None:
        return "inputs_embeds"
    if any(bound.get(name) is not None for name in _OTHER_WAYS):
        return "mode"
    if config.get_generation_mode(None) not in _PLAIN_MODES:
        return "mode"
    if config.num_return_sequences not in (None, 1):
        return "sequences"
    if config.use_cache is False:
        return "no_cache"
    if config.cache_implementation not in _PLAIN_CACHES:
        return "cache_implementation"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size"  # it cuts the prompt from its begin, whatever is in the cache
    if config.output_attentions or config.output_hidden_states:
        return "outputs"  # those of the prompt would be missing
    if config.token_healing or config.guidance_scale not in (None, 1, 1.0):
        return "mode"
    unknown = {name for name, value in extras.items() if value is not None} - _HARMLESS
    return "other_inputs" if unknown else ""


def _tokens(ids: Any, extras: Mapping[str, Any], config: Any) -> Prompt:
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] == 0:
        return Prompt(None, "input_ids")
    if ids.dtype not in (torch.int64, torch.int32):
        return Prompt(None, "input_ids")
    if ids.shape[0] != 1:
        return Prompt(None, "batch")
    mask = extras.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or not bool((mask == 1).all())):
        return Prompt(None, "padding")
    # Without a mask, transformers takes one from where the padding token is.
    pad = config.pad_token_id
    if mask is None and pad is not None and bool((ids == pad).any()):
        return Prompt(None, "padding")
    return Prompt(ids[0])
