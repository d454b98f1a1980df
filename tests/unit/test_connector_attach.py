"""An engine and its pool: an engine starts without one, attaches later, and is never in its way."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool import BadArgument, Manifest
from kvpool.connectors import attach
from kvpool.connectors.attach import Attachment
from kvpool.connectors.options import read_options
from tests.pools import keys, opaque, payloads
from tests.served import WAIT_S, Served, served, wait_for

SOME = keys(range(3))


class Lines(logging.Handler):
    """What an operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def of(self, level: str) -> list[str]:
        return [line for line in self.lines if line.startswith(level)]


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def log(lines: Lines, request: pytest.FixtureRequest) -> Iterator[logging.Logger]:
    log = logging.getLogger(f"kvpool.test.{request.node.name}")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(lines)
    yield log
    log.removeHandler(lines)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For tests that neither end nor stop it; each has a namespace of its own."""
    with served(tmp_path_factory.mktemp("node")) as daemon:
        yield daemon


@pytest.fixture
def mine(request: pytest.FixtureRequest) -> Manifest:
    return opaque(salt=request.node.name)


def attached(log: logging.Logger, address: str, **more: Any) -> Attachment:
    extra = {"address": address, "connect_timeout_s": 0.2, "load_timeout_s": 5, **more}
    return Attachment(read_options(extra), name="test engine", log=log)


@pytest.fixture(params=["shm", "tcp"])
def channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_node_that_is_there_is_attached_at_once(
    node: Served, mine: Manifest, channel: str, log: logging.Logger, lines: Lines
) -> None:
    one = attached(log, node.address(channel), connect_timeout_s=WAIT_S)
    assert one.pool is not None
    assert one.shares_memory == one.pool.shares_memory == (channel == "shm")
    space = one.space(mine)
    assert space is not None
    assert space.put(SOME, payloads(SOME)).stored == 3
    assert one.space(mine) is space
    assert one.space(opaque(salt="other")) is not space
    assert one._thread is None
    assert lines.of("WARNING") == []
    (told,) = lines.of("INFO")
    assert node.address(channel) in told
    one.close()
    one.close()
    assert (one.pool, one.space(mine), one.shares_memory) == (None, None, False)


def test_a_node_that_comes_later_is_attached_then_and_each_is_told_once(
    tmp_path: Path, log: logging.Logger, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(attach, "PAUSE_S_MAX", 0.02)
    attempts = counted(monkeypatch)
    daemon = Served(tmp_path)
    one = attached(log, f"unix:{daemon.socket_path}")
    assert (one.pool, one.space(opaque()), one.shares_memory) == (None, None, False)
    wait_for(lambda: len(attempts) > 3, what="it is looked for again and again")
    (missing,) = lines.of("WARNING")
    assert str(daemon.socket_path) in missing
    assert "start `kvpool serve`" in missing
    try:
        daemon.start()
        wait_for(lambda: one.pool is not None, what="attached")
        space = one.space(opaque())
        assert space is not None
        assert space.put(SOME, payloads(SOME)).stored == 3
        wait_for(lambda: len(lines.of("INFO")) == 1, what="told")
        one.close()
    finally:
        daemon.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    attempts: list[int] = []
    connect = kvpool.connect

    def counting(*arguments: Any, **options: Any) -> kvpool.Pool:
        attempts.append(1)
        return connect(*arguments, **options)

    monkeypatch.setattr(kvpool, "connect", counting)
    return attempts


def test_a_restarted_node_is_the_same_space(tmp_path: Path, log: logging.Logger) -> None:
    daemon = Served(tmp_path).start()
    try:
        one = attached(log, daemon.unix_address, connect_timeout_s=WAIT_S)
        space = one.space(opaque())
        assert space is not None
        daemon.kill()
        assert space.lookup(SOME).blocks == 0
        assert one.pool is not None
        assert one.space(opaque()) is space
        daemon.start()
        wait_for(lambda: space.put(SOME, payloads(SOME)).stored > 0, what="it is back")
        assert space.lookup(SOME).blocks == 3
        one.close()
    finally:
        daemon.close()


def test_a_space_of_a_node_that_hangs_is_had_when_it_goes_on(
    tmp_path: Path, log: logging.Logger, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "PAUSE_S_MAX", 0.5)
    with served(tmp_path) as daemon:
        one = attached(log, daemon.unix_address, connect_timeout_s=WAIT_S, load_timeout_s=0.2)
        daemon.signal(signal.SIGSTOP)
        try:
            assert one.space(opaque()) is None
            assert one.space(opaque()) is None  # which asked nobody: see the next test
            assert len(lines.of("WARNING")) == 1
        finally:
            daemon.signal(signal.SIGCONT)
        wait_for(lambda: one.space(opaque()) is not None, what="the space is had")
        one.close()


def test_a_space_is_one_request_whoever_asks_for_it(
    node: Served, mine: Manifest, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attached(log, node.unix_address, connect_timeout_s=WAIT_S)
    asked: list[Manifest] = []
    opened = Attachment._opened

    def counting(self: Attachment, pool: kvpool.Pool, manifest: Manifest) -> Any:
        asked.append(manifest)
        return opened(self, pool, manifest)

    monkeypatch.setattr(Attachment, "_opened", counting)
    barrier = threading.Barrier(8)
    found: list[Any] = []

    def ask() -> None:
        barrier.wait(WAIT_S)
        found.append(one.space(mine))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 8
    assert found[0] is not None
    assert len({id(each) for each in found}) == 1
    assert asked == [mine]
    one.close()


def test_a_manifest_that_differs_is_told_once_with_its_fields(
    node: Served, log: logging.Logger, lines: Lines
) -> None:
    one = attached(log, node.unix_address, connect_timeout_s=WAIT_S)
    assert one.space(opaque(name="prod", engine="block=32; attention=A")) is not None
    other = opaque(name="prod", engine="block=32; attention=B")
    with node.connect() as theirs:
        theirs.namespace(opaque(name="prod", engine="block=32; attention=A"))
    for _ in range(3):
        assert one.space(other) is None
    (told,) = lines.of("WARNING")
    assert "engine: stored 'attention=A', given 'attention=B'" in told
    assert one._thread is None  # it never will be: nobody tries again
    one.close()


def test_a_wrong_token_is_told_and_a_corrected_one_attaches(
    tmp_path: Path, log: logging.Logger, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(attach, "PAUSE_S_MAX", 0.02)
    attempts = counted(monkeypatch)
    right, ours = tmp_path / "right", tmp_path / "ours"
    right.write_text("right-token")
    ours.write_text("wrong-token")
    with served(tmp_path, token_file=str(right)) as daemon:
        address = daemon.tcp_address
        one = attached(log, address, token_file=str(ours), connect_timeout_s=WAIT_S)
        wait_for(lambda: len(attempts) > 2, what="it is tried again")
        assert one.pool is None
        (told,) = lines.of("WARNING")
        assert "refuses this engine" in told
        assert "wrong-token" not in told
        ours.unlink()  # an error of another kind, in the middle of it
        wait_for(lambda: len(lines.of("WARNING")) >= 2, what="told")
        ours.write_text("right-token")
        wait_for(lambda: one.pool is not None, what="attached")
        one.close()


def test_a_token_file_that_is_not_there_is_refused_at_once(
    tmp_path: Path, log: logging.Logger
) -> None:
    with pytest.raises(BadArgument, match="cannot be read"):
        attached(log, f"unix:{tmp_path}/none.sock", token_file=str(tmp_path / "none"))


def test_an_address_of_the_environment_that_cannot_be_meant(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "localhost:7070")
    with pytest.raises(BadArgument, match="write unix:"):
        Attachment(read_options({}), name="test engine", log=log)


def test_close_ends_the_thread_that_looks_for_a_node(tmp_path: Path, log: logging.Logger) -> None:
    one = attached(log, f"unix:{tmp_path}/none.sock")
    thread = one._thread
    assert thread is not None
    assert thread.daemon
    one.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert one.pool is None


def test_a_pool_that_comes_while_it_is_closed_is_given_back(
    tmp_path: Path, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "PAUSE_S_MIN", 0.01)
    connect = kvpool.connect
    came, go = threading.Event(), threading.Event()
    pools: list[kvpool.Pool] = []

    def slow(*arguments: Any, **options: Any) -> kvpool.Pool:
        pool = connect(*arguments, **options)
        pools.append(pool)
        came.set()
        assert go.wait(WAIT_S)
        return pool

    with served(tmp_path) as daemon:
        one = attached(log, f"unix:{tmp_path}/none.sock")
        thread = one._thread
        assert thread is not None
        monkeypatch.setattr(kvpool, "connect", lambda _, **more: slow(daemon.unix_address, **more))
        assert came.wait(WAIT_S)
        one.close()
        go.set()
        thread.join(WAIT_S)
        assert one.pool is None
        assert all(pool.closed for pool in pools)


def test_a_forked_child_has_no_pool_and_takes_none_from_its_parent(
    node: Served, mine: Manifest, log: logging.Logger
) -> None:
    one = attached(log, node.unix_address, connect_timeout_s=WAIT_S)
    space = one.space(mine)
    assert space is not None
    child = os.fork()
    if child == 0:
        none = one.pool is None and one.space(mine) is None and not one.shares_memory
        one.close()
        os._exit(0 if none else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert one.space(mine) is space
    assert space.put(SOME, payloads(SOME)).stored == 3
    one.close()


def test_asking_for_the_pool_does_not_wait_for_who_opens_a_space(
    node: Served, mine: Manifest, log: logging.Logger
) -> None:
    one = attached(log, node.unix_address, connect_timeout_s=WAIT_S)
    known = one.space(mine)
    with one._lock:  # as a thread has it that waits for a request
        assert one.pool is not None
        assert one.shares_memory
        assert one.space(mine) is known
    one.close()


def test_what_is_asked_of_a_node_later_has_the_time_of_a_load(
    tmp_path: Path, log: logging.Logger
) -> None:
    with served(tmp_path) as daemon:
        one = attached(log, daemon.unix_address, connect_timeout_s=WAIT_S, load_timeout_s=0.3)
        assert one.pool is not None
        daemon.signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert one.space(opaque()) is None
        assert 0.25 <= time.monotonic() - begin < WAIT_S
        daemon.signal(signal.SIGCONT)
        one.close()
