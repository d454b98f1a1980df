"""What of kvpool works on this machine, and how to mend the rest: verdicts from facts. Pure.

A check is a function of Facts that gives one Finding: `ok`, `warn` (it works, slower or not for
long) or `fail` (it does not), what was found, and for all but ok what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvpool.config import format_size
from kvpool.operate.probes import Facts

Verdict = Literal["ok", "warn", "fail"]

PYTHON_MIN = (3, 11)
DESCRIPTORS_MIN = 4096  # about 400 clients, at 10 each
GIB = 1 << 30
_SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies")
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs")
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


Check = Callable[[Facts], Finding | None]  # None: nothing to say here


def examine(facts: Facts) -> list[Finding]:
    """Every check, in the order of CHECKS."""
    return [found for check in CHECKS if (found := check(facts)) is not None]


def _ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


# --- software ------------------------------------------------------------------------------------


def python(facts: Facts) -> Finding:
    """A version that the package supports."""
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < PYTHON_MIN:
        return Finding("python", "fail", version, "use Python 3.11 or newer")
    return _ok("python", version)


def core(facts: Facts) -> Finding:
    """The compiled core loads and is of the same installation."""
    if facts.core_error:
        remedy = "build it for this Python: pip install --force-reinstall kvpool"
        return Finding("core", "fail", facts.core_error, remedy)
    if facts.installed is not None and facts.installed != facts.kvpool:
        found = f"runs {facts.kvpool}, but {facts.installed} is installed"
        return Finding("core", "warn", found, "look at PYTHONPATH: two copies are in the way")
    return _ok("core", f"kvpool {facts.kvpool}")


def system(facts: Facts) -> Finding:
    """Linux only."""
    found = f"{facts.system} {facts.kernel} on {facts.machine}"
    if facts.system != "Linux":
        return Finding("system", "fail", found, "kvpool runs on Linux alone")
    return _ok("system", found)


def processor(facts: Facts) -> Finding:
    """Which kernels of copying, checksums and hashing can be chosen."""
    flags = facts.cpu_flags
    if flags is None:
        return Finding("processor", "warn", "not known", "is /proc mounted?")
    if facts.machine in ("aarch64", "arm64"):
        return _ok("processor", _having(flags, {"asimd": "NEON", "sha2": "SHA-256"}))
    wide = {"avx2": "AVX2", "avx512f": "AVX-512", "sha_ni": "SHA-256", "erms": "fast rep movsb"}
    if "avx2" not in flags:
        remedy = "nothing to mend: copies and checksums take their plain forms"
        return Finding("processor", "warn", "without AVX2", remedy)
    return _ok("processor", _having(flags, wide))


def _having(flags: frozenset[str], names: dict[str, str]) -> str:
    have = [name for flag, name in names.items() if flag in flags]
    lack = [name for flag, name in names.items() if flag not in flags]
    return ", ".join(have) + (f"; without {', '.join(lack)}" if lack else "")


def clock(facts: Facts) -> Finding:
    """Every use of a block reads it."""
    if facts.clock is None:
        return _ok("clock", "not told by this kernel")
    if facts.clock in _SLOW_CLOCKS:
        remedy = "a slow clock source: see tsc in dmesg, or clocksource=tsc on the kernel's line"
        return Finding("clock", "warn", facts.clock, remedy)
    return _ok("clock", facts.clock)


# --- memory --------------------------------------------------------------------------------------


def memfd(facts: Facts) -> Finding:
    """What arenas, index and shared memory are made of."""
    if facts.memfd_error:
        remedy = (
            "allow memfd_create and large sparse files: seccomp profile, RLIMIT_FSIZE, ulimit -v"
        )
        return Finding("memfd", "fail", facts.memfd_error, remedy)
    return _ok("memfd", "1 TiB, sparse, can be made and mapped")


def addresses(facts: Facts) -> Finding | None:
    """Arenas reserve four times what they may grow to."""
    if facts.address_bytes is None:
        return None
    remedy = "ulimit -v unlimited: 16 x dram of addresses are reserved by default"
    return Finding("addresses", "warn", f"limited to {format_size(facts.address_bytes)}", remedy)


def memory(facts: Facts) -> Finding:
    """Whether the DRAM asked for is there, in the machine and in its container."""
    limits = [each for each in (facts.memory_bytes, facts.cgroup_bytes) if each is not None]
    if not limits:
        return Finding("memory", "warn", "not known", "is /proc mounted?")
    least, asked = min(limits), facts.asked_dram_bytes
    found = f"{format_size(facts.memory_bytes or 0)} in the machine"
    if facts.cgroup_bytes is not None:
        found += f", {format_size(facts.cgroup_bytes)} for this container"
    if facts.available_bytes is not None:
        found += f", {format_size(facts.available_bytes)} available"
    if asked is None:
        return _ok("memory", found)
    if asked >= least:
        remedy = (
            f"ask for less than {format_size(least)}, or give more (memory.max of the container)"
        )
        return Finding("memory", "fail", f"{found}; asked for {format_size(asked)}", remedy)
    if asked > least * 9 // 10 or asked > (facts.available_bytes or least):
        remedy = "leave a tenth for index, books and the engine; shared memory counts in full"
        return Finding("memory", "warn", f"{found}; asked for {format_size(asked)}", remedy)
    return _ok("memory", f"{found}; {format_size(asked)} fits")


def overcommit(facts: Facts) -> Finding | None:
    """2 counts reserved addresses as memory."""
    if facts.overcommit is None:
        return None
    if facts.overcommit == 2:
        remedy = "sysctl vm.overcommit_memory=0: strict accounting counts what is only reserved"
        return Finding("overcommit", "fail", "strict (2)", remedy)
    return _ok("overcommit", {0: "heuristic (0)", 1: "always (1)"}.get(facts.overcommit, "other"))


def huge_pages(facts: Facts) -> Finding:
    """Fewer misses of the TLB; everything works without them."""
    found = f"transparent: {facts.thp or 'not in this kernel'}"
    if facts.hugetlb_pages:
        found += f"; {facts.hugetlb_pages:,} reserved, which kvpool does not use"
    if facts.gets_huge_pages:
        return _ok("huge pages", f"a pool gets them ({found})")
    remedy = "optional, and faster: Linux 6.1 or newer, shmem_enabled not deny, memory in one piece"
    return Finding("huge pages", "warn", f"a pool gets none ({found})", remedy)


def shm_filesystem(facts: Facts) -> Finding | None:
    """Not used by kvpool; a small one is looked for in vain when engines fail."""
    size = facts.shm_fs_bytes
    if size is None or size >= GIB:
        return None
    found = f"{format_size(size)}; kvpool does not use it"
    return Finding("/dev/shm", "warn", found, "engines may need more: docker run --shm-size=8g")


def memlock(facts: Facts) -> Finding:
    """Only for memory that devices read by themselves."""
    if facts.memlock_bytes is None:
        return _ok("memlock", "unlimited")
    found = f"limited to {format_size(facts.memlock_bytes)}"
    if not (facts.has_ucx or facts.has_cuda):
        return _ok("memlock", f"{found}; nothing here needs more")
    remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity): RDMA and CUDA pin what they read"
    return Finding("memlock", "warn", found, remedy)


def descriptors(facts: Facts) -> Finding:
    """The daemon raises its soft limit to the hard one."""
    soft, hard = facts.descriptors
    found = f"{soft:,}, up to {hard:,}"
    if hard < DESCRIPTORS_MIN:
        remedy = (
            f"LimitNOFILE=65536: a client takes about 10, so {hard:,} are {hard // 10:,} clients"
        )
        return Finding("descriptors", "warn", found, remedy)
    return _ok("descriptors", found)


# --- disk ----------------------------------------------------------------------------------------


def ssd_folder(facts: Facts) -> Finding | None:
    """Whether it can be written to, and on what it lies."""
    ssd = facts.ssd
    if ssd is None:
        return None
    if not ssd.is_writable:
        remedy = f"make {ssd.path} and give it to the daemon's user: install -d -o USER {ssd.path}"
        return Finding("ssd folder", "fail", f"{ssd.path} is not writable", remedy)
    found = f"{ssd.path} on {ssd.filesystem or 'an unknown filesystem'}"
    found += "" if ssd.exists else ", to be made"
    if ssd.filesystem in _MEMORY_FILESYSTEMS:
        remedy = "that is memory, not a disk: give it to dram, and name a folder on an SSD"
        return Finding("ssd folder", "fail", found, remedy)
    if ssd.filesystem in _NETWORK_FILESYSTEMS:
        remedy = "use a disk of this host: others could open the tier, and reads are slow"
        return Finding("ssd folder", "fail", found, remedy)
    if ssd.filesystem == "overlay":
        remedy = "a container's own layer is slow and goes with it: mount a volume"
        return Finding("ssd folder", "warn", found, remedy)
    return _ok("ssd folder", found)


def ssd_direct(facts: Facts) -> Finding | None:
    """Past the page cache."""
    ssd = facts.ssd
    if ssd is None or not ssd.is_writable:
        return None
    if ssd.takes_direct:
        return _ok("O_DIRECT", "works")
    remedy = "ext4 or xfs on a disk of this host; else the page cache takes memory beside dram"
    return Finding("O_DIRECT", "warn", f"refused: {ssd.why_not_direct or 'not tried'}", remedy)


def ssd_room(facts: Facts) -> Finding | None:
    """Capacity is allocated at once, and a floor is left."""
    ssd = facts.ssd
    if ssd is None or ssd.free_bytes is None:
        return None
    found = f"{format_size(ssd.free_bytes)} free"
    if ssd.free_bytes < 2 * GIB:
        remedy = "1 GiB is left free by default: make room, or set --ssd-free-floor"
        return Finding("ssd room", "fail", found, remedy)
    return _ok("ssd room", found)


# --- connections ---------------------------------------------------------------------------------


def sockets(facts: Facts) -> Finding:
    """Where a daemon of this user would listen by itself."""
    usable = [path for path, why in facts.sockets if not why]
    if not usable:
        reasons = "; ".join(why for _, why in facts.sockets) or "no folder to look in"
        return Finding("socket", "fail", reasons, "name one: --socket, and $KVPOOL_ADDRESS")
    return _ok("socket", f"{usable[0]} can be made")


def daemon(facts: Facts) -> Finding:
    """Whether one answers, and of which version."""
    found = facts.daemon
    if found.where is None:
        tried = found.reason.splitlines()
        reason = " ".join(" ".join(tried[:-1] or tried).split())  # the last line is a hint
        remedy = "start one: kvpool serve --dram 8GiB (embedded pools need none)"
        return Finding("daemon", "warn", reason, remedy)
    told = f"version {found.version or 'unknown'} at {found.where}"
    if found.version is not None and found.version != facts.kvpool:
        remedy = "upgrade the older side: both work while their protocols meet"
        return Finding("daemon", "warn", f"{told}; this is {facts.kvpool}", remedy)
    return _ok("daemon", told)


def ucx(facts: Facts) -> Finding:
    """For other hosts; TCP works without it."""
    return _ok("UCX", "libucp is here" if facts.has_ucx else "not here; TCP is used")


def cuda(facts: Facts) -> Finding:
    """For engines on GPUs."""
    if not facts.has_cuda:
        return _ok("CUDA", "no GPU here; blocks are exchanged in host memory")
    if facts.cupy is None:
        remedy = "pip install cupy-cuda12x, if an engine is to hand over GPU memory by itself"
        return Finding("CUDA", "warn", "a driver is here, cupy is not", remedy)
    return _ok("CUDA", f"a driver and cupy {facts.cupy}")


def extras(facts: Facts) -> Finding:
    """What makes some commands nicer."""
    wanted = {"textual": "top", "matplotlib": "plot"}
    missing = [extra for name, extra in wanted.items() if name not in facts.extras]
    if missing:
        return _ok("extras", f"pip install 'kvpool[{','.join(missing)}]' for more (optional)")
    return _ok("extras", "all here")


CHECKS: tuple[Check, ...] = (
    *(python, core, system, processor, clock),
    *(memfd, addresses, memory, overcommit, huge_pages, shm_filesystem, memlock, descriptors),
    *(ssd_folder, ssd_direct, ssd_room),
    *(sockets, daemon, ucx, cuda, extras),
)
