"""What every test shares: one seed for the whole run, and the traces beside the repository.

The seed is $KVPOOL_SEED, or comes from what is committed: the same files always run the same cases,
whatever their history; other files run others. It is printed at the top and again below a failure,
drives hypothesis, `rng` and (through the environment) the C++ tests, so `KVPOOL_SEED=n make test`
repeats a run.
"""

import os
import shutil
import subprocess
import zlib
from pathlib import Path

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SEED_WITHOUT_GIT = 20231105


def seed_of_run() -> int:
    given = os.environ.get("KVPOOL_SEED")
    if given:
        return int(given)
    if shutil.which("git") is None:
        return SEED_WITHOUT_GIT
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(tree.stdout[:8], 16) if tree.returncode == 0 else SEED_WITHOUT_GIT


def register_profiles() -> None:
    # No deadline: a slow machine is not a bug, and a hang is caught by the tests that can hang.
    quiet = {"deadline": None, "print_blob": True}
    hypothesis.settings.register_profile("dev", max_examples=50, stateful_step_count=30, **quiet)
    # CI starts from an empty database, so that the seed alone decides what runs.
    hypothesis.settings.register_profile(
        "ci", max_examples=200, stateful_step_count=50, database=None, **quiet
    )
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    seed = seed_of_run()
    os.environ["KVPOOL_SEED"] = str(seed)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seed
    if not config.getoption("--hypothesis-profile"):
        register_profiles()


def pytest_report_header() -> str:
    profile = hypothesis.settings.get_current_profile_name()
    return f"kvpool: KVPOOL_SEED={os.environ['KVPOOL_SEED']}, hypothesis profile {profile}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"to repeat: KVPOOL_SEED={os.environ['KVPOOL_SEED']}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers from the run's seed and the test's name, whatever ran before."""
    name = zlib.crc32(request.node.nodeid.encode())
    return np.random.default_rng([int(os.environ["KVPOOL_SEED"]), name])


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of the public request traces; without one the test says so and is skipped."""
    folder = Path(os.environ.get("KVPOOL_TRACES", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"no request traces: {folder} is not a folder (set KVPOOL_TRACES)")
    return folder
