"""What is printed says what was found: shares, marks, JSON fields, a plot that is a picture."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from kvpool.replay import report
from kvpool.replay.score import Copied, Score, json_fields

BLOCKS = 10_000
HITS = {"belady": 5000, "lru": 2000, "temperature": 2600, "fifo": 1400}


def score_of(policy: str, hits: int, capacity: int = 100, copied: Copied | None = None) -> Score:
    return Score(policy, capacity, 50, BLOCKS, hits, 7, 0.25, 1234 if copied else None, copied)


def copied_of(mismatches: int) -> Copied:
    first = "block id 3" if mismatches else None
    return Copied(3 * 10**9, 10**9, 0.3, 0.2, 1e10, mismatches, first)


SCORES = [score_of(policy, hits) for policy, hits in HITS.items()]
GRID = {(score.policy, score.capacity_blocks): score for score in SCORES}


def printed(*parts: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def line_of(text: str, word: str) -> str:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(word))
    return line


def test_share_of_the_gap() -> None:
    assert report.gap_recovered(GRID, GRID["temperature", 100]) == pytest.approx(0.2)
    assert report.gap_recovered(GRID, GRID["fifo", 100]) == pytest.approx(-0.2)
    assert report.gap_recovered(GRID, GRID["belady", 100]) == pytest.approx(1)


def test_no_share_of_no_gap_and_none_without_the_references() -> None:
    flat = {(policy, 100): score_of(policy, 2000) for policy in HITS}
    assert report.gap_recovered(flat, flat["temperature", 100]) is None
    alone = {("temperature", 100): GRID["temperature", 100]}
    assert report.gap_recovered(alone, alone["temperature", 100]) is None


def test_the_best_is_one_that_does_not_know_the_future() -> None:
    assert report.best_online(GRID, 100) == "temperature"
    assert report.best_online({("lru", 100): GRID["lru", 100]}, 100) is None


def test_hit_table_shows_rates_marks_and_shares() -> None:
    more = score_of("temperature", 9000, capacity=2000)
    text = printed(report.hit_table([*SCORES, more], block_bytes=1 << 20))
    assert "100 blocks" in text
    assert "2,000 blocks" in text
    assert "100 MiB" in text
    assert "0.2600*" in line_of(text, "temperature")
    assert "+20%" in line_of(text, "temperature")
    assert "0.9000" in line_of(text, "temperature")
    assert "-20%" in line_of(text, "fifo")
    rows = [line.split()[0] for line in text.splitlines() if line.split()[:1] and "0." in line]
    assert rows == ["belady", "temperature", "lru", "fifo"]


def test_copy_table_shows_rates_and_wrong_blocks() -> None:
    scores = [score_of("lru", 1, copied=copied_of(0)), score_of("fifo", 1, copied=copied_of(3))]
    text = printed(report.copy_table(scores))
    assert line_of(text, "lru").split() == [
        "lru", "100", "1,234", "7", "4.00", "8.00", "10.00", "0.80", "0",
    ]  # fmt: skip
    assert line_of(text, "fifo").split()[-1] == "3"


def test_tables_fit_a_terminal_of_80_columns() -> None:
    capacities = (100, 1000, 5000, 20_000, 50_000, 100_000, 500_000)
    scores = [
        score_of(policy, hits, capacity, copied_of(0))
        for policy, hits in HITS.items()
        for capacity in capacities
    ]
    parts = report.tables("trace.jsonl", scores, block_bytes=65536, width=80)
    text = printed(*parts, width=80)
    assert "…" not in text
    assert [f"{capacity:,} blocks" in text for capacity in capacities] == [True] * 7
    assert text.count("0.2600*") == 7


def test_a_path_is_not_markup() -> None:
    text = printed(*report.tables("[red]odd[/red].jsonl", SCORES, block_bytes=None, width=120))
    assert "[red]odd[/red].jsonl" in text


def test_a_file_name_that_is_no_text_is_shown_and_drawn(tmp_path: Path) -> None:
    name = os.fsdecode(b"$odd$ \\alpha \xff.jsonl")
    assert "$odd$ \\alpha ?.jsonl" in printed(
        *report.tables(name, SCORES, block_bytes=None, width=120)
    )
    report.plot(tmp_path / "hits.png", name, SCORES)
    assert json.loads(report.json_line(name, SCORES[0]))["trace"] == name


def test_json_has_exactly_the_fields() -> None:
    fields = json.loads(report.json_line("t.jsonl", score_of("lru", 2500, copied=copied_of(2))))
    assert fields == {
        "trace": "t.jsonl",
        "policy": "lru",
        "capacity_blocks": 100,
        "requests": 50,
        "blocks": BLOCKS,
        "hit_blocks": 2500,
        "hit_rate": 0.25,
        "bytes_moved": 4 * 10**9,
        "mismatches": 2,
        "seconds": 0.25,
    }
    simulated = json_fields("t.jsonl", score_of("lru", 2500))
    assert (simulated["bytes_moved"], simulated["mismatches"]) == (0, 0)


def test_rates_of_nothing_are_zero() -> None:
    assert Score("lru", 1, 0, 0, 0, 0, 0.0).hit_rate == 0
    assert Copied(0, 0, 0.0, 0.0, 0.0, 0, None).bytes_per_s == 0


def test_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "hits.png"
    report.check_plot(path)
    report.plot(path, "t", [*SCORES, score_of("lru", 3000, 1000)])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["hits.xyz", "hits", "absent/hits.png"])
def test_a_plot_that_cannot_be_drawn_is_known_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"ending|no folder"):
        report.check_plot(tmp_path / name)
