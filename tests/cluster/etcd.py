"""Real etcd processes for tests: started, killed, wiped and paused, on ports of their own."""

import functools
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

from kvpool.cluster.access import Access
from kvpool.cluster.answers import encoded
from kvpool.cluster.gateway import Gateway
from kvpool.cluster.http_post import Endpoint

READY_S = 60.0


def is_installed() -> bool:
    return shutil.which("etcd") is not None


def free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in socks]
    for each in socks:
        each.close()
    return ports


class Etcd:
    """An etcd of one member. Its port stays the same through stop() and start()."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self.folder = folder
        self.options = options
        self.scheme = scheme
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._peer_port = free_ports(2)
        self.endpoint = Endpoint("127.0.0.1", self.port)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Etcd":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, wait: bool = True) -> None:
        here, peer = f"{self.scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        command = ["etcd", "--name", "one", "--data-dir", str(self.folder / "data")]
        command += ["--listen-client-urls", here, "--advertise-client-urls", here]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"one={peer}", "--initial-cluster-state", "new"]
        command += ["--unsafe-no-fsync"] if has_option("--unsafe-no-fsync") else []
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self.options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            if self._is_healthy():
                return
            time.sleep(0.02)
        raise AssertionError(f"etcd is not ready after {READY_S} s: {self.log()}")

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(20)
            self._process = None

    def wipe(self) -> None:
        """Its data is gone; as it was never there."""
        assert self._process is None
        shutil.rmtree(self.folder / "data")

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, path: str, **request: Any) -> Any:
        """What no member asks. As fast as it goes: etcdctl takes a second of its own."""
        gateway = self.gateway(timeout_s=30.0)
        try:
            return gateway._ask(path, request)[1]
        finally:
            gateway.close()

    def put(self, key: str, value: str) -> None:
        self.ask("kv/put", key=encoded(key), value=encoded(value))

    def remove(self, key: str) -> None:
        self.ask("kv/deleterange", key=encoded(key))

    def gateway(self, access: Access | None = None, timeout_s: float = 10.0) -> Gateway:
        return Gateway([self.endpoint], access or Access(), timeout_s)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def _is_healthy(self) -> bool:
        if self.scheme == "https":
            unchecked = ssl._create_unverified_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=1, context=unchecked
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            connection.request("GET", "/health")
            told: Any = json.loads(connection.getresponse().read())
            return bool(told.get("health") == "true")
        except (OSError, ValueError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@functools.cache
def has_option(option: str) -> bool:
    """Later versions have some that earlier ones refuse."""
    done = subprocess.run(["etcd", "--help"], capture_output=True, text=True, check=False)
    return option in done.stdout + done.stderr
