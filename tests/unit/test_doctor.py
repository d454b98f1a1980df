"""What doctor says of machines that fail in one way each, and that it can look at this one."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.operate import doctor, probes
from kvpool.operate.doctor import CHECKS, Finding, examine
from kvpool.operate.probes import DaemonFacts, Facts, SsdFacts
from tests.operated import command, controlled

GIB = 1 << 30
SSD = SsdFacts(
    path="/var/lib/kvpool",
    exists=True,
    is_writable=True,
    filesystem="xfs",
    free_bytes=500 * GIB,
    takes_direct=True,
)
WELL = Facts(
    python=(3, 11, 7),
    kvpool="1.0.0",
    installed="1.0.0",
    core_error="",
    system="Linux",
    machine="x86_64",
    kernel="6.1.0",
    cpu_flags=frozenset({"avx2", "avx512f", "sha_ni", "erms"}),
    memfd_error="",
    shm_fs_bytes=8 * GIB,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    cgroup_bytes=None,
    overcommit=0,
    thp="madvise",
    gets_huge_pages=True,
    hugetlb_pages=0,
    memlock_bytes=None,
    address_bytes=None,
    descriptors=(1024, 65_536),
    sockets=(("/run/kvpool/node.sock", ""),),
    clock="tsc",
    has_ucx=True,
    has_cuda=True,
    cupy="13.0",
    extras=("textual", "matplotlib"),
    asked_dram_bytes=32 * GIB,
    ssd=SSD,
    daemon=DaemonFacts(where="unix:/run/kvpool/node.sock", version="1.0.0"),
)


def one(facts: Facts, name: str) -> Finding:
    (found,) = [each for each in examine(facts) if each.name == name]
    return found


def test_all_is_well() -> None:
    found = examine(WELL)
    assert [each.name for each in found if each.verdict != "ok"] == []
    assert len({each.name for each in found}) == len(found) >= len(CHECKS) - 2
    assert not any(each.remedy for each in found)


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "found", "remedy"),
    [
        ("python", {"python": (3, 10, 2)}, "fail", "3.10.2", "3.11 or newer"),
        ("core", {"core_error": "ImportError: x"}, "fail", "ImportError", "force-reinstall"),
        ("core", {"installed": "0.9.0"}, "warn", "0.9.0 is installed", "PYTHONPATH"),
        ("system", {"system": "Darwin"}, "fail", "Darwin", "Linux alone"),
        ("processor", {"cpu_flags": frozenset({"sse2"})}, "warn", "without AVX2", "plain forms"),
        ("processor", {"cpu_flags": None}, "warn", "not known", "/proc"),
        ("clock", {"clock": "hpet"}, "warn", "hpet", "tsc"),
        ("memfd", {"memfd_error": "memfd_create: EPERM"}, "fail", "EPERM", "seccomp"),
        ("addresses", {"address_bytes": 4 * GIB}, "warn", "4 GiB", "ulimit -v"),
        ("memory", {"cgroup_bytes": 16 * GIB}, "fail", "16 GiB for this container", "memory.max"),
        ("memory", {"memory_bytes": 34 * GIB}, "warn", "asked for 32 GiB", "a tenth"),
        ("memory", {"available_bytes": 8 * GIB}, "warn", "8 GiB available", "a tenth"),
        ("memory", {"memory_bytes": None}, "warn", "not known", "/proc"),
        ("overcommit", {"overcommit": 2}, "fail", "strict", "vm.overcommit_memory=0"),
        ("huge pages", {"gets_huge_pages": False}, "warn", "gets none", "shmem_enabled"),
        ("huge pages", {"gets_huge_pages": None, "thp": None}, "warn", "not in this", "optional"),
        ("/dev/shm", {"shm_fs_bytes": 64 << 20}, "warn", "64 MiB", "--shm-size"),
        ("memlock", {"memlock_bytes": 8 << 20}, "warn", "8 MiB", "LimitMEMLOCK"),
        ("descriptors", {"descriptors": (1024, 1024)}, "warn", "1,024", "102 clients"),
        ("socket", {"sockets": (("/x", "/ is not writable"),)}, "fail", "not writable", "--socket"),
        ("socket", {"sockets": ()}, "fail", "no folder", "--socket"),
        ("daemon", {"daemon": DaemonFacts(reason="nobody\nhint")}, "warn", "nobody", "serve"),
        (
            "daemon",
            {"daemon": DaemonFacts(where="unix:/x", version="2.0.0")},
            "warn",
            "this is 1.0.0",
            "older side",
        ),
        ("CUDA", {"cupy": None}, "warn", "cupy is not", "pip install"),
    ],
)
def test_a_machine_that_fails_in_one_way(
    name: str, changes: dict[str, Any], verdict: str, found: str, remedy: str
) -> None:
    facts = dataclasses.replace(WELL, **changes)
    told = one(facts, name)
    assert (told.verdict, found in told.found, remedy in told.remedy) == (verdict, True, True), told
    others = [each for each in examine(facts) if each.name != name and each.verdict != "ok"]
    assert others == []


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "words"),
    [
        ("ssd folder", {"is_writable": False}, "fail", "not writable"),
        ("ssd folder", {"filesystem": "tmpfs"}, "fail", "tmpfs"),
        ("ssd folder", {"filesystem": "nfs4"}, "fail", "nfs4"),
        ("ssd folder", {"filesystem": "overlay"}, "warn", "overlay"),
        ("ssd folder", {"exists": False}, "ok", "to be made"),
        ("ssd folder", {"filesystem": None}, "ok", "unknown filesystem"),
        ("O_DIRECT", {"takes_direct": False, "why_not_direct": "Invalid"}, "warn", "Invalid"),
        ("O_DIRECT", {"takes_direct": None}, "warn", "not tried"),
        ("ssd room", {"free_bytes": GIB}, "fail", "1 GiB free"),
    ],
)
def test_a_disk_that_fails_in_one_way(
    name: str, changes: dict[str, Any], verdict: str, words: str
) -> None:
    facts = dataclasses.replace(WELL, ssd=dataclasses.replace(SSD, **changes))
    told = one(facts, name)
    assert (told.verdict, words in told.found) == (verdict, True), told
    assert bool(told.remedy) == (verdict != "ok")


def test_nothing_is_said_of_a_disk_that_nobody_asked_about() -> None:
    names = {each.name for each in examine(dataclasses.replace(WELL, ssd=None))}
    assert not names & {"ssd folder", "O_DIRECT", "ssd room"}


def test_a_machine_without_devices_needs_nothing() -> None:
    facts = dataclasses.replace(WELL, has_ucx=False, has_cuda=False, memlock_bytes=8 << 20)
    assert one(facts, "memlock").verdict == "ok"
    assert one(facts, "CUDA").verdict == "ok"
    assert one(facts, "UCX").verdict == "ok"


def test_an_arm_processor_has_other_features() -> None:
    facts = dataclasses.replace(WELL, machine="aarch64", cpu_flags=frozenset({"asimd"}))
    assert one(facts, "processor").found == "NEON; without SHA-256"


# --- probes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({"memory.max": "max", "a/b/memory.max": "1000"}, "0::/a/b", 1000),
        ({"a/memory.max": "500", "a/b/memory.max": "1000"}, "0::/a/b", 500),
        ({"memory.max": "700"}, "0::/not/seen/in/here", 700),
        ({"a/memory.max": "max"}, "0::/a", None),
        ({"memory/a/memory.limit_in_bytes": "300"}, "4:memory:/a\n3:cpu:/a", 300),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/", None),
        ({"memory.max": "5"}, "", None),
        ({}, "0::/", None),
    ],
)
def test_the_limit_of_a_container(
    tmp_path: Path, files: dict[str, str], own: str, limit: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert probes.cgroup_limit(tmp_path, own) == limit


@pytest.mark.parametrize(
    ("text", "word"),
    [("always [madvise] never", "madvise"), ("[never]", "never"), ("odd", None), (None, None)],
)
def test_the_chosen_word(text: str | None, word: str | None) -> None:
    assert probes.chosen(text) == word


def test_the_filesystem_of_a_folder(tmp_path: Path) -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 8:2 / {tmp_path} rw shared:1 - xfs /dev/b rw\n"
        f"3 1 8:3 / {tmp_path}/in\\040side rw - tmpfs none rw\n"
        "garbage\n"
    )
    (tmp_path / "in side").mkdir()
    assert probes.filesystem_of(str(tmp_path / "deep"), mounts) == "xfs"
    assert probes.filesystem_of(str(tmp_path / "in side"), mounts) == "tmpfs"
    assert probes.filesystem_of("/etc", mounts) == "ext4"
    assert probes.filesystem_of("/etc", "") is None


def test_a_folder_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    found = probes.ssd_facts(str(tmp_path / "to" / "be" / "made"))
    assert (found.exists, found.is_writable) == (False, True)
    assert found.takes_direct is not None
    assert found.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_sockets_say_why_not(tmp_path: Path) -> None:
    assert probes.why_no_socket(str(tmp_path / "kvpool" / "node.sock")) == ""
    assert "there is no" in probes.why_no_socket(str(tmp_path / "a" / "b" / "node.sock"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_socket_in_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "not writable" in probes.why_no_socket(str(tmp_path / "node.sock"))


def test_a_memfd_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes._try_memfd() == ""

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "not permitted" in probes._try_memfd()
    monkeypatch.undo()
    monkeypatch.setattr(os, "ftruncate", refuse)
    assert "sparse" in probes._try_memfd()


# --- the command ---------------------------------------------------------------------------------


def test_doctor_finds_the_daemon(tmp_path: Path) -> None:
    with controlled(tmp_path) as server:
        words = ("doctor", "--ssd", tmp_path, "--dram", "1MiB", "--address", server.address)
        done = command(*words, "--json", status=None)
    found = {each["name"]: each for each in json.loads(done.stdout)}
    assert found["daemon"]["found"] == f"version 9.9.9 at {server.address}; this is " + (
        kvpool.__version__
    )
    assert found["core"]["verdict"] == "ok"
    assert found["python"]["verdict"] == "ok"
    assert done.exit_code == any(each["verdict"] == "fail" for each in found.values())


def test_doctor_fails_where_something_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = dataclasses.replace(WELL, overcommit=2)
    gather: Callable[..., Facts] = lambda **_: facts  # noqa: E731
    monkeypatch.setattr(probes, "gather", gather)
    done = command("doctor", "--address", f"unix:{tmp_path}/x.sock", status=1)
    assert "strict (2)" in done.stdout
    assert "-> sysctl vm.overcommit_memory=0" in done.stdout
    assert "0 warnings, 1 failures" in done.stdout
    monkeypatch.setattr(probes, "gather", lambda **_: WELL)
    command("doctor", "--address", f"unix:{tmp_path}/x.sock")


def test_every_check_tells_what_it_is_for() -> None:
    assert all(each.__doc__ for each in CHECKS)
    assert set(CHECKS) <= {each for each in vars(doctor).values() if callable(each)}
