"""How far a pass over a trace is, on stderr when that is a terminal, else nowhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpool.replay.run import Watch
from kvpool.replay.trace import Request, Trace

_EVERY = 64  # requests between two looks at how much was read


@contextlib.contextmanager
def watching(*, prints_meanwhile: bool = False) -> Iterator[Watch]:
    """A Watch that draws one bar per pass; it may be called from any one thread at a time.

    prints_meanwhile: results go to stdout while the bar is there. When that is a terminal too,
    there is no bar: it would mix with them.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[requests]:,} requests"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # else what is printed lands on stderr, wrapped
        redirect_stderr=False,
    )
    mixes = prints_meanwhile and sys.stdout.isatty()
    bar.disable = mixes or not bar.console.is_terminal
    with bar:
        yield lambda step, requests: _watched(bar, step, requests)


def _watched(bar: Progress, step: str, requests: Iterable[Request]) -> Iterator[Request]:
    trace = requests if isinstance(requests, Trace) else None
    whole = trace.size_bytes() if trace else None
    task = bar.add_task(step, total=whole, requests=0)
    count = 0
    for count, request in enumerate(requests, start=1):
        if count % _EVERY == 0:
            read = trace.bytes_read if trace else count
            bar.update(task, completed=read, requests=count)
        yield request
    bar.update(task, total=count, completed=count, requests=count)
