"""Pages in every order of memory that vLLM has go out and come in byte for byte.

The cases run in the engine's Python, which has torch: tests/engines/children/pages.py.
"""

import json
import re
import subprocess

import pytest

from tests.engines.rig import CHILDREN, START_S, engine_python, environment

SCRIPT = CHILDREN / "pages.py"
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def names() -> list[str]:
    text = SCRIPT.read_text()
    plain = re.findall(r"^@case\ndef (\w+)", text, re.MULTILINE)
    of_layouts = re.findall(r"^for_layouts\((\w+)\)", text, re.MULTILINE)
    return [*plain, *(f"{name}[{layout}]" for name in of_layouts for layout in LAYOUTS)]


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    done = subprocess.run(
        [str(engine_python()), str(SCRIPT)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", names())
def test_case(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def test_no_case_is_forgotten(results: dict[str, str]) -> None:
    assert sorted(results) == sorted(names())
