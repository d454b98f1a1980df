"""A node with its server and a daemon's loop, in this process, for clients that are not ours."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from kvpool.daemon import Daemon
from kvpool.serve_listen import Listeners
from kvpool.serve_log import open_log
from kvpool.serve_plan import Plan
from kvpool.tenants.opening import open_tenants
from tests.daemons import WAIT_S, planned


def beside_a_node(folder: Path, work: Callable[[str], None], plan: Plan | None = None) -> None:
    """Calls work(path of the node's socket) in a thread and raises what it raises."""
    asyncio.run(_beside(plan or planned(folder, log_level="error", dram="64MiB"), work))


async def _beside(plan: Plan, work: Callable[[str], None]) -> None:
    listeners = Listeners(plan)
    log = open_log(plan.log_format, plan.log_level)
    daemon = Daemon(plan, open_tenants(plan, log), listeners, log, "0")
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(daemon.run(stop, ready.set))
    try:
        await asyncio.wait_for(ready.wait(), WAIT_S)
        await asyncio.to_thread(work, plan.socket_path)
    finally:
        stop.set()
        await running
