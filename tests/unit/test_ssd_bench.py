"""The bench of the SSD tier: rows as promised, a floor that really moves bytes, no file left."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvpool
from kvpool import _core, cli
from kvpool.bench import disk, rows, ssd, ssd_beside
from kvpool.bench.disk import RawFile, bench_directory, filesystem_of, forget_pages
from kvpool.bench.scale import Scale

FIELDS = {"work", "block_bytes", "batch", "GBps", "raw_GBps", "ratio", "cpu_s_per_GiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    if filesystem_of(path) in ("tmpfs", "ramfs"):
        pytest.skip("the folder for temporary files is in memory")
    try:
        _core.RawDisk(str(path / "probe"), 1, 4096, 1, 1)
    except kvpool.NoResource as error:
        pytest.skip(f"the folder for temporary files is on no disk for this: {error}")
    (path / "probe").unlink()
    return path


@pytest.fixture(scope="module")
def measured(folder: Path) -> list[dict]:
    done = CliRunner().invoke(cli.app, ["bench", "ssd", "--json", "--quick", "--dir", str(folder)])
    assert done.exit_code == 0, done.output
    assert list(folder.iterdir()) == []
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_puts_and_gets_have_exactly_their_fields(measured: list[dict]) -> None:
    found = [row for row in measured if row["work"] in ("put", "get")]
    assert all(set(row) == FIELDS for row in found)
    wanted = set(itertools.product(("put", "get"), ssd.QUICK_BLOCK_BYTES, ssd.BATCHES))
    assert {(row["work"], row["block_bytes"], row["batch"]) for row in found} == wanted
    assert all(row["cpu_s_per_GiB"] > 0 for row in found)


def test_the_neighbours_are_measured(measured: list[dict]) -> None:
    works = [row["work"] for row in measured]
    assert works.count("get_while_writing") == 1
    assert works.count("put_full") == 1
    (row,) = (row for row in measured if row["work"] == "put_full")
    assert row["p50_us"] <= row["p99_us"]


def test_real_sizes_are_those_promised() -> None:
    assert ssd.BLOCK_BYTES == (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    assert ssd.BATCHES == (1, 16, 64)
    assert set(ssd.RATIO_MIN) <= set(
        itertools.product(("put", "get"), ssd.BLOCK_BYTES, ssd.BATCHES)
    )
    assert ssd_beside.REOPEN_ENTRIES == 1_000_000


def test_rows_of_other_fields_get_a_table_of_their_own() -> None:
    made = [rows.Row({"a": 1}), rows.Row({"a": 2}), rows.Row({"b": 1}), rows.Row({"b": 2})]
    assert [table.row_count for table in rows.tables(made)] == [2, 2]


def test_wrong_bytes_from_the_ssd_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = kvpool.Namespace.get_into

    def flipping(space, key_array, out, **kept) -> int:
        count = honest(space, key_array, out, **kept)
        out[-1, -1] ^= out.dtype.type(1)
        return count

    monkeypatch.setattr(kvpool.Namespace, "get_into", flipping, raising=False)
    with pytest.raises(rows.BenchError, match="get gave wrong bytes"):
        list(ssd.rates(Scale(is_quick=True, directory=folder)))
    assert list(folder.iterdir()) == []


# --- the raw disk --------------------------------------------------------------------------------


def test_the_raw_disk_moves_every_block_of_a_batch(folder: Path) -> None:
    path = folder / "raw"
    raw = _core.RawDisk(str(path), 32, 4096, 8, 4)
    assert path.stat().st_blocks * 512 >= 32 * 4096
    raw.write([0, 5, 31])
    written = path.read_bytes()
    whole = {at for at in range(32) if any(written[at * 4096 : (at + 1) * 4096])}
    assert whole == {0, 5, 31}
    assert written[:4096] != written[5 * 4096 : 6 * 4096]
    raw.read([0, 5, 31])
    raw.write(list(range(8)))
    assert all(any(path.read_bytes()[at * 4096 : (at + 1) * 4096]) for at in range(8))
    path.unlink()


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((8, 1000, 4, 2), "multiple of 4096"),
        ((8, 0, 4, 2), "multiple of 4096"),
        ((8, 4096, 9, 2), "a batch is"),
        ((8, 4096, 0, 2), "a batch is"),
        ((8, 4096, 4, 0), "1..64"),
        ((1 << 40, 4096, 4, 1), "1 TiB"),
    ],
)
def test_a_shape_of_no_use_is_refused(folder: Path, shape: tuple, complaint: str) -> None:
    with pytest.raises(kvpool.BadArgument, match=complaint):
        _core.RawDisk(str(folder / "no"), *shape)
    assert not (folder / "no").exists()


def test_blocks_outside_of_file_or_batch_are_refused(folder: Path) -> None:
    raw = _core.RawDisk(str(folder / "small"), 8, 4096, 2, 2)
    for blocks, complaint in (([8], "no such block"), ([0, 1, 2], "more blocks")):
        for move in (raw.read, raw.write):
            with pytest.raises(kvpool.BadArgument, match=complaint):
                move(blocks)
    (folder / "small").unlink()


def test_a_failing_disk_is_told(folder: Path) -> None:
    with pytest.raises(kvpool.NoResource, match="cannot open"):
        _core.RawDisk(str(folder / "absent" / "raw"), 8, 4096, 2, 2)
    raw = _core.RawDisk(str(folder / "cut"), 8, 4096, 2, 2)
    (folder / "cut").open("r+b").truncate(4096)
    with pytest.raises(kvpool.NoResource, match="pread"):
        raw.read([5])
    (folder / "cut").unlink()


def test_steps_of_the_raw_file_visit_all_of_it(folder: Path, monkeypatch) -> None:
    asked: list[list[int]] = []

    class Noting:
        def __init__(self, *_: object) -> None:
            pass

        def write(self, blocks: list[int]) -> None:
            asked.append(blocks)

    monkeypatch.setattr(disk._core, "RawDisk", Noting)
    raw = RawFile(folder / "none", 10, 4096, 4)
    assert sorted(itertools.chain(*asked)) == list(range(10))
    asked.clear()
    step = raw.writes(2, seed=1)
    for _ in range(5):
        step()
    assert sorted(itertools.chain(*asked)) == list(range(10))


# --- where it works ------------------------------------------------------------------------------


def test_memory_is_no_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "filesystem_of", lambda _path: "tmpfs")
    with (
        pytest.raises(rows.BenchError, match="tmpfs: that is memory"),
        bench_directory(Scale(directory=folder), 0),
    ):
        pass
    with pytest.raises(rows.BenchError, match="name a --dir"), bench_directory(Scale(), 0):
        pass


def test_a_disk_without_room_is_refused(folder: Path) -> None:
    with (
        pytest.raises(rows.BenchError, match="this bench needs 1024 PiB"),
        bench_directory(Scale(directory=folder), 1 << 60),
    ):
        pass


def test_the_filesystem_is_that_of_the_longest_mount() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/")) not in ("", "proc")


def test_pages_are_forgotten_and_bytes_stay(folder: Path) -> None:
    (folder / "some").write_bytes(b"x" * 10_000)
    forget_pages(folder)
    assert (folder / "some").read_bytes() == b"x" * 10_000
    (folder / "some").unlink()
