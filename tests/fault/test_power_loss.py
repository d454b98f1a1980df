"""What is left of an SSD tier when the power goes, at any moment of any commit.

kvpool_power_loss (tests/core/tools) runs the real tier, the real LMDB and the real node, keeps what
a disk would hold, and judges an image of it a few times in each group. Here are its verdicts: no
image may be bad under the order of writes that the product has, and every order that is known to
be wrong must give bad ones, or the tool would prove nothing.
"""

import json
import os
import subprocess
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "core"
TOOL = BUILD / "kvpool_power_loss"
BUILD_S_MAX = 1800
RUN_S_MAX = 300
IMAGES = 300  # of an order that must be right
IMAGES_OF_BROKEN = 100


@pytest.fixture(scope="module")
def tool() -> Path:
    """The program, brought up to date: a run must not judge old code."""
    if not (BUILD / "build.ninja").exists():
        pytest.fail(f"{BUILD} is not built: run `make test`", pytrace=False)
    command = ["cmake", "--build", str(BUILD), "--target", TOOL.name]
    made = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S_MAX, check=False)
    assert made.returncode == 0, made.stdout[-4000:]
    return TOOL


def findings(tool: Path, directory: Path, **options: object) -> dict[str, int]:
    """Runs the program; its seed comes from the run's and from what it is asked to do."""
    name = " ".join(f"--{name}={value}" for name, value in options.items())
    seed = zlib.crc32(name.encode(), int(os.environ["KVPOOL_SEED"]) & 0xFFFFFFFF)
    command = [str(tool), f"--directory={directory}", f"--seed={seed}", *name.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    print(done.stdout, done.stderr)  # shown where a test fails
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, int] = json.loads(done.stdout)
    assert found["unheard_bytes"] == 0, "a write passed the simulator by: it proves nothing"
    return found


def check_whole(found: dict[str, int], *, may_lose: int) -> None:
    """No image is bad, and the images were of the moments that matter."""
    assert found["images"] == IMAGES
    assert found["bad_images"] == 0
    assert found["lost_max"] <= may_lose
    assert found["in_commit"] > IMAGES // 10
    assert found["has_open_commit"] > 0  # on the disk before it was acknowledged
    assert found["entries"] > 20 * IMAGES
    assert found["recycled"] > IMAGES // 3  # written where another block had been


@pytest.mark.parametrize("contract", ["durable", "async"])
@pytest.mark.parametrize("load", ["tier", "node"])
def test_nothing_acknowledged_is_lost(tool: Path, tmp_path: Path, load: str, contract: str) -> None:
    found = findings(tool, tmp_path, load=load, contract=contract, images=IMAGES)
    check_whole(found, may_lose=0)
    assert found["has_older"] == 0
    check_load(found, load)


@pytest.mark.parametrize(
    ("load", "policy"), [("tier", "temperature"), ("node", "temperature"), ("node", "lru")]
)
def test_relaxed_loses_the_newest_commit_at_most(
    tool: Path, tmp_path: Path, load: str, policy: str
) -> None:
    found = findings(tool, tmp_path, load=load, contract="relaxed", policy=policy, images=IMAGES)
    check_whole(found, may_lose=1)
    assert found["has_older"] > 0  # it did lose one, and what it fell back to was whole
    check_load(found, load)


def check_load(found: dict[str, int], load: str) -> None:
    """The program's driver and the product agreed while there was power."""
    assert found["differing"] == found["wrong_gets"] == found["not_kept"] == 0
    if load == "node":
        assert found["puts"] > 0
        assert found["hits"] > 0
        assert found["moves"] > 0


# The order that is broken, under which contract, and what must come of it.
BROKEN = [
    ("early_reuse", "durable", ["damaged"]),
    ("no_payload_sync", "durable", ["damaged"]),
    ("no_index_sync", "durable", ["refused", "lost_too_much"]),
    ("hasty_reuse", "relaxed", ["damaged"]),
]


@pytest.mark.parametrize(("broken", "contract", "signs"), BROKEN)
def test_a_wrong_order_is_caught(
    tool: Path, tmp_path: Path, broken: str, contract: str, signs: list[str]
) -> None:
    found = findings(tool, tmp_path, contract=contract, broken=broken, images=IMAGES_OF_BROKEN)
    assert found["images"] == IMAGES_OF_BROKEN
    assert found["bad_images"] > 3
    for sign in signs:
        assert found[sign] > 0
    assert found["wrong"] == 0  # even then: never other bytes than were put
