"""Benches of a daemon run tiny, with the fields that they promise, and leave nothing behind."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kvpool
from kvpool import cli
from kvpool.bench import clients, lookup, rows, served_works, shm, tcp
from kvpool.bench.buffers import Buffers, Memory
from kvpool.bench.raw_sockets import raw_peer
from kvpool.bench.scale import Scale
from kvpool.bench.served import Served, environment_of_child, require_memory, served
from kvpool.bench.ssd import namespace

RATE = {"work", "block_bytes", "batch", "GBps", "p50_us", "p99_us", "ratio", "round_trip_us"}
CPU = {"cpu_s_per_GiB", "node_cpu_s_per_GiB"}
PACE = {
    "work", "block_bytes", "batch", "sides", "p50_us", "p99_us", "round_trip_us", "beyond_us",
}  # fmt: skip
CLIENTS = {"work", "channel", "clients", "blocks", "block_bytes", "batch", "GBps", "ratio"}
OBSERVED = {
    "work", "channel", "block_bytes", "batch", "pairs", "scrapes", "alone_GBps", "scraped_GBps",
    "ratio",
}  # fmt: skip
IDLE = {"work", "channel", "node_core_share"}
READS = ("get_into", "view", "view_hot")
WRITES = ("put_from", "put_staged")


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict]]:
    found = {}
    for name in ("shm", "tcp"):
        done = CliRunner().invoke(cli.app, ["bench", name, "--json", "--quick"])
        assert done.exit_code == 0, done.output
        found[name] = [json.loads(line) for line in done.stdout.splitlines()]
    return found


@pytest.fixture(scope="module")
def daemon() -> Iterator[Served]:
    with served(64 << 20) as running:
        yield running


def of(measured: dict[str, list[dict]], channel: str, *works: str) -> list[dict]:
    return [row for row in measured[channel] if row["work"] in works and "sides" not in row]


def test_shm_measures_every_work_size_and_batch(measured) -> None:
    wanted = itertools.product((*READS, *WRITES), shm.QUICK_BLOCK_BYTES, shm.BATCHES)
    found = of(measured, "shm", *READS, *WRITES)
    assert {(r["work"], r["block_bytes"], r["batch"]) for r in found} == set(wanted)
    for row in found:
        extra = {"same_copy_ratio"} if row["work"] in READS else set()
        assert set(row) == RATE | CPU | {"memcpy_GBps"} | extra
        assert 0 < row["p50_us"] <= row["p99_us"]


def test_tcp_measures_every_work_size_and_batch(measured) -> None:
    works = ("get_into", "view", "put_from")
    wanted = itertools.product(works, tcp.QUICK_BLOCK_BYTES, tcp.BATCHES)
    found = of(measured, "tcp", *works)
    assert {(r["work"], r["block_bytes"], r["batch"]) for r in found} == set(wanted)
    assert all(set(row) == RATE | CPU | {"raw_GBps"} for row in found)


def test_being_watched_is_measured_beside_not_being_watched() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "observed", "--json", "--quick"])
    assert done.exit_code == 0, done.output
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert set(row) == OBSERVED
    assert row["scrapes"] > 0
    assert row["ratio"] > 0


def test_a_put_is_measured_awake_and_asleep(measured) -> None:
    paces = [row for row in measured["shm"] if "sides" in row]
    assert [row["sides"] for row in paces] == ["awake", "asleep"]
    assert all(set(row) == PACE for row in paces)


@pytest.mark.parametrize(("channel", "floor"), [("shm", "memcpy_GBps"), ("tcp", "raw_GBps")])
def test_several_clients_read_the_same_blocks_and_others(measured, channel, floor) -> None:
    found = of(measured, channel, "clients")
    wanted = list(itertools.product(clients.QUICK_CLIENTS, clients.WORKS))
    assert [(row["clients"], row["blocks"]) for row in found] == wanted
    assert all(set(row) == CLIENTS | CPU | {floor} for row in found)


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_an_idle_daemon_is_measured(measured, channel: str) -> None:
    (row,) = of(measured, channel, "idle")
    assert set(row) == IDLE
    assert 0 <= row["node_core_share"] < 1


def test_tcp_costs_the_daemon_what_shared_memory_does_not(measured) -> None:
    def node_s(channel: str) -> float:
        big = [row for row in of(measured, channel, "get_into") if row["batch"] == 16]
        return max(big, key=lambda row: row["block_bytes"])["node_cpu_s_per_GiB"]

    assert node_s("shm") < node_s("tcp")


def test_a_daemon_serves_both_channels_and_ends_with_the_with() -> None:
    with served(64 << 20) as daemon:
        folder = Path(daemon.unix.removeprefix("unix:")).parent
        for address in (daemon.unix, daemon.tcp):
            with kvpool.connect(address) as pool:
                assert pool.stats()["server"]["clients"] >= 1
        assert daemon.cpu_s() > 0
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(daemon.pid, 0)


def test_a_daemon_is_gone_after_a_bench_that_failed() -> None:
    with pytest.raises(rows.BenchError, match="as asked"), served(64 << 20) as daemon:
        raise rows.BenchError("as asked")
    with pytest.raises(ProcessLookupError):
        os.kill(daemon.pid, 0)


def test_a_daemon_that_cannot_begin_says_why() -> None:
    with (
        pytest.raises(rows.BenchError, match=r"did not become ready: .*policy"),
        served(64 << 20, policy="none such"),
    ):
        pass


def test_more_memory_than_the_machine_has_is_refused_beforehand() -> None:
    with pytest.raises(rows.BenchError, match="more memory than there is"):
        require_memory(1 << 60)


def test_lookup_takes_fewer_entries_where_memory_lacks(monkeypatch) -> None:
    said: list[str] = []
    scale = Scale(say=said.append)
    assert lookup._that_fit(scale, 20_000) == 20_000
    assert not said
    monkeypatch.setattr(lookup, "memory_available_bytes", lambda: 3 << 30)
    assert lookup._that_fit(scale, 1_000_000) == 500_000
    assert "too little memory for 1,000,000" in said[0]


def test_a_daemon_of_a_bench_is_told_nothing_by_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("KVPOOL_SERVE_DRAM", "nonsense")
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/nowhere")
    with served(64 << 20) as daemon, kvpool.connect(daemon.unix):
        assert not any(name.startswith("KVPOOL_") for name in environment_of_child())


def test_idle_share_is_of_the_daemon(daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
        assert served_works.idle_share(daemon, 0.05) == 0
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            assert served_works.idle_share(Served(spinning.pid, "", ""), 0.3) > 0
        finally:
            spinning.kill()


def test_raw_sockets_move_what_they_are_asked_to() -> None:
    data = np.random.default_rng(5).integers(0, 1 << 63, (8, 128 << 10), dtype=np.uint64)
    out = np.zeros_like(data)
    with raw_peer(16 << 20) as peer:
        for raw, at in ((peer.by_tcp(2), 0), (peer.by_unix(), 8 << 20)):
            raw.write(at, data)
            raw.round_trip()
            out.fill(0)
            raw.read(at, out)
            assert np.array_equal(out, data)
            raw.read(at + data[0].nbytes, out[:1])  # one block, from its place
            assert np.array_equal(out[0], data[1])
            raw.close()


def test_paced_sleeps_before_each_work() -> None:
    calls: list[tuple[str, float]] = []
    steps = {name: lambda name=name: calls.append((name, time.monotonic())) for name in "ab"}
    assert [len(t.steps_us) for t in served_works.paced(steps, 3, 0).values()] == [3, 3]
    assert [name for name, _ in calls] == [*"aaabbb"]
    calls.clear()
    served_works.paced(steps, 3, 0.002)
    assert [name for name, _ in calls] == [*"ababab"]
    times = [at for _, at in calls]
    assert all(later - earlier >= 0.002 for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("work", ["get_into", "view"])
def test_a_wrong_byte_from_a_daemon_is_found(daemon, monkeypatch, work: str) -> None:
    honest = kvpool.Namespace.view_blocks

    def flipping_get(space, keys, out, **kept) -> int:
        count = kvpool._core.Space.get_into(space, keys, out, **kept)
        out[-1, -1] ^= out.dtype.type(1)
        return count

    def flipping_view(space, keys) -> list:
        return [bytes([b[0] ^ 1]) + bytes(b[1:]) for b in map(memoryview, honest(space, keys))]

    buffers = Buffers(Memory(1 << 20), 64 << 10)
    with kvpool.connect(daemon.unix) as pool:
        space = namespace(pool, buffers.block_bytes)
        space.drop()
        served_works.fill(space, buffers)
        if work == "get_into":
            monkeypatch.setattr(kvpool.Namespace, "get_into", flipping_get, raising=False)
            wanted = "get_into gave wrong bytes"
        else:
            monkeypatch.setattr(kvpool.Namespace, "view", lambda s, k: _Listed(flipping_view(s, k)))
            wanted = "view showed wrong bytes"
        with pytest.raises(rows.BenchError, match=wanted):
            served_works.check_reads(space, buffers)


def test_a_wrong_byte_of_a_put_is_found(daemon, monkeypatch) -> None:
    honest, honest_staged = kvpool.Namespace.put, kvpool.Namespace.put_staged

    def flipping(space, keys, data, **kept) -> kvpool.PutResult:
        return honest(space, keys, data ^ data.dtype.type(1), **kept)

    def flipping_staged(space, keys, staged) -> kvpool.PutResult:
        staged[0][9] ^= 1
        return honest_staged(space, keys, staged)

    buffers = Buffers(Memory(1 << 20), 64 << 10)
    with kvpool.connect(daemon.unix) as pool:
        space = namespace(pool, buffers.block_bytes)
        puts = served_works.Puts(space, buffers)
        with space.staging(4) as staged:
            puts.check(4)
            puts.check_staged(staged)
            monkeypatch.setattr(kvpool.Namespace, "put", flipping)
            monkeypatch.setattr(kvpool.Namespace, "put_staged", flipping_staged)
            with pytest.raises(rows.BenchError, match="put stored wrong bytes"):
                puts.check(4)
            with pytest.raises(rows.BenchError, match="put_staged stored wrong bytes"):
                puts.check_staged(staged)
        space.drop()


class _Listed:
    """A view that is what it is told to be."""

    def __init__(self, blocks: list[bytes]) -> None:
        self._blocks = blocks

    def __enter__(self) -> list[bytes]:
        return self._blocks

    def __exit__(self, *_: object) -> None:
        pass
