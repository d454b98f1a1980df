"""One `kvpool serve` of a lab."""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvpool
from kvpool.lab.child import WAIT_S, Child
from kvpool.lab.disk import Disk
from kvpool.lab.linux import LabError
from kvpool.lab.network import Host
from kvpool.observe.cluster import Cluster
from kvpool.operate.client import Operator, Reach

PORT = 7070
_SKEWED = """
import time
now_s, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now_s() + {0}, lambda: now_ns() + {0} * 10**9
from kvpool.cli import main
main()
"""
CALL_S = 5.0  # of a client that names no time of its own


class Node(Child):
    """A daemon. Clients reach it by its unix socket, which is no part of any network.

    options: of `kvpool serve`, by their names: cluster_ttl=3. A "{disk}" in one is the folder of
    its disk, "{folder}" its own.
    """

    def __init__(self, host: Host, folder: Path, options: dict[str, Any]) -> None:
        super().__init__(folder.name, host, folder)
        self.disk: Disk | None = None
        self.skew_s = 0  # of its clock; in force with the next start
        self.options = {
            "socket": str(folder / "node.sock"),
            "listen": self.tcp,
            "prefault": "off",
            "huge_pages": False,
            "log_level": "warning",
            **options,
        }

    def close(self) -> None:
        super().close()
        if self.disk is not None:
            self.disk.close()

    @property
    def tcp(self) -> str:
        """Where the other members reach it."""
        return f"{self.host.address}:{PORT}"

    @property
    def unix_address(self) -> str:
        return f"unix:{self.options['socket']}"

    def launch(self) -> None:
        """Begins; ready() says when it is there. Its port and its folder stay the same."""
        mounts = [] if self.disk is None else [self.disk.mounts]
        code = ["-c", _SKEWED.format(self.skew_s)] if self.skew_s else ["-m", "kvpool.cli"]
        self._launch([sys.executable, *code, "serve", *self._flags()], *mounts)

    def ready(self) -> Node:
        """Returns when clients can connect. Raises LabError where it says that they cannot."""
        process = self._running()
        assert process.stdout is not None
        found, _, _ = select.select([process.stdout], [], [], WAIT_S)
        line = process.stdout.readline().decode() if found else ""
        if not line.startswith("kvpool: ready "):
            raise LabError(f"{self.name} does not get ready ({line or found}): {self.said()}")
        return self

    def start(self) -> Node:
        self.launch()
        return self.ready()

    def connect(self, **options: Any) -> kvpool.Pool:
        """As a client on the same host, by shared memory. Raises KvpoolError."""
        return kvpool.connect(self.unix_address, **{"timeout": CALL_S, **options})

    def told(self) -> Cluster:
        """What it says of its cluster. Raises LabError, KvpoolError."""
        with Operator.connect(Reach(address=self.unix_address)) as operator:
            found = operator.nodes()
        if found is None:
            raise LabError(f"{self.name} is in no cluster")
        return found

    def locate(self, manifest: kvpool.Manifest, keys: bytes) -> list[set[str]]:
        """The members that have each of these packed keys, as this node knows it: itself among
        them. Raises KvpoolError; LabError where nobody has opened the namespace here."""
        with Operator.connect(Reach(address=self.unix_address)) as operator:
            known = [each for each in operator.spaces() if each.manifest == manifest]
            if not known:
                raise LabError(f"{self.name} does not know this namespace")
            found, own = operator.locate(known[0], keys), self.told().own
        return [{*each.nodes, *([own] if each.tiers else [])} for each in found]

    def _flags(self) -> Iterator[str]:
        places = {"folder": self.folder, "disk": self.disk.folder if self.disk else ""}
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                yield f"--{flag}" if value else f"--no-{flag}"
            else:
                yield from (f"--{flag}", str(value).format_map(places))
