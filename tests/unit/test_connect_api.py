"""kvpool.connect() to a real `kvpool serve`: the pool that it gives, and what it refuses."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import BadArgument, ForkedProcess, PoolClosed, Refused, Unreachable
from tests.pools import got, is_there, key, keys, opaque, payload, payloads, run_python, wait_until
from tests.serve_process import Served, served

SOME = keys(range(6))
TOKEN = "s3cret"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "token").write_text(TOKEN)
    words = ("--listen", "localhost:0", "--token-file", str(folder / "token"))
    with served(folder, *words) as daemon:
        yield daemon


@pytest.fixture(params=["unix", "tcp"])
def pool(node: Served, request: pytest.FixtureRequest) -> Iterator[kvpool.Pool]:
    with connected(node, request.param) as found:
        yield found


def connected(node: Served, kind: str = "unix", **options: Any) -> kvpool.Pool:
    if kind == "unix":
        return kvpool.connect(node.address, **options)
    first = node.listen.split(",")[0]
    return kvpool.connect(first, token=TOKEN, **options)


def fresh(pool: kvpool.Pool, test: Any, **fields: Any) -> kvpool.Namespace:
    return pool.namespace(opaque(salt=f"{test.node.name} {time.monotonic_ns()}", **fields))


def test_what_one_client_puts_another_gets(
    node: Served, pool: kvpool.Pool, request: pytest.FixtureRequest
) -> None:
    space = fresh(pool, request)
    assert space.put(SOME, payloads(SOME)).stored == 6
    for kind in ("unix", "tcp"):
        with connected(node, kind) as other:
            assert got(other.namespace(space.manifest), SOME) == 6


def test_who_reads_in_place_says_so(node: Served) -> None:
    for kind in ("unix", "tcp"):
        with connected(node, kind) as pool:
            assert pool.shares_memory == (kind == "unix")
        assert pool.shares_memory == (kind == "unix")  # it does not change with the connection


def test_connecting_may_take_less_or_more_than_a_call(tmp_path: Path) -> None:
    missing = f"unix:{tmp_path}/none.sock"
    begin = time.monotonic()
    with pytest.raises(Unreachable):
        kvpool.connect(missing, timeout=3600, connect_timeout=0.05)
    assert time.monotonic() - begin < 600  # not the other one
    with pytest.raises(BadArgument, match="connect_timeout is 0; it must be"):
        kvpool.connect(missing, connect_timeout=0)


def test_a_put_without_patience_stores_and_costs_nobody_a_connection(
    pool: kvpool.Pool, request: pytest.FixtureRequest
) -> None:
    """Its timeout is for another writer of the key, and there is none."""
    space = fresh(pool, request)
    for each in keys(range(20)):
        assert space.put([each], payload(each), timeout=0).stored == 1
        assert got(space, [each]) == 1


def test_drop_temperature_remove_and_wait(
    pool: kvpool.Pool, request: pytest.FixtureRequest
) -> None:
    space = fresh(pool, request)
    assert space.temperature(SOME[0]) is None
    space.put(SOME, payloads(SOME))
    assert isinstance(space.temperature(SOME[0]), float)
    assert space.remove(SOME[:2]) == 2
    assert space.wait(SOME[2:], 10) == 4
    assert space.drop() == 4
    assert not is_there(space, SOME[2])
    with pytest.raises(BadArgument, match="key"):
        space.temperature(b"short")


def test_a_wait_is_woken_by_another_client_s_put(
    node: Served, pool: kvpool.Pool, request: pytest.FixtureRequest
) -> None:
    space = fresh(pool, request)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(space.wait(SOME, 30)))
    waiting.start()
    with connected(node) as other:
        wait_until(lambda: other.stats()["clients_waiting"] > 0)
        other.namespace(space.manifest).put(SOME, payloads(SOME))
        waiting.join(30)
    assert found == [6]


def test_two_manifests_of_one_name_are_told_apart_by_field(
    node: Served, pool: kvpool.Pool, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    pool.namespace(opaque(name=name, tp=(0, 2)))
    with connected(node) as other, pytest.raises(kvpool.ManifestMismatch) as error:
        other.namespace(opaque(name=name, tp=(1, 2), epoch=3))
    assert error.value.name == name
    assert error.value.differing == {"tp": ((0, 2), (1, 2)), "epoch": (0, 3)}


def test_limits_are_the_node_s_and_change_for_all(node: Served) -> None:
    with connected(node) as pool, connected(node, "tcp") as other:
        assert pool.resize("32MiB", max_blocks=5000) >= 0
        assert other.stats()["bytes_limit"] == 32 << 20
        assert other.stats()["blocks_limit"] == 5000
        assert pool.resize("16MiB", max_blocks=0) >= 0
        assert other.stats()["bytes_limit"] == 16 << 20
        with pytest.raises(BadArgument, match="this pool was opened for"):
            pool.resize("1TiB")
        with pytest.raises(BadArgument, match="no SSD tier to resize"):
            pool.resize(ssd_capacity="1GiB")
        with pytest.raises(BadArgument, match="unknown unit"):
            pool.resize("8G")
        pool.trim()
        for each in (pool, other):
            assert each.flush(5) is True
            each.check()


def test_a_token_makes_nobody_an_administrator(node: Served) -> None:
    with connected(node, "tcp") as pool:
        before = pool.stats()
        with pytest.raises(kvpool.NotAllowed, match="resize is for administrators"):
            pool.resize("32MiB")
        with pytest.raises(PermissionError, match="trim is for administrators"):
            pool.trim()
        after = pool.stats()
    assert after["bytes_limit"] == before["bytes_limit"]
    counted = after["tenant"]["refused"]["not_admin"]
    assert counted - before["tenant"]["refused"].get("not_admin", 0) == 2


def test_stats_are_of_the_node_its_server_and_this_side(pool: kvpool.Pool) -> None:
    stats = pool.stats()
    assert stats["bytes_limit"] > 0
    assert stats["server"]["clients"] >= 1
    client = stats["client"]
    assert client["connected"] is True
    assert client["reconnects"] == 0
    assert client["shares_memory"] is (client["address"].startswith("unix:"))


def test_a_pool_says_when_it_is_closed(node: Served) -> None:
    pool = connected(node)
    space = pool.namespace(opaque())
    pool.close()
    pool.close()
    assert pool.closed
    for call in (
        pool.stats,
        pool.trim,
        lambda: pool.resize("16MiB"),
        lambda: pool.flush(1),
        lambda: pool.namespace(opaque()),
        lambda: space.temperature(SOME[0]),
        space.drop,
        lambda: space.put(SOME, payloads(SOME)),
        lambda: space.lookup(SOME),
    ):
        with pytest.raises(PoolClosed):
            call()


def test_closing_leaves_no_descriptor_and_no_thread(node: Served) -> None:
    connected(node).close()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for kind in ("unix", "tcp") * 3:
        with connected(node, kind) as pool:
            pool.namespace(opaque()).put(SOME, payloads(SOME))
    del pool
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_pool_that_is_forgotten_is_disconnected(node: Served) -> None:
    with connected(node) as watcher:
        pool = connected(node, name="forgotten")
        pool.namespace(opaque())
        wait_until(lambda: watcher.stats()["server"]["clients"] == 2)
        del pool
        wait_until(lambda: watcher.stats()["server"]["clients"] == 1)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"address": "here"}, "write unix:"),
        ({"address": 7}, "address is int"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "5"}, "timeout is str"),
        ({"connections": 0}, "connections is 0; it must be 1..16"),
        ({"connections": 17}, "connections is 17"),
        ({"name": b"x"}, "name is bytes"),
        ({"name": "n" * 300}, "at most 256 bytes"),
        ({"token": ""}, "token must have 1..4096 bytes"),
        ({"token": 5}, "token is int"),
        ({"token": "t", "token_file": "f"}, "token and token_file are both given"),
        ({"token_file": "absent"}, "token_file is 'absent': cannot be read"),
        ({"tenant": "a/b"}, "tenant is 'a/b'; a tenant's name is"),
        ({"tenant": ""}, "tenant is ''"),
        ({"tenant": 5}, "tenant is int"),
    ],
)
def test_options_that_cannot_be_meant(
    node: Served, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(BadArgument, match=complaint):
        kvpool.connect(**{"address": node.address, **options})


def test_the_token_comes_from_a_file_or_a_variable(
    node: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    address = node.listen.split(",")[0]
    with kvpool.connect(address, token_file=tmp_path / "token") as pool:
        assert pool.stats()["tenant"]["name"] == "default"
    monkeypatch.setenv("KVPOOL_TOKEN", TOKEN)
    monkeypatch.setenv("KVPOOL_TENANT", "default")
    with kvpool.connect(address) as pool:
        assert pool.stats()["client"]["connected"]
    with pytest.raises(Refused, match="no such tenant"):
        kvpool.connect(address, tenant="another")
    with pytest.raises(Refused, match="no such tenant"):
        kvpool.connect(address, token="another")


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_right_token_tcp_is_refused_at_once(node: Served, token: str | None) -> None:
    begin = time.monotonic()
    with pytest.raises(Refused, match="token") as error:
        kvpool.connect(node.listen.split(",")[0], token=token, timeout=30)
    assert error.value.code == "token"
    assert time.monotonic() - begin < 15


def test_no_node_in_time_lists_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    with pytest.raises(Unreachable) as error:
        kvpool.connect(timeout=0.1)
    assert f"unix:{tmp_path}/kvpool/node.sock: No such file" in str(error.value)
    assert "is `kvpool serve` running?" in str(error.value)


def test_connect_finds_the_node_of_the_environment(
    node: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", node.address)
    with kvpool.connect() as pool:
        assert pool.stats()["client"]["address"] == node.address


def test_connect_finds_the_node_that_was_told_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    code = """
import sys
sys.argv[:] = ["kvpool", *(word for word in sys.argv[1:] if "node.sock" not in word)]
sys.argv.remove("--socket")
from kvpool.cli import main; main()
"""
    with served(tmp_path, code=code), kvpool.connect() as pool:
        assert pool.stats()["client"]["address"] == f"unix:{tmp_path}/kvpool/node.sock"


def test_something_else_at_the_address_is_told_as_such(tmp_path: Path) -> None:
    import socket

    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()

        def greet() -> None:
            for _ in range(100):
                try:
                    sock, _ = other.accept()
                except OSError:
                    return
                with sock:
                    sock.sendall(b"220 mail.example.org ESMTP\r\n")

        greeting = threading.Thread(target=greet, daemon=True)
        greeting.start()
        with pytest.raises(Unreachable, match="begins with b'220 ma'"):
            kvpool.connect(f"unix:{path}", timeout=0.3)
        other.shutdown(socket.SHUT_RDWR)
        greeting.join()


# --- processes -----------------------------------------------------------------------------------


def test_a_process_ends_by_itself_with_a_pool_open(node: Served) -> None:
    code = """
import sys, kvpool
from tests.pools import *
pool = kvpool.connect(sys.argv[1])
space = pool.namespace(opaque(salt="ends"))
space.put([key(1)], payload(key(1)))
print("done")
"""
    begin = time.monotonic()
    status, out, error = run_python(code, node.address)
    assert (status, out) == (0, "done\n"), error
    assert time.monotonic() - begin < 15


def test_a_process_ends_by_itself_while_its_node_is_gone(tmp_path: Path) -> None:
    code = """
import os, signal, sys, kvpool
from tests.pools import *
pool = kvpool.connect(sys.argv[1], timeout=30)
os.kill(int(sys.argv[2]), signal.SIGKILL)
wait_until(lambda: not pool.stats()["client"]["connected"])
print("done")
"""
    with served(tmp_path) as daemon:
        begin = time.monotonic()
        status, out, error = run_python(code, daemon.address, str(daemon.pid))
        assert (status, out) == (0, "done\n"), error
        assert time.monotonic() - begin < 20


FORKS = """
import contextlib, os, sys, kvpool
from tests.pools import *
pool = kvpool.connect(sys.argv[1])
space = pool.namespace(opaque(salt=sys.argv[1]))
space.put([key(1)], payload(key(1)))
child = os.fork()
if child == 0:
    told = 0
    for call in (pool.stats, pool.trim, lambda: pool.namespace(opaque()), space.drop,
                 lambda: space.lookup([key(1)]), lambda: space.temperature(key(1))):
        try:
            call()
        except kvpool.ForkedProcess:
            told += 1
    pool.close()
    assert pool.closed
    with kvpool.connect(sys.argv[1]) as own:
        assert got(own.namespace(opaque(salt=sys.argv[1])), [key(1)]) == 1
    del own
    def left():
        links = []
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{each}"))
        return [each for each in links if each.startswith("socket:") or "memfd" in each]
    try:
        wait_until(lambda: not left(), 10)  # its own keeper may be about to let go of them
    finally:
        os._exit(0 if (told, left()) == (6, []) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, got(space, [key(1)]), pool.stats()["client"]["reconnects"])
"""


def test_a_forked_child_is_told_and_holds_nothing_of_its_parent_s(node: Served) -> None:
    status, out, error = run_python(FORKS, node.address)
    assert (status, out) == (0, "0 1 0\n"), error


def test_a_parent_that_dies_is_gone_though_its_child_lives(node: Served) -> None:
    code = """
import os, sys, time, kvpool
from tests.pools import *
pool = kvpool.connect(sys.argv[1], name="parent")
pool.namespace(opaque())
if os.fork() == 0:
    os.close(0), os.close(1), os.close(2)
    time.sleep(20)
    os._exit(0)
print("forked", flush=True)
os._exit(0)
"""
    with connected(node) as watcher:
        assert run_python(code, node.address)[1] == "forked\n"
        begin = time.monotonic()
        wait_until(lambda: watcher.stats()["server"]["clients"] == 1)
        assert time.monotonic() - begin < 10


def test_a_child_that_ends_normally_does_not_harm_its_parent(node: Served) -> None:
    code = """
import os, sys, kvpool
from tests.pools import *
pool = kvpool.connect(sys.argv[1])
space = pool.namespace(opaque(salt="normal"))
space.put([key(1)], payload(key(1)))
child = os.fork()
if child == 0:
    del pool, space
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, got(space, [key(1)]), space.put([key(2)], payload(key(2))).stored,
      pool.stats()["client"]["reconnects"])
"""
    status, out, error = run_python(code, node.address)
    assert (status, out) == (0, "0 1 1 0\n"), error


def test_a_killed_client_is_gone(node: Served) -> None:
    code = """
import os, signal, sys, kvpool
pool = kvpool.connect(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""
    with connected(node) as watcher:
        assert run_python(code, node.address)[0] == -signal.SIGKILL
        wait_until(lambda: watcher.stats()["server"]["clients"] == 1)
        assert watcher.stats()["server"]["streams"] == 2


def test_the_fork_error_is_the_one_of_an_embedded_pool() -> None:
    assert issubclass(ForkedProcess, PoolClosed)
    assert key(1) != payload(key(1))
