"""Addresses: what can be meant, where a node is looked for, and whose folder is trusted."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvpool import BadArgument, BadType, address, remote
from kvpool.address import TcpAddress, UnixAddress, parse_address, read_token


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("unix:/run/kvpool/node.sock", UnixAddress("/run/kvpool/node.sock")),
        ("unix:///run/kvpool/node.sock", UnixAddress("/run/kvpool/node.sock")),
        ("tcp://host:7070", TcpAddress("host", 7070)),
        ("tcp://[::1]:65535", TcpAddress("::1", 65535)),
    ],
)
def test_an_address_is_read(text: str, found: object) -> None:
    assert parse_address(text) == found
    assert parse_address(str(found)) == found


def test_a_relative_socket_is_of_this_folder() -> None:
    assert parse_address("unix:node.sock") == UnixAddress(os.path.join(os.getcwd(), "node.sock"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "write unix:"),
        ("/run/kvpool/node.sock", "write unix:/path/to/node.sock or tcp://host:port"),
        ("http://host:80", "write unix:"),
        ("tcp:host:80", "write unix:"),
        ("unix:", "names no socket"),
        ("unix:/a\0b", "NUL"),
        ("unix:/" + "s" * 107, "a path of 108 bytes; a unix socket has 107 at most"),
        ("tcp://host", "write host:port"),
        ("tcp://:7070", "write host:port"),
        ("tcp://host:", "write host:port"),
        ("tcp://host:70x", "write host:port"),
        ("tcp://host:\u0667", "write host:port"),
        ("tcp://host:0", "the port 0; it must be 1..65535"),
        ("tcp://host:65536", "it must be 1..65535"),
        ("tcp://host:" + "9" * 5000, "it must be 1..65535"),
        ("tcp://::1:7070", "put an IPv6 host in brackets"),
    ],
)
def test_what_is_no_address(text: str, complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint) as error:
        parse_address(text)
    assert len(str(error.value)) < 300


def test_an_address_is_text() -> None:
    with pytest.raises(BadType, match="address is int; write unix:"):
        parse_address(5)


def test_the_longest_path_is_one_that_can_be_bound(tmp_path: Path) -> None:
    room = address.SOCKET_PATH_BYTES_MAX - len(os.fsencode(tmp_path)) - 1
    path = str(tmp_path / ("s" * room))
    assert address.check_socket_path("socket", path) == path
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)


def test_a_client_looks_where_a_daemon_listens_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(address, "SYSTEM_FOLDER", str(tmp_path / "run"))
    own = str(tmp_path / "temporary" / f"kvpool-{os.getuid()}" / "node.sock")
    system = str(tmp_path / "run" / "kvpool" / "node.sock")
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert address.default_sockets({}) == [system, own]
    assert address.default_sockets(runtime) == [str(tmp_path / "kvpool" / "node.sock"), system, own]
    assert address.default_socket(runtime) == str(tmp_path / "kvpool" / "node.sock")
    assert address.default_socket({}) == own  # there is no such folder to make one in
    (tmp_path / "run").mkdir()
    assert address.default_socket({}) == system
    gone = {"XDG_RUNTIME_DIR": str(tmp_path / "logged out")}
    assert address.default_socket(gone) == system


def test_a_folder_is_own_or_root_s_and_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert address.is_own_folder(str(folder))
    assert not address.is_own_folder(str(link))
    assert not address.is_own_folder(str(tmp_path / "absent"))
    status = os.lstat(folder)
    stranger = os.stat_result((status.st_mode, 0, 0, 1, status.st_uid + 1, 0, 0, 0, 0, 0))
    assert stat.S_ISDIR(stranger.st_mode)
    monkeypatch.setattr(address.os, "lstat", lambda _: stranger)
    assert not address.is_own_folder(str(folder))


def test_a_stranger_s_temporary_folder_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path / "own")
    monkeypatch.setattr(remote, "own_temporary_folder", lambda: own)
    monkeypatch.setattr(remote, "default_sockets", lambda _: ["/run/x", f"{own}/node.sock"])
    monkeypatch.setattr(remote, "is_own_folder", lambda _: False)
    assert remote.candidates(None, {}) == [UnixAddress("/run/x")]
    monkeypatch.setattr(remote, "is_own_folder", lambda _: True)
    assert len(remote.candidates(None, {})) == 2


def test_the_address_of_the_environment_is_for_who_gives_none() -> None:
    environment = {"KVPOOL_ADDRESS": "tcp://there:1"}
    assert remote.candidates(None, environment) == [TcpAddress("there", 1)]
    assert remote.candidates("tcp://here:2", environment) == [TcpAddress("here", 2)]
    with pytest.raises(BadArgument):
        remote.candidates("", environment)


def test_a_token_is_not_waited_for_at_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadArgument, match="a pipe"):
        read_token("token_file", str(pipe))
