"""KvpoolTier as vLLM's manager of tiers calls it, over a real daemon and without an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.rig import CHILDREN, Asked, Child, engines, environment, model_folder
from tests.served import Served, served, wait_for

ROW_BYTES = 8192


class TierProcess(Asked):
    """A process with a tier in it; see children/tier_child.py."""

    def __init__(self, folder: Path) -> None:
        command = [str(CHILDREN / "tier_child.py")]
        super().__init__(Child(command, folder, "tier", env=environment()))

    def open(self, daemon: Served, channel: str = "shm", **more: Any) -> str:
        options = {"address": daemon.address(channel), "load_timeout_s": 2.0}
        options |= more.pop("options", {})
        return str(self.ask("open", folder=str(model_folder("llama")), options=options, **more))

    def store(self, request: str, keys: list[int], chunks: list[int], **more: Any) -> None:
        self.ask("submit", request=request, keys=keys, chunks=chunks, load=False, **more)

    def load(self, request: str, keys: list[int], chunks: list[int], **more: Any) -> None:
        self.ask("submit", request=request, keys=keys, chunks=chunks, load=True, **more)

    def lookup(self, request: str, keys: list[int]) -> list[str]:
        """Until there is an answer: by sockets a thread asks, and the scheduler asks again."""
        found: list[str] = []

        def are_known() -> bool:
            found[:] = self.ask("lookup", request=request, keys=keys)
            self.ask("end_step")
            return "RETRY" not in found

        wait_for(are_known, what="lookups are answered")
        return found


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    with engines(TierProcess(tmp_path_factory.mktemp("tier"))) as (one,):
        yield one


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as node:
        yield node


@pytest.fixture(params=["shm", "tcp"])
def tier(request: pytest.FixtureRequest, process: TierProcess, daemon: Served) -> TierProcess:
    process.open(daemon, request.param)
    process.ask("begin", request="r")
    return process


def whole(job: int, chunks: int) -> dict[str, Any]:
    return {"job": job, "success": True, "keys": [], "bytes": chunks * ROW_BYTES}


def test_chunks_come_back_into_other_rows(tier: TierProcess) -> None:
    tier.ask("fill", chunks={0: 10, 1: 11, 2: 12})
    tier.store("r", [3, 1, 2], [2, 0, 1])
    assert tier.ask("finished") == [whole(1, 3)]
    assert tier.lookup("r", [1, 2, 3, 4]) == ["HIT", "HIT", "HIT", "MISS"]
    tier.load("r", [1, 2, 3], [7, 6, 5])
    assert tier.ask("finished") == [whole(2, 3)]
    assert tier.ask("rows") == [10, 11, 12, 0, 0, 12, 11, 10]
    assert tier.ask("counts") == {"stored_chunks": 3, "loaded_chunks": 3, "attached": 1}
    assert tier.ask("counts") == {"attached": 1}


def test_groups_of_layers_do_not_meet(tier: TierProcess) -> None:
    tier.store("r", [1], [0], group=1)
    tier.ask("finished")
    assert tier.lookup("r", [1]) == ["MISS"]  # of group 0


def test_missing_chunk_fails_alone(tier: TierProcess) -> None:
    tier.ask("fill", chunks={0: 10, 1: 11})
    tier.store("r", [1], [0])
    tier.store("r", [3], [1])
    tier.ask("finished")
    tier.load("r", [1, 2, 3], [4, 5, 6])
    (result,) = tier.ask("finished")
    assert (result["success"], result["keys"]) == (False, [1, 3])
    assert result["bytes"] == 2 * ROW_BYTES
    assert tier.ask("rows")[4] == 10
    assert tier.ask("rows")[6] == 11
    assert tier.ask("counts")["not_loaded_chunks:('ABSENT',)"] == 1


def test_chunk_that_was_not_loaded_is_missing_for_that_request_only(tier: TierProcess) -> None:
    tier.load("r", [1], [4])  # that another engine has dropped since it was looked up
    assert tier.ask("finished")[0]["success"] is False
    tier.ask("begin", request="other")
    tier.store("other", [1], [0])
    tier.ask("finished")
    assert tier.lookup("r", [1]) == ["MISS"]
    assert tier.lookup("other", [1]) == ["HIT"]
    tier.ask("end", request="r")
    tier.ask("begin", request="r")
    assert tier.lookup("r", [1]) == ["HIT"]


def test_work_is_pending_until_it_was_told(tier: TierProcess) -> None:
    assert tier.ask("has_pending_work") is False
    tier.store("r", [1], [0])
    assert tier.ask("has_pending_work") is True
    tier.ask("finished")
    assert tier.ask("has_pending_work") is False


def test_jobs_end_after_their_request(tier: TierProcess) -> None:
    tier.store("r", [1], [0])
    tier.load("r", [9], [1])
    tier.ask("end", request="r")
    assert {each["job"] for each in tier.ask("finished")} == {1, 2}


def test_full_queue_fails_at_once(process: TierProcess, daemon: Served) -> None:
    process.open(daemon)
    process.ask("begin", request="r")
    process.store("r", [1, 2, 3], [0, 1, 2])
    process.ask("finished")
    process.ask("block", jobs_max=1)
    for key in (1, 2, 3):  # one is moved, one may wait
        process.load("r", [key], [key])
    failed: list[Any] = process.ask("finished", drain=False)
    process.ask("go")
    told = failed + process.ask("finished")
    assert sorted(each["job"] for each in told) == [2, 3, 4]
    # Whether the first was under way already when the second came is the thread's affair.
    refused = process.ask("counts")["not_loaded_chunks:('queue_full',)"]
    assert refused == sum(not each["success"] for each in told)
    assert refused in (1, 2)


def test_load_that_waited_too_long_is_not_tried(process: TierProcess, daemon: Served) -> None:
    process.open(daemon, options={"load_timeout_s": 0.001})
    process.ask("begin", request="r")
    process.ask("block", jobs_max=8)
    process.load("r", [1], [0])
    process.load("r", [2], [1])
    process.ask("wait_late")
    process.ask("go")
    process.ask("finished")
    assert process.ask("counts")["not_loaded_chunks:('late',)"] >= 1


def test_bug_of_ours_fails_the_job_and_not_the_thread(tier: TierProcess) -> None:
    tier.ask("break_store")
    tier.store("r", [1], [0])
    tier.store("r", [2], [1])
    results = {each["job"]: each["success"] for each in tier.ask("finished")}
    assert results == {1: False, 2: True}
    assert tier.ask("counts")["not_stored_chunks:('bug',)"] == 1


def test_dead_daemon_fails_jobs_and_misses(tier: TierProcess, daemon: Served) -> None:
    tier.store("r", [1, 2], [0, 1])
    tier.ask("finished")
    daemon.kill()
    tier.ask("wait_lost")
    assert tier.lookup("r", [3]) == ["MISS"]
    tier.load("r", [1, 2], [4, 5])
    tier.store("r", [4], [3])
    assert [each["success"] for each in tier.ask("finished")] == [False, False]
    counts = tier.ask("counts")
    assert counts["not_loaded_chunks:('DISCONNECTED',)"] == 2
    assert counts["not_stored_chunks:('DISCONNECTED',)"] == 1


def test_tier_starts_without_a_daemon_and_attaches_later(
    process: TierProcess, tmp_path: Path
) -> None:
    daemon = Served(tmp_path)
    options = {"connect_timeout_s": 0.1}
    process.open(daemon, options=options)
    process.ask("begin", request="r")
    process.store("r", [1], [0])
    assert process.ask("finished")[0]["success"] is False
    assert process.lookup("r", [1]) == ["MISS"]
    assert process.ask("counts") == {"not_stored_chunks:('no_pool',)": 1, "attached": 0}
    try:
        daemon.start()
        wait_for(lambda: process.ask("counts") == {"attached": 1}, what="attached")
        process.store("r", [1], [0])
        assert process.ask("finished") == [whole(2, 1)]
        daemon.stop()
    finally:
        daemon.close()


def test_shutdown_leaves_no_reference_to_the_rows(tier: TierProcess) -> None:
    tier.store("r", [1], [0])
    tier.ask("close")  # fails where memory is still referred to
    tier.ask("forget")


def test_everything_that_is_counted_is_defined(tier: TierProcess) -> None:
    tier.store("r", [1], [0])
    tier.load("r", [1, 2], [1, 2])
    tier.ask("finished")
    defined = {name.removeprefix("vllm:kvpool_tier_") for name in tier.ask("defined")}
    counted = {name.partition(":")[0] for name in tier.ask("counts")}
    assert counted <= defined
    assert len(defined) == 5


# --- namespaces -----------------------------------------------------------------------------------


def test_engines_that_write_other_bytes_do_not_share(process: TierProcess, daemon: Served) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"chunk": 2},
        {"layout": "LBNHC"},
        {"workers": 2},
        {"row_bytes": 4096},
        {"options": {"salt": "other"}},
        {"options": {"weights": "mine"}},
        {"engine": {"dtype": "bfloat16"}},
        {"engine": {"hf_overrides": {"rope_theta": 12345.0}}},
    ]
    ids = [process.open(daemon, **dict(change)) for change in changes]
    assert len(set(ids)) == len(changes)
    assert process.open(daemon) == ids[0]
    assert process.open(daemon, rows=5) == ids[0]  # how much memory there is changes no byte
    # Nor does the way to the pool, or the batch size.
    assert process.open(daemon, "tcp", engine={"max_num_seqs": 3}) == ids[0]


def test_other_weights_do_not_share(process: TierProcess, daemon: Served) -> None:
    options = {"address": daemon.unix_address}
    ids = [
        process.ask("open", folder=str(model_folder(name)), options=options)
        for name in ("llama", "hybrid")
    ]
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adress": "unix:/x"}, "did you mean 'address'"),
        ({"save": "all"}, "'save' means nothing to a tier"),
        ({"load_timeout_s": -1}, "load_timeout_s is -1"),
        ({"address": "nowhere"}, "address"),
    ],
)
def test_wrong_option_is_told_at_the_start(
    process: TierProcess, options: dict[str, Any], words: str
) -> None:
    said = process.ask("refused", folder=str(model_folder("llama")), options=options)
    assert words in said
    assert "secondary_tiers" in said


def test_tier_that_sees_no_configuration_is_refused(process: TierProcess) -> None:
    assert "no engine's configuration" in process.ask("refused_without_config")
