"""An etcd of one member, on a host of its own, and its data on a disk in memory: it waits for each
write, which takes long on a machine that is busy."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from pathlib import Path
from typing import Any

from kvpool.lab.child import Child, until
from kvpool.lab.disk import Disk
from kvpool.lab.linux import LabError, in_mounts
from kvpool.lab.network import Host

PORT = 2379
_PEER_PORT = 2380
_ANSWER_S = 2.0
_DISK_BYTES = 512 << 20


class Etcd(Child):
    """Its data stays through kill() and start(), until wipe()."""

    def __init__(self, host: Host, folder: Path) -> None:
        if shutil.which("etcd") is None:
            raise LabError("there is no `etcd`: install it (Debian: etcd-server)")
        super().__init__("etcd", host, folder)
        self._disk = Disk(folder / "disk", _DISK_BYTES)

    def close(self) -> None:
        super().close()
        self._disk.close()

    @property
    def endpoint(self) -> str:
        return f"{self.host.address}:{PORT}"

    def start(self) -> None:
        """Returns when it answers."""
        here, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{_PEER_PORT}"
        command = ["etcd", "--name", "one", "--data-dir", str(self._data)]
        command += ["--listen-client-urls", here, "--advertise-client-urls", here]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"one={peer}", "--initial-cluster-state", "new"]
        process = self._launch(command, self._disk.mounts)
        until(lambda: self._is_healthy() or process.poll() is not None, "etcd answers")
        if process.poll() is not None:
            raise LabError(f"etcd ended: {self.said()}")

    def wipe(self) -> None:
        """Its data is gone, as if it had never been there. It must not run."""
        if self.is_running:
            raise LabError("etcd runs")
        in_mounts(self._disk.mounts, lambda: shutil.rmtree(self._data))

    @property
    def _data(self) -> Path:
        return self._disk.folder / "data"

    def _is_healthy(self) -> bool:
        try:
            with self.host.connect(self.host.address, PORT, _ANSWER_S) as sock:
                return bool(_asked(sock, "/health").get("health") == "true")
        except (OSError, ValueError, http.client.HTTPException):
            return False


def _asked(sock: socket.socket, path: str) -> Any:
    connection = http.client.HTTPConnection("etcd", timeout=_ANSWER_S)
    connection.sock = sock
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())
