"""`kvpool serve`: a node as a service of this host."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvpool

if TYPE_CHECKING:
    from kvpool.cluster.joined import Joined
    from kvpool.daemon import Daemon
    from kvpool.events.publisher import Publisher
    from kvpool.serve_log import EventLog
    from kvpool.serve_plan import Plan
    from kvpool.tenants.tenant import Tenant

END_S_MAX = 4.9  # from SIGTERM to the end of the process, whatever hangs


def serve(
    *,
    config: str | None,
    print_config: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Serve one pool to every process of this host, until SIGTERM.

    Every option can also stand in a file (--config) or in a variable: --ssd-capacity is capacity in
    the table ssd of that file, and KVPOOL_SERVE_SSD_CAPACITY. Flags win over variables, variables
    over the file, which alone has tenants. SIGHUP reads all of it again. Says `kvpool: ready` on
    stdout when clients can connect; logs to stderr.
    """
    from kvpool import serve_config, serve_plan

    def replan() -> Plan:
        return serve_plan.plan(serve_config.load(config, os.environ, flags), os.environ)

    try:
        settings = serve_config.load(config, os.environ, flags)
        plan = serve_plan.plan(settings, os.environ)
    except kvpool.BadArgument as error:
        _tell(f"error: {error}")
        raise typer.Exit(2) from None
    if print_config:
        print((serve_config.as_json if as_json else serve_config.as_toml)(settings))
        return
    if as_json:
        _tell("error: --json goes with --print-config; the log's form is --log-format")
        raise typer.Exit(2)
    try:
        run(plan, replan)
    except (kvpool.KvpoolError, MemoryError) as error:
        _tell(f"error: {error}")
        raise typer.Exit(1) from None


def run(plan: Plan, replan: Callable[[], Plan] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Raises KvpoolError if it cannot begin.

    replan: the plan of the configuration as it is now, for SIGHUP.
    """
    from kvpool import serve_listen, serve_log
    from kvpool.tenants.opening import open_tenants

    log = serve_log.open_log(plan.log_format, plan.log_level)
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        listeners = stack.enter_context(contextlib.closing(serve_listen.Listeners(plan)))
        web = stack.enter_context(_web(plan))
        join = _place(plan, listeners, stack, log)
        tenants = open_tenants(plan, log)
        joined = join(tenants)
        events = _events(plan, tenants, joined, stack, log)
        asyncio.run(_serve(plan, tenants, (listeners, web, joined, events), log, replan))
    log.info("ended")


async def _serve(
    plan: Plan,
    tenants: dict[str, Tenant],
    where: tuple[Any, Any, Joined | None, Publisher | None],
    log: EventLog,
    replan: Callable[[], Plan] | None,
) -> None:
    from kvpool.daemon import Daemon

    listeners, web, joined, events = where

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _told_to_end, stop, log, number)
    daemon = Daemon(
        plan,
        tenants,
        listeners,
        log,
        kvpool.__version__,
        replan=replan,
        web=web,
        joined=joined,
        events=events,
    )
    reloads: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
    loop.add_signal_handler(signal.SIGHUP, _told_to_reload, daemon, reloads)
    await daemon.run(stop, lambda: _tell_ready(plan, listeners, web, log))


def _web(plan: Plan) -> Any:
    """HTTP, where it is asked for: otherwise its libraries are not even loaded."""
    if plan.http is None:
        return contextlib.nullcontext()
    from kvpool import serve_http

    return contextlib.closing(serve_http.Web(plan.http))


def _place(
    plan: Plan, listeners: Any, stack: contextlib.ExitStack, log: EventLog
) -> Callable[[dict[str, Tenant]], Joined | None]:
    """Takes this node's place in its cluster, where it is in one; gives what fills it.

    The daemon closes what it was given; the stack a place that none was begun with.
    """
    if plan.cluster is None:
        return lambda tenants: None
    from kvpool import serve_cluster

    place = serve_cluster.open_place(plan, listeners, log)
    assert place is not None  # there is a plan of it
    begun = stack.enter_context(contextlib.ExitStack())
    begun.callback(place.close)

    def join(tenants: dict[str, Tenant]) -> Joined:
        assert plan.cluster is not None  # looked at above
        joined = serve_cluster.join(plan.cluster, place, tenants, log, kvpool.__version__)
        begun.pop_all()
        return joined

    return join


def _events(
    plan: Plan,
    tenants: dict[str, Tenant],
    joined: Joined | None,
    stack: contextlib.ExitStack,
    log: EventLog,
) -> Publisher | None:
    """The daemon closes it, and the stack one that none was begun with."""
    if plan.events is None:
        return None
    from kvpool import serve_events

    own = None if joined is None else joined.own
    publisher = serve_events.open_publisher(plan, tenants, own, log)
    assert publisher is not None  # there is a plan of it
    stack.callback(publisher.close)
    return publisher


def _told_to_reload(daemon: Daemon, reloads: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(daemon.reload())
    reloads.add(task)
    task.add_done_callback(reloads.discard)


def _told_to_end(stop: asyncio.Event, log: EventLog, number: int) -> None:
    if stop.is_set():
        os._exit(128 + number)
    log.info("ending", signal=signal.Signals(number).name)
    # A thread of C: it ends the process even if a call never comes back, and shows where it hung.
    faulthandler.dump_traceback_later(END_S_MAX, exit=True)
    notify("STOPPING=1")
    stop.set()


def _tell_ready(plan: Plan, listeners: Any, web: Any, log: EventLog) -> None:
    where = {"socket": plan.socket_path, "listen": ",".join(listeners.tcp_addresses)}
    where["http"] = "" if web is None else web.address
    known = {name: value for name, value in where.items() if value}
    line = " ".join(f"{name}={value}" for name, value in known.items())
    with contextlib.suppress(OSError):  # whoever started us does not listen
        print(f"kvpool: ready {line} pid={os.getpid()}", flush=True)
    log.info("ready", **known, pid=os.getpid(), dram=plan.node["dram"], ssd=plan.node["ssd"])
    if listeners.is_reachable:
        log.warning("other machines can connect", listen=known["listen"], encrypted=False)
    notify("READY=1")


def notify(state: str) -> None:
    """Tells systemd, or whoever else set $NOTIFY_SOCKET, in one datagram. Never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def raise_descriptor_limit() -> None:
    """As many descriptors as the system allows: each connection of a client takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def command() -> Callable[..., None]:
    """serve() with a flag for each option, for the parser, which reads them from the signature."""
    from kvpool import serve_config

    def call(**values: Any) -> None:
        serve(**values)

    own = {
        "config": Annotated[
            str | None,
            typer.Option("--config", metavar="FILE.toml", help="Read options from this file."),
        ],
        "print_config": Annotated[
            bool,
            typer.Option("--print-config", help="Show the options and where they come from."),
        ],
        "as_json": Annotated[bool, typer.Option("--json", help="With --print-config.")],
    }
    flags = {each.name: _flag(each) for each in serve_config.options()}
    kinds: dict[str, Any] = own | flags
    empty = {"config": None, "print_config": False, "as_json": False}
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=empty.get(name), annotation=kind
            )
            for name, kind in kinds.items()
        ]
    )
    call.__annotations__ = kinds
    call.__name__, call.__doc__ = serve.__name__, serve.__doc__
    return call


def _flag(option: Any) -> Any:
    """Every value is text, read as a variable's would be; but yes and no have a flag each."""
    help_text = option.description
    if option.default is not None:
        help_text += f" Default: {option.default}."
    if option.kind in (bool, bool | None):
        return Annotated[
            bool | None, typer.Option(f"{option.flag}/--no-{option.flag[2:]}", help=help_text)
        ]
    return Annotated[str | None, typer.Option(option.flag, metavar="VALUE", help=help_text)]


def _tell(line: str) -> None:
    print(f"kvpool: {line}", file=sys.stderr)
