"""A cluster on one machine.

    with Lab(3) as lab:
        lab.start()
        with lab.nodes[0].connect() as pool: ...
        lab.nodes[1].kill(); lab.part(lab.nodes[:1], lab.nodes[2:]); lab.etcd.pause()

Promises:  1. nothing of it is left when this process has ended, however that came;
           2. whatever does not come in time is a LabError, with what the daemon said.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvpool.errors import KvpoolError
from kvpool.lab.child import WAIT_S, Child, until
from kvpool.lab.disk import Disk
from kvpool.lab.etcd import Etcd
from kvpool.lab.linux import LabError
from kvpool.lab.network import Host, Network
from kvpool.lab.node import Node

TTL_S = 5  # less is lost now and then where machines are busy
DRAM = "32MiB"
_FOLDERS = "kvpool-lab-"
_YOUNG_S = 60.0  # a folder this new may be of a lab that has not locked it yet


class Lab:
    """A context manager; its nodes begin with start()."""

    def __init__(self, count: int, *, has_etcd: bool = True, **options: Any) -> None:
        """options: of every node, as for Node. disk_bytes: each gets a disk of that size. Without
        an etcd, members are a list. Raises LabError."""
        self._undo = contextlib.ExitStack()
        try:
            self.folder = Path(self._undo.enter_context(_folder()))
            self.network = self._undo.enter_context(Network())
            self._options = options
            self.nodes: list[Node] = []
            self._etcd = self._make_etcd() if has_etcd else None
            hosts = [self.network.add() for _ in range(count)]
            self._where = self._members(hosts)
            for each in hosts:
                self._make(each, {})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Nothing ends well: stop() is for that."""
        self._undo.close()

    @property
    def etcd(self) -> Etcd:
        if self._etcd is None:
            raise LabError("this lab has no etcd")
        return self._etcd

    def start(self) -> None:
        """Returns when all nodes are members for all, and connected."""
        if self._etcd is not None and not self._etcd.is_running:
            self._etcd.start()
        begun = [each for each in self.nodes if not each.is_running]
        for each in begun:
            each.launch()
        for each in begun:
            each.ready()
        self.meet()

    def add(self, **options: Any) -> Node:
        """One more node, on a host of its own; not begun. Members come from an etcd then."""
        if self._etcd is None:
            raise LabError("nobody can join a list")
        return self._make(self.network.add(), options)

    def stop(self) -> None:
        """All that run end well. Raises LabError."""
        for each in self.nodes:
            each.stop()

    # --- who knows whom --------------------------------------------------------------------------

    def meet(self, nodes: Sequence[Node] | None = None, late_s: float = WAIT_S) -> float:
        """Returns when these, or all that run, see one another and nobody else."""
        those = [each for each in self.nodes if each.is_running] if nodes is None else nodes
        names = ", ".join(each.name for each in those)
        return until(lambda: have_met(those), f"{names} have met", late_s)

    # --- trouble ---------------------------------------------------------------------------------

    def part(self, *groups: Sequence[Node | Etcd]) -> None:
        """As Network.part. An etcd in none of the groups is reached by all."""
        self.network.part(*[[each.host for each in group] for group in groups])

    def heal(self) -> None:
        self.network.heal()

    def pull(self, child: Child) -> None:
        """Its cable."""
        self.network.pull(child.host)

    def plug(self, child: Child) -> None:
        self.network.plug(child.host)

    # --- making ----------------------------------------------------------------------------------

    def _make_etcd(self) -> Etcd:
        etcd = Etcd(self.network.add(), self.folder / "etcd")
        self._undo.callback(etcd.close)
        return etcd

    def _members(self, hosts: Sequence[Host]) -> dict[str, Any]:
        if self._etcd is not None:
            return {"cluster_etcd": self._etcd.endpoint, "cluster_ttl": TTL_S}
        return {"cluster_static": ",".join(f"{each.address}:7070" for each in hosts)}

    def _make(self, host: Host, options: dict[str, Any]) -> Node:
        told = {
            "dram": DRAM,
            "token_file": str(_token(self.folder / "token")),
            "cluster_token_file": str(_token(self.folder / "members")),
            "cluster_state_dir": "{folder}/state",
            **self._where,
            **self._options,
            **options,
        }
        disk_bytes = told.pop("disk_bytes", 0)
        node = Node(host, self.folder / f"node-{len(self.nodes)}", told)
        self._undo.callback(node.close)
        if disk_bytes:
            node.disk = Disk(node.folder / "disk", disk_bytes)
        self.nodes.append(node)
        return node


def have_met(nodes: Sequence[Node]) -> bool:
    """All are members for all of these, nobody else is, and all are connected to all others."""
    try:
        told = [each.told() for each in nodes]
    except KvpoolError:
        return False
    own = {each.own for each in told}
    for each in told:
        others = [node for node in each.nodes if not node.is_own]
        if {node.id for node in each.nodes} != own or not each.is_entered:
            return False
        if not all(any(link.streams for link in node.links) for node in others):
            return False
    return True


def _token(path: Path) -> Path:
    if not path.exists():
        path.write_text(secrets.token_hex(32))
    return path


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A new one for temporary files, after those of labs that were killed are gone."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_FOLDERS, ignore_cleanup_errors=True) as folder:
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(held)


def _sweep(parent: Path) -> None:
    """Nobody holds the folder of a lab whose process has ended."""
    for each in parent.glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):
            held = os.open(each, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(held).st_mtime > _YOUNG_S:
                    shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(held)
