"""A daemon's control side for tests of commands: real hellos and messages, answers of the test.

Every operation is a function of the request's fields; what it returns is the answer. Requests are
kept, so that a test can say what was asked.
"""

import contextlib
import json
import os
import socket
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from kvpool import cli, wire
from kvpool.cluster.joined import Joined
from kvpool.errors import BadArgument, NotAllowed
from kvpool.manifest import Manifest
from kvpool.observe import report
from kvpool.serve_control import Operation as ServedOperation
from kvpool.serve_control import Refusals, Requests
from kvpool.serve_log import open_log
from kvpool.serve_observe import Observer
from kvpool.tenants.identity import Claim
from kvpool.tenants.plans import Limits
from kvpool.tenants.tenant import Client, Peer, Tenant
from tests import reports
from tests.daemons import BookServer

Operation = Callable[[dict[str, Any]], Mapping[str, Any]]
ENVIRONMENT = {
    "COLUMNS": "160",
    "NO_COLOR": "1",
    **dict.fromkeys(("KVPOOL_ADDRESS", "KVPOOL_TOKEN", "KVPOOL_TENANT"), ""),
}


class ControlServer:
    """Listens on folder/node.sock until stop(); start() again is a daemon that came back."""

    def __init__(self, folder: Path, **operations: Operation) -> None:
        self.path = str(folder / "node.sock")
        self.operations: dict[str, Operation] = dict(operations)
        self.requests: list[dict[str, Any]] = []
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(self) -> "ControlServer":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listener.bind(self.path)
        listener.listen(16)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Idempotent. Connections end as those of a killed daemon do."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        os.unlink(self.path)
        for each in [listener, *self._connections]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._connections.clear()

    def asked(self, op: str) -> list[dict[str, Any]]:
        return [request for request in self.requests if request["op"] == op]

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                self._connections.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, wire.WireError, ConnectionError):
            version, length = wire.read_head(_exactly(sock, wire.HEAD_BYTES))
            wire.read_hello(version, _exactly(sock, length))
            facts = {"ok": True, "client": bytes(16), "streams_max": 2, "boot": b"boot"}
            sock.sendall(wire.pack_hello({**facts, "version": "9.9.9", "shm": False}))
            while True:
                length = wire.read_length(_exactly(sock, wire.LENGTH_BYTES))
                request = wire.read_map(_exactly(sock, length))
                self.requests.append(request)
                sock.sendall(wire.pack_message(self._answer(request)))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = self.operations.get(request["op"])
        try:
            if operation is None:
                raise BadArgument(f"there is no operation {request['op']!r}; ping")
            return {"id": request["id"], "ok": True, **operation(request)}
        except BadArgument as error:
            refused = {"ok": False, "error": "bad_argument", "message": str(error)}
            return {"id": request["id"], **refused}


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            raise ConnectionError("closed")
        parts += part
    return parts


@contextlib.contextmanager
def controlled(folder: Path, **operations: Operation) -> Iterator[ControlServer]:
    """A control server with these operations beside those of an ordinary daemon at rest."""
    usual: dict[str, Operation] = {
        "report": lambda _: {"report": report.as_json(reports.example())},
        "hottest": lambda asked: {"hottest": hottest(asked["count"])},
    }
    server = ControlServer(folder, **{**usual, **operations}).start()
    try:
        yield server
    finally:
        server.stop()


LIMITS = Limits(
    dram_min=0,
    dram_max=1 << 30,
    ssd_capacity=0,
    max_clients=8,
    put_bytes_per_s=0,
    get_bytes_per_s=0,
    pin_bytes=0,
)
NOBODY = Peer("uid:1000", 1, is_unix=True, uid=1000)


def tenant_of(name: str, node: Any, manifests: Sequence[Manifest]) -> Tenant:
    """Of a daemon, over a node in this process."""
    made = Tenant(name, node, BookServer(), LIMITS)
    for each in manifests:
        made.open_namespace(each, len(each.pack()))
    return made


def observing(
    *tenants: Tenant, is_admin: bool = True, joined: Joined | None = None
) -> dict[str, Operation]:
    """The operations of a daemon's observer, as the first of these tenants; its report is an
    example."""
    by_name = {tenant.name: tenant for tenant in tenants}
    log = open_log("text", "error")
    requests = Requests(by_name, log, Refusals())
    daemon: Any = types.SimpleNamespace(tenants=by_name, requests=requests, joined=joined)
    told = Observer(daemon).operations()
    asking = Client(0, "test", 1, NOBODY, tenants[0], is_admin, Claim(1000))

    def bound(operation: ServedOperation) -> Operation:
        def answer(request: dict[str, Any]) -> Mapping[str, Any]:
            if operation.needs_admin and not is_admin:
                raise NotAllowed("for administrators")
            return operation.call(request, asking)

        return answer

    return {name: bound(each) for name, each in told.items() if name != "report"}


def hottest(count: int) -> list[dict[str, Any]]:
    """As a daemon tells them."""
    return [
        {
            "key": (bytes([n + 1]) * 16).hex(),
            "depth": 10 * (n + 1),
            "tokens": 160 * (n + 1),
            "heat": 50.0 / (n + 1),
            "idle_s": 2.5 * n,
            "tiers": 1 + n % 3,
            "children": n,
            "tenant": "default",
            "namespace": "chat" if n % 2 == 0 else "02" * 16,
        }
        for n in range(min(count, 12))
    ]


def command(*words: object, status: int | None = 0, **options: Any) -> Result:
    """One command in this process, which must end with that status (None: any)."""
    environment = {**ENVIRONMENT, **options.pop("env", {})}
    arguments = [str(word) for word in words]
    done = CliRunner().invoke(cli.app, arguments, env=environment, **options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert status in (None, done.exit_code), done.stdout + done.stderr
    return done


def json_of(*words: object, **options: Any) -> Any:
    """What a command with --json says on stdout: one object."""
    return json.loads(command(*words, "--json", **options).stdout)
