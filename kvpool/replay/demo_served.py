"""The part of `kvpool demo` with a daemon: one process writes prompts, another reads them.

A daemon of its own (bench.served), and per channel two client processes that know the same tokens
(demo_client). First the handover: the reader waits for each prompt by its prefix hash and is woken
when its last block is there. Then rates, one process at a time: put, get, and on the same host view
in place. Every byte is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from kvpool.bench.rows import BenchError
from kvpool.bench.served import Served, environment_of_child, first_line, served
from kvpool.config import format_size
from kvpool.replay import report
from kvpool.replay.demo_client import BLOCK_BYTES, BLOCK_TOKENS, VIEW_BLOCKS, Done, Setup

PROMPTS = 32
PROMPT_BLOCKS = 128
SHARED_BLOCKS = 32
DRAM_BYTES = 512 << 20  # more than both channels put together
CHANNELS = ("shm", "tcp")
NOTE = (
    "[dim]GB/s of the median call, and of memcpy of as many bytes between the calls; CPU of the"
    " client's calls and of the daemon's process; every byte compared[/]"
)


class ServedError(Exception):
    """There is no daemon, or a client of it failed, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One work by one channel, by one process."""

    channel: str
    work: str
    done: Done
    node_cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        """Of the median call."""
        return statistics.median(self.done.bytes_per_s)

    @property
    def memcpy_bytes_per_s(self) -> float:
        """0 for a view, which copies nothing."""
        rates = self.done.memcpy_bytes_per_s
        return statistics.median(rates) if rates else 0.0

    @property
    def view_us(self) -> float:
        """Of the median view."""
        return VIEW_BLOCKS * BLOCK_BYTES / self.bytes_per_s * 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Handover:
    """How long after the writer's put returned its reader was awake: the median of the prompts.

    0: before it returned, for the last block is readable a moment earlier.
    """

    channel: str
    prompts: int
    awake_us: float
    mismatches: int


def steps(seed: int, tell: Callable[[str], None]) -> Iterator[Step | Handover]:
    """Yields each as soon as it is done. Raises ServedError. tell: what is under way."""
    try:
        tell("a daemon and two clients")
        with served(DRAM_BYTES, prefault="all") as daemon:
            for channel in CHANNELS:
                yield from _by(channel, daemon, seed, tell)
    except (BenchError, OSError) as error:
        raise ServedError(str(error)) from None


def _by(
    channel: str, daemon: Served, seed: int, tell: Callable[[str], None]
) -> Iterator[Step | Handover]:
    address = daemon.unix if channel == "shm" else daemon.tcp
    setup = Setup(address, channel, PROMPTS, PROMPT_BLOCKS, SHARED_BLOCKS, seed)
    with _Client(setup) as writer, _Client(setup) as reader:
        tell(f"{channel}: handover")
        reader.ask("take")
        writer.ask("hand")
        written, taken = writer.answer(), reader.answer()
        yield _handover(channel, written, taken)
        for who, work in ((writer, "put"), (reader, "get"), (reader, "view")):
            if work == "view" and channel != "shm":
                continue
            tell(f"{channel}: {work}")
            before_s = daemon.cpu_s()
            who.ask(work)
            done = who.answer()
            yield Step(channel, work, done, daemon.cpu_s() - before_s)


def _handover(channel: str, written: Done, taken: Done) -> Handover:
    waits = [
        max(0.0, woken - put) for put, woken in zip(written.times_s, taken.times_s, strict=True)
    ]
    return Handover(channel, len(waits), statistics.median(waits) * 1e6, taken.mismatches)


class _Client:
    """A client process; a context manager that ends it."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvpool.replay.demo_client",
                json.dumps(dataclasses.asdict(setup)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of_child(),
        )

    def __enter__(self) -> _Client:
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            if first_line(self._process) != b"ready\n":
                self._fail()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, work: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{work}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def answer(self) -> Done:
        """Raises ServedError where the client has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return Done(**json.loads(line))

    def _fail(self) -> None:
        self._process.kill()
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        raise ServedError(f"a client of the daemon failed: {said[-1] if said else 'in silence'}")

    def _end(self) -> None:
        self._process.kill()
        with self._process:  # closes its pipes and waits
            pass


def mismatches(done: Sequence[Step | Handover]) -> int:
    """Blocks that were not, byte for byte, what their writer put."""
    return sum(
        each.mismatches if isinstance(each, Handover) else each.done.mismatches for each in done
    )


# --- showing -------------------------------------------------------------------------------------


def json_line(step: Step | Handover) -> str:
    """One line per step, and per handover."""
    if isinstance(step, Handover):
        fields: dict[str, object] = {"part": "handover", **dataclasses.asdict(step)}
        fields["awake_us"] = round(step.awake_us, 1)
        return json.dumps(fields)
    done = step.done
    fields = {
        "part": "daemon",
        "channel": step.channel,
        "work": step.work,
        "blocks": done.blocks,
        "block_bytes": BLOCK_BYTES,
        "cpu_s_per_GB": round(done.cpu_s / done.moved_bytes * 1e9, 4),
        "node_cpu_s_per_GB": round(step.node_cpu_s / done.moved_bytes * 1e9, 4),
        "mismatches": done.mismatches,
    }
    if step.work == "view":
        fields["p50_us"] = round(step.view_us, 2)
        fields["batch"] = VIEW_BLOCKS
    else:
        fields["GBps"] = round(step.bytes_per_s / 1e9, 3)
        fields["memcpy_GBps"] = round(step.memcpy_bytes_per_s / 1e9, 3)
    return json.dumps(fields)


def summary(done: Sequence[Step | Handover]) -> list[RenderableType]:
    """What to print, in order."""
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    heading = (
        f"[bold]A daemon with {format_size(DRAM_BYTES)}, a process that writes {PROMPTS} prompts of"
        f" {tokens:,} tokens ({format_size(PROMPT_BLOCKS * BLOCK_BYTES)} of KV each, of which they"
        f" share {format_size(SHARED_BLOCKS * BLOCK_BYTES)}), and one that reads them[/]"
    )
    handed = ", ".join(
        f"{each.channel}: {_awake(each)}" for each in done if isinstance(each, Handover)
    )
    return [
        heading,
        _table([each for each in done if isinstance(each, Step)]),
        f"Handed over by prefix hash; when a prompt's put had returned, its reader ({handed})",
        NOTE,
        "",
    ]


def _awake(handed: Handover) -> str:
    return f"awake {handed.awake_us:,.0f} us later" if handed.awake_us >= 1 else "was awake"


def _table(rows: Sequence[Step]) -> Table:
    table = report.plain_table(gap=2)
    for header in ("channel", "work"):
        table.add_column(header, no_wrap=True, vertical="bottom")
    for header in (
        "blocks", "GB\nmoved", "GB/s", "memcpy", "ratio", "client CPU\ns per GB",
        "daemon CPU\ns per GB", "mis-\nmatches",
    ):  # fmt: skip
        table.add_column(header, justify="right", vertical="bottom")
    for number, row in enumerate(rows):
        is_last = number + 1 < len(rows) and rows[number + 1].channel != row.channel
        table.add_row(*_cells(row), end_section=is_last)
    return table


def _cells(row: Step) -> list[str]:
    done, floor, is_view = row.done, row.memcpy_bytes_per_s, row.work == "view"
    wrong = f"{done.mismatches:,}"
    return [
        row.channel,
        f"view in place: {row.view_us:.1f} us per {VIEW_BLOCKS}" if is_view else row.work,
        f"{done.blocks:,}",
        f"{done.moved_bytes / 1e9:.2f}",
        "" if is_view else f"{row.bytes_per_s / 1e9:.2f}",
        f"{floor / 1e9:.2f}" if floor else "",
        f"{row.bytes_per_s / floor:.2f}" if floor else "",
        f"{done.cpu_s / done.moved_bytes * 1e9:.3f}",
        f"{row.node_cpu_s / done.moved_bytes * 1e9:.3f}",
        f"[bold red]{wrong}[/]" if done.mismatches else f"[green]{wrong}[/]",
    ]
