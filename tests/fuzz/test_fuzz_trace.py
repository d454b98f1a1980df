"""Whatever a file holds, reading it ends, and what comes out is in range or named as bad."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.replay.trace import ID_MAX, Request, Trace, TraceError, batches, write_line

MARK = b"\xef\xbb\xbf"  # of UTF-8, as some editors put in front
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "timestamp": st.one_of(NUMBERS, JSON),
        "input_length": st.one_of(st.integers(0, 10**6), JSON),
        "output_length": st.one_of(st.integers(0, 10**4), JSON),
        "hash_ids": st.one_of(st.lists(st.integers(0, 40), max_size=6), JSON),
        "extra": JSON,
    },
)
LINES = st.one_of(
    FIELDS.map(lambda fields: json.dumps(fields).encode()),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.sampled_from([b"", b"\r", MARK, b"\x1f\x8b", b"[" * 2000, b'{"a":' * 2000]),
)
FILES = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\n\n"])), max_size=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.jsonl"


@given(lines=FILES)
def test_any_file_is_read_to_its_end(path: Path, lines: list[tuple[bytes, bytes]]) -> None:
    content = b"".join(line + end for line, end in lines)
    path.write_bytes(content)
    trace = Trace(path)
    if content.startswith(b"\x1f\x8b"):  # as gzip does
        with pytest.raises(TraceError, match="compressed"):
            list(trace)
        return
    requests = list(trace)
    check_requests(requests)
    assert trace.bytes_read == len(content)
    assert trace.requests == len(requests)
    with_content = [line for line in content.removeprefix(MARK).split(b"\n") if line.strip()]
    assert trace.requests + trace.skipped == len(with_content)


def check_requests(requests: list[Request]) -> None:
    for request in requests:
        assert request.time_s >= 0
        assert request.input_tokens >= 0
        assert len(set(request.block_ids)) == len(request.block_ids)
        assert all(0 <= block <= ID_MAX for block in request.block_ids)
    times = [request.time_s for request in requests]
    assert times == sorted(times)
    assert sum(len(batch.ids) for batch in batches(requests, blocks_max=3)) == sum(
        len(request.block_ids) for request in requests
    )


@given(
    times_ms=st.lists(st.integers(0, 10**12), max_size=5),
    ids=st.lists(st.integers(0, ID_MAX), unique=True, max_size=8),
)
def test_what_is_written_is_read_back(path: Path, times_ms: list[int], ids: list[int]) -> None:
    requests = [Request(ms / 1000, len(ids), 0, ids) for ms in sorted(times_ms)]
    path.write_bytes(b"".join(map(write_line, requests)))
    assert list(Trace(path, strict=True)) == requests
