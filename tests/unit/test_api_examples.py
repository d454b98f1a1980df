"""What a reader copies works as it stands: the examples, and the code of the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.address import ADDRESS_VARIABLE
from tests.pools import ROOT, run_python
from tests.served import served

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "01_embedded_pool.py": [
        r"engine A: computed \d+, reused \d+ blocks",
        r"engine B: computed \d+, reused \d+ blocks",
        r"48 of  48 blocks reused: byte for byte",
    ],
    "02_paged_tensors.py": [
        r"engine A saved 128 blocks",
        r"engine B loaded 128 blocks",
        r"the same in both engines",
    ],
    "05_ssd_tier.py": [
        r"after a restart: 256 of 256 blocks",
        r"got 256 blocks, byte for byte",
    ],
    "06_prefill_and_decode.py": [
        r"prefill: 0 blocks were there, 64 put",
        r"decode: 64 of 64 blocks, byte for byte",
    ],
}


def test_every_example_is_known_here() -> None:
    assert {path.name for path in EXAMPLES} >= set(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_it_stands(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    for line in SAYS.get(path.name, []):
        assert re.search(line, done.stdout), done.stdout


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    said = [
        r"10 found, 10 delivered, the first starts with b'\\x01\\x01\\x01\\x01'",
        r"10 blocks computed elsewhere, 10 read in place",
        r"20 of 20 blocks found after the restart, 20 read back",
    ]
    with served(tmp_path, dram="1GiB") as daemon:
        monkeypatch.setenv(ADDRESS_VARIABLE, daemon.unix_address)
        for block, line in zip(blocks, said, strict=True):
            status, shown, errors = run_python(block)
            assert (status, errors) == (0, "")
            assert re.search(line, shown), shown
