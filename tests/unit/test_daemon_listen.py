"""The sockets of a daemon: stale files, living rivals, rights, and too few descriptors."""

import asyncio
import contextlib
import errno
import io
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kvpool import NoResource, serve_listen, wire
from kvpool.serve_listen import Acceptor, Listeners
from kvpool.serve_log import open_log
from tests.daemons import answer_to, asked, connected, hello, planned, serving


def listeners(folder: Path, **flags: Any) -> Any:
    return contextlib.closing(Listeners(planned(folder, **flags)))


def test_the_socket_is_there_while_the_daemon_is(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with serving(tmp_path):
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()


@pytest.mark.parametrize(("text", "mode"), [("0600", 0o600), ("660", 0o660), ("0666", 0o666)])
def test_the_socket_has_just_the_rights_that_were_asked(
    tmp_path: Path, text: str, mode: int
) -> None:
    before = os.umask(0)  # the daemon's own must not shine through
    try:
        with listeners(tmp_path / "made", socket_mode=text):
            path = tmp_path / "made" / "node.sock"
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert stat.S_IMODE(path.parent.stat().st_mode) == (0o700 if mode == 0o600 else 0o755)
            assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_socket_that_a_dead_daemon_left_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "node.sock"))
        dead.listen()
    with serving(tmp_path) as daemon, connected(daemon) as sock:
        assert asked(sock, hello())["ok"] is True


def test_a_second_daemon_is_refused_and_the_first_not_disturbed(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        with pytest.raises(NoResource, match=rf"another kvpool serve .*process {os.getpid()}\)"):
            Listeners(planned(tmp_path))
        with connected(daemon) as sock:
            assert asked(sock, hello())["ok"] is True


def test_a_socket_that_another_program_listens_on_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "node.sock"))
        other.listen()
        with pytest.raises(NoResource, match="another process listens there"):
            Listeners(planned(tmp_path))
        assert (tmp_path / "node.sock").exists()


def test_of_daemons_that_race_one_wins(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "node.sock"))
    found: list[Listeners] = []
    refused: list[str] = []
    start = threading.Barrier(4)

    def race() -> None:
        start.wait()
        try:
            found.append(Listeners(planned(tmp_path)))
        except NoResource as error:
            refused.append(str(error))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(found), len(refused)) == (1, 3)
    found[0].close()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "node.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoResource, match="it is no socket"):
        Listeners(planned(tmp_path))
    assert os.path.lexists(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(NoResource, match="cannot be made: No such file or directory"):
        Listeners(planned(tmp_path / "two" / "levels"))


def test_what_was_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NoResource, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
            Listeners(planned(tmp_path, listen=f"127.0.0.1:{port}"))
    assert sorted(os.listdir(tmp_path)) == ["node.sock.lock"]
    assert len(os.listdir("/proc/self/fd")) <= before
    with listeners(tmp_path):  # the lock was given back
        pass


def test_a_socket_that_somebody_else_put_there_is_not_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with listeners(tmp_path):
        path.unlink()
        path.write_text("somebody's")
    assert path.read_text() == "somebody's"


def test_tcp_and_unix_serve_the_same_node(tmp_path: Path) -> None:
    with (
        serving(tmp_path, listen="127.0.0.1:0") as daemon,
        connected(daemon) as unix,
        connected(daemon, tcp=True) as tcp,
    ):
        assert asked(unix, hello())["boot"] == asked(tcp, hello())["boot"]


def test_a_folder_of_somebody_else_s_is_not_used_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_listen, "own_temporary_folder", lambda: str(tmp_path))
    monkeypatch.setattr(serve_listen, "is_own_folder", lambda _: False)
    with pytest.raises(NoResource, match="belongs to somebody else"):
        serve_listen.UnixListener(str(tmp_path / "node.sock"), 0o600, is_default=True)


# --- too few descriptors -------------------------------------------------------------------------


class Starved(socket.socket):
    """A listening socket without descriptors to give: accept() works while one was given up."""

    acceptor: Acceptor
    is_starved = True

    def accept(self) -> Any:
        if self.is_starved and self.acceptor._spare is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_descriptors_who_connects_is_told_and_the_rest_are_served_later(
    tmp_path: Path,
) -> None:
    path, log, admitted = str(tmp_path / "node.sock"), io.StringIO(), asyncio.Event()

    async def admit(sock: socket.socket, is_unix: bool) -> None:
        assert is_unix
        sock.close()
        admitted.set()

    async def case(listener: Starved) -> list[wire.Map]:
        listener.acceptor = Acceptor(listener, admit, open_log("text", "info", log))
        running = asyncio.create_task(listener.acceptor.run())
        answers = []
        for _ in range(30):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                answers.append(await asyncio.to_thread(answer_to, client, b""))
        listener.is_starved = False
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            await asyncio.wait_for(admitted.wait(), 30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert listener.acceptor._spare is None
        return answers

    with Starved(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        answers = asyncio.run(case(listener))
    assert {answer["error"] for answer in answers} == {"descriptors"}
    assert "out of descriptors" in answers[0]["message"]
    begun, ended = log.getvalue().splitlines()
    assert "ERROR out of descriptors: connections are turned away" in begun
    assert ended.endswith("WARNING descriptors are back turned_away=30")


class Stubborn(socket.socket):
    """A listening socket whose accept() always fails."""

    number = 0
    calls = 0

    def accept(self) -> Any:
        self.calls += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_an_accept_that_fails_for_ever_does_not_spin(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_spare() -> int:
        raise OSError(errno.EMFILE, "none")

    async def admit(*_: Any) -> None:
        raise AssertionError

    async def case(listener: Stubborn) -> None:
        with open(os.devnull, "w") as nowhere:
            acceptor = Acceptor(listener, admit, open_log("text", "error", nowhere))
            monkeypatch.setattr(serve_listen, "_spare_descriptor", no_spare)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.55):
                    await acceptor.run()

    path = str(tmp_path / "node.sock")
    with Stubborn(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.number = number
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        client.connect(path)
        asyncio.run(case(listener))
        assert 2 <= listener.calls <= 12  # a pause of 0.1 s between two
