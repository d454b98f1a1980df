"""Files in a pool: whole or a miss, whatever is lost or replaced; and the commands on a daemon."""

import contextlib
import io
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvpool
from kvpool.errors import BadArgument, KvpoolError
from kvpool.operate import files
from tests.operated import command, json_of
from tests.pools import ROOT, opened
from tests.served import Served, served

BLOCK = 4096


@pytest.fixture
def space() -> Iterator[kvpool.Namespace]:
    with opened("8MiB") as pool:
        yield pool.namespace(files.manifest_of("files", BLOCK))


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def put(space: kvpool.Namespace, key: str, data: bytes) -> files.Stored:
    return files.put(space, key, io.BytesIO(data))


def got(space: kvpool.Namespace, key: str) -> bytes:
    return b"".join(files.get(space, key))


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 100 * BLOCK + 7])
def test_what_was_put_is_got(space: kvpool.Namespace, size: int) -> None:
    data = content(size)
    done = put(space, "k", data)
    assert (done.bytes, done.blocks, done.present) == (size, -(-size // BLOCK), 0)
    assert got(space, "k") == data


def test_more_than_a_slice(space: kvpool.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLICE_BYTES", 3 * BLOCK)
    data = content(10 * BLOCK + 5)
    put(space, "k", data)
    parts = list(files.get(space, "k"))
    assert [len(part) for part in parts] == [3 * BLOCK, 3 * BLOCK, 3 * BLOCK, BLOCK + 5]
    assert b"".join(parts) == data


def test_a_pipe_gives_what_it_has(space: kvpool.Namespace) -> None:
    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 1000))

    data = content(3 * BLOCK + 1)
    files.put(space, "k", Trickle(data))
    assert got(space, "k") == data


def test_the_same_again_moves_nothing(space: kvpool.Namespace) -> None:
    data = content(9 * BLOCK)
    put(space, "k", data)
    done = put(space, "k", data)
    assert (done.present, done.is_replaced) == (9, False)
    assert got(space, "k") == data


def test_other_content_replaces_and_leaves_nothing_behind(space: kvpool.Namespace) -> None:
    put(space, "k", content(9 * BLOCK))
    before = space.pool.stats()["blocks"]
    shorter = content(9 * BLOCK)[: 4 * BLOCK] + b"another end"
    done = put(space, "k", shorter)
    assert (done.is_replaced, done.present) == (True, 4)
    assert got(space, "k") == shorter
    assert space.pool.stats()["blocks"] == before - 4  # 4 of 9 stay, 1 is new


def test_keys_do_not_meet(space: kvpool.Namespace) -> None:
    put(space, "a", content(BLOCK))
    put(space, "b", content(BLOCK))
    assert files.remove(space, "a") == 2
    assert got(space, "b") == content(BLOCK)
    with pytest.raises(files.FileMiss, match="there is no file 'a'"):
        got(space, "a")


@pytest.mark.parametrize("lost", [0, 1, 6])
def test_a_lost_block_is_a_miss_that_names_it(space: kvpool.Namespace, lost: int) -> None:
    put(space, "k", content(7 * BLOCK))
    space.remove([files.find(space, "k").names[lost]])
    with pytest.raises(files.FileMiss, match=f"block {lost + 1} of 7"):
        got(space, "k")


def test_a_block_of_other_bytes_is_a_miss(space: kvpool.Namespace) -> None:
    put(space, "k", content(3 * BLOCK))
    names = files.find(space, "k").names
    space.remove(names[1:2])
    space.put(names[1:2], content(BLOCK, seed=2), parent=names[0])
    with pytest.raises(files.FileMiss, match="block 2 of 'k' is not what its head names"):
        got(space, "k")


@pytest.mark.parametrize("at", [0, 8, 12, 20, 24, 40, 24 + 3 * 16])
def test_a_damaged_head_is_a_miss(space: kvpool.Namespace, at: int) -> None:
    put(space, "k", content(3 * BLOCK))
    name = files._head_name(space, "k")
    block = bytearray(files._block_of(space, name) or b"")
    block[at] ^= 0x10
    space.remove([name])
    space.put([name], bytes(block))
    with pytest.raises(files.FileMiss, match="none that this version reads"):
        got(space, "k")


def test_a_damaged_head_can_be_replaced(space: kvpool.Namespace) -> None:
    space.put([files._head_name(space, "k")], bytes(BLOCK))
    put(space, "k", b"whole")
    assert got(space, "k") == b"whole"


def test_a_file_larger_than_the_pool_is_refused_and_the_old_one_stays() -> None:
    with opened("4MiB") as pool:
        space = pool.namespace(files.manifest_of("files", 64 << 10))
        put(space, "k", b"old")
        with pytest.raises(KvpoolError, match=r"the pool (kept|took)"):
            put(space, "k", content(6 << 20))
        with pytest.raises(files.FileMiss):  # evicted by what did not fit, and not mixed with it
            got(space, "k")


def test_a_file_that_a_head_cannot_name_is_refused(
    space: kvpool.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_names_max", lambda _: 4)
    with pytest.raises(BadArgument, match="larger --block-bytes"):
        put(space, "k", content(5 * BLOCK))


def test_writers_of_one_key_never_mix(space: kvpool.Namespace) -> None:
    """Whoever wins: a reader has one of the contents, or a miss."""
    contents = [content(20 * BLOCK + at, seed=at) for at in range(4)]
    put(space, "k", contents[0])
    seen: set[bytes | None] = set()
    stop = threading.Event()

    def write(at: int) -> None:
        for _ in range(50):
            with contextlib.suppress(KvpoolError):  # others replaced it again and again
                put(space, "k", contents[at])

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(got(space, "k"))
            except files.FileMiss:
                seen.add(None)

    with ThreadPoolExecutor(5) as threads:
        reader = threads.submit(read)
        try:
            for each in [threads.submit(write, at) for at in range(4)]:
                each.result()
        finally:
            stop.set()
        reader.result()
    assert seen <= {*contents, None}
    put(space, "k", contents[1])
    assert got(space, "k") == contents[1]


@pytest.mark.parametrize("key", ["", "x" * 4097])
def test_keys_have_bounds(space: kvpool.Namespace, key: str) -> None:
    with pytest.raises(BadArgument, match="a key has"):
        put(space, key, b"")


def test_names_are_these(space: kvpool.Namespace) -> None:
    """The format: another version must find what this one stored."""
    put(space, "k", b"content")
    assert files._head_name(space, "k").hex() == "33ea9b31b133194cbec417a00abf506e"
    assert files.find(space, "k").names[0].hex() == "89db14af404694034072be31676c4a1c"


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_a_file_by_the_commands(daemon: Served, tmp_path: Path, channel: str) -> None:
    data = content((3 << 20) + 5)
    (tmp_path / "in").write_bytes(data)
    there = ("--address", daemon.address(channel))
    told = json_of("put", "model.bin", tmp_path / "in", *there)
    assert told == {
        "key": "model.bin",
        "bytes": len(data),
        "blocks": 4,
        "present": 0,
        "replaced": False,
    }
    command("get", "model.bin", tmp_path / "out", *there)
    assert (tmp_path / "out").read_bytes() == data
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out"]
    assert json_of("rm", "model.bin", *there) == {"key": "model.bin", "blocks": 5}
    done = command("get", "model.bin", tmp_path / "out", *there, status=1)
    assert "there is no file 'model.bin'" in done.stderr
    assert (tmp_path / "out").read_bytes() == data


def test_pipes(daemon: Served) -> None:
    data = content((2 << 20) + 1, seed=3)
    environment = {**os.environ, "KVPOOL_ADDRESS": daemon.unix_address}
    kvpool_ = f"{sys.executable} -m kvpool"
    script = f"{kvpool_} put piped >&2 && {kvpool_} get piped && {kvpool_} get piped --stream"
    done = subprocess.run(
        ["bash", "-c", script],
        input=data,
        capture_output=True,
        cwd=ROOT,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == data + data


def test_nothing_comes_out_of_a_torn_file(daemon: Served, tmp_path: Path) -> None:
    there = ("--address", daemon.unix_address)
    (tmp_path / "in").write_bytes(content(40 << 20))
    command("put", "torn", tmp_path / "in", *there)
    with daemon.connect() as pool:
        space = pool.namespace(files.manifest_of("files"))
        space.remove(files.find(space, "torn").names[-1:])
    done = command("get", "torn", *there, status=1)
    assert done.stdout_bytes == b""
    assert "block 40 of 40 of 'torn' is missing" in done.stderr
    streamed = command("get", "torn", "--stream", *there, status=1)
    assert streamed.stdout_bytes == content(40 << 20)[: 32 << 20]
    command("get", "torn", tmp_path / "out", *there, status=1)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
    command("rm", "torn", *there)


def test_namespaces_of_other_block_sizes_are_told_apart(daemon: Served, tmp_path: Path) -> None:
    there = ("--address", daemon.unix_address, "--namespace", "small")
    (tmp_path / "in").write_bytes(b"x")
    command("put", "k", tmp_path / "in", "--block-bytes", "64KiB", *there)
    done = command("get", "k", *there, status=2)
    assert "block_bytes: stored 65536, given 1048576" in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (("put", "k", "absent"), 1, "absent: cannot be read: No such file"),
        (("get", "k", "out", "--stream"), 2, "--stream is for stdout"),
        (("put", "k", "in", "--block-bytes", "64K"), 2, "write KiB (1024s)"),
        (("put", "k", "in", "--block-bytes", "100"), 2, "it must be 4096 or more"),
        (("get", "never put"), 1, "there is no file 'never put'"),
        (("rm", "never put"), 1, "there is no file 'never put'"),
    ],
)
def test_mistakes(
    daemon: Served,
    words: tuple[str, ...],
    status: int,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(b"x")
    done = command(*words, "--address", daemon.unix_address, status=status)
    assert complaint in done.stderr
    assert done.stdout == ""


def test_a_file_that_cannot_be_written(daemon: Served, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x")
    there = ("--address", daemon.unix_address)
    command("put", "k", tmp_path / "in", *there)
    done = command("get", "k", tmp_path / "absent" / "out", *there, status=1)
    assert "cannot be written" in done.stderr
