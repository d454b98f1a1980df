"""A trace through DRAM and SSD: right bytes, hits by tier, and what a restart leaves of them."""

import io
import itertools
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import kvpool
from kvpool import cli
from kvpool.replay import demo, ssd, through_pool, tier_table
from kvpool.replay.arguments import ReplayArguments
from kvpool.replay.payload import keys_of
from kvpool.replay.run import Plan, replay
from kvpool.replay.score import OnSsd, Score, json_fields
from kvpool.replay.simulate import simulate
from kvpool.replay.ssd import SsdError, SsdOptions, TierOptions
from kvpool.replay.through_pool import PoolOptions
from kvpool.replay.trace import Request, Trace, batches, write_line
from kvpool.replay.workload import WorkloadOptions, generate

BLOCK_BYTES = 65536
WORKLOAD = WorkloadOptions(seed=2, requests=300)
DRAM_BLOCKS, SSD_BLOCKS = 100, 1000


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(generate(WORKLOAD))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    path.write_bytes(b"".join(map(write_line, generate(WORKLOAD))))
    return path


def without_watching(_step: str, requests):
    return requests


def options(path: Path, **changed) -> PoolOptions:
    path.mkdir(exist_ok=True)
    tier = TierOptions(path / "tier", SSD_BLOCKS, **{"admit": "all", **changed})
    return PoolOptions("temperature", DRAM_BLOCKS, BLOCK_BYTES, ssd=tier)


def test_hits_by_tier_are_those_that_the_pool_counted(
    requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last: dict = {}
    honest = kvpool.Pool.stats
    monkeypatch.setattr(kvpool.Pool, "stats", lambda pool: last.update(honest(pool)) or last)
    score = through_pool.through_pool(requests, options(tmp_path))
    done = score.on_ssd
    assert done is not None
    assert score.copied is not None
    assert score.copied.mismatches == done.unflushed == 0
    assert done.dram_hit_blocks + done.ssd_hit_blocks == score.hit_blocks
    assert done.ssd_hit_blocks == last["ssd_hits"] > 0
    assert done.dram_hit_blocks > 0
    assert done.demotions == last["demotions"] > 0
    assert done.written_bytes >= done.written_blocks * BLOCK_BYTES > 0
    assert done.read_bytes >= done.ssd_hit_blocks * BLOCK_BYTES
    assert done.restored_hits == done.restored_blocks == 0


def test_a_second_tier_hits_what_dram_alone_cannot(requests, tmp_path: Path) -> None:
    alone = through_pool.through_pool(
        requests, PoolOptions("temperature", DRAM_BLOCKS, BLOCK_BYTES)
    )
    both = through_pool.through_pool(requests, options(tmp_path))
    (bound,) = simulate(batches(requests), ["belady"], [DRAM_BLOCKS + 2 * SSD_BLOCKS])
    assert alone.hit_blocks < both.hit_blocks <= bound.hit_blocks


def test_one_thread_gives_the_same_hits_every_time(requests, tmp_path: Path) -> None:
    found = set()
    for turn in range(3):
        score = through_pool.through_pool(
            requests, options(tmp_path / str(turn), restart_after=150, admit="second_use")
        )
        done = score.on_ssd
        assert done is not None
        found.add((score.hit_blocks, done.ssd_hit_blocks, done.restored_hits, done.written_blocks))
    assert len(found) == 1


def test_hits_from_before_a_restart_are_counted_and_right(requests, tmp_path: Path) -> None:
    score = through_pool.through_pool(requests, options(tmp_path, restart_after=150))
    done = score.on_ssd
    assert done is not None
    assert score.copied is not None
    assert (score.requests, score.copied.mismatches) == (300, 0)
    assert done.restored_blocks > DRAM_BLOCKS
    assert 0 < done.restored_hits <= score.hit_blocks
    whole = through_pool.through_pool(requests, options(tmp_path / "whole"))
    second_half = through_pool.through_pool(requests[150:], options(tmp_path / "half"))
    first_half = through_pool.through_pool(requests[:150], options(tmp_path / "first"))
    # A restart on nothing would hit what the halves hit apart.
    assert first_half.hit_blocks + second_half.hit_blocks < score.hit_blocks <= whole.hit_blocks


def test_the_clock_goes_on_over_a_restart(requests, tmp_path: Path) -> None:
    times: list[float] = []
    honest = kvpool.open

    def noting(*args, **kept):
        times.append(kept["clock"].now())
        return honest(*args, **kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(through_pool.kvpool, "open", noting)
        through_pool.through_pool(requests, options(tmp_path, restart_after=150))
    assert times == [0.0, requests[149].time_s]


def test_threads_give_right_bytes_over_a_restart(requests, tmp_path: Path) -> None:
    asked = options(tmp_path, restart_after=150)
    score = through_pool.through_pool(
        requests, PoolOptions("temperature", DRAM_BLOCKS, 4096, threads=3, ssd=asked.ssd)
    )
    assert score.copied is not None
    assert (score.requests, score.copied.mismatches) == (300, 0)


@pytest.mark.parametrize(
    ("blocks", "block_bytes"),
    [(1, 4096), (5000, 4096), (700, 5000), (31, 65536), (1000, 65536), (1, 1 << 20), (31, 3 << 20)],
)
def test_a_tier_of_n_blocks_holds_n_blocks(tmp_path: Path, blocks: int, block_bytes: int) -> None:
    with kvpool.open(
        "8MiB",
        prefault="off",
        **ssd.open_arguments(TierOptions(tmp_path / "tier", blocks, "all"), block_bytes),
    ) as pool:
        space = pool.namespace(
            kvpool.Manifest(model="m", layout="opaque", block_tokens=1, block_bytes=block_bytes)
        )
        together = max(1, min(64, (4 << 20) // block_bytes))
        data = bytes(together * block_bytes)
        for start in range(0, blocks, together):
            some = keys_of(range(start, min(start + together, blocks)))
            space.put(some, data[: len(some) * block_bytes])
            assert pool.flush()
        stats = pool.stats()
        assert (stats["ssd_blocks"], stats["ssd_evictions"]) == (blocks, 0)


# --- directories ---------------------------------------------------------------------------------


def plan(trace: Path, folder: Path, **changed) -> Plan:
    asked = {"capacity_blocks": SSD_BLOCKS, **changed}
    return Plan(
        Trace(trace),
        ("temperature", "lru"),
        (DRAM_BLOCKS,),
        block_bytes=4096,
        ssd=SsdOptions(folder, **asked),
    )


def test_every_pool_has_a_fresh_directory_that_is_gone_afterwards(
    trace: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "ssd"
    seen: list[list[str]] = []

    def watch(step: str, requests):
        seen.append(sorted(path.name for path in folder.iterdir()))
        return requests

    scores = list(replay(plan(trace, folder), watch))
    assert [score.policy for score in scores] == ["temperature", "lru"]
    assert seen == [["temperature-100"], ["lru-100"]]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_and_files_are_kept_when_asked(
    trace: Path, tmp_path: Path
) -> None:
    list(replay(plan(trace, tmp_path), without_watching))
    assert list(tmp_path.iterdir()) == []
    list(replay(plan(trace, tmp_path, is_kept=True), without_watching))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lru-100", "temperature-100"]
    assert (tmp_path / "lru-100" / "slabs").is_file()


def test_nothing_that_is_not_ours_is_touched(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SsdError, match="is not empty"):
        list(replay(plan(trace, tmp_path), without_watching))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(SsdError, match="Not a directory"):
        list(replay(plan(trace, tmp_path / "mine"), without_watching))


def test_a_failure_takes_the_directory_away(trace: Path, tmp_path: Path) -> None:
    def stop(_step: str, requests):
        raise RuntimeError("made to fail")

    with pytest.raises(RuntimeError, match="made to fail"):
        list(replay(plan(trace, tmp_path / "ssd"), stop))
    assert list(tmp_path.iterdir()) == []


def test_a_restart_is_at_the_share_of_the_requests(trace: Path, tmp_path: Path) -> None:
    lives: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        from kvpool.replay import run

        honest = run.through_pool

        def noting(requests, options):
            lives.append(options.ssd.restart_after)
            return honest(requests, options)

        patch.setattr(run, "through_pool", noting)
        list(replay(plan(trace, tmp_path, restart_at=0.25), without_watching))
    assert lives == [75, 75]


# --- the command ---------------------------------------------------------------------------------

ADDED = {
    "ssd_capacity_blocks", "dram_hit_blocks", "ssd_hit_blocks", "restored_blocks", "restored_hits",
    "demotions", "promotions", "ssd_written_bytes", "ssd_read_bytes", "ssd_writes_per_hit",
}  # fmt: skip


def words(trace: Path, folder: Path, *more: object) -> list[str]:
    usual = ["--bytes", "--block-bytes", "64KiB", "--capacity-blocks", DRAM_BLOCKS]
    tier = ["--ssd", folder, "--ssd-capacity-blocks", SSD_BLOCKS]
    return [str(word) for word in ["replay", trace, *usual, *tier, *more]]


def test_json_has_the_fields_of_the_tier_with_one_only(trace: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli.app, words(trace, tmp_path / "s", "--restart-at", 0.5, "--json", "--ssd-admit", "all")
    )
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, done.stdout.splitlines())
    plain = json_fields("t", Score("lru", 1, 1, 1, 1, 1, 1.0))
    assert set(row) == set(plain) | ADDED
    assert row["dram_hit_blocks"] + row["ssd_hit_blocks"] == row["hit_blocks"]
    assert row["ssd_capacity_blocks"] == SSD_BLOCKS
    assert row["restored_hits"] > 0
    assert row["ssd_writes_per_hit"] > 0
    assert row["mismatches"] == 0
    assert not (tmp_path / "s").exists()


def test_the_oracle_has_both_tiers_as_one_and_no_figures_of_a_pool(
    trace: Path, requests, tmp_path: Path
) -> None:
    done = CliRunner().invoke(cli.app, words(trace, tmp_path / "s", "--policy", "belady", "--json"))
    (row,) = map(json.loads, done.stdout.splitlines())
    (bound,) = simulate(batches(requests), ["belady"], [DRAM_BLOCKS + SSD_BLOCKS])
    assert (row["capacity_blocks"], row["hit_blocks"]) == (DRAM_BLOCKS, bound.hit_blocks)
    assert {row[name] for name in ADDED - {"ssd_capacity_blocks"}} == {None}


def test_the_table_shows_tiers(trace: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, words(trace, tmp_path / "s", "--restart-at", 0.5))
    assert done.exit_code == 0, done.output
    for word in ("restored", "demoted", "promoted", "per hit", "belady", "one tier"):
        assert word in done.stdout


def test_a_full_folder_fails_the_command_plainly(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = CliRunner().invoke(cli.app, words(trace, tmp_path, "--json"))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "is not empty" in done.stderr


def asked(**changed: object) -> ReplayArguments:
    given = {"block_bytes": 65536, "with_bytes": True, **changed}
    return ReplayArguments(path=Path("trace.jsonl"), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"ssd": "s"}, "needs --ssd-capacity-blocks"),
        ({"ssd": "s", "ssd_capacity_blocks": 5, "with_bytes": False}, "needs --bytes"),
        ({"ssd": "", "ssd_capacity_blocks": 5}, "is an empty path"),
        ({"ssd": __file__, "ssd_capacity_blocks": 5}, "is a file"),
        ({"ssd_capacity_blocks": 5}, "needs --ssd"),
        ({"restart_at": 0.5}, "needs --ssd"),
        ({"keep_ssd": True}, "needs --ssd"),
        ({"ssd_admit": "all"}, "needs --ssd"),
        ({"ssd": "s", "ssd_capacity_blocks": 5, "ssd_admit": "x"}, "second_use, all"),
        ({"ssd": "s", "ssd_capacity_blocks": 5, "restart_at": 1.0}, "between 0 and 1"),
        ({"ssd": "s", "ssd_capacity_blocks": 5, "restart_at": 0.0}, "between 0 and 1"),
        ({"ssd": "s", "ssd_capacity_blocks": 5, "restart_at": float("nan")}, "no share"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(changed: dict, complaint: str) -> None:
    with pytest.raises(typer.BadParameter, match=complaint):
        asked(**changed).plan()


def test_what_was_asked_is_planned() -> None:
    made = asked(ssd="s", ssd_capacity_blocks=7, restart_at=0.5, keep_ssd=True).plan()
    assert made.ssd == SsdOptions(Path("s"), 7, "second_use", 0.5, True)
    assert asked().plan().ssd is None


def test_a_public_trace_restarts_and_comes_back_byte_for_byte(traces: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    with (traces / "conversation_trace.jsonl").open("rb") as whole:
        part.write_bytes(b"".join(itertools.islice(whole, 1500)))
    pool = "--bytes --block-bytes 16KiB --capacity-blocks 1000 --ssd-capacity-blocks 5000"
    more = "--ssd-admit all --restart-at 0.5 --json"
    words = ["replay", str(part), *pool.split(), *more.split(), "--ssd", str(tmp_path / "ssd")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, done.stdout.splitlines())
    assert (row["requests"], row["mismatches"]) == (1500, 0)
    assert min(row["dram_hit_blocks"], row["ssd_hit_blocks"], row["restored_hits"]) > 0


# --- tables and the demo -------------------------------------------------------------------------


def score_of(**changed) -> Score:
    usual = {
        "dram_hit_blocks": 300, "ssd_hit_blocks": 200, "restored_blocks": 50, "restored_hits": 40,
        "demotions": 10, "promotions": 5, "evictions": 1, "written_blocks": 400,
        "written_bytes": 4 * 10**9, "read_bytes": 2 * 10**9, "unflushed": 0, "is_direct": True,
    }  # fmt: skip
    copied = through_pool.Copied(1, 1, 0.1, 0.1, 1e9, 0, None)
    on_ssd = OnSsd(**{**usual, **changed})
    return Score("lru", 10, 5, 1000, 500, 7, 0.5, 1, copied, 100, on_ssd)


def printed(*parts: object) -> str:
    console = Console(file=io.StringIO(), width=150)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_shares_and_wear() -> None:
    text = printed(*tier_table.tier_parts([score_of()], 10**8))
    (line,) = (line for line in text.splitlines() if line.strip().startswith("lru"))
    assert line.split() == [
        "lru", "10", "100", "0.3000", "0.2000", "0.0400", "1.00", "0.50", "2.00", "4.00", "2.00",
        "0",
    ]  # fmt: skip
    assert "O_DIRECT" not in text


def test_what_makes_figures_worth_less_is_said() -> None:
    text = printed(*tier_table.tier_parts([score_of(unflushed=3, is_direct=False)], 10**8))
    assert "After 3 requests the SSD could not take what was due" in text
    assert "no O_DIRECT" in text
    assert tier_table.tier_parts([Score("lru", 1, 1, 1, 1, 1, 1.0)], 4096) == []


def test_only_what_was_simulated_is_said_to_be_one_tier() -> None:
    simulated = Score("belady", 10, 5, 1000, 500, 7, 0.5, ssd_capacity_blocks=100)
    assert tier_table.one_tier_notes([score_of()]) == []
    text = printed(*tier_table.one_tier_notes([simulated, score_of(), simulated]))
    assert text.startswith("belady: as if")


def test_no_hits_have_no_wear() -> None:
    score = score_of(ssd_hit_blocks=0)
    assert json_fields("t", score)["ssd_writes_per_hit"] is None
    printed(*tier_table.tier_parts([score], 4096))


def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(demo, "CAPACITY_BLOCKS", 500)
    monkeypatch.setattr(demo, "WITH_SSD_BLOCKS", 100)
    monkeypatch.setattr(demo, "SSD_BLOCKS", 1000)


def test_the_demo_restarts_and_hits_on_every_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_demo(monkeypatch)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    score = demo.with_ssd(WORKLOAD, without_watching)
    done = score.on_ssd
    assert done is not None
    assert score.copied is not None
    assert score.copied.mismatches == 0
    assert min(done.dram_hit_blocks, done.ssd_hit_blocks, done.restored_hits) > 0
    assert list(tmp_path.iterdir()) == []
    alone = demo.without_ssd(WORKLOAD, without_watching)
    assert alone.on_ssd is None
    assert alone.hit_blocks < score.hit_blocks
    text = printed(*demo.summary(WORKLOAD, [Score("belady", 500, 5, 9, 5, 1, 0.5), alone, score]))
    assert "restarted halfway" in text
    rates = f"{alone.hit_rate:.4f} without the SSD, {score.hit_rate:.4f} with the SSD"
    assert f"Hits in all: {rates}" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("temperature")]
    assert [row[:3] for row in rows] == [
        ["temperature", "100", "0"],
        ["temperature", "100", "1,000"],
    ]
    assert rows[0][3:] == [f"{alone.hit_rate:.4f}", "0"]


def test_the_demo_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    small_demo(monkeypatch)
    monkeypatch.setattr(demo, "SSD_BLOCKS", 1 << 30)
    with pytest.raises(demo.NoRoom, match="free, and the part with an SSD tier needs"):
        demo.with_ssd(WORKLOAD, without_watching)
    monkeypatch.setattr(demo, "demo", lambda *_: [Score("belady", 500, 5, 9, 5, 1, 0.5)])
    done = CliRunner().invoke(cli.app, ["demo"])
    assert done.exit_code == 0
    assert "without the part on SSD" in done.stderr
