"""Two other pools with vLLM connectors, started as their own pages say, on loopback ports.

Each lies in a folder of its own, filled by `pip install --no-deps --target DIR PACKAGE...`, and is
seen by its own processes and its own engine only. docs/benchmarks.md has the packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvpool.bench.rows import BenchError
from kvpool.bench.vllm_plan import BLOCK_TOKENS

READY_S_MAX = 60.0
POLL_S = 0.1
LMCACHE_CHUNK_TOKENS = 256  # its default
MOONCAKE_BUFFER_BYTES = 512 << 20
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """What an engine is told to use it."""

    transfer: Mapping[str, object]
    environment: Mapping[str, str]
    chunk_tokens: int
    loads_numba: bool = False


@contextlib.contextmanager
def mooncake(python: Path, folder: Path, kv_bytes: int) -> Iterator[Peer]:
    """A Mooncake master; the store's memory lies in the engine, which is its embedded mode.

    Engine and store talk by TCP, the only transport without special hardware.
    """
    del python  # its daemon is no Python
    package = folder / "mooncake"
    master = package / "mooncake_master"
    if not master.exists():
        raise BenchError(f"there is no {master}: install mooncake-transfer-engine-non-cuda there")
    rpc, metadata, metrics = free_ports(3)
    command = [
        str(master),
        f"--rpc_address={_LOOPBACK}",
        f"--rpc_port={rpc}",
        "--enable_http_metadata_server=true",
        f"--http_metadata_server_host={_LOOPBACK}",
        f"--http_metadata_server_port={metadata}",
        f"--metrics_host={_LOOPBACK}",
        f"--metrics_port={metrics}",
    ]
    config = {
        "metadata_server": f"http://{_LOOPBACK}:{metadata}/metadata",
        "master_server_address": f"{_LOOPBACK}:{rpc}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": kv_bytes,
        "local_buffer_size": MOONCAKE_BUFFER_BYTES,
    }
    libraries = {"LD_LIBRARY_PATH": str(package)}
    with tempfile.NamedTemporaryFile("w", prefix="kvpool-bench-", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        with _server("mooncake_master", command, libraries, (rpc, metadata)):
            environment = {
                **_with_path(folder),
                **libraries,
                "MOONCAKE_CONFIG_PATH": file.name,
                "VLLM_HOST_IP": _LOOPBACK,
                "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # off by default; quicker
            }
            yield Peer({"kv_connector": "MooncakeStoreConnector"}, environment, BLOCK_TOKENS)


@contextlib.contextmanager
def lmcache(python: Path, folder: Path, kv_bytes: int) -> Iterator[Peer]:
    """An LMCache server of its own process, in the one mode that works without a GPU."""
    if not (folder / "lmcache").is_dir():
        raise BenchError(f"there is no lmcache in {folder}: install it there")
    (port,) = free_ports(1)
    options = {
        "host": _LOOPBACK,
        "port": port,
        "l1-size-gb": f"{kv_bytes / (1 << 30):.3f}",
        "chunk-size": LMCACHE_CHUNK_TOKENS,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "engine_driven",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    module = ["-m", "lmcache.v1.multiprocess.server", "--disable-observability"]
    told = {
        **_with_path(folder),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }
    with _server("the LMCache server", [str(python), *module, *flags], told, (port,)):
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{_LOOPBACK}",
                "lmcache.mp.port": port,
            },
        }
        yield Peer(transfer, told, LMCACHE_CHUNK_TOKENS, loads_numba=True)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody has now. Somebody else may take one before it is used."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def _with_path(folder: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([known] if known else [])])}


@contextlib.contextmanager
def _server(
    name: str, command: Sequence[str], environment: Mapping[str, str], ports: Sequence[int]
) -> Iterator[None]:
    """Runs a server until it listens on all its ports, and for as long as the `with` lasts."""
    with (
        tempfile.TemporaryFile(prefix="kvpool-bench-peer-") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + READY_S_MAX
            while not all(map(_listens, ports)):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines()[-1:]
                    raise BenchError(f"{name} did not begin to listen: {''.join(said)}")
                time.sleep(POLL_S)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _listens(port: int) -> bool:
    try:
        socket.create_connection((_LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True
