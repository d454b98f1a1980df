"""Daemons that are members of one cluster, as processes, each with a folder of its own."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvpool
from tests.cluster.etcd import Etcd, free_ports
from tests.operated import json_of
from tests.served import Blocks, Served

LATE_S = 60.0
BLOCK = 64 << 10
TTL_S = 3


def comes(is_so: Callable[[], Any], what: str, late_s: float = LATE_S) -> Any:
    """What is_so() gives once that is true."""
    deadline = time.monotonic() + late_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"it never came that {what}"
        time.sleep(0.02)
    return found


def nodes_of(daemon: Served, token: str = "") -> Any:
    """What it says of its cluster."""
    environment = {"KVPOOL_TOKEN": token} if token else {}
    told = ("nodes", "--json", "--address", daemon.unix_address)
    return json_of(*told, env=environment)


def met(daemons: Sequence[Served], token: str = "") -> bool:
    """All are members for all, and connected to all the others."""
    for each in daemons:
        told = nodes_of(each, token)
        if len(told["nodes"]) != len(daemons) or not told["is_entered"]:
            return False
        others = [node for node in told["nodes"] if node["id"] != told["own"]]
        if not all(any(link["streams"] for link in node["links"]) for node in others):
            return False
    return True


def directory_of(daemon: Served) -> Any:
    return nodes_of(daemon)["directories"][0]


def link_to(daemon: Served, other: str) -> Any:
    """How it sees the one of that id; None: it does not."""
    node = next((each for each in nodes_of(daemon)["nodes"] if each["id"] == other), None)
    return node["links"][0] if node and node["links"] else None


def options_of(folder: Path, token: Path, port: int, **where: Any) -> dict[str, Any]:
    if not token.exists():
        token.write_text(secrets.token_hex(32))
    return {
        "dram": "32MiB",
        "listen": f"127.0.0.1:{port}",
        "cluster_token_file": str(token),
        "cluster_state_dir": str(folder / "state"),
        "cluster_max_replicas": 1,  # blocks are where a test has put them, however long it takes
        **where,
    }


class Town:
    """Begins with some daemons; more may be added where there is an etcd."""

    def __init__(self, folder: Path, etcd: Etcd | None, count: int, **options: Any) -> None:
        """options: of `kvpool serve`. "{folder}" in a value: the daemon's own."""
        self.folder = folder
        self.daemons: list[Served] = []
        self._options = options
        ports = free_ports(count)
        if etcd is None:
            self._where = {"cluster_static": ",".join(f"127.0.0.1:{port}" for port in ports)}
        else:
            self._where = {"cluster_etcd": str(etcd.endpoint), "cluster_ttl": str(TTL_S)}
        for port in ports:
            self.add(port)

    def add(self, port: int | None = None) -> Served:
        """One more; not begun."""
        folder = self.folder / f"node-{len(self.daemons)}"
        folder.mkdir()
        port = free_ports(1)[0] if port is None else port
        told = options_of(folder, self.folder / "token", port, **self._where, **self._options)
        for name, value in told.items():
            told[name] = value.format(folder=folder) if isinstance(value, str) else value
        daemon = Served(folder, **told)
        self.daemons.append(daemon)
        return daemon

    def start(self) -> None:
        for each in self.daemons:
            each.start()
        comes(lambda: met(self.daemons), "all are members")

    def stop(self) -> None:
        for each in self.daemons:
            if each.process.poll() is None:
                each.stop()
            assert "Traceback" not in each.log(), each.log()

    def close(self) -> None:
        for each in self.daemons:
            each.close()


@contextlib.contextmanager
def town(folder: Path, etcd: Etcd | None, count: int, **options: Any) -> Iterator[Town]:
    """Of daemons that know one another, and that must end well unless the test killed them."""
    made = Town(folder, etcd, count, **options)
    try:
        made.start()
        yield made
        made.stop()
    finally:
        made.close()


@contextlib.contextmanager
def blocks_at(daemon: Served, channel: str = "shm", **options: Any) -> Iterator[Blocks]:
    """Blocks as a client of that daemon puts and gets them, every byte looked at."""
    with daemon.connect(channel, **options) as pool:
        yield Blocks(pool, BLOCK)


def are_known(at: Blocks, numbers: Sequence[int]) -> None:
    """Waits until the cluster says that it has them all."""
    keys = at.keys(numbers)
    comes(lambda: at.space.lookup(keys).blocks == len(numbers), "all blocks are known")


def tiers_at(at: Blocks, numbers: Sequence[int]) -> list[kvpool.Tier]:
    return [kvpool.Tier(each) for each in at.space.lookup(at.keys(numbers)).tiers]
