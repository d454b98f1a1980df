"""What kvpool relies on in vLLM is as it was recorded: signatures, fields, and tensors in memory.

After a change of vLLM this fails first, and its first line names what changed. Whoever has looked
at the differences, and at what kvpool makes of them, records the new version:

    KVPOOL_RECORD=1 make test-engines ARGS='-k contract'
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.rig import CHILDREN, START_S, Engine, Model, engine_python, engines, environment

RECORDED = Path(__file__).parent / "contract.json"
MODELS = ("llama", "llama-bfloat16", "mla", "hybrid")


def differences(recorded: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    for name in sorted({*recorded, *now}):
        if recorded.get(name) != now.get(name):
            yield f"{name}: was {recorded.get(name, 'not there')}"
            yield f"{' ' * len(name)}   is {now.get(name, 'gone')}"


def check(part: str, version: str, now: dict[str, str]) -> None:
    """Against what was recorded; or records it, where that was asked for."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("KVPOOL_RECORD"):
        recorded.update({"vllm": version, part: now})
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        return
    found = list(differences(recorded[part], now))
    if found:
        told = f"vLLM {version}, recorded of {recorded['vllm']}: {found[0]}"
        pytest.fail("\n".join([told, *found[1:]]), pytrace=False)


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = subprocess.run(
        [str(engine_python()), str(CHILDREN / "contract.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_contract_of_members(told: dict[str, Any]) -> None:
    check("members", told["vllm"], told["members"])


@pytest.mark.parametrize("name", MODELS)
def test_the_contract_of_memory(
    name: str, model: Callable[[str], Model], told: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "recorded.json"
    connector = {
        "kv_connector": "Recorder",
        "kv_connector_module_path": "recorder",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(path)},
    }
    with engines(Engine(model(name), tmp_path, connector=connector)) as (engine,):
        engine.generate([range(10, 110)], 2)
    check(name, told["vllm"], json.loads(path.read_text()))


def test_a_difference_is_told_by_its_name() -> None:
    was = {"A.same": "()", "B.changed": "(self)", "C.gone": "()"}
    now = {"A.same": "()", "B.changed": "(self, more)", "D.new": "(x)"}
    assert list(differences(was, now)) == [
        "B.changed: was (self)",
        "            is (self, more)",
        "C.gone: was ()",
        "         is gone",
        "D.new: was not there",
        "        is (x)",
    ]
