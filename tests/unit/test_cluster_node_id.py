"""Who a node is, kept in a directory: through restarts, damage, and a second daemon."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cluster import node_id
from kvpool.cluster.node_id import FILE, INCARNATION_MAX, StateDirectory, StateRefused


def opened(path: Path, now_ns: int = 1000) -> StateDirectory:
    return StateDirectory(str(path), lambda: now_ns)


def test_the_id_stays_and_the_incarnation_grows(tmp_path: Path) -> None:
    seen = []
    for now_ns in (1000, 2000, 2000, 5, 3000):  # the clock stands still, and goes back
        one = opened(tmp_path / "state", now_ns)
        seen.append(one.node)
        one.close()
    assert len({each.id for each in seen}) == 1
    assert [each.incarnation for each in seen] == [1000, 2000, 2001, 2002, 3000]
    assert len(seen[0].id) == 32


def test_two_directories_are_two_nodes(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "a"), opened(tmp_path / "b")
    assert one.node.id != other.node.id
    one.close()
    other.close()


def test_it_is_for_one_daemon_at_a_time(tmp_path: Path) -> None:
    one = opened(tmp_path)
    with pytest.raises(StateRefused, match=rf"pid {os.getpid()}\) uses it; .*state_dir"):
        opened(tmp_path)
    one.close()
    one.close()
    opened(tmp_path).close()


def test_a_daemon_that_was_killed_leaves_it_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from kvpool.cluster.node_id import StateDirectory\n"
        "s = StateDirectory(sys.argv[1], lambda: 9); print(s.node.id, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        told = child.stdout.readline().strip()
        with pytest.raises(StateRefused, match=rf"pid {child.pid}"):
            opened(tmp_path)
        child.kill()
    one = opened(tmp_path)
    assert (one.node.id, one.node.incarnation) == (told, 1000)
    one.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        b"[]",
        b"\xff\xfe",
        b'{"id": "' + b"0" * 32 + b'"}',
        b'{"id": 5, "incarnation": 1, "check": 0}',
        b"[" * 4000,
        b"x" * 10_000,
    ],
)
def test_damage_is_named_and_no_new_id_is_made(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    for _ in range(2):
        with pytest.raises(StateRefused, match=r"damaged.*remove it"):
            opened(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


def test_one_wrong_digit_is_damage(tmp_path: Path) -> None:
    opened(tmp_path).close()
    told = json.loads((tmp_path / FILE).read_text())
    for field, value in (("incarnation", told["incarnation"] + 1), ("id", "0" * 32)):
        (tmp_path / FILE).write_text(json.dumps(told | {field: value}))
        with pytest.raises(StateRefused, match="damaged"):
            opened(tmp_path)


def test_the_last_incarnation_is_named(tmp_path: Path) -> None:
    opened(tmp_path, INCARNATION_MAX).close()
    with pytest.raises(StateRefused, match="last one"):
        opened(tmp_path, INCARNATION_MAX)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateRefused, match=r"cannot be used: (File exists|Not a directory)"):
        opened(tmp_path / "file")
    (tmp_path / "state" / FILE).mkdir(parents=True)
    with pytest.raises(StateRefused, match="cannot be read"):
        opened(tmp_path / "state")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StateRefused, match="cannot be used: Permission denied"):
        opened(tmp_path / "state")


def test_a_full_disk_keeps_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).close()
    before = (tmp_path / FILE).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(node_id.os, "fsync", full)
    with pytest.raises(StateRefused, match=r"cannot be written: No space.*another state_dir"):
        opened(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["node.json", "node.lock"]
    monkeypatch.undo()
    one = opened(tmp_path)  # the refusal gave the lock back
    assert one.node.incarnation == 1001
    one.close()
