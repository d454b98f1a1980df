"""The `kvpool` command as a user runs it: a process, its two streams and its exit status."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvpool
from kvpool import cli
from kvpool.replay.score import POLICIES
from kvpool.replay.trace import Trace, write_line
from kvpool.replay.workload import WorkloadOptions, generate

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "trace": str,
    "policy": str,
    "capacity_blocks": int,
    "requests": int,
    "blocks": int,
    "hit_blocks": int,
    "hit_rate": float,
    "bytes_moved": int,
    "mismatches": int,
    "seconds": float,
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}


def run(*args: object, status: int = 0, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", *map(str, args)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
        **options,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict]:
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == FIELDS
    return rows


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    path.write_bytes(b"".join(map(write_line, generate(WorkloadOptions(requests=200)))))
    return path


def test_version_is_the_package_s() -> None:
    assert run("--version").stdout == f"kvpool {kvpool.__version__}\n"


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for command in ("replay", "workload", "demo", "bench"):
        assert command in text


def test_json_has_a_line_for_each_policy_and_capacity(trace: Path) -> None:
    done = run("replay", trace, "--policy", "all", "--capacity-blocks", 50, 500, 5000, "--json")
    pairs = [(row["policy"], row["capacity_blocks"]) for row in rows_of(done)]
    assert pairs == [(policy, capacity) for policy in POLICIES for capacity in (50, 500, 5000)]
    assert done.stderr == ""


@pytest.mark.parametrize(
    "flags",
    [
        "TRACE --policy lru fifo --capacity-blocks 50 500",
        "TRACE --policy lru --policy fifo --capacity-blocks 50 --capacity-blocks 500",
        "--policy=lru fifo --capacity-blocks=50 500 TRACE",
        "--capacity-blocks 50 500 --policy lru fifo -- TRACE",
    ],
)
def test_several_values_by_one_flag_or_by_many(trace: Path, flags: str) -> None:
    words = [str(trace) if word == "TRACE" else word for word in flags.split()]
    pairs = [(r["policy"], r["capacity_blocks"]) for r in rows_of(run("replay", "--json", *words))]
    assert pairs == [("lru", 50), ("lru", 500), ("fifo", 50), ("fifo", 500)]


def test_table_has_the_references_and_no_progress_when_piped(trace: Path) -> None:
    done = run("replay", trace, "--policy", "fifo", "--capacity-blocks", 100)
    words = done.stdout.split()
    assert {"belady", "lru", "fifo"} <= set(words)
    assert "temperature" not in words
    assert done.stderr == ""


def test_progress_is_shown_on_a_terminal(trace: Path) -> None:
    reader, writer = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "replay", str(trace), "--json"],
        stdout=subprocess.PIPE,
        stderr=writer,
        env={**ENVIRONMENT, "TERM": "xterm"},
        timeout=120,
        check=True,
    )
    os.close(writer)
    shown = b""
    while chunk := read_to_end(reader):
        shown += chunk
    os.close(reader)
    assert b"200 requests" in shown
    assert len(done.stdout.splitlines()) == 3


def read_to_end(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux: the other side of the terminal is closed
        return b""


def test_bad_lines_are_named_on_stderr_and_skipped(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    path = tmp_path / "flawed.jsonl"
    path.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[2:], *[b"x\n"] * 30]))
    done = run("replay", path, "--json", "--capacity-blocks", 100)
    assert [row["requests"] for row in rows_of(done)] == [200]
    assert "line 3: Object missing required field `timestamp`" in done.stderr
    assert "and 11 more bad lines" in done.stderr
    assert "31 bad lines skipped, 200 requests replayed" in done.stderr


def test_a_bad_line_fails_when_strict(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "flawed.jsonl"
    path.write_bytes(trace.read_bytes() + b"{}\n")
    done = run("replay", path, "--strict", "--json", status=1)
    assert done.stdout == ""
    assert f"kvpool: error: {path}, line 201: " in done.stderr


def test_times_that_go_back_are_told(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_bytes(trace.read_bytes() * 2)
    assert "requests lie before an earlier one" in run("replay", path, "--json").stderr


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "holds no request: it is empty"), (b"x\ny\n", "2 bad lines"), (b"\x1f\x8b", "zcat")],
)
def test_what_is_no_trace_fails(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    assert complaint in run("replay", path, status=1).stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("replay", "Missing argument"),
        ("replay absent.jsonl", "does not exist"),
        ("replay .", "is a directory"),
        ("replay TRACE --policy temprature", "did you mean 'temperature'"),
        ("replay TRACE --capacity-blocks 0", "greater than or equal to 1"),
        ("replay TRACE --capacity-blocks many", "valid integer"),
        ("replay TRACE --block-bytes 64K --bytes", "write KiB (1024s) or KB (1000s)"),
        ("replay TRACE --block-bytes 12 --bytes", "multiple of 8"),
        ("replay TRACE --threads 2", "needs --bytes"),
        ("replay TRACE --tau 0", "--tau"),
        ("replay TRACE --plot hits.xyz", "the ending 'xyz'"),
        ("replay TRACE --plot absent/hits.png", "no folder absent"),
        ("replay TRACE --bogus", "--bogus"),
        ("bench everything", "everything"),
        ("workload --requests 0", "greater than or equal to 1"),
        ("bogus", "No such command"),
    ],
)
def test_a_wrong_question_is_a_usage_error(
    trace: Path, words: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    args = [str(trace) if word == "TRACE" else word for word in words.split()]
    done = CliRunner().invoke(cli.app, args, env=ENVIRONMENT)
    assert done.exit_code == 2
    assert complaint in " ".join(done.stderr.split()).replace(" │ │ ", " ")
    assert done.stdout == ""


def test_a_usage_error_is_the_exit_status_of_the_process() -> None:
    assert "does not exist" in run("replay", "absent.jsonl", status=2).stderr


def test_a_plot_is_written(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "hits.png"
    run("replay", trace, "--policy", "all", "--capacity-blocks", 50, 500, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "replay", str(trace), "--plot", "hits.png"],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'kvpool[plot]'" in done.stderr


def test_a_workload_replays_by_the_pipe_as_by_the_file(tmp_path: Path) -> None:
    made = run("workload", "--seed", 3, "--requests", 300).stdout
    path = tmp_path / "made.jsonl"
    path.write_text(made)
    assert len(list(Trace(path, strict=True))) == 300
    words = ("--policy", "lru", "--capacity-blocks", 200, "--json")
    (by_file,) = rows_of(run("replay", path, *words))
    (by_pipe,) = rows_of(run("replay", "/dev/stdin", *words, input=made))
    assert by_pipe["hit_blocks"] == by_file["hit_blocks"] > 0


def test_a_pipe_cannot_be_read_twice(trace: Path) -> None:
    words = ("--bytes", "--block-bytes", "4KiB", "--capacity-blocks", 50, 60, "--json")
    done = run("replay", "/dev/stdin", *words, input=trace.read_text(), status=1)
    assert "reads it 2 times" in done.stderr


def test_a_reader_that_leaves_early_is_no_failure_of_ours(trace: Path) -> None:
    command = f"{sys.executable} -m kvpool.cli workload --requests 20000 | head -n 1"
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_help_does_not_load_what_only_work_needs() -> None:
    code = (
        "import sys; import kvpool.cli; "
        "print(sorted({'matplotlib', 'kvpool.bench.local', 'kvpool.replay.demo'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert done.stdout == "[]\n"
