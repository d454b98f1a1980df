"""An engine's connection to its pool: there now, there later, or not there; never in the way.

Promises:  1. an engine starts whether or not there is a node: one that is missing is told once, in
              words that say what to do, and looked for in the background;
           2. no call raises after the construction, and asking for the pool never waits;
           3. a namespace costs one request, which is waited for load_timeout_s at most; where it
              fails, others are made in the background and the caller is told "not yet";
           4. a forked child has no pool.
Thread rule: any thread. _lock is held over the request that opens a namespace, and only there.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import kvpool
from kvpool.connectors.options import Options
from kvpool.connectors.spawn import ensure_node
from kvpool.errors import BadArgument, KvpoolError, PoolClosed, Refused
from kvpool.manifest import Manifest
from kvpool.namespace import Namespace
from kvpool.pool import Pool
from kvpool.remote import caller_of, candidates

PAUSE_S_MIN = 0.25
PAUSE_S_MAX = 30.0
_WHERE = "where `kvpool serve` of this user listens"


class Attachment:
    """The pool of one connector, and the namespaces that it opened there."""

    def __init__(self, options: Options, *, name: str, log: logging.Logger) -> None:
        """Looks for the node for options.connect_timeout_s; then a thread goes on.

        name: of this client, in the node's log. Raises BadArgument: options that cannot be meant.
        """
        self._options = options
        self._name = name
        self._log = log
        self._pid = os.getpid()
        self._pool: Pool | None = None
        self._lock = threading.Lock()
        self._spaces: dict[Manifest, Namespace | None] = {}  # None: refused, for good
        self._wanted: set[Manifest] = set()  # asked for, and to be had later
        self._told: set[str] = set()
        self._work = threading.Event()  # for the thread: something is wanted, or it is to end
        self._is_closed = False
        self._thread: threading.Thread | None = None
        candidates(options.address, os.environ)
        caller_of(name, options.token, options.token_file, options.tenant)
        try:
            self._connect()
        except BadArgument:
            raise
        except (KvpoolError, OSError) as error:
            self._tell_missing(error)
            self._need_thread()

    @property
    def pool(self) -> Pool | None:
        """None while there was no node yet, after close() and in a forked child. Never waits.

        A pool whose node went away is still one: its blocks are misses until the node is back.
        """
        return self._pool if os.getpid() == self._pid else None

    @property
    def shares_memory(self) -> bool:
        """Whether lookups may be made inline; see Pool.shares_memory."""
        pool = self.pool
        return pool is not None and pool.shares_memory

    def space(self, manifest: Manifest) -> Namespace | None:
        """The namespace of a manifest; None while it cannot be had, or if the node refuses it.

        Waits for a request at the first call with a manifest; later calls do not wait.
        """
        pool = self.pool
        if pool is None:
            return None
        if (found := self._spaces.get(manifest)) is not None:
            return found
        if manifest in self._spaces or manifest in self._wanted:
            return None
        with self._lock:
            if manifest in self._spaces or manifest in self._wanted:
                return self._spaces.get(manifest)
            found = self._opened(pool, manifest)
            if found is None and manifest not in self._spaces:
                self._wanted.add(manifest)
                self._need_thread()
            return found

    def close(self) -> None:
        """Leaves the node. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        self._work.set()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    # --- connecting ------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Raises KvpoolError."""
        options = self._options
        address = ensure_node(options, os.environ) if options.spawn else options.address
        pool = kvpool.connect(
            address,
            token=options.token,
            token_file=options.token_file,
            tenant=options.tenant,
            timeout=options.load_timeout_s,
            connect_timeout=options.connect_timeout_s,
            name=self._name,
        )
        self._pool = pool
        if self._is_closed:  # meanwhile; close() did not see this pool
            self._pool = None
            pool.close()
            return
        how = "shared memory" if pool.shares_memory else "sockets"
        self._log.info("kvpool: attached to the pool at %s, by %s", address or _WHERE, how)

    def _need_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="kvpool-attach", daemon=True)
            self._thread.start()
        self._work.set()

    def _keep(self) -> None:
        """Until close(): what is missing is tried again, with growing pauses."""
        pause_s = PAUSE_S_MIN
        while not self._is_closed:
            if self._pool is not None and not self._wanted:
                self._work.wait()
                self._work.clear()
                pause_s = PAUSE_S_MIN
                continue
            end = time.monotonic() + pause_s
            while not self._is_closed and (left_s := end - time.monotonic()) > 0:
                self._work.wait(left_s)
                self._work.clear()
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            try:
                self._try_again()
            except (KvpoolError, OSError) as error:
                self._tell_missing(error)
            except Exception:  # a bug of ours; the engine has no use for it
                self._tell_once("bug", "kvpool: cannot attach to the pool", exc_info=True)

    def _try_again(self) -> None:
        if self._is_closed:
            return
        if self._pool is None:
            self._connect()
        for manifest in list(self._wanted):
            pool = self._pool
            if pool is None:
                return
            found = self._opened(pool, manifest)
            if found is not None or manifest in self._spaces:
                self._wanted.discard(manifest)

    # --- namespaces ------------------------------------------------------------------------------

    def _opened(self, pool: Pool, manifest: Manifest) -> Namespace | None:
        """None and noted in _spaces: it never will be; None and not noted: perhaps later."""
        try:
            found = pool.namespace(manifest)
        except BadArgument as error:  # ManifestMismatch: it says in which fields
            self._tell_once(
                f"space {manifest.namespace_id.hex()}",
                "kvpool: no blocks of %s are kept: %s",
                _short(manifest),
                error,
            )
            self._spaces[manifest] = None
            return None
        except PoolClosed:
            return None
        except KvpoolError as error:
            code = error.code if isinstance(error, Refused) else type(error).__name__
            self._tell_once(
                f"space {manifest.namespace_id.hex()} {code}",
                "kvpool: no blocks of %s are kept for now, it is tried again: %s",
                _short(manifest),
                error,
            )
            return None
        self._spaces[manifest] = found
        return found

    # --- telling ---------------------------------------------------------------------------------

    def _tell_missing(self, error: Exception) -> None:
        """Once per kind of reason: what another attempt meets may be another one."""
        if isinstance(error, Refused):
            self._tell_once(
                f"refused {error.code}",
                "kvpool: the node at %s refuses this engine, which goes on without a pool and asks"
                " again every %d s at most: %s",
                self._options.address or _WHERE,
                PAUSE_S_MAX,
                error,
            )
            return
        self._tell_once(
            type(error).__name__,
            "kvpool: no pool at %s; the engine goes on without one and attaches when there is one"
            " (start `kvpool serve`, or correct address in kv_connector_extra_config): %s",
            self._options.address or _WHERE,
            error,
        )

    def _tell_once(self, key: str, text: str, *values: object, exc_info: bool = False) -> None:
        if key not in self._told:
            self._told.add(key)
            self._log.warning(text, *values, exc_info=exc_info)


def _short(manifest: Manifest) -> str:
    return f"{manifest.model} (namespace {manifest.namespace_id.hex()})"
