"""size --model and config: what they tell, and how they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.operated import command, json_of
from tests.unit.test_sizing import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_3_8B


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(content: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_model_s_kv(config: Any) -> None:
    text = command("size", "--model", config(LLAMA_3_8B)).stdout
    for words in (
        "llama: gqa, 8 KV heads of 128 (K and V), bfloat16",
        "a token takes 131,072 bytes (128 KiB), a block of 16 tokens 2 MiB",
        "layers: 32 attend to all",
    ):
        assert words in text, text
    assert ["64", "GiB", "524,288", "32,768"] in [line.split() for line in text.splitlines()]


def test_a_model_with_a_window(config: Any) -> None:
    text = command("size", "--model", config(GPT_OSS_120B)).stdout
    assert "18 attend to all, 18 to the last 128 tokens" in text
    assert "of that 50% is of layers with a window" in text


def test_a_model_with_a_latent(config: Any) -> None:
    words = ("--tensor-parallel", 8, "--kv-dtype", "fp8")
    text = command("size", "--model", config(DEEPSEEK_V3), *words).stdout
    assert "mla, one latent of 576, fp8, for one of 8 ranks" in text
    assert "note: the latent is one for all heads" in text


def test_a_model_for_programs(config: Any) -> None:
    told = json_of("size", "--model", config(LLAMA_3_8B), "--block-tokens", 32)
    assert told["bytes_per_token"] == 131_072
    assert told["block_bytes"] == 32 * 131_072
    assert told["tokens_per_gib"] == 8192


@pytest.mark.parametrize(
    ("content", "status", "complaint"),
    [
        ("not json", 2, "is not JSON"),
        ("[1]", 2, "holds no object"),
        ("[" * 100_000, 2, "is not JSON"),
        ({"num_hidden_layers": 2}, 1, "the config has no num_attention_heads (or n_head, n_heads)"),
        ({**LLAMA_3_8B, "torch_dtype": "int3"}, 1, "dtype is 'int3'"),
    ],
)
def test_a_config_that_is_none(config: Any, content: Any, status: int, complaint: str) -> None:
    done = command("size", "--model", config(content), status=status)
    assert complaint in done.stderr
    assert done.stdout == ""


def test_no_config(tmp_path: Path) -> None:
    done = command("size", "--model", tmp_path / "absent.json", status=2)
    assert "cannot be read: No such file" in done.stderr


# --- config --------------------------------------------------------------------------------------


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text('[pool]\ndram = "8GiB"\n')
    text = command("config", "show", path, env={"KVPOOL_SERVE_POLICY": "lru"}).stdout
    lines = {line.split(" = ")[0]: line for line in text.splitlines() if " = " in line}
    assert lines["dram"].split("# ")[1] == str(path)
    assert lines["policy"].split("# ")[1] == "$KVPOOL_SERVE_POLICY"
    assert lines["prefault"].split("# ")[1] == "default"
    told = json_of("config", "show", path)
    assert told["pool"]["dram"] == {"value": "8GiB", "from": str(path)}


def test_config_show_of_a_file_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text('[pool]\ndrm = "8GiB"\n')
    done = command("config", "show", path, status=2)
    assert "did you mean 'dram'" in done.stderr


def test_config_check_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text('[pool]\ndram = "8GiB"\n')
    assert command("config", "check", path).stdout == f"{path}: nothing is wrong\n"
    assert json_of("config", "check", path) == {"file": str(path), "faults": []}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[pool]\ndrm = "8GiB"\n', ["'drm'", "did you mean 'dram'"]),
        ("[pool\n", ["is not TOML"]),
        ('[pool]\ndram = "8G"\n', ["8G", "GiB"]),
        ("[log]\nlevel = 5\n", ["level"]),
    ],
)
def test_config_check_names_what_is_wrong(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text(content)
    done = command("config", "check", path, status=1)
    for word in words:
        assert word in done.stdout, done.stdout
    assert "1 fault" in done.stdout
    (fault,) = json_of("config", "check", path, status=1)["faults"]
    assert set(fault) == {"line", "where", "message", "suggestion"}


def test_config_check_of_no_file(tmp_path: Path) -> None:
    done = command("config", "check", tmp_path / "absent.toml", status=1)
    assert "cannot be read" in done.stdout
