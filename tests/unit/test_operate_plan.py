"""size and config: what they tell, and how they refuse."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import _core
from tests.operated import command, controlled, json_of, observing, tenant_of
from tests.pools import keys, opaque, opened
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


def test_config_check_names_every_fault_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text('[pool]\ndrm = "8GiB"\npolicy = "luck"\n\n[log]\nlevel = 5\n')
    text = command("config", "check", path, status=1).stdout
    assert f"{path}:2: [pool] has no option 'drm'" in text
    assert "    did you mean 'dram'?" in text
    assert f"{path}:3: " in text
    assert f"{path}:6: " in text
    assert f"{path}: 3 faults" in text
    faults = json_of("config", "check", path, status=1)["faults"]
    assert [fault["line"] for fault in faults] == [2, 3, 6]
    assert set(faults[0]) == {"line", "where", "message", "suggestion"}


def test_config_check_of_what_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text("[pool\n")
    assert "is not TOML" in command("config", "check", path, status=1).stdout


def test_config_check_of_no_file(tmp_path: Path) -> None:
    done = command("config", "check", tmp_path / "absent.toml", status=1)
    assert "cannot be read" in done.stdout


# --- size of a daemon and of a trace -------------------------------------------------------------

MIB = 1 << 20


def counted(scale: float = 1.0) -> dict[str, Any]:
    """As Node.reuse() tells it: half of 10,000 uses within 1 GiB, another 3,000 within 4 GiB."""
    return {
        "references": 10_000.0 * scale,
        "sampled": 5000.0,
        "samples": 1000,
        "rate": 0.5,
        "seen_bytes": float(64 << 30),
        "cold": 2000.0 * scale,
        "bounds_bytes": [float(1 << 30), float(4 << 30)],
        "counts": [5000.0 * scale, 3000.0 * scale],
    }


def reuse_of(*tenants: str, scale: float = 1.0) -> dict[str, Any]:
    """As a daemon with these tenants answers."""
    each = {"all": counted(scale), "spaces": {"chat": counted(scale)}}
    sizes = {"dram_bytes": 2 << 30, "ssd_bytes": 8 << 30}
    return {"reuse": json.dumps({name: {**each, **sizes} for name in tenants}).encode()}


def reusing(_: dict[str, Any]) -> dict[str, Any]:
    return reuse_of("default")


def test_a_daemon_s_table_compares_with_what_it_has(tmp_path: Path) -> None:
    with controlled(tmp_path, reuse=reusing) as server:
        text = command("size", "--address", server.address).stdout
        (told,) = json_of("size", "--address", server.address)
    rows = {row["factor"]: row for row in told["rows"]}
    assert told["of"] == "tenant default"
    assert (told["dram_bytes"], told["ssd_bytes"]) == (2 << 30, 8 << 30)
    assert rows[0.5]["hit_dram"] == pytest.approx(0.5)
    assert rows[2]["hit_dram"] == pytest.approx(0.8)
    assert rows[1]["hit_dram"] == pytest.approx(0.6)
    assert "tenant default, with 8 GiB of SSD behind" in text
    assert "doubling DRAM (2 GiB -> 4 GiB): hit 80% -> 80%" in text
    assert "1/4" in text


def test_another_size_to_compare_with(tmp_path: Path) -> None:
    with controlled(tmp_path, reuse=reusing) as server:
        (told,) = json_of("size", "--dram", "1GiB", "--address", server.address)
    assert told["dram_bytes"] == 1 << 30


def test_one_namespace(tmp_path: Path) -> None:
    with controlled(tmp_path, reuse=reusing) as server:
        there = ("--address", server.address)
        (told,) = json_of("size", "--namespace", "chat", *there)
        assert told["of"] == "tenant default, namespace chat"
        done = command("size", "--namespace", "cat", *there, status=2)
        assert "no use of a namespace 'cat' lately" in done.stderr


def test_a_table_for_each_tenant(tmp_path: Path) -> None:
    with controlled(tmp_path, reuse=lambda _: reuse_of("acme", "umbrella")) as server:
        told = json_of("size", "--address", server.address)
    assert [each["of"] for each in told] == ["tenant acme", "tenant umbrella"]


@pytest.mark.parametrize(
    "memory", [{"dram": "8MiB"}, {"dram": "64MiB", "max_blocks": 128}], ids=["bytes", "blocks"]
)
def test_a_real_pool_s_distances_are_read(tmp_path: Path, memory: Any) -> None:
    """200 blocks, used in turn ten times: not all of them fit, and so none is ever a hit."""
    with opened(**memory) as pool:
        chat = opaque(name="chat", block_bytes=64 << 10)
        tenant = tenant_of("default", pool._node, [chat])
        space = _core.Space(tenant.opened(chat))
        out = np.empty(64 << 10, np.uint8)
        for _ in range(10):
            for each in keys(range(200)):
                if not space.get_into([each], out):
                    space.put_codes([each], out, None, None, None, 5.0)
        with controlled(tmp_path, **observing(tenant)) as server:
            (told,) = json_of("size", "--namespace", "chat", "--address", server.address)
    rows = {row["factor"]: row["hit"] for row in told["rows"]}
    assert told["dram_bytes"] == 8 << 20
    assert rows[1] == pytest.approx(0.0, abs=0.05)
    assert rows[2] == pytest.approx(0.9, abs=0.1)


def test_too_few_uses_are_told(tmp_path: Path) -> None:
    with controlled(tmp_path, reuse=lambda _: reuse_of("default", scale=0.01)) as server:
        text = command("size", "--address", server.address).stdout
    assert "only 100 uses counted lately" in text


def test_a_trace(tmp_path: Path) -> None:
    """Two blocks, each used 500 times in turn: all of it fits two blocks, nothing one."""
    path = tmp_path / "trace.jsonl"
    line = {"input_length": 512, "output_length": 1}
    path.write_text(
        "".join(
            json.dumps({**line, "timestamp": 1000 * at, "hash_ids": [at % 2]}) + "\n"
            for at in range(1000)
        )
    )
    words = ("size", "--trace", path, "--block-bytes", "1MiB", "--exact")
    (told,) = json_of(*words, "--dram", "2MiB")
    rows = {row["dram_bytes"]: row["hit"] for row in told["rows"]}
    assert rows[2 * MIB] == pytest.approx(0.998, abs=0.01)
    assert rows[MIB // 2] == pytest.approx(0.0, abs=0.01)
    whole = command(*words).stdout
    assert "2 MiB" in whole
    assert "1/256" in whole
    assert "were seen" not in whole


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (("--trace", "absent.jsonl"), 1, "cannot read absent.jsonl"),
        (("--trace", "x", "--model", "y"), 2, "one at a time"),
        (("--trace", "absent.jsonl", "--block-bytes", "64K"), 2, "write KiB (1024s)"),
    ],
)
def test_size_asked_wrongly(words: tuple[str, ...], status: int, complaint: str) -> None:
    assert complaint in command("size", *words, status=status).stderr
