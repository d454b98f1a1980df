"""A cluster on one machine is there as told, and gone without a trace; so are its bench and its
example."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool import cli
from kvpool.lab import cluster
from kvpool.lab.cluster import Lab
from kvpool.lab.linux import LabError
from kvpool.lab.network import Network
from tests.cluster.town import comes
from tests.pools import ROOT

ROWS = {
    "remote_get": {
        "work", "channel", "block_bytes", "batch", "GBps", "p50_us", "p99_us", "raw_GBps", "ratio",
    },
    "miss_after_kill": {
        "work", "rounds", "p50_ms", "max_ms", "deadline_ms", "next_p50_ms", "next_p99_ms",
    },
    "lookup": {"work", "blocks", "nodes", "p50_us", "p99_us", "remembered_p50_us"},
    "published": {"work", "keys", "told", "seconds", "bytes_per_key"},
    "hot_prefix": {
        "work", "workload", "nodes", "replicas", "requests", "hit", "egress_max_to_mean",
        "fetched_MiB", "copied_MiB", "fetch_p50_ms", "fetch_p99_ms",
    },
}  # fmt: skip
ROWS |= dict.fromkeys(("miss_after_stop", "miss_after_cut"), ROWS["miss_after_kill"])
KILLED = """
import sys, time
from kvpool.lab.cluster import Lab
with Lab(1, disk_bytes=8 << 20) as lab:
    lab.start()
    print(lab.folder, lab.etcd.pid, lab.nodes[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make networks")


def test_hosts_reach_one_another_unless_they_are_parted() -> None:
    with Network() as network:
        hosts = [network.add() for _ in range(3)]

        def reach(one: int, other: int) -> bool:
            listener = hosts[other].run(lambda: socket_on(hosts[other].address))
            try:
                hosts[one].connect(hosts[other].address, listener.getsockname()[1], 0.5).close()
            except OSError:
                return False
            finally:
                listener.close()
            return True

        assert all(reach(one, other) for one, other in ((0, 1), (1, 2), (2, 0)))
        network.part(hosts[:1], hosts[1:2])
        assert [reach(0, 1), reach(1, 0), reach(0, 2), reach(2, 1)] == [False, False, True, True]
        network.part(hosts[:2], hosts[2:])
        assert [reach(0, 1), reach(1, 2), reach(2, 0)] == [True, False, False]
        network.heal()
        network.pull(hosts[1])
        assert [reach(0, 1), reach(1, 2), reach(2, 0)] == [False, False, True]
        network.plug(hosts[1])
        assert reach(0, 1)


def socket_on(address: str):  # type: ignore[no-untyped-def]
    import socket

    return socket.create_server((address, 0))


def test_nothing_is_left_of_a_lab_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder, *pids = process.stdout.readline().split()
        assert Path(folder).is_dir()
        process.send_signal(signal.SIGKILL)
    comes(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its processes ended")
    assert folder not in Path("/proc/self/mounts").read_text()
    monkeypatch.setattr(cluster, "_YOUNG_S", -1.0)
    cluster._sweep(Path(tempfile.gettempdir()))
    assert not Path(folder).exists()


def test_a_lab_that_runs_is_not_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_YOUNG_S", -1.0)
    with Lab(1, has_etcd=False) as lab:
        cluster._sweep(Path(tempfile.gettempdir()))
        assert lab.folder.is_dir()
    assert not lab.folder.exists()


def test_a_node_that_does_not_begin_says_why() -> None:
    with Lab(1, has_etcd=False, dram="12 parsecs") as lab:
        begin = time.monotonic()
        with pytest.raises(LabError, match="parsecs"):
            lab.start()
        assert time.monotonic() - begin < 60


def test_the_bench_gives_its_rows() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "cluster", "--json", "--quick"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["work"] for row in rows} == set(ROWS)
    for row in rows:
        assert set(row) == ROWS[row["work"]]
    assert all(row["max_ms"] > 0 for row in rows if row["work"].startswith("miss_after"))


def test_the_example_runs_through() -> None:
    done = subprocess.run(
        [sys.executable, "examples/04_cluster/run.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"still served: fetched from node-2", done.stdout)
    assert "every byte that came was what was put" in done.stdout
