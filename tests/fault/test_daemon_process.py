"""`kvpool serve` as a process: ready when it says so, and ended in time whatever hangs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvpool
from kvpool import wire
from tests.pools import ROOT, got, keys, opaque, payloads, wait_until
from tests.serve_process import END_S, Served, descriptors_of, processor_s_of, served

SOME = keys(range(8))


def filled(pool: kvpool.Pool) -> kvpool.Namespace:
    space = pool.namespace(opaque())
    assert space.put(SOME, payloads(SOME)).no_room == 0
    return space


def test_it_is_ready_when_it_says_so(tmp_path: Path) -> None:
    with served(tmp_path, "--listen", "127.0.0.1:0") as daemon:
        assert daemon.ready == (
            f"kvpool: ready socket={daemon.socket} listen={daemon.listen.removeprefix('tcp://')}"
            f" pid={daemon.pid}\n"
        )
        for address in (daemon.address, daemon.listen):
            with kvpool.connect(address) as pool:
                assert got(filled(pool), SOME) == 8
        assert daemon.is_logged("INFO ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_takes_the_socket_away(tmp_path: Path, number: int) -> None:
    with served(tmp_path) as daemon, kvpool.connect(daemon.address) as pool:
        space = filled(pool)
        status, seconds = daemon.end(number)
        assert status == 0
        assert seconds < END_S
        assert not os.path.exists(daemon.socket)
        wait_until(lambda: not pool.stats()["client"]["connected"])
        assert got(space, SOME) == 0
        assert daemon.is_logged("INFO ended")


def test_it_ends_in_time_under_load(tmp_path: Path) -> None:
    with served(tmp_path) as daemon:
        stop = threading.Event()

        def load() -> None:
            with kvpool.connect(daemon.address) as pool:
                space = pool.namespace(opaque(block_bytes=1 << 20))
                wanted, data = keys(range(4)), bytes(4 << 20)
                while not stop.is_set():
                    space.remove(wanted)
                    space.put(wanted, data, timeout=1)
                    space.get_into(wanted, bytearray(4 << 20))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for each in threads:
            each.start()
        with kvpool.connect(daemon.address) as pool:
            wait_until(lambda: pool.stats()["puts"] > 20)
        status, seconds = daemon.end()
        stop.set()
        for each in threads:
            each.join()
        assert (status, seconds < END_S) == (0, True)


HANGS = """
import signal, threading, time
from kvpool import _core
class Hanging:
    def __init__(self, node):
        self.node = node
    def __getattr__(self, name):
        return getattr(self.node, name)
    def close(self, *args):
        print("closing", flush=True)
        time.sleep(60)
server = _core.Server.create
_core.Server.create = staticmethod(lambda node, **options: server(node.node, **options))
_core.Node.open = staticmethod(lambda open=_core.Node.open, **options: Hanging(open(**options)))
from kvpool.cli import main
main()
"""


def test_it_ends_in_time_even_if_the_core_hangs_and_says_where(tmp_path: Path) -> None:
    with served(tmp_path, code=HANGS) as daemon:
        status, seconds = daemon.end()
        assert status == 1
        assert END_S - 1 < seconds < END_S + 5  # and not the 60 s of the hanging core
        assert daemon.is_logged("Timeout (0:00:04")
        assert daemon.is_logged("in close")


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with served(tmp_path, code=HANGS) as daemon:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.stdout is not None
        assert daemon.process.stdout.readline() == "closing\n"
        status, seconds = daemon.end(signal.SIGINT)
        assert status == 128 + signal.SIGINT
        assert seconds < END_S - 1


def test_a_client_that_is_stopped_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    code = """
import sys, kvpool
from tests.pools import *
pool = kvpool.connect(sys.argv[1])
space = pool.namespace(opaque())
space.put([key(1)], payload(key(1)))
with space.view([key(1)]) as blocks:
    print(len(blocks), flush=True)
    sys.stdin.read()
"""
    with served(tmp_path) as daemon:
        client = subprocess.Popen(
            [sys.executable, "-c", code, daemon.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "1\n"
        stop(client.pid)
        status, seconds = daemon.end()
        client.kill()
        client.communicate()
        assert (status, seconds < END_S) == (0, True)


def test_what_was_put_is_on_the_ssd_after_a_signal(tmp_path: Path) -> None:
    words = ("--ssd", str(tmp_path / "tier"), "--ssd-capacity", "16MiB", "--ssd-admit", "all")
    floor = ("--ssd-free-floor", "0")
    with served(tmp_path, *words, *floor) as daemon, kvpool.connect(daemon.address) as pool:
        filled(pool)
        assert daemon.end()[0] == 0
    with served(tmp_path, *words, *floor) as daemon, kvpool.connect(daemon.address) as pool:
        assert got(pool.namespace(opaque()), SOME) == 8
        assert pool.stats()["ssd_hits"] == 8


def test_a_killed_daemon_s_socket_is_taken_over_and_its_clients_come_back(tmp_path: Path) -> None:
    words = ("--ssd", str(tmp_path / "tier"), "--ssd-capacity", "16MiB")
    more = ("--durability", "durable", "--ssd-free-floor", "0", "--listen", "127.0.0.1:0")
    with served(tmp_path, *words, *more) as daemon:
        pools = [kvpool.connect(each) for each in (daemon.address, daemon.listen)]
        spaces = [filled(each) for each in pools]
        port = daemon.listen
        daemon.kill()
    assert os.path.exists(daemon.socket)
    wait_until(lambda: not any(each.stats()["client"]["connected"] for each in pools))
    for pool, space in zip(pools, spaces, strict=True):
        begin = time.monotonic()
        # Memory that the dead node shared is as it left it, and may be read for a while.
        is_mapped = pool.stats()["client"]["address"] == daemon.address
        assert got(space, SOME) in ((0, 8) if is_mapped else (0,))
        assert space.put(SOME, payloads(SOME)).stored == 0
        assert time.monotonic() - begin < 4  # a call may take 5
    more = (*more[:-1], port.removeprefix("tcp://"))
    with served(tmp_path, *words, *more):
        for pool, space in zip(pools, spaces, strict=True):
            wait_until(lambda pool=pool: pool.stats()["client"]["connected"])
            assert got(space, SOME) == 8
            assert pool.stats()["client"]["reconnects"] == 1
            pool.close()


def test_a_stopped_daemon_costs_the_deadline_and_comes_back(tmp_path: Path) -> None:
    with (
        served(tmp_path, "--listen", "127.0.0.1:0") as daemon,
        kvpool.connect(daemon.listen, timeout=0.5) as pool,
    ):
        space = filled(pool)
        stop(daemon.pid)
        begin = time.monotonic()
        assert got(space, SOME) == 0
        assert space.temperature(SOME[0]) is None
        assert pool.flush(0.1) is False
        with pytest.raises(kvpool.Unreachable):
            pool.namespace(opaque(salt="new"))
        daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda: got(space, SOME) == 8)
        wait_until(lambda: "blocks" in pool.stats())
        assert time.monotonic() - begin < 60


def test_a_second_daemon_is_refused_and_ends_with_1(tmp_path: Path) -> None:
    with served(tmp_path) as daemon:
        other = Served(tmp_path)
        assert other.ready == ""
        assert other.wait() == 1
        assert other.is_logged(f"kvpool: error: socket {daemon.socket}: another kvpool serve has")
        assert other.is_logged(f"process {daemon.pid})")
        with kvpool.connect(daemon.address):
            pass


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--ssd", "/proc/self/tier", "--ssd-capacity", "1GiB"), "error: SSD tier in"),
        (("--listen", "127.0.0.1:1", "--socket", "/proc/none.sock"), "error: socket /proc/none"),
    ],
)
def test_what_the_machine_refuses_ends_it_with_1(
    tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    daemon = Served(tmp_path, *words)
    assert daemon.ready == ""
    assert daemon.wait() == 1
    assert daemon.is_logged(complaint)
    assert not daemon.is_logged("Traceback")
    assert not os.path.exists(daemon.socket)


def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(30)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with served(tmp_path, environment=environment) as daemon:
            assert notified.recv(100) == b"READY=1"
            daemon.end()
            assert notified.recv(100) == b"STOPPING=1"


def test_nobody_needs_to_read_what_it_says(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ["serve", "--socket", str(tmp_path / "node.sock"), "--dram", "2MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool", *words], cwd=ROOT, stdout=writer, stderr=writer
    )
    os.close(writer)
    with kvpool.connect(f"unix:{tmp_path}/node.sock", timeout=30) as pool:
        assert got(filled(pool), SOME) == 8
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_its_log_is_json_if_asked(tmp_path: Path) -> None:
    import json

    with served(tmp_path, "--log-format", "json", "--log-level", "debug") as daemon:
        with kvpool.connect(daemon.address, name='a "quoted"\nname'):
            pass
        daemon.end()
        lines = [json.loads(line) for line in daemon.log]
        assert [line["event"] for line in lines if line["event"] == "ready"] == ["ready"]
        (connected,) = [line for line in lines if line["event"] == "client connected"]
        assert connected["name"] == 'a "quoted"\nname'
        assert connected["pid"] == os.getpid()


def stop(pid: int) -> None:
    """Returns when every thread has stopped, which is some time after the signal."""
    os.kill(pid, signal.SIGSTOP)

    def is_stopped() -> bool:
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        return {each.read_text().rpartition(")")[2].split()[0] for each in tasks} == {"T"}

    wait_until(is_stopped)


def idle_share(pid: int) -> float:
    """Of one processor, that a process uses while nobody wants anything of it."""
    begin_s, begin = processor_s_of(pid), time.monotonic()
    time.sleep(1)  # what is measured
    return (processor_s_of(pid) - begin_s) / (time.monotonic() - begin)


# --- strangers -----------------------------------------------------------------------------------


def connection(daemon: Served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(daemon.socket)
    return sock


def test_a_crowd_of_silent_strangers_keeps_a_client_out_for_a_second_or_two(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as daemon:
        crowd = [connection(daemon) for _ in range(64)]
        begin = time.monotonic()
        with kvpool.connect(daemon.address, timeout=30) as pool:
            assert got(filled(pool), SOME) == 8
        assert time.monotonic() - begin < 10
        for each in crowd:
            each.close()


def test_a_flood_of_garbage_leaves_nothing_behind_and_a_short_log(tmp_path: Path) -> None:
    with served(tmp_path) as daemon:
        with kvpool.connect(daemon.address) as pool:
            space = filled(pool)
            before = descriptors_of(daemon.pid)
            for number in range(300):
                with connection(daemon) as sock:
                    said = wire.pack_hello({"kind": "control"}, version=number)[: number % 40]
                    sock.sendall(said or b"\0")
            with connection(daemon) as sock, contextlib.suppress(OSError):  # it does not read all
                sock.sendall(os.urandom(1 << 20))
            assert got(space, SOME) == 8
            wait_until(lambda: descriptors_of(daemon.pid) == before)
        assert daemon.end()[0] == 0
        assert len(daemon.log) < 100


def test_out_of_descriptors_it_serves_on_without_spinning(tmp_path: Path) -> None:
    with (
        served(tmp_path, descriptors_max=64) as daemon,
        kvpool.connect(daemon.address, timeout=30) as pool,
    ):
        space = filled(pool)
        crowd = [connection(daemon) for _ in range(100)]
        wait_until(lambda: daemon.is_logged("ERROR out of descriptors"))
        assert got(space, SOME) == 8
        assert pool.stats()["blocks"] == 8
        with pytest.raises(kvpool.Unreachable):
            kvpool.connect(daemon.address, timeout=0.2)
        assert idle_share(daemon.pid) < 0.2
        for each in crowd:
            each.close()
        with kvpool.connect(daemon.address, timeout=30) as other:
            assert got(other.namespace(opaque()), SOME) == 8
        assert idle_share(daemon.pid) < 0.2
        assert len([line for line in daemon.log if "ERROR out of descriptors" in line]) == 1
