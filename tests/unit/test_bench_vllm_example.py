"""The example with vLLM says what it lacks; tests/engines runs it with an engine."""

import subprocess
import sys
from pathlib import Path

from tests.pools import ROOT

EXAMPLE = ROOT / "examples/03_vllm/run.py"


def test_without_an_engine_the_example_tells_the_way_to_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no Python with vLLM was found" in done.stderr
    assert ".ci/setup-engines" in done.stderr
    assert "Traceback" not in done.stderr
