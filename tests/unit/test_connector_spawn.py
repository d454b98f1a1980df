"""An engine's own node: one for all that start together, outliving them, and never waited for."""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import kvpool
from kvpool import BadArgument, Unreachable
from kvpool.connectors import spawn
from kvpool.connectors.attach import Attachment
from kvpool.connectors.options import Options, read_options
from tests.pools import keys, opaque, payloads
from tests.served import WAIT_S, wait_for, working

QUICK = {"KVPOOL_SERVE_PREFAULT": "off", "KVPOOL_SERVE_HUGE_PAGES": "false"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A private folder; a node that is on a socket in it afterwards is killed."""
    home = tmp_path / "node"
    home.mkdir(mode=0o700)
    yield home
    for path in home.rglob("*.sock"):
        if spawn.answers(str(path)):
            kill(str(path))


def told(folder: Path, **more: object) -> Options:
    extra = {"address": f"unix:{folder}/kv.sock", "spawn": True, "spawn_dram": "16MiB", **more}
    return read_options(extra)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **QUICK, **more}


def node_pid(path: str) -> int:
    """Of the process that listens, from the kernel."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iii", packed)[0])


def kill(path: str) -> None:
    pid = node_pid(path)
    descriptor = os.pidfd_open(pid)
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    wait_for(lambda: not spawn.answers(path), what="the node is dead")
    os.close(descriptor)


def attach(pipe: Connection, options: Options) -> None:
    """Of a process of its own: waits for the word, starts or finds a node, tells whose it is."""
    pipe.send("ready")
    pipe.recv()
    address = spawn.ensure_node(options, environment())
    with kvpool.connect(address, timeout=WAIT_S) as pool:
        pipe.send((node_pid(address.removeprefix("unix:")), pool.shares_memory))
        pipe.recv()


def together(options: Options, count: int = 4) -> list[tuple[int, bool]]:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(working(attach, options)) for _ in range(count)]
        for worker in workers:
            assert worker.hear() == "ready"
        for worker in workers:
            worker.tell("go")
        found = [worker.hear(spawn.START_S_MAX + WAIT_S) for worker in workers]
        for worker in workers:
            worker.tell("end")
            assert worker.join() == 0
    return found


def test_of_four_that_start_together_one_starts_a_node_that_outlives_them(folder: Path) -> None:
    path = str(folder / "kv.sock")
    first = together(told(folder))
    assert len(set(first)) == 1
    pid, shares_memory = first[0]
    assert shares_memory
    assert spawn.answers(path), "the node ended with the processes that used it"
    log = Path(spawn.log_path(path))
    assert log.read_text().count("kvpool: ready ") == 1
    assert stat.S_IMODE(log.stat().st_mode) == 0o600

    assert set(together(told(folder))) == {(pid, True)}

    kill(path)  # and leaves its socket's file
    ((again, _),) = set(together(told(folder)))
    assert again != pid
    assert log.read_text().count("kvpool: ready ") == 2


def test_the_node_is_no_child_and_has_a_session_of_its_own(folder: Path) -> None:
    address = spawn.ensure_node(told(folder), environment(NOTIFY_SOCKET="@engine"))
    pid = node_pid(address.removeprefix("unix:"))
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    variables = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in variables
    held = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    assert not any(name.endswith(".spawn") for name in held), "it holds the lock of who started it"
    with kvpool.connect(address, timeout=WAIT_S) as pool:
        assert pool.stats()["bytes_limit"] == 16 << 20


def test_a_lock_whose_holder_died_is_not_waited_for(folder: Path) -> None:
    (folder / "kv.sock.spawn").write_bytes(b"")
    (folder / "kv.sock").write_bytes(b"")  # no socket at all
    with pytest.raises(Unreachable, match=r"kvpool serve ended: .*kv\.sock"):
        spawn.ensure_node(told(folder), environment())
    (folder / "kv.sock").unlink()
    assert spawn.answers(spawn.ensure_node(told(folder), environment()).removeprefix("unix:"))


def test_a_lock_that_is_held_is_waited_for_a_bounded_time(folder: Path) -> None:
    with (folder / "kv.sock.spawn").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(Unreachable, match="another process is starting a node"):
            spawn.ensure_node(told(folder), environment(), timeout_s=0.2)
        assert time.monotonic() - begin >= 0.2
    assert not (folder / "kv.log").exists()


def test_a_node_that_cannot_begin_says_why(folder: Path) -> None:
    damaged = folder / "ssd"
    damaged.write_text("a file, not a folder")
    options = told(folder, spawn_ssd=str(damaged), spawn_ssd_capacity="64MiB")
    with pytest.raises(Unreachable, match=r"kvpool serve ended: .*error: .*ssd"):
        spawn.ensure_node(options, environment())


def test_an_ssd_tier_is_asked_for(folder: Path) -> None:
    options = told(folder, spawn_ssd=str(folder / "ssd"), spawn_ssd_capacity="64MiB")
    more = {"KVPOOL_SERVE_SSD_FREE_FLOOR": "0", "KVPOOL_SERVE_SSD_DIRECT": "false"}
    address = spawn.ensure_node(options, environment(**more))
    with kvpool.connect(address, timeout=WAIT_S) as pool:
        assert 0 < pool.stats()["ssd_capacity_bytes"] <= 64 << 20


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(BadArgument, match="other users may write to it"):
        spawn.ensure_node(told(folder), environment())
    folder.chmod(0o700)
    assert list(folder.iterdir()) == []


def test_a_node_elsewhere_cannot_be_started(folder: Path) -> None:
    options = read_options({"spawn": True})
    with pytest.raises(BadArgument, match="on a unix socket only"):
        spawn.ensure_node(options, {"KVPOOL_ADDRESS": "tcp://127.0.0.1:1"})


def test_without_an_address_it_is_where_clients_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("kvpool.address.SYSTEM_FOLDER", str(folder / "none"))
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    options = read_options({"spawn": True, "spawn_dram": "16MiB"})
    address = spawn.ensure_node(options, environment())
    assert address == f"unix:{folder}/kvpool/node.sock"
    assert stat.S_IMODE((folder / "kvpool").stat().st_mode) == 0o700
    with kvpool.connect(timeout=WAIT_S) as pool:
        assert pool.shares_memory
    assert spawn.ensure_node(options, environment()) == address


def test_an_engine_attaches_to_the_node_that_it_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    log = logging.getLogger("kvpool.test.spawn")
    one, other = (Attachment(told(folder), name=name, log=log) for name in ("one", "other"))
    assert one.pool is not None
    assert other.pool is not None
    spaces = [each.space(opaque()) for each in (one, other)]
    assert spaces[0] is not None
    assert spaces[1] is not None
    some = keys(range(3))
    assert spaces[0].put(some, payloads(some)).stored == 3
    assert spaces[1].lookup(some).blocks == 3
    one.close()
    other.close()
    assert spawn.answers(str(folder / "kv.sock"))


def test_relative_folders_of_modules_stay_where_they_are() -> None:
    kept = spawn._environment({"PYTHONPATH": f"lib{os.pathsep}{os.sep}opt", "A": "b"})
    assert kept == {"PYTHONPATH": f"{os.getcwd()}/lib{os.pathsep}{os.sep}opt", "A": "b"}
