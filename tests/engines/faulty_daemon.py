"""`kvpool serve` whose node's fault points a test can reach: faulty_daemon.py SOCKET serve ...

On SOCKET it takes (name, arguments) and answers with what node.fault_<name>(*arguments) gives.
"""

import sys
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tests.served import Served, wait_for


class FaultyDaemon(Served):
    """The test's side: a daemon as any other, that can be made to fail."""

    def command(self) -> list[str]:
        Path(self._faults).unlink(missing_ok=True)
        return [sys.executable, "-X", "faulthandler", "-m", __name__, self._faults]

    @property
    def _faults(self) -> str:
        return str(self.folder / "faults.sock")

    def fault(self, name: str, *arguments: Any) -> Any:
        """fail, pause, resume, clear, hits, waiting: see Node in kvpool/_core.pyi."""
        with Client(self._faults) as connection:
            connection.send((name, arguments))
            return connection.recv()

    def wait_paused(self, point: str) -> None:
        """Until somebody waits at a point that was paused."""
        wait_for(lambda: self.fault("waiting", point) > 0, what=f"somebody comes to {point}")


def serve_faults(path: str, node: Any) -> None:
    with Listener(path) as listener:
        while True:
            with listener.accept() as connection:
                name, arguments = connection.recv()
                connection.send(getattr(node, f"fault_{name}")(*arguments))


def main() -> None:
    from kvpool import cli, daemon

    path = sys.argv.pop(1)

    class Reachable(daemon.Daemon):
        def __init__(self, plan: Any, tenants: Any, *rest: Any, **options: Any) -> None:
            super().__init__(plan, tenants, *rest, **options)
            node = tenants["default"].node
            threading.Thread(target=serve_faults, args=(path, node), daemon=True).start()

    daemon.Daemon = Reachable  # type: ignore[misc]
    cli.main()


if __name__ == "__main__":
    main()
