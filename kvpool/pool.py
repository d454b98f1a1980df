"""A pool, whatever lies behind it: a node in this process, on this host, or elsewhere."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from kvpool import _core
from kvpool.config import check_number, check_type
from kvpool.errors import ManifestMismatch
from kvpool.manifest import Manifest
from kvpool.namespace import TIMEOUT_S_MAX, AnyData, Namespace

Result = TypeVar("Result")

RESIZE_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 30.0
CLOSE_FLUSH_TIMEOUT_S = 10.0
ASYNC_THREADS = 2

_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Backend(Protocol):
    """What a Pool asks of whatever lies behind it; see the methods of Pool and Namespace."""

    def open_space(self, manifest: Manifest) -> _core.OpenedSpace: ...
    def drop(self, space: Namespace) -> int: ...
    def temperature(self, space: Namespace, key: Any) -> float | None: ...
    def wait(self, space: Namespace, keys: Any, timeout_s: float) -> int: ...
    def resize(
        self,
        dram: str | int | None,
        max_blocks: int | None,
        ssd_capacity: str | int | None,
        timeout: float,
    ) -> int: ...
    def flush(self, timeout: float) -> bool: ...
    def trim(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def check(self) -> None: ...
    def close(self, flush_timeout_s: float) -> None: ...
    def require_usable(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_forked(self) -> bool: ...
    @property
    def shares_memory(self) -> bool: ...


class Pool:
    """What kvpool.open() and kvpool.connect() give. A context manager; or call close().

    Blocks that somebody views stay readable after close(); every call that needs the pool raises
    PoolClosed.
    """

    def __init__(self, backend: Backend) -> None:
        """For kvpool.open() and kvpool.connect()."""
        self._backend = backend
        self._lock = threading.Lock()  # guards _named and _executor
        self._named: dict[str, Manifest] = {}
        self._executor: ThreadPoolExecutor | None = None
        _open_pools.add(self)

    def namespace(self, manifest: Manifest) -> Namespace:
        """The namespace that this manifest defines, made at its first use.

        Raises ManifestMismatch when a namespace of the same (non-empty) name exists with another
        manifest, naming the fields. O(1).
        """
        check_type("manifest", manifest, Manifest)
        self._backend.require_usable()  # in a forked child, the lock may be held for ever
        self._require_same(self._named.get(manifest.name), manifest)
        # Not under the lock: it can be a request to a node, and asynchronous calls take the lock on
        # the thread of their event loop.
        space = Namespace(self, manifest)
        if manifest.name:
            with self._lock:
                self._require_same(self._named.setdefault(manifest.name, manifest), manifest)
        return space

    @staticmethod
    def _require_same(known: Manifest | None, manifest: Manifest) -> None:
        if known is not None and known != manifest:
            raise ManifestMismatch(manifest.name, known.differing(manifest))

    def register(self, memory: AnyData) -> _core.Region:
        """Register one tensor or buffer; later calls name places in it by byte offset.

        Saves the cost of looking at the object in every call. The region keeps it alive; do not
        resize a torch tensor, or give it other storage, while it is registered or in use here.
        """
        self._backend.require_usable()
        return _core.Region(memory)

    def resize(
        self,
        dram: str | int | None = None,
        *,
        max_blocks: int | None = None,
        ssd_capacity: str | int | None = None,
        timeout: float = RESIZE_TIMEOUT_S,
    ) -> int:
        """Change the limits while the pool is in use; returns the memory committed now, in bytes.

        Growing is at once. Shrinking evicts the coldest blocks, gathers the others and gives the
        memory back to the system; what is pinned stays, and the pool goes on in the background
        after `timeout` seconds. The arena's base address never changes. None leaves a limit as it
        is; max_blocks=0 lifts that limit. ssd_capacity: as in open(); growing takes the room on
        the disk first and raises NoResource where there is none.
        """
        return self._backend.resize(dram, max_blocks, ssd_capacity, timeout)

    def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until every block admitted to the SSD so far is committed there.

        True: what was put before, is worth keeping (ssd_admit) and has not been evicted
        (stats()["evicted_unwritten"]) survives a crash of the process and loss of power, under
        `relaxed` too. False: the time ran out, or the tier takes nothing more
        (stats()["ssd_read_only_reason"]). True at once without an SSD tier. Releases the GIL.
        """
        return self._backend.flush(check_number("timeout", timeout, 0, TIMEOUT_S_MAX))

    def trim(self) -> None:
        """Give memory that holds no block back to the system now."""
        self._backend.trim()

    def stats(self) -> dict[str, Any]:
        """Counters since open() and levels now, by name (docs/architecture.md). Takes the lock."""
        return self._backend.stats()

    def check(self) -> None:
        """Abort the process if the pool's books do not add up (free + held = total). For tests."""
        self._backend.check()

    @property
    def shares_memory(self) -> bool:
        """Whether blocks are read in place, so that a lookup or a view takes no request.

        True of an embedded pool, and of a node of this host that gave its memory by its unix
        socket; False where each is a round trip. Decided when the pool was opened; it stays so
        while the node is away (a lookup is then a miss, at once) and after close(). O(1).
        """
        return self._backend.shares_memory

    @property
    def _node(self) -> Any:  # of an embedded pool; for tests and benches
        return self._backend.node  # type: ignore[attr-defined]

    @property
    def closed(self) -> bool:
        """True after close(), and in a forked child."""
        return self._backend.is_forked or self._backend.is_closed

    def close(self, flush_timeout: float = CLOSE_FLUSH_TIMEOUT_S) -> None:
        """End the pool. Idempotent; does nothing in a forked child.

        Waits inside the pool end at once, and what was not stored yet is reported as FAILED. Calls
        that copy in other threads end their copy; asynchronous ones are waited for. With an SSD
        tier, blocks that are worth keeping and not written yet are, for `flush_timeout` seconds at
        most; 0 leaves them out.
        """
        if self._backend.is_forked:  # the lock may be held for ever in a child
            return
        flush_timeout_s = check_number("flush_timeout", flush_timeout, 0, TIMEOUT_S_MAX)
        with self._lock:
            executor, self._executor = self._executor, None
        self._backend.close(flush_timeout_s)
        if executor is not None:
            executor.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        self._backend.require_usable()
        with self._lock:
            self._backend.require_usable()  # close() takes the executor away under the lock
            if self._executor is None:
                self._executor = ThreadPoolExecutor(ASYNC_THREADS, "kvpool")
            answer = asyncio.get_running_loop().run_in_executor(self._executor, call)
        return await answer


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
    _core.end_gil_sections()  # daemon threads must be out of the core before the interpreter ends
