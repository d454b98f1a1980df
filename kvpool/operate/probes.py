"""What this machine says about itself: facts for `kvpool doctor`, each found by trying or reading.

Promises:  1. nothing that is there is changed; what is made to try something is removed again;
           2. a fact that cannot be found out is None, never a guess and never an exception.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MEMFD_BYTES = 1 << 40  # sparse: takes no memory
_DIRECT_BYTES = 4096
_POOL_BYTES = 8 << 20
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdFacts:
    """Of the folder that an SSD tier would lie in."""

    path: str
    exists: bool
    is_writable: bool
    filesystem: str | None
    free_bytes: int | None
    takes_direct: bool | None  # O_DIRECT
    why_not_direct: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """What came of looking for a daemon."""

    where: str | None = None
    version: str | None = None
    reason: str = ""  # why there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that the checks look at."""

    python: tuple[int, int, int]
    kvpool: str
    installed: str | None  # as the package's metadata says
    core_error: str  # "" where the compiled core loads
    system: str
    machine: str
    kernel: str
    cpu_flags: frozenset[str] | None
    memfd_error: str  # "" where a large sparse memfd can be made and mapped
    shm_fs_bytes: int | None
    memory_bytes: int | None
    available_bytes: int | None
    cgroup_bytes: int | None  # the tightest limit of this process's group; None: none
    overcommit: int | None
    thp: str | None  # always, madvise, never
    gets_huge_pages: bool | None  # a small pool got some; None: it could not be tried
    hugetlb_pages: int | None
    memlock_bytes: int | None  # None: unlimited
    address_bytes: int | None  # RLIMIT_AS; None: unlimited
    descriptors: tuple[int, int]  # soft, hard
    sockets: tuple[tuple[str, str], ...]  # path of a default socket, why it cannot be made
    clock: str | None
    has_ucx: bool
    has_cuda: bool
    cupy: str | None  # its version
    extras: tuple[str, ...]  # optional packages that are here
    asked_dram_bytes: int | None
    ssd: SsdFacts | None
    daemon: DaemonFacts


def gather(
    *, asked_dram_bytes: int | None, ssd: str | None, daemon: DaemonFacts, sockets: list[str]
) -> Facts:
    """Everything, in well under a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = _meminfo()
    version, core_error = _core()
    return Facts(
        python=sys.version_info[:3],
        kvpool=version,
        installed=_installed("kvpool"),
        core_error=core_error,
        system=platform.system(),
        machine=platform.machine(),
        kernel=platform.release(),
        cpu_flags=_cpu_flags(),
        memfd_error=_try_memfd(),
        shm_fs_bytes=_filesystem_bytes("/dev/shm"),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        cgroup_bytes=cgroup_limit(Path("/sys/fs/cgroup"), _read("/proc/self/cgroup") or ""),
        overcommit=_number("/proc/sys/vm/overcommit_memory"),
        thp=chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        gets_huge_pages=None if core_error else _try_huge_pages(),
        hugetlb_pages=_number("/proc/sys/vm/nr_hugepages"),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        address_bytes=_limit(resource.RLIMIT_AS),
        descriptors=(soft, hard),
        sockets=tuple((path, why_no_socket(path)) for path in sockets),
        clock=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        has_ucx=ctypes.util.find_library("ucp") is not None,
        has_cuda=os.path.exists("/dev/nvidiactl") or ctypes.util.find_library("cuda") is not None,
        cupy=_installed("cupy-cuda12x") or _installed("cupy-cuda13x") or _installed("cupy"),
        extras=tuple(
            name for name in ("textual", "matplotlib") if importlib.util.find_spec(name) is not None
        ),
        asked_dram_bytes=asked_dram_bytes,
        ssd=None if ssd is None else ssd_facts(ssd),
        daemon=daemon,
    )


# --- files of the kernel -------------------------------------------------------------------------


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def chosen(text: str | None) -> str | None:
    """The word in brackets of "always [madvise] never"."""
    if text is None or "[" not in text:
        return None
    return text.partition("[")[2].partition("]")[0]


def _meminfo() -> dict[str, int]:
    found = {}
    for line in (_read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _cpu_flags() -> frozenset[str] | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(rest.split())
    return None


def cgroup_limit(root: Path, own: str) -> int | None:
    """The tightest memory limit from a process's group up. own: text of /proc/self/cgroup.

    Version 2 has one tree and memory.max, version 1 a tree for memory and a limit that is huge
    where there is none. In a container the path may be that of the host: then the root counts.
    """
    limits = []
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            limits += _limits_up(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_up(root / "memory", path, "memory.limit_in_bytes")
    real = [limit for limit in limits if limit < 1 << 60]
    return min(real) if real else None


def _limits_up(root: Path, path: str, name: str) -> list[int]:
    found = []
    at = (root / path.lstrip("/")).resolve()
    for folder in (at, *at.parents):
        text = _read(str(folder / name))
        if text is not None and text.isdigit():
            found.append(int(text))
        if folder == root.resolve():
            break
    return found


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


# --- what is tried -------------------------------------------------------------------------------


def _try_memfd() -> str:
    """Makes a large sparse memfd and maps it, as an arena is: "" where that works."""
    try:
        fd = os.memfd_create("kvpool doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        return f"memfd_create: {error}"
    try:
        os.ftruncate(fd, MEMFD_BYTES)
        with mmap.mmap(
            fd, MEMFD_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        ) as mapped:
            mapped[MEMFD_BYTES - 1] = 1
    except (OSError, ValueError, OverflowError) as error:
        return f"{MEMFD_BYTES >> 40} TiB, sparse: {error}"
    finally:
        os.close(fd)
    return ""


def _try_huge_pages() -> bool | None:
    """Opens a small pool: its core asks for them in a way that no setting tells of."""
    import kvpool

    try:
        with kvpool.open(_POOL_BYTES, prefault="all") as pool:
            pool._node.settle(_SETTLE_S)
            return bool(pool.stats()["units_huge"])
    except kvpool.KvpoolError:
        return None


def _filesystem_bytes(path: str) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize


def ssd_facts(path: str) -> SsdFacts:
    """Of a folder, or of the nearest one above it that exists."""
    whole = os.path.abspath(path)
    there = whole
    while not os.path.isdir(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    free: int | None = None
    with contextlib.suppress(OSError):
        facts = os.statvfs(there)
        free = facts.f_bavail * facts.f_frsize
    direct, reason = _try_direct(there)
    return SsdFacts(
        path=whole,
        exists=os.path.isdir(whole),
        is_writable=os.access(there, os.W_OK | os.X_OK),
        filesystem=filesystem_of(there, _read("/proc/self/mountinfo") or ""),
        free_bytes=free,
        takes_direct=direct,
        why_not_direct=reason,
    )


def filesystem_of(path: str, mounts: str) -> str | None:
    """Its kind, of the mount that the path lies in. mounts: text of /proc/self/mountinfo."""
    best, found = -1, None
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after:
            continue
        point = words[4].encode().decode("unicode_escape")
        is_inside = real == point or real.startswith(point.rstrip("/") + "/")
        if is_inside and len(point) >= best:  # of two on one point the later one is seen
            best, found = len(point), after.split()[0]
    return found


def _try_direct(folder: str) -> tuple[bool | None, str]:
    """Writes one block past the page cache; None where not even a file can be made."""
    try:
        fd, name = tempfile.mkstemp(prefix=".kvpool-doctor-", dir=folder)
    except OSError as error:
        return None, str(error.strerror)
    try:
        os.close(fd)
        direct = os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, _DIRECT_BYTES) as aligned:
                os.write(direct, aligned)
        finally:
            os.close(direct)
    except OSError as error:
        return False, os.strerror(error.errno or errno.EINVAL)
    finally:
        os.unlink(name)
    return True, ""


def why_no_socket(path: str) -> str:
    """Why this user cannot make a socket there; "" where it can, or already did."""
    folder = os.path.dirname(path)
    if os.path.isdir(folder):
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"
    above = os.path.dirname(folder)
    if not os.path.isdir(above):
        return f"there is no {above}"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} is not writable"


def _core() -> tuple[str, str]:
    """The package's version, and why its compiled core does not load."""
    try:
        import kvpool
        from kvpool import _core

        _core.policy_names()
    except Exception as error:  # whatever it is, that is the finding
        return "unknown", f"{type(error).__name__}: {error}"
    return kvpool.__version__, ""


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
