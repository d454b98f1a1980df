"""The `kvpool` command: parses, calls, prints. Exit status 0 well, 1 failed, 2 asked wrongly.

Modules that do the work are imported by the command that needs them, so that `--help` is quick.
Results go to stdout; progress, bad lines and errors go to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvpool.replay import arguments

if TYPE_CHECKING:
    from kvpool.replay.score import Score
    from kvpool.replay.trace import Trace

PIPE_WIDTH = 120  # columns of a table that does not go to a terminal

app = typer.Typer(
    help="A KVCache pool for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same workload.")]


def main() -> None:
    """Entry point of the `kvpool` script."""
    app(prog_name="kvpool")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvpool {version('kvpool')}")
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
def replay(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE.jsonl",
            help="Requests in the Mooncake format.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME ...",
            help="temperature, lru, lfu, fifo, s3fifo, belady, or all (default: temperature).",
        ),
    ] = None,
    capacity_blocks: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...",
            min=1,
            max=2**31 - 1,
            help="Default: 1000 10000 50000; with --bytes 5000.",
        ),
    ] = None,
    block_bytes: Annotated[
        int, typer.Option(parser=arguments.block_bytes, metavar="SIZE", help="Payload of a block.")
    ] = "64KiB",  # type: ignore[assignment]  # the parser turns it into bytes
    with_bytes: Annotated[
        bool, typer.Option("--bytes", help="Move every block through a pool, compare every hit.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="With --bytes.")] = 1,
    tau: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.001, help="Half-life of heat (default: follows the trace)."
        ),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw hit rate against capacity.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a trace with bad lines.")
    ] = False,
) -> None:
    """Replay a request trace: policies side by side, or every byte through a pool.

    Without --json, LRU and Belady (which knows the future) are shown for reference.
    """
    from kvpool.replay import progress, report, run
    from kvpool.replay.trace import Trace

    if plot is not None:
        _check_plot(plot)
    if threads > 1 and not with_bytes:
        raise typer.BadParameter("needs --bytes", param_hint="--threads")
    plan = run.Plan(
        trace=Trace(path, strict=strict),
        policies=arguments.policies(policy or ["temperature"]),
        capacities_blocks=tuple(
            dict.fromkeys(capacity_blocks or ([5000] if with_bytes else [1000, 10000, 50000]))
        ),
        tau_s=tau or 0.0,
        block_bytes=block_bytes if with_bytes else None,
        threads=threads,
    )
    references = () if as_json else report.REFERENCES
    scores = []
    with _told_plainly(), progress.watching() as watch:
        for score in run.replay(plan, watch, references=references):
            scores.append(score)
            if as_json:
                print(report.json_line(str(path), score), flush=True)
    _tell_problems(plan.trace)
    if not as_json:
        for part in report.tables(str(path), scores, block_bytes=plan.block_bytes):
            _tables().print(part)
    if plot is not None:
        _draw(plot, str(path), scores)
    _fail_on_mismatches(scores)


@app.command()
def workload(
    seed: Seed = 1,
    requests: Annotated[int, typer.Option(min=1, help="How many lines.")] = 4000,
) -> None:
    """Write a made-up, chat-like request trace to stdout, in the Mooncake format."""
    from kvpool.replay.trace import write_line
    from kvpool.replay.workload import WorkloadOptions, generate

    for request in generate(WorkloadOptions(seed=seed, requests=requests)):
        sys.stdout.buffer.write(write_line(request))


# --- what commands share -------------------------------------------------------------------------


@contextlib.contextmanager
def _told_plainly() -> Iterator[None]:
    """Failures that a user can act on become one line and exit status 1; our bugs stay loud."""
    import kvpool
    from kvpool.replay.run import ReplayError
    from kvpool.replay.trace import TraceError

    try:
        yield
    except (TraceError, ReplayError, kvpool.KvpoolError) as error:
        _tell(f"error: {error}")
        raise typer.Exit(1) from None


def _tell(line: str) -> None:
    print(f"kvpool: {line}", file=sys.stderr)


def _tables() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


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
