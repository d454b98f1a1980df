"""Reading traces: every line is a whole request, or is counted with the reason why it is not."""

import gzip
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool.replay import trace as trace_module
from kvpool.replay.trace import (
    ID_MAX,
    PROBLEMS_KEPT,
    Request,
    Trace,
    TraceError,
    batches,
    pack,
    write_line,
)

GOOD = {"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [3, 4]}


def line_of(**changed: object) -> bytes:
    """A good line with fields changed; a field set to None is left out."""
    fields = {name: value for name, value in {**GOOD, **changed}.items() if value is not None}
    return json.dumps(fields).encode() + b"\n"


@pytest.fixture
def write(tmp_path: Path):
    def write_file(*lines: bytes) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(b"".join(lines))
        return path

    return write_file


def test_fields_are_read_with_their_units(write) -> None:
    trace = Trace(write(line_of()))
    assert list(trace) == [Request(1.5, 1024, 7, [3, 4])]
    assert (trace.requests, trace.skipped, trace.clamped) == (1, 0, 0)


def test_windows_line_ends_marks_blank_lines_and_no_last_newline(write) -> None:
    path = write(
        b"\xef\xbb\xbf" + line_of().replace(b"\n", b"\r\n"), b"\r\n", b"  \n", line_of()[:-1]
    )
    trace = Trace(path, strict=True)
    assert len(list(trace)) == 2


def test_fields_that_are_not_ours_are_ignored(write) -> None:
    assert len(list(Trace(write(line_of(model="x", deep={"a": [1, {}]})), strict=True))) == 1


def test_a_request_without_blocks_is_a_request(write) -> None:
    (request,) = Trace(write(line_of(hash_ids=[])))
    assert request.block_ids == []


def test_fractions_of_a_millisecond_and_the_largest_id(write) -> None:
    (request,) = Trace(write(line_of(timestamp=0.25, hash_ids=[0, ID_MAX])))
    assert request.time_s == 0.00025
    assert request.block_ids == [0, ID_MAX]


BAD_LINES = [
    (b"{\n", "malformed|truncated"),
    (b"[1, 2]\n", "Expected `object`"),
    (b"null\n", "Expected `object`"),
    (line_of()[:-1] + b" x\n", "trailing"),
    (line_of(timestamp=None), "missing required field `timestamp`"),
    (line_of(input_length=None), "missing required field `input_length`"),
    (line_of(output_length=None), "missing required field `output_length`"),
    (line_of(hash_ids=None), "missing required field `hash_ids`"),
    (line_of(timestamp=float("nan")), "malformed"),
    (line_of(timestamp=float("inf")), "malformed"),
    (line_of(timestamp=-1), ">= 0"),
    (line_of(timestamp=1e16), "<= 1000000000000000"),
    (line_of(timestamp="1"), "Expected `float`"),
    (line_of(input_length=1.5), "Expected `int`"),
    (line_of(input_length=-1), ">= 0"),
    (line_of(input_length=2**31), "<= 2147483647"),
    (line_of(hash_ids=[1, -1]), ">= 0"),
    (line_of(hash_ids=[1.0]), "Expected `int`"),
    (line_of(hash_ids=[True]), "Expected `int`"),
    (line_of(hash_ids=["1"]), "Expected `int`"),
    (line_of(hash_ids=[2**63]), "<= 9223372036854775807"),
    (line_of(hash_ids=[10**400]), "out of range|<= "),
    (line_of(hash_ids=7), "Expected `array`"),
    (line_of(hash_ids=[1, 2, 1]), "repeat"),
    (line_of(note="?").replace(b"?", b"\xff"), "not UTF-8"),
    (b"\x80\n", "not UTF-8"),
    (b"\x00" * 40 + b"\n", "malformed"),
    (b'{"a":' * 100_000 + b"\n", "nested too deep"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_skipped_and_named(write, line: bytes, reason: str) -> None:
    trace = Trace(write(line_of(), line, line_of()))
    assert len(list(trace)) == 2
    assert trace.skipped == 1
    (problem,) = trace.problems
    assert problem.line_number == 2
    assert re.search(reason, problem.reason)


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_refused_when_strict(write, line: bytes, reason: str) -> None:
    path = write(line_of(), line, line_of())
    requests = iter(Trace(path, strict=True))
    next(requests)
    with pytest.raises(TraceError, match=f"line 2: .*({reason})"):
        next(requests)


def test_a_line_too_long_is_skipped_without_being_held(write, monkeypatch) -> None:
    monkeypatch.setattr(trace_module, "LINE_BYTES_MAX", 1000)
    good = line_of()
    exact = good[:-1] + b" " * (1000 - len(good) + 1)  # 1,000 bytes before its newline
    long = [b"[" + b"1," * 5000 + b"1]\n", b" " * 1001 + b"\n", b"x" * 3000]
    trace = Trace(write(good, long[0], exact + b"\n", long[1], good, long[2]))
    assert len(list(trace)) == 3
    assert [problem.line_number for problem in trace.problems] == [2, 4, 6]
    assert all("longer than 1,000 bytes" in problem.reason for problem in trace.problems)


def test_only_the_first_problems_are_kept_but_all_are_counted(write) -> None:
    trace = Trace(write(*[b"x\n"] * (PROBLEMS_KEPT + 5), line_of()))
    assert len(list(trace)) == 1
    assert trace.skipped == PROBLEMS_KEPT + 5
    assert len(trace.problems) == PROBLEMS_KEPT


def test_times_never_go_back_and_those_that_did_are_counted(write) -> None:
    times_ms = [1000, 500, 2000, 1999, 2000]
    trace = Trace(write(*[line_of(timestamp=time_ms) for time_ms in times_ms]), strict=True)
    assert [request.time_s for request in trace] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert trace.clamped == 2


def test_reading_again_counts_again(write) -> None:
    trace = Trace(write(line_of(), b"x\n"))
    for _ in range(2):
        assert len(list(trace)) == 1
        assert (trace.requests, trace.skipped, len(trace.problems)) == (1, 1, 1)
    assert trace.bytes_read == trace.size_bytes()


def test_an_empty_file_holds_no_requests(write) -> None:
    assert list(Trace(write())) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("", "is a directory"), ("absent", "No such file"), ("nul\0", "null byte")],
)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        list(Trace(os.path.join(tmp_path, name)))


def test_compressed_traces_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(line_of()))
    with pytest.raises(TraceError, match="zcat"):
        list(Trace(path))


def test_a_pipe_is_read_and_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(line_of() * 3,))
    writer.start()
    trace = Trace(path)
    assert trace.size_bytes() is None
    assert len(list(trace)) == 3
    writer.join()


def test_batches_hold_every_request_in_order_and_are_bounded(rng: np.random.Generator) -> None:
    requests = [
        Request(i / 8, 100 + i, 1, list(range(i * 100, i * 100 + int(rng.integers(0, 9)))))
        for i in range(200)
    ]
    made = list(batches(requests, blocks_max=16))
    assert all(len(batch.ids) < 16 + 8 and len(batch.lengths) <= 16 for batch in made)
    assert np.concatenate([batch.times_s for batch in made]).tolist() == [
        r.time_s for r in requests
    ]
    lengths = np.concatenate([batch.lengths for batch in made])
    assert lengths.tolist() == [len(request.block_ids) for request in requests]
    ids = np.concatenate([batch.ids for batch in made])
    assert ids.tolist() == [i for request in requests for i in request.block_ids]


def test_a_batch_has_the_types_that_the_simulator_takes() -> None:
    batch = pack([Request(0.0, 0, 0, []), Request(1.0, 5, 0, [ID_MAX])])
    assert (batch.times_s.dtype, batch.lengths.dtype, batch.ids.dtype) == (
        np.float64,
        np.uint32,
        np.int64,
    )
    assert batch.ids.tolist() == [ID_MAX]


def test_written_lines_read_back(write) -> None:
    requests = [Request(0.0, 10, 1, [1]), Request(1.25, 1024, 0, [1, ID_MAX])]
    assert list(Trace(write(*map(write_line, requests)), strict=True)) == requests


def test_public_traces_read_whole(traces: Path) -> None:
    found = {}
    for name in ("conversation_trace.jsonl", "synthetic_trace.jsonl"):
        trace = Trace(traces / name, strict=True)
        found[name] = (sum(len(request.block_ids) for request in trace), trace.requests)
        assert trace.clamped == 0
    assert found["conversation_trace.jsonl"] == (288_500, 12_031)
    assert found["synthetic_trace.jsonl"] == (121_877, 3_993)
