"""What clients ask on their control connections, and what the node answers.

A request is {"id", "op", ...}, its answer {"id", "ok": true, ...} or {"id", "ok": false, "error",
"message"}; docs/protocol.md has the operations.

Promises:  1. whatever a request holds, it is answered: a mistake with what is wrong about it;
           2. no request waits longer than it asks for, and never longer than WAIT_S_MAX or
              RESIZE_WAIT_S_MAX; beside that it takes what the work itself takes.
Thread rule: answer() from any thread, none of which is the event loop's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvpool import _core, config
from kvpool.errors import (
    BadArgument,
    KvpoolError,
    ManifestMismatch,
    NoResource,
    PoolClosed,
    TierRefused,
)
from kvpool.manifest import Manifest, unpack
from kvpool.serve_log import EventLog
from kvpool.wire import Map

WAIT_S_MAX = 1.0  # a client that would wait longer asks again
RESIZE_WAIT_S_MAX = 10.0  # its answer does not say whether all is done: so in one go
NAMED_BYTES_MAX = 64 << 20  # of manifests that are kept for their names
KEY_BYTES = 16
_NUMBER_MAX = (1 << 32) - 1
_SIZE_MAX = 1 << 62

# The end of a core call may lie behind a disk: these have threads of their own.
SLOW = frozenset({"drop", "resize", "trim", "flush", "settle"})


class Server(Protocol):
    """What is used of the core's Server."""

    @property
    def sources(self) -> int: ...
    def sources_of(self, client: int) -> int: ...
    def add_client(self) -> int: ...
    def drop_client(self, client: int) -> None: ...
    def add_stream(self, client: int, fd: int) -> None: ...
    def make_shm(self, client: int, fd: int) -> tuple[list[int], dict[str, Any]]: ...
    def start_shm(self, client: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def drain(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Requests:
    """The operations on a node, by name; and which manifest each name of a namespace stands for."""

    def __init__(self, node: _core.Node, server: Server, log: EventLog) -> None:
        self._node = node
        self._server = server
        self._log = log
        self._lock = threading.Lock()  # guards the names
        self._named: dict[str, Manifest] = {}
        self._named_bytes = 0
        self._operations: Mapping[str, Callable[[Map], Map]] = {
            "open_namespace": self._open_namespace,
            "drop": self._drop,
            "temperature": self._temperature,
            "stats": self._stats,
            "resize": self._resize,
            "trim": self._trim,
            "flush": self._flush,
            "settle": self._settle,
            "ping": self._ping,
        }

    def answer(self, request: Map) -> Map:
        """Does what is asked. Blocks for as long as the core does; releases the GIL with it."""
        number = request.get("id")
        if not isinstance(number, int) or isinstance(number, bool):
            number = 0
        operation = self._operations.get(str(request.get("op")))
        try:
            if operation is None:
                names = ", ".join(self._operations)
                raise BadArgument(f"there is no operation {request.get('op')!r:.64}; {names}")
            return {"id": number, "ok": True, **operation(request)}
        except ManifestMismatch as error:
            more = {"name": error.name, "differing": _listed(error.differing)}
            return _refused(number, "manifest_mismatch", error, **more)
        except BadArgument as error:
            return _refused(number, "bad_argument", error)
        except (NoResource, TierRefused) as error:
            return _refused(number, "no_resource", error)
        except PoolClosed as error:
            return _refused(number, "closing", error)
        except KvpoolError as error:
            return _refused(number, "failed", error)
        except Exception as error:  # our bug: the client is told, and the others are served on
            self._log.error("a request failed", op=request.get("op"), reason=repr(error))
            return _refused(number, "internal", "the node failed at this; its log says at what")

    def _open_namespace(self, request: Map) -> Map:
        packed = _bytes(request, "manifest")
        manifest = unpack(packed)
        assert manifest.block_bytes is not None  # computed by the manifest
        with self._lock:
            known = self._named.get(manifest.name) if manifest.name else None
            if known is not None and known != manifest:
                raise ManifestMismatch(manifest.name, known.differing(manifest))
            if self._named_bytes > NAMED_BYTES_MAX and manifest.name and known is None:
                raise NoResource(f"the names of namespaces take {self._named_bytes} bytes already")
            opened = self._node.open_space(manifest.namespace_id, manifest.block_bytes)
            if manifest.name and known is None:
                self._named[manifest.name] = manifest
                self._named_bytes += len(packed)
        return {"number": _core.Space(opened).number, "block_bytes": manifest.block_bytes}

    def _drop(self, request: Map) -> Map:
        return {"blocks": self._node.drop(_count(request, "number", _NUMBER_MAX))}

    def _temperature(self, request: Map) -> Map:
        number, key = _count(request, "number", _NUMBER_MAX), _bytes(request, "key", KEY_BYTES)
        return {"temperature": self._node.temperature(number, key)}

    def _stats(self, request: Map) -> Map:
        return {"node": self._node.stats(), "server": self._server.stats()}

    def _resize(self, request: Map) -> Map:
        """As Pool.resize(): the SSD first, as it can be refused, and then nothing has changed."""
        wait_s = _wait(request, RESIZE_WAIT_S_MAX)
        if request.get("ssd_capacity") is not None:
            self._node.resize_ssd(_count(request, "ssd_capacity", _SIZE_MAX), wait_s)
        dram = _count(request, "dram", _SIZE_MAX, is_optional=True)
        max_blocks = _count(request, "max_blocks", _SIZE_MAX, is_optional=True)
        return {"bytes": self._node.resize(dram, max_blocks, wait_s)}

    def _trim(self, request: Map) -> Map:
        self._node.trim()
        return {}

    def _flush(self, request: Map) -> Map:
        return {"done": self._node.flush(_wait(request))}

    def _settle(self, request: Map) -> Map:
        return {"done": self._node.settle(_wait(request))}

    def _ping(self, request: Map) -> Map:
        return {}


def _refused(number: int, code: str, message: object, **more: Any) -> Map:
    return {"id": number, "ok": False, "error": code, "message": str(message)[:4096], **more}


def _listed(differing: dict[str, tuple[object, object]]) -> dict[str, list[object]]:
    return {field: list(pair) for field, pair in differing.items()}


def _bytes(request: Map, name: str, length: int | None = None) -> bytes:
    value = request.get(name)
    if not isinstance(value, bytes) or (length is not None and len(value) != length):
        raise BadArgument(f"{name} must be {'' if length is None else f'{length} '}bytes")
    return value


def _count(request: Map, name: str, most: int, *, is_optional: bool = False) -> Any:
    value = request.get(name)
    return None if value is None and is_optional else config.check_count(name, value, 0, most)


def _wait(request: Map, most_s: float = WAIT_S_MAX) -> float:
    return min(config.check_number("timeout", request.get("timeout"), 0, 86_400), most_s)
