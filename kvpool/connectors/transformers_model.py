"""What a Hugging Face model says about its KV: shapes, weights, and whether a prefix has its own.

Promises:  1. a model whose KV cannot be taken up at a prefix is refused, with the reason: by its
              configuration, and by running it on a few tokens in both ways and comparing;
           2. shapes come from the tensors that the model fills, never from its configuration;
           3. a manifest has whatever changes the bytes: weights, shapes, dtype, attention, device,
              positions, the rest of the configuration, and the version of transformers.
Thread rule: none of its own; a model is looked at by whoever runs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import xxhash
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvpool.errors import BadArgument
from kvpool.manifest import Manifest

PROBE_TOKENS = 8  # of which the second half is computed after the first, and with it
SAMPLES = 4  # places in every weight that are looked at before every use of the pool
SAMPLE_BYTES = 64

# Their frequencies depend on how long the sequence is by now, so K of a prefix on what follows it.
MOVING_ROPES = ("dynamic", "longrope")

# Of a configuration: says where the model came from or what is reported, not what it computes.
_IDLE_FIELDS = frozenset({"_name_or_path", "transformers_version", "architectures", "use_cache"})

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the tensors of a filled cache look like: (1, kv_heads, tokens, head_dim), K and V."""

    dtype: str
    kv_heads: int
    head_dim: int
    devices: tuple[torch.device, ...]  # one per layer


def require_prefix_cache(model: Any) -> None:
    """Refuse a model that the configuration shows to keep more, or less, than K and V by position.

    Raises BadArgument with the reason. O(layers).
    """
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise BadArgument(
            f"model is {type(model).__name__}; it must be a transformers model that can generate"
        )
    config = model.config
    if config.is_encoder_decoder:
        raise _refused(model, "an encoder's output decides its KV, not the prefix alone")
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise _refused(model, "it takes more than text, and tokens do not name an image")
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise _refused(model, "its forward takes no attention_mask, so a prefix cannot be skipped")
    if not model._supports_default_dynamic_cache():
        raise _refused(model, "it does not keep its state in a DynamicCache")
    _require_plain_layers(model, text)
    _require_fixed_ropes(model)
    if model.training:
        raise _refused(model, "it is in training mode, where dropout changes KV; call eval()")


def _require_plain_layers(model: Any, text: Any) -> None:
    layers = DynamicCache(config=text).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others:
        raise _refused(
            model,
            f"it has cache layers of the kinds {', '.join(others)}: a window or a state is kept "
            "there, not K and V of every token",
        )


def _require_fixed_ropes(model: Any) -> None:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in MOVING_ROPES:
                raise _refused(
                    model, f"its rope is {kind}: K of a prefix depends on what follows it"
                )


def _refused(model: Any, reason: str) -> BadArgument:
    return BadArgument(f"{type(model).__name__} cannot have a prefix cache: {reason}")


def observe(model: Any) -> Shape:
    """Run the model on PROBE_TOKENS tokens, whole and in two parts; returns what its cache is like.

    Raises BadArgument where the two ways differ by more than rounding, or the tensors are not one
    K and one V of one shape in every layer. Cost: three forward passes of a few tokens.
    """
    vocabulary = model.config.vocab_size
    tokens = (torch.arange(PROBE_TOKENS, device=model.device) * 7 + 3) % vocabulary
    half = PROBE_TOKENS // 2
    with torch.no_grad():
        whole, end = _run(model, tokens, None)
        prefix, _ = _run(model, tokens[:half], None)
        shape = _shape_of(model, whole)
        _require_same(model, _cut(whole, half), prefix, "K and V of a prefix change with the rest")
        continued, end_again = _run(model, tokens, prefix)
    _require_same(model, _cut(whole), continued, "going on from a prefix gives other K and V")
    if _differs(end, end_again):
        raise _refused(model, "going on from a prefix gives another next token")
    return shape


def _run(model: Any, tokens: Any, past: Any) -> tuple[Any, Any]:
    """Forward what is not in `past` yet; returns the cache and the logits of the last token."""
    cache = past if past is not None else empty_cache(model)
    known = cache.get_seq_length()
    positions = torch.arange(known, len(tokens), device=tokens.device)
    inputs = {
        "input_ids": tokens[None, known:],
        "attention_mask": torch.ones_like(tokens)[None],
        "past_key_values": cache,
        "use_cache": True,
    }
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions[None]
    return cache, model(**inputs).logits[0, -1]


def empty_cache(model: Any) -> Any:
    """The cache that generate() makes by itself."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _shape_of(model: Any, cache: Any) -> Shape:
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    if not pairs or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise _refused(model, "it fills no cache of plain layers")
    if any(keys is None or values is None for keys, values in pairs):
        raise _refused(model, "it leaves a layer of its cache empty")
    shapes = {tuple(tensor.shape) for pair in pairs for tensor in pair}
    dtypes = {tensor.dtype for pair in pairs for tensor in pair}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise _refused(model, f"K and V differ in shape or dtype: {shapes}, {dtypes}")
    ((batch, heads, tokens, width),) = shapes
    (dtype,) = dtypes
    if batch != 1 or tokens != PROBE_TOKENS:
        raise _refused(model, f"its cache has shape {(batch, heads, tokens, width)}")
    if dtype not in _DTYPES:
        raise _refused(model, f"its KV is {dtype}")
    return Shape(_DTYPES[dtype], heads, width, tuple(keys.device for keys, _ in pairs))


def _cut(cache: Any, tokens: int | None = None) -> list[Any]:
    return [t[:, :, :tokens] for layer in cache.layers for t in (layer.keys, layer.values)]


def _require_same(model: Any, wanted: list[Any], cache: Any, reason: str) -> None:
    found = _cut(cache)
    if len(found) != len(wanted) or any(
        a.shape != b.shape or _differs(a, b) for a, b in zip(wanted, found, strict=True)
    ):
        raise _refused(model, reason)


def _differs(wanted: Any, found: Any) -> bool:
    """By more than another order of the same sums: a part in 1000, or in 20 of half the bits."""
    limit = 1e-3 if wanted.dtype == torch.float32 else 5e-2
    wanted, found = wanted.float(), found.float()
    error = torch.linalg.vector_norm(wanted - found)
    return not bool(error <= limit * torch.linalg.vector_norm(wanted))


class Weights:
    """The tensors that decide what a model computes, and a way to see that they changed.

    is_current() compares objects, addresses, torch's own counts of writes, and samples of the
    bytes: the counts miss what is written through `.data`, as a merge of an adapter does.
    """

    def __init__(self, model: Any) -> None:
        """Raises BadArgument for weights that are not in memory. O(tensors)."""
        tensors = _tensors(model)
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                raise _refused(model, f"{name} is not in memory (offloaded)")
        self._facts = {name: _facts(tensor) for name, tensor in tensors.items()}
        self._sample = _sample(tensors)

    def is_current(self, model: Any) -> bool:
        """Whether `model` still has these weights. O(tensors), no pass over their bytes."""
        tensors = _tensors(model)
        if tensors.keys() != self._facts.keys():
            return False
        for name, tensor in tensors.items():
            known, *facts = self._facts[name]
            if known() is not tensor or facts != _facts(tensor)[1:]:
                return False
        return self._sample == _sample(tensors)


def _tensors(model: Any) -> dict[str, Any]:
    return dict(model.state_dict(keep_vars=True))


def _facts(tensor: Any) -> list[Any]:
    version = 0 if tensor.is_inference() else tensor._version
    return [weakref.ref(tensor), tensor.data_ptr(), version, tensor.dtype]


def _sample(tensors: dict[str, Any]) -> bytes:
    """Some bytes of every tensor, hashed. A tensor of fewer bytes is taken whole."""
    digest = hashlib.sha256()
    parts: dict[Any, list[Any]] = {}
    for tensor in tensors.values():
        size = tensor.numel() * tensor.element_size()
        last = max(size - SAMPLE_BYTES, 0)
        starts = sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)})
        if type(tensor) in _PLAIN_TENSORS and tensor.is_cpu and tensor.is_contiguous():
            address = tensor.data_ptr()  # slices of torch take ten times as long
            for start in starts:
                digest.update(ctypes.string_at(address + start, min(SAMPLE_BYTES, size)))
        else:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            found = [flat[start : start + SAMPLE_BYTES] for start in starts]
            parts.setdefault(tensor.device, []).extend(found)
    for group in parts.values():  # one transfer per device
        digest.update(torch.cat(group).cpu().numpy().data)
    return digest.digest()


def weights_digest(model: Any) -> str:
    """Digest of every byte of every weight and kept buffer, with names, shapes and dtypes.

    The whole, since a changed row of one matrix is another model. Not cryptographic: XXH3 of 128
    bits for each tensor. Raises BadArgument for weights that cannot be read. Cost: one pass over
    the weights at memory speed; those of a device are copied to the host, one at a time.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        facts = f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
        try:
            flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise _refused(model, f"{name} cannot be read ({error}); give `weights`") from error
        digest.update(facts.encode() + xxhash.xxh3_128_digest(flat.data))
    return digest.hexdigest()


def engine_text(model: Any) -> str:
    """What changes bytes and has no field of its own in a manifest, as canonical JSON."""
    config = model.config.to_dict()
    kept = {name: value for name, value in config.items() if name not in _IDLE_FIELDS}
    facts = {
        "attention": model.config._attn_implementation,
        "config": hashlib.sha256(_canonical(kept).encode()).hexdigest()[:32],
        "device": ",".join(sorted({tensor.device.type for tensor in model.parameters()})),
        "engine": f"transformers {transformers.__version__}",
        "rope": config.get("rope_parameters"),
    }
    return _canonical(facts)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def manifest_of(
    model: Any, shape: Shape, block_tokens: int, *, salt: str, name: str, weights: str
) -> Manifest:
    """The namespace of this model's KV. weights: the operator's word, or "" for the digest."""
    return Manifest(
        model=type(model).__name__,
        name=name,
        weights=weights or weights_digest(model),
        dtype=shape.dtype,
        layout="hnd",
        block_tokens=block_tokens,
        layers=len(shape.devices),
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        salt=salt,
        engine=engine_text(model),
    )
