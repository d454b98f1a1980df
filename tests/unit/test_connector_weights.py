"""Which weights: the same files are the same anywhere, and what training changes is seen."""

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from kvpool import BadArgument
from kvpool.connectors import weights
from kvpool.connectors.weights import (
    SAMPLE_BYTES,
    SAMPLES,
    adapter_identity,
    model_folder,
    weights_identity,
)

LARGE = 3 * SAMPLES * SAMPLE_BYTES  # a third of it is read
COMMIT = "0123456789abcdef0123456789abcdef01234567"


GOLDEN = "sampled-sha256:f092e05bfcd9e7ee8f92ba1e1a9a5973f4c7c8bda1ff64c2ecd8e0bec27fbcfb"


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    weights._known.clear()


def safetensors(seed: int, size: int, header: dict[str, Any] | None = None) -> bytes:
    text = json.dumps(header or {"w": {"dtype": "U8", "shape": [size]}}).encode()
    return struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(size)


def model(folder: Path, **files: bytes) -> Path:
    """A folder with config.json and two weight files; more of them by name, . as __."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model-1.safetensors").write_bytes(safetensors(1, 4096))
    (folder / "model-2.safetensors").write_bytes(safetensors(2, LARGE))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_the_same_files_are_the_same_wherever_and_whenever(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a" / "one"), model(tmp_path / "other")
    os.utime(other / "model-1.safetensors", (1, 1))
    (tmp_path / "linked").mkdir()
    for path in one.iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    ids = {weights_identity(path) for path in (one, other, tmp_path / "linked", f"{other}/")}
    assert len(ids) == 1
    assert ids.pop().startswith("sampled-sha256:")


def test_the_identity_is_golden(tmp_path: Path) -> None:
    # Blocks are found by it across versions and machines: it must never change.
    assert weights_identity(model(tmp_path / "m")) == GOLDEN


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "README.md", "optimizer.pt", "rng_state_0.pth", "events.log"]
)
def test_what_does_not_make_kv_does_not_count(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "m")
    before = weights_identity(folder)
    (folder / name).write_text("anything")
    (folder / "original").mkdir()
    (folder / "original" / "other.safetensors").write_bytes(safetensors(9, 100))
    assert weights_identity(folder) == before


def changed(folder: Path, name: str, offset: int, byte: int = 0xFF) -> None:
    with (folder / name).open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        old = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old ^ byte]))


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("config.json", 3),
        ("model-1.safetensors", 2000),  # small: read in full
        ("model-1.safetensors", -1),
        ("model-2.safetensors", 12),  # in the header
        ("model-2.safetensors", -1),
        ("modeling.py", 1),
        ("quantize_config.json", 1),
        ("pytorch_model.bin", 0),
        ("pytorch_model.bin", -1),
        ("weights.gguf", 9),
        ("weights.pt", 9),
        ("weights.pth", 9),
    ],
)
def test_one_byte_of_what_is_read_changes_it(tmp_path: Path, name: str, offset: int) -> None:
    more = {
        "modeling__py": b"x = 1",
        "quantize_config__json": b"{}",
        "pytorch_model__bin": random.Random(3).randbytes(LARGE),
        "weights__gguf": b"GGUF and more",
        "weights__pt": b"one and more",
        "weights__pth": b"one and more",
    }
    folder = model(tmp_path / "m", **more)
    before = weights_identity(folder)
    changed(folder, name, offset)
    weights._known.clear()  # a change within a tick of the file system's clock
    assert weights_identity(folder) != before


def test_names_sizes_and_order_count(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", a__bin=b"one", b__bin=b"two")
    ids = {weights_identity(folder)}
    (folder / "a.bin").write_bytes(b"two")
    (folder / "b.bin").write_bytes(b"one")
    ids.add(weights_identity(folder))
    (folder / "b.bin").rename(folder / "c.bin")
    ids.add(weights_identity(folder))
    (folder / "c.bin").write_bytes(b"on")
    ids.add(weights_identity(folder))
    (folder / "a.bin").unlink()
    ids.add(weights_identity(folder))
    assert len(ids) == 5


def test_bytes_cannot_move_from_one_file_into_the_next(tmp_path: Path) -> None:
    one = model(tmp_path / "one", a__bin=b"xy", b__bin=b"z")
    other = model(tmp_path / "other", a__bin=b"x", b__bin=b"yz")
    assert weights_identity(one) != weights_identity(other)


def test_a_change_as_long_as_the_gap_between_samples_is_seen(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    folder = model(tmp_path / "m")
    path = folder / "model-2.safetensors"
    before, content = weights_identity(folder), path.read_bytes()
    gap = LARGE // (SAMPLES - 1) + SAMPLE_BYTES
    for _ in range(8):
        at = chance.randrange(200, len(content) - gap)
        path.write_bytes(content[:at] + bytes(gap) + content[at + gap :])
        weights._known.clear()
        assert weights_identity(folder) != before, at


def test_a_change_between_two_samples_is_not_seen(tmp_path: Path) -> None:
    # What the module says of itself; whoever makes this test fail may say more.
    folder = model(tmp_path / "m")
    before = weights_identity(folder)
    header = len(safetensors(2, 0, {"w": {"dtype": "U8", "shape": [LARGE]}}))
    changed(folder, "model-2.safetensors", header + SAMPLE_BYTES + 1)
    weights._known.clear()
    assert weights_identity(folder) == before


@pytest.mark.parametrize("length", [0, 7, LARGE - 7, 1 << 62])
def test_a_file_that_is_no_safetensors_file_is_sampled_all_the_same(
    tmp_path: Path, length: int
) -> None:
    content = struct.pack("<Q", length) + random.Random(4).randbytes(LARGE)
    folder = model(tmp_path / "m", odd__safetensors=content)
    before = weights_identity(folder)
    changed(folder, "odd.safetensors", -1)
    weights._known.clear()
    assert weights_identity(folder) != before


def test_a_large_file_is_not_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "m")
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    read = 0
    pread = os.pread

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal read
        got = pread(descriptor, size, offset)
        read += len(got)
        return got

    monkeypatch.setattr(os, "pread", counting)
    weights_identity(folder)
    assert 0 < read <= 3 * (SAMPLES * SAMPLE_BYTES + 4096)


def test_files_that_did_not_change_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "m")
    before = weights_identity(folder)

    def digest(*_: Any) -> str:
        return "read again"

    monkeypatch.setattr(weights, "_digest", digest)
    assert weights_identity(folder) == before
    assert weights_identity(f"{folder}/.") == before
    os.utime(folder / "model-1.safetensors", (1, 1))
    assert weights_identity(folder) == "read again"


def test_one_file_of_weights_has_an_identity(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", one__gguf=b"GGUF one", two__gguf=b"GGUF two")
    one, two = weights_identity(folder / "one.gguf"), weights_identity(folder / "two.gguf")
    assert one != two
    (folder / "two.gguf").unlink()
    assert weights_identity(folder / "one.gguf") == one


@pytest.mark.parametrize("what", ["missing", "empty", "no weights", "no file of weights"])
def test_where_there_are_no_weights_the_path_is_told(tmp_path: Path, what: str) -> None:
    path = tmp_path / "folder of weights"
    if what != "missing":
        path.mkdir()
        (path / "config.json").write_text("{}" if what != "empty" else "")
    if what == "no file of weights":
        path = path / "config.json"
    with pytest.raises(BadArgument, match="folder of weights"):
        weights_identity(path)


def test_a_link_to_nowhere_is_told(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model-3.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(BadArgument, match=r"model-3\.safetensors.*cannot be read"):
        weights_identity(folder)


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    def adapter(name: str, rank: int, seed: int) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (folder / "adapter_model.safetensors").write_bytes(safetensors(seed, 512))
        return folder

    one, same = adapter("one", 8, 1), adapter("same", 8, 1)
    assert adapter_identity(one) == adapter_identity(same)
    others = [adapter("rank", 16, 1), adapter("weights", 8, 2)]
    assert len({adapter_identity(each) for each in (one, *others)}) == 3


@pytest.mark.parametrize("kind", ["missing", "no configuration", "no weights"])
def test_what_is_no_adapter_is_told(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "lora"
    if kind != "missing":
        folder.mkdir()
    if kind == "no configuration":
        (folder / "adapter_model.safetensors").write_bytes(safetensors(1, 8))
    elif kind == "no weights":
        (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BadArgument, match=r"adapter .*lora"):
        adapter_identity(folder)


# --- where a model is ----------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache of Hugging Face's with one model at one commit."""
    home = tmp_path / "hf" / "hub" / "models--org--some.model-1B"
    (home / "snapshots" / COMMIT).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (home / "refs" / "v2").write_text(COMMIT + "\n")
    return tmp_path / "hf"


@pytest.mark.parametrize("revision", [None, "main", "v2", COMMIT])
def test_a_model_of_the_hub_is_found_with_its_commit(hub: Path, revision: str | None) -> None:
    found = model_folder("org/some.model-1B", revision, {"HF_HOME": str(hub)})
    assert found.path == str(hub / "hub" / "models--org--some.model-1B" / "snapshots" / COMMIT)
    assert (found.name, found.revision) == ("org/some.model-1B", COMMIT)


def test_the_cache_is_where_the_environment_says(hub: Path, tmp_path: Path) -> None:
    for environment in (
        {"HF_HUB_CACHE": str(hub / "hub"), "HF_HOME": "/nowhere"},
        {"HUGGINGFACE_HUB_CACHE": str(hub / "hub")},
        {"HF_HOME": str(hub)},
    ):
        assert model_folder("org/some.model-1B", None, environment).path is not None
    assert model_folder("org/some.model-1B", None, {}, str(hub / "hub")).path is not None
    caches = tmp_path / "caches"
    caches.mkdir()
    (caches / "huggingface").symlink_to(hub)
    assert model_folder("org/some.model-1B", None, {"XDG_CACHE_HOME": str(caches)}).path is not None


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("org/other", None),
        ("org/some.model-1B", "v3"),
        ("org/some.model-1B", "../refs/main"),
        ("org/some.model-1B", "."),
        ("org/some.model-1B", ".."),
        ("s3://bucket/model", None),
        ("a/b/c", None),
        ("", None),
    ],
)
def test_what_is_not_there_is_not_found(hub: Path, name: str, revision: str | None) -> None:
    found = model_folder(name, revision, {"HF_HOME": str(hub)})
    assert found == (None, name, revision or "")


def test_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    folder = model(tmp_path / "some-model")
    assert model_folder(str(folder)) == (str(folder), "some-model", "")
    assert model_folder(f"{folder}/", "r7") == (str(folder), "some-model", "r7")


def test_a_snapshot_given_as_a_folder_is_the_model_of_the_hub(hub: Path) -> None:
    by_name = model_folder("org/some.model-1B", None, {"HF_HOME": str(hub)})
    assert by_name.path is not None
    assert model_folder(by_name.path) == by_name
    assert model_folder(by_name.path + "/") == by_name
