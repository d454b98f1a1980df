"""The made-up workload: repeatable, in order, and of the shape that it claims."""

import dataclasses
import hashlib
import itertools
from collections import Counter
from pathlib import Path

import pytest

from kvpool.replay.trace import Trace, write_line
from kvpool.replay.workload import WorkloadOptions, generate

OPTIONS = WorkloadOptions(seed=7, requests=3000)


def test_a_seed_always_gives_the_same_requests() -> None:
    lines = b"".join(map(write_line, generate(WorkloadOptions(seed=1, requests=500))))
    assert hashlib.sha256(lines).hexdigest()[:16] == GOLDEN
    assert list(generate(OPTIONS)) == list(generate(OPTIONS))


def test_another_seed_gives_others() -> None:
    other = dataclasses.replace(OPTIONS, seed=8)
    assert list(generate(OPTIONS)) != list(generate(other))


def test_it_reads_back_as_a_trace_without_a_flaw(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(map(write_line, generate(OPTIONS))))
    trace = Trace(path, strict=True)
    assert list(trace) == list(generate(OPTIONS))
    assert trace.clamped == 0


def test_an_id_names_one_prefix() -> None:
    before: dict[int, int] = {}
    for request in generate(OPTIONS):
        for parent, block in itertools.pairwise([-1, *request.block_ids]):
            assert before.setdefault(block, parent) == parent


def test_prompts_are_shared_and_histories_grow() -> None:
    first = Counter(request.block_ids[0] for request in generate(OPTIONS))
    shares = [count / OPTIONS.requests for _, count in first.most_common(3)]
    assert shares[0] > 0.1  # the most popular system prompt, by Zipf
    assert shares[0] > 1.5 * shares[2]
    lengths = sorted(len(request.block_ids) for request in generate(OPTIONS))
    assert lengths[len(lengths) // 2] < 20 < lengths[-1]


def test_the_parts_have_the_shares_and_means_asked_for() -> None:
    options = WorkloadOptions(
        seed=3, requests=4000, turns_mean=1, document_share=0.3, system_prompts=1,
        system_blocks_mean=1,
    )  # fmt: skip
    requests = list(generate(options))
    documents = [request for request in requests if request.block_ids[0] != 0]
    assert len(documents) / len(requests) == pytest.approx(0.3, abs=0.03)
    mean = sum(len(request.block_ids) for request in documents) / len(documents)
    assert mean == pytest.approx(options.document_blocks_mean, rel=0.1)
    rate = len(requests) / requests[-1].time_s
    assert rate == pytest.approx(options.sessions_per_s, rel=0.1)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"sessions_per_s": 0.0}, "sessions_per_s must be more than 0"),
        ({"system_prompts": 0}, "system_prompts must be more than 0"),
        ({"document_share": 1.5}, "at most 1"),
        ({"think_s_mean": -1.0}, "think_s_mean is -1"),
        ({"zipf_exponent": float("nan")}, "zipf_exponent is nan"),
    ],
)
def test_options_that_are_no_workload_are_refused(changed: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        generate(WorkloadOptions(**changed))


GOLDEN = "0bc4e6c9b5aca718"
