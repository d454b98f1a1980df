"""The `kvpool` command: parses, calls, prints. Exit status 0 well, 1 failed, 2 asked wrongly.

Modules that do the work are imported by the command that needs them, so that `--help` is quick.
Results go to stdout; progress, bad lines and errors go to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType

import kvpool
from kvpool import serve_cli, ssd_cli
from kvpool.bench.arguments import Bench, BenchArguments
from kvpool.operate import commands
from kvpool.replay import arguments, shapes

if TYPE_CHECKING:
    from kvpool.replay import demo_served
    from kvpool.replay.score import Score
    from kvpool.replay.trace import Trace

PIPE_WIDTH = 200  # columns of a table that does not go to a terminal

app = typer.Typer(
    help="A KVCache pool for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve_cli.command())
app.add_typer(ssd_cli.app, name="ssd")
commands.add_to(app)

Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same workload.")]


def main() -> None:
    """Entry point of the `kvpool` script."""
    try:
        app(prog_name="kvpool")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise  # a bug of ours, unless it is stdout
        _tell(f"error: what was to be shown cannot be written: {error.strerror}")
        os._exit(1)  # the interpreter would try once more to write it, and say so


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvpool {kvpool.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command(cls=arguments.ReplayCommand)
@arguments.taking(arguments.ReplayArguments)
def replay(asked: arguments.ReplayArguments) -> None:
    """Replay a request trace: policies side by side, every byte through a pool, or in clusters.

    Without --json, LRU and Belady (which knows the future) are shown for reference.
    """
    from kvpool.replay import progress, report, run, tier_table

    if asked.nodes:
        _replay_clusters(asked)
        return
    if asked.plot is not None:
        _check_plot(asked.plot)
    plan, name = asked.plan(), str(asked.path)
    references = () if asked.as_json else report.REFERENCES
    scores = []
    with _told_plainly(), progress.watching(prints_meanwhile=asked.as_json) as watch:
        for score in run.replay(plan, watch, references=references):
            scores.append(score)
            if asked.as_json:
                print(report.json_line(name, score), flush=True)
    _tell_problems(plan.trace)
    if not asked.as_json:
        width = _console().width
        _print(*report.tables(name, scores, block_bytes=plan.block_bytes, width=width))
        if plan.ssd and plan.block_bytes:
            notes = tier_table.one_tier_notes(scores)
            _print(*notes, "", *tier_table.tier_parts(scores, plan.block_bytes))
    if asked.plot is not None:
        _draw(asked.plot, name, scores)
    _fail_on_mismatches(scores)


def _replay_clusters(asked: arguments.ReplayArguments) -> None:
    from kvpool.replay import cluster, cluster_report, progress

    plan = asked.cluster_plan()
    with _told_plainly(), progress.watching() as watch:
        scores = cluster.replay_clusters(plan, watch)
    _tell_problems(plan.trace)
    if asked.as_json:
        for score in scores:
            print(cluster_report.json_line(plan, score), flush=True)
    else:
        _print(*cluster_report.tables(plan, scores))


@app.command()
def workload(
    seed: Seed = 1,
    requests: Annotated[int, typer.Option(min=1, help="How many lines.")] = 6000,
    shape: Annotated[
        str, typer.Option(metavar="SHAPE", help="What is asked for: " + ", ".join(shapes.SHAPES))
    ] = shapes.CHAT,
) -> None:
    """Write a made-up (synthetic) request trace to stdout, in the Mooncake format."""
    from kvpool.replay.trace import write_line

    if shape not in shapes.SHAPES:
        raise typer.BadParameter(
            f"there is no shape {shape!r}; choose from {', '.join(shapes.SHAPES)}",
            param_hint="--shape",
        )
    for request in shapes.made_up(shape, seed=seed, requests=requests):
        sys.stdout.buffer.write(write_line(request))


@app.command()
def demo(seed: Seed = 1, as_json: arguments.AsJson = False) -> None:
    """Show a pool at work, every byte compared: a daemon with two clients, then an embedded pool.

    The daemon is reached by shared memory and by TCP, each beside memcpy. The embedded pool runs a
    made-up workload under every policy, and with an SSD tier. Takes under 60 s on two idle cores.
    """
    from kvpool.replay import demo, demo_served, progress
    from kvpool.replay.workload import WorkloadOptions

    workload = WorkloadOptions(seed=seed)
    with _told_plainly():
        by_daemon = _demo_served(seed, as_json)
    scores = []
    with _told_plainly(), progress.watching(prints_meanwhile=as_json) as watch:
        for score in demo.demo(workload, watch):
            scores.append(score)
            if as_json:
                print(demo.json_line(workload, score), flush=True)
        try:
            on_ssd = demo.with_ssd(workload, watch)
        except demo.NoRoom as reason:
            _tell(f"without the part on SSD: {reason}")
        else:
            for score in (demo.without_ssd(workload, watch), on_ssd):
                scores.append(score)
                if as_json:
                    print(demo.json_line(workload, score), flush=True)
    if not as_json:
        _print(*demo.summary(workload, scores))
    _fail_on_mismatches(scores)
    if wrong := demo_served.mismatches(by_daemon):
        _tell(f"error: {wrong:,} wrong blocks by the daemon")
        raise typer.Exit(1)


def _demo_served(seed: int, as_json: bool) -> list[demo_served.Step | demo_served.Handover]:
    """Prints as soon as it is done."""
    from kvpool.replay import demo_served

    done = []
    with Console(stderr=True).status("a daemon") as status:  # a spinner, on a terminal only
        for step in demo_served.steps(seed, status.update):
            done.append(step)
            if as_json:
                print(demo_served.json_line(step), flush=True)
    if not as_json:
        _print(*demo_served.summary(done))
    return done


@app.command()
@arguments.taking(BenchArguments)
def bench(asked: BenchArguments) -> None:
    """Measure the pool beside memcpy, raw sockets or the raw disk in the same run, and hold it to
    its bars. Also daemons, of its own, for shm, tcp and lookup, and vLLM with other connectors."""
    from kvpool.bench import rows, suite, timing

    scale = asked.scale(_tell)
    usual = [name for name in suite.BENCHES if name not in suite.NOT_IN_ALL]
    names = usual if asked.what == Bench.ALL else [asked.what.value]
    _tell(timing.environment(asked.seed))
    with _told_plainly():
        for name in names:
            if asked.as_json:
                for row in suite.BENCHES[name](scale):
                    print(rows.json_line(row), flush=True)
                continue
            with Console(stderr=True).status(name):  # a spinner, on a terminal only
                found = list(suite.BENCHES[name](scale))
            _print(*rows.tables(found))


# --- what commands share -------------------------------------------------------------------------


@contextlib.contextmanager
def _told_plainly() -> Iterator[None]:
    """Failures that a user can act on become one line and exit status 1; our bugs stay loud."""
    from kvpool.bench.rows import BenchError
    from kvpool.replay.demo_served import ServedError
    from kvpool.replay.run import ReplayError
    from kvpool.replay.ssd import SsdError
    from kvpool.replay.trace import TraceError

    ours = (TraceError, ReplayError, SsdError, BenchError, ServedError)
    try:
        yield
    except (*ours, kvpool.KvpoolError) as error:
        _tell(f"error: {error}")
        raise typer.Exit(1) from None


def _tell(line: str) -> None:
    print(f"kvpool: {line}", file=sys.stderr)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _print(*parts: RenderableType) -> None:
    console = _console()
    for part in parts:
        console.print(part)


def _tell_problems(trace: Trace) -> None:
    for problem in trace.problems:
        _tell(f"{trace.path}, {problem}")
    unnamed = trace.skipped - len(trace.problems)
    if unnamed:
        _tell(f"{trace.path}: and {unnamed:,} more bad lines")
    if trace.skipped:
        _tell(f"{trace.skipped:,} bad lines skipped, {trace.requests:,} requests replayed")
    if trace.clamped:
        _tell(f"{trace.clamped:,} requests lie before an earlier one; replayed at its time")


def _check_plot(path: str) -> None:
    from kvpool.replay import report

    try:
        report.check_plot(path)
    except ImportError:
        _tell("error: --plot needs matplotlib; install it with: pip install 'kvpool[plot]'")
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(f"cannot draw {path}: {error}", param_hint="--plot") from None


def _draw(path: str, title: str, scores: list[Score]) -> None:
    from kvpool.replay import report

    try:
        report.plot(path, title, scores)
    except (OSError, ValueError) as error:
        _tell(f"error: cannot draw {path}: {error}")
        raise typer.Exit(1) from None


def _fail_on_mismatches(scores: list[Score]) -> None:
    wrong = [score for score in scores if score.copied and score.copied.mismatches]
    for score in wrong:
        assert score.copied is not None
        _tell(
            f"error: {score.copied.mismatches:,} wrong blocks under {score.policy} at"
            f" {score.capacity_blocks:,}; the first: {score.copied.first_mismatch}"
        )
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
