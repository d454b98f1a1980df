"""What a reader types works with a real engine: the example with vLLM, and the bench, tiny."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.engines.rig import engine_python, environment, model_folder
from tests.pools import ROOT

RUN_S_MAX = 2400  # a hang, not slowness: 150 s on two cores with nothing else to do


def run(command: list[str], folder: Path) -> str:
    """What it says on stdout; shows the rest where it fails."""
    where = ["--python", str(engine_python()), "--model", str(model_folder("smollm"))]
    done = subprocess.run(
        [sys.executable, *command, *where],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_example_shows_the_same_text_from_the_pool(tmp_path: Path) -> None:
    said = run([str(ROOT / "examples/03_vllm/run.py")], tmp_path)
    rows = [re.findall(r"[\d,.]+|yes|no", line) for line in said.splitlines() if "│" in line]
    rows = [row for row in rows if row and row[-1] in ("yes", "no")]
    assert len(rows) == 3, said
    for tokens, _, from_pool, _, _, is_same in rows:
        assert is_same == "yes"
        assert 0 < int(from_pool.replace(",", "")) < int(tokens.replace(",", ""))


def test_the_bench_proves_what_it_counts(tmp_path: Path) -> None:
    command = ["-m", "kvpool.cli", "bench", "vllm", "--json", "--quick", "--threads", "1"]
    rows = [json.loads(line) for line in run(command, tmp_path).splitlines()]
    ttft = {(row["system"], row["prompt_tokens"]): row for row in rows if row["work"] == "ttft"}
    assert {system for system, _ in ttft} == {"none", "kvpool", "example"}
    for (system, tokens), row in ttft.items():
        # In blocks of 128; the example leaves out the last two tokens, kvpool none.
        whole = {"none": 0, "kvpool": tokens // 128 * 128, "example": (tokens - 2) // 128 * 128}
        assert row["external_tokens"] == whole[system]
        assert row["same_token"] == row["rounds"]
    (overhead,) = [row for row in rows if row["work"] == "overhead"]
    assert overhead["tokens_per_s"] > 0
    alone, pooled = [row for row in rows if row["work"] == "turns"]
    assert alone["external_rate"] == 0 < pooled["external_rate"]
