"""`kvpool ssd inspect` and `verify` as a user runs them, and the functions below them."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool import BadArgument, BadType, PoolClosed, TierRefused, _core, ssd, ssd_cli
from tests.pools import BLOCK_BYTES, ROOT, keys, opaque, opened, payload, payloads

BLOCKS = 64
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}


def run(*args: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool", "ssd", *map(str, args)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "tier"
    with opened(ssd=path, ssd_capacity="64MiB", ssd_free_floor=0, durability="durable") as pool:
        space = pool.namespace(opaque())
        assert space.put(keys(range(BLOCKS)), payloads(keys(range(BLOCKS)))).stored == BLOCKS
    return path


@pytest.fixture
def tier(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole one, to be spoilt."""
    return Path(shutil.copytree(whole, tmp_path / "tier"))


def spoil(tier: Path, number: int) -> int:
    """Changes a byte of that block; gives its offset in the slab file."""
    slabs = tier / "slabs"
    at = slabs.read_bytes().index(payload(keys([number])[0]))
    with slabs.open("r+b") as file:
        file.seek(at + 1000)
        byte = file.read(1)[0]
        file.seek(at + 1000)
        file.write(bytes([byte ^ 1]))
    return at


def test_inspect_says_what_is_there(whole: Path) -> None:
    found = json.loads(run("inspect", whole, "--json").stdout)
    assert found["path"] == str(whole)
    assert found["format_version"] == 1
    assert found["capacity_bytes"] == 64 << 20
    assert found["blocks"] == BLOCKS
    assert found["bytes"] == found["slot_bytes"] == BLOCKS * BLOCK_BYTES
    assert found["damaged"] == found["missing_parents"] == 0
    (namespace,) = found["namespaces"]
    assert namespace == {
        "id": opaque().namespace_id.hex(),
        "block_bytes": BLOCK_BYTES,
        "blocks": BLOCKS,
        "bytes": BLOCKS * BLOCK_BYTES,
    }
    (size,) = found["classes"]
    assert (size["slot_bytes"], size["slabs"], size["blocks"]) == (BLOCK_BYTES, 1, BLOCKS)
    assert sum(age["blocks"] for age in found["ages"]) == BLOCKS
    assert [age["seconds_max"] for age in found["ages"]][-1] is None
    files = sum(file.stat().st_size for file in whole.iterdir())
    assert found["slab_file_bytes"] + found["index_bytes"] <= files <= found["capacity_bytes"]


def test_inspect_shows_tables(whole: Path) -> None:
    shown = run("inspect", whole).stdout
    for part in ("64 of ", "256 KiB of", opaque().namespace_id.hex(), "100.0%", "longer ago"):
        assert part in shown


def test_verify_of_a_whole_tier_ends_well(whole: Path) -> None:
    done = run("verify", whole)
    assert "64 blocks, all whole (256 KiB read" in done.stdout
    assert done.stderr == ""
    found = json.loads(run("verify", whole, "--json").stdout)
    assert found["seconds"] > 0
    assert {**found, "seconds": 0} == {
        "path": str(whole),
        "blocks": BLOCKS,
        "bytes": BLOCKS * BLOCK_BYTES,
        "damaged": 0,
        "seconds": 0,
        "damage": [],
    }


def test_verify_names_damaged_blocks_and_fails(tier: Path) -> None:
    at = spoil(tier, 5)
    found = json.loads(run("verify", tier, "--json", status=1).stdout)
    assert found["damaged"] == 1
    assert found["damage"] == [
        {
            "kind": "payload",
            "namespace": opaque().namespace_id.hex(),
            "hash": keys([5])[0].hex(),
            "offset": at,
            "bytes": BLOCK_BYTES,
        }
    ]
    shown = run("verify", tier, status=1).stdout
    assert keys([5])[0].hex() in shown
    assert "64 blocks, 1 damaged" in shown


def test_verify_shows_some_of_much_damage(tier: Path) -> None:
    os.truncate(tier / "slabs", 64 << 10)
    shown = run("verify", tier, status=1).stdout
    assert shown.count("outside") == ssd_cli.DAMAGE_SHOWN
    assert f"and {BLOCKS - ssd_cli.DAMAGE_SHOWN} more" in shown


def test_damaged_tier_still_gives_right_bytes_or_a_miss(tier: Path) -> None:
    spoil(tier, 0)
    with opened(ssd=tier, ssd_free_floor=0) as pool:
        space = pool.namespace(opaque())
        out = bytearray(BLOCK_BYTES)
        assert space.get_into(keys([0]), out) == 0
        assert space.get_into(keys([1]), out) == 1
        assert out == payload(keys([1])[0])
    assert ssd.verify(tier).damaged == 0  # the entry went with the miss


def test_tier_in_use_is_refused_by_name(tier: Path) -> None:
    with opened(ssd=tier, ssd_free_floor=0):
        for command in ("inspect", "verify"):
            done = run(command, tier, status=1)
            assert done.stdout == ""
            assert done.stderr.startswith("kvpool: error: ")
            assert str(tier) in done.stderr
            assert "has it open" in done.stderr


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    assert "No such file" in run("verify", tmp_path / "none", status=1).stderr
    assert "no tier" in run("inspect", tmp_path, status=1).stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("x")
    for command in ("inspect", "verify"):
        said = run(command, tmp_path, status=1).stderr
        assert said == f"kvpool: error: SSD tier in {tmp_path}: holds no tier of kvpool\n"
    (tmp_path / "slabs").write_bytes(b"")
    assert "no index.mdb" in run("inspect", tmp_path, status=1).stderr


@pytest.mark.parametrize(
    ("path", "kind", "complaint"),
    [
        (b"tier", BadType, "path is bytes; it must be a path"),
        (7, BadType, "path is int"),
        (None, BadType, "path is NoneType"),
        ([], BadType, "path is list"),
        (True, BadType, "path is bool"),
        ("\udcff", BadArgument, "path is a path that is not UTF-8"),
        ("", BadArgument, "path is an empty path"),
        ("a\0b", BadArgument, "path has a NUL byte"),
    ],
)
def test_what_is_no_path_is_named(
    path: object, kind: type[BadArgument], complaint: str, tmp_path: Path
) -> None:
    for call in (ssd.inspect, ssd.verify):
        with pytest.raises(kind, match=complaint):
            call(path)  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("now_s", "kind", "complaint"),
    [
        (float("nan"), BadArgument, "now_s is nan; it must be 0"),
        (-1, BadArgument, "now_s is -1; it must be 0"),
        (1e300, BadArgument, "now_s is 1e.300; it must be 0"),
        (10**400, BadArgument, "now_s is an int of 1329 bits"),
        ("x", BadType, "now_s is str; it must be a number"),
        (True, BadType, "now_s is bool"),
        (b"1", BadType, "now_s is bytes"),
    ],
)
def test_what_is_no_time_is_named(
    now_s: object, kind: type[BadArgument], complaint: str, whole: Path
) -> None:
    with pytest.raises(kind, match=complaint):
        ssd.inspect(whole, now_s=now_s)  # type: ignore[arg-type]
    assert ssd.inspect(whole, now_s=1e12).ages[-1].blocks == BLOCKS


@pytest.mark.parametrize("args", [("verify",), ("inspect", "a", "b"), ("look", "a"), ()])
def test_wrong_question_is_status_2(args: tuple[str, ...]) -> None:
    run(*args, status=2)


def test_an_empty_path_is_refused_plainly() -> None:
    assert run("inspect", "", status=1).stderr.startswith("kvpool: error: path is an empty path")


def test_progress_is_drawn_on_a_terminal_only(whole: Path) -> None:
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "ssd", "verify", str(whole), "--json"],
        stdout=subprocess.PIPE,
        stderr=its_end,
        cwd=ROOT,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )
    os.close(its_end)
    drawn = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        drawn += piece
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 0
    assert json.loads(out)["damaged"] == 0
    assert b"verify" in drawn


def test_progress_goes_to_the_end(whole: Path) -> None:
    told: list[tuple[int, int, int]] = []
    found = ssd.verify(whole, progress=lambda *each: told.append(each))
    assert told[0] == (0, BLOCKS * BLOCK_BYTES, 0)
    assert told[-1] == (found.bytes, BLOCKS * BLOCK_BYTES, 0)
    assert told == sorted(told)


def test_scan_gives_the_directory_back(whole: Path) -> None:
    scan = _core.SsdScan(str(whole))
    with pytest.raises(TierRefused, match="has it open"):
        ssd.inspect(whole)
    scan.close()
    scan.close()
    assert ssd.inspect(whole).blocks == BLOCKS
    for call in (scan.facts, scan.damage, lambda: scan.ages(0), lambda: scan.verify_some(1)):
        with pytest.raises(PoolClosed):
            call()


def test_interrupted_progress_gives_the_directory_back(whole: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ssd.verify(whole, progress=stop)
    assert ssd.inspect(whole).blocks == BLOCKS


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (100 << 10, "100 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert ssd_cli.size(count) == text
