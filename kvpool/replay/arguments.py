"""The arguments of `kvpool replay`, and what its parser does not know by itself.

With cluster_arguments.py, the only part of replay/ that knows of the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from kvpool.config import ADMISSIONS, parse_size
from kvpool.replay.cluster import ClusterPlan
from kvpool.replay.cluster_arguments import ClusterArguments
from kvpool.replay.payload import WORD_BYTES
from kvpool.replay.run import Plan
from kvpool.replay.score import ONLINE_POLICIES, POLICIES
from kvpool.replay.ssd import SsdOptions
from kvpool.replay.trace import Trace

ALL = "all"
CAPACITIES_BLOCKS = (1000, 10_000, 50_000)
CAPACITY_BLOCKS_WITH_BYTES = 5000  # 50,000 blocks would be gigabytes of memory
_NAMES = (*POLICIES, ALL)

Arguments = TypeVar("Arguments")


def block_bytes(text: str) -> int:
    """A block size that payload can fill; a usage error says what is wrong with it."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size == 0 or size % WORD_BYTES:
        raise typer.BadParameter(f"{text} is not a positive multiple of {WORD_BYTES} bytes")
    return size


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]


@dataclasses.dataclass(frozen=True)
class ReplayArguments(ClusterArguments):
    """What `kvpool replay` was asked, as it was asked."""

    path: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE.jsonl",
            help="Requests in the Mooncake format.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ]
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME ...", help=f"{', '.join(_NAMES)} (default: temperature)."),
    ] = None
    capacity_blocks: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...",
            min=1,
            max=2**30,
            help=f"Default: {' '.join(map(str, CAPACITIES_BLOCKS))};"
            f" with --bytes {CAPACITY_BLOCKS_WITH_BYTES}.",
        ),
    ] = None
    block_bytes: Annotated[
        int, typer.Option(parser=block_bytes, metavar="SIZE", help="Payload of a block.")
    ] = "64KiB"  # type: ignore[assignment]  # the parser turns it into bytes
    with_bytes: Annotated[
        bool, typer.Option("--bytes", help="Move every block through a pool, compare every hit.")
    ] = False
    threads: Annotated[int, typer.Option(min=1, max=64, help="With --bytes.")] = 1
    ssd: Annotated[
        str | None,  # not a Path, of which "" is the working directory
        typer.Option(
            metavar="PATH",
            help="With --bytes: add an SSD tier in this directory, which must be empty or absent,"
            " and is emptied again unless --keep-ssd.",
        ),
    ] = None
    ssd_capacity_blocks: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=2**30, help="Blocks that the SSD holds.")
    ] = None
    ssd_admit: Annotated[
        str, typer.Option(metavar="RULE", help="Blocks that are written: " + ", ".join(ADMISSIONS))
    ] = ADMISSIONS[0]
    restart_at: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Close the pool after this share of the requests and open it again on its SSD.",
        ),
    ] = None
    keep_ssd: Annotated[
        bool, typer.Option("--keep-ssd", help="Leave the tier's files there when done.")
    ] = False
    tau: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.001, help="Half-life of heat (default: follows the trace)."
        ),
    ] = None
    as_json: AsJson = False
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw hit rate against capacity.")
    ] = None
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a trace with bad lines.")] = False

    def plan(self) -> Plan:
        """What to do; raises a usage error for arguments that do not go together."""
        self.check_no_cluster()
        if self.threads > 1 and not self.with_bytes:
            raise typer.BadParameter("needs --bytes", param_hint="--threads")
        usual = (CAPACITY_BLOCKS_WITH_BYTES,) if self.with_bytes else CAPACITIES_BLOCKS
        return Plan(
            trace=Trace(self.path, strict=self.strict),
            policies=_policies(self.policy or ["temperature"]),
            capacities_blocks=tuple(dict.fromkeys(self.capacity_blocks or usual)),
            tau_s=self.tau or 0.0,
            block_bytes=self.block_bytes if self.with_bytes else None,
            threads=self.threads,
            ssd=self._ssd_options(),
        )

    def cluster_plan(self) -> ClusterPlan:
        """What to do with --nodes; raises a usage error for arguments that do not go with it."""
        needless = {
            "--bytes": self.with_bytes,
            "--ssd": self.ssd is not None,
            "--plot": self.plot is not None,
        }
        for name, is_given in needless.items():
            if is_given:
                raise typer.BadParameter("does not go with --nodes", param_hint=name)
        named = _policies(self.policy or ["temperature"])
        policies = tuple(name for name in named if name in ONLINE_POLICIES)
        if not policies:
            raise typer.BadParameter(
                f"no node can run {named[0]}; it stands beside the others anyway",
                param_hint="--policy",
            )
        return ClusterPlan(
            trace=Trace(self.path, strict=self.strict),
            policies=policies,
            sizes=tuple(self.cluster_sizes(self.capacity_blocks)),
            options=self.cluster_options(),
            tau_s=self.tau or 0.0,
            block_bytes=self.block_bytes,
            spreads=self.spread,
        )

    def _ssd_options(self) -> SsdOptions | None:
        if self.ssd is None:
            needless = {
                "--ssd-capacity-blocks": self.ssd_capacity_blocks is not None,
                "--ssd-admit": self.ssd_admit != ADMISSIONS[0],
                "--restart-at": self.restart_at is not None,
                "--keep-ssd": self.keep_ssd,
            }
            for name, is_given in needless.items():
                if is_given:
                    raise typer.BadParameter("needs --ssd", param_hint=name)
            return None
        if not self.with_bytes:
            raise typer.BadParameter("needs --bytes", param_hint="--ssd")
        if self.ssd_capacity_blocks is None:
            raise typer.BadParameter("needs --ssd-capacity-blocks", param_hint="--ssd")
        if self.ssd_admit not in ADMISSIONS:
            raise typer.BadParameter(
                f"there is no {self.ssd_admit!r}; choose from {', '.join(ADMISSIONS)}",
                param_hint="--ssd-admit",
            )
        if self.restart_at is not None and not 0 < self.restart_at < 1:
            raise typer.BadParameter(
                f"{self.restart_at} is no share of the requests; between 0 and 1",
                param_hint="--restart-at",
            )
        return SsdOptions(
            _folder(self.ssd),
            self.ssd_capacity_blocks,
            self.ssd_admit,
            self.restart_at,
            self.keep_ssd,
        )


def _folder(text: str) -> Path:
    if not text:
        raise typer.BadParameter("is an empty path; name a directory", param_hint="--ssd")
    if os.path.exists(text) and not os.path.isdir(text):
        raise typer.BadParameter(f"{text!r} is a file; name a directory", param_hint="--ssd")
    return Path(text)


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    """The policies named, each once; `all` is every one. A usage error suggests the nearest."""
    for name in names:
        if name not in _NAMES:
            close = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "choose from " + ", ".join(_NAMES)
            raise typer.BadParameter(f"there is no policy {name!r}; {hint}", param_hint="--policy")
    return POLICIES if ALL in names else tuple(dict.fromkeys(names))


def taking(arguments: type[Arguments]) -> Callable[[Callable[[Arguments], None]], Any]:
    """Decorates a command of one parameter: its options are the fields of a dataclass.

    The parser reads a command's options from its signature, so it is shown one that has them.
    """

    def decorate(command: Callable[[Arguments], None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            command(arguments(**values))

        hints = get_type_hints(arguments, include_extras=True)
        parameters = inspect.signature(arguments).parameters.values()
        shown = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
        call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        call.__annotations__ = hints
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return decorate


# --- flags that take several values --------------------------------------------------------------


class ReplayCommand(TyperCommand):
    """A command whose --policy, --capacity-blocks and --nodes take one value or several."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {
            "--policy": _is_policy_like,
            "--capacity-blocks": _is_count,
            "--nodes": _is_count,
        }
        return super().parse_args(ctx, spread_values(args, takes))


def spread_values(args: Sequence[str], takes: Mapping[str, Callable[[str], bool]]) -> list[str]:
    """`--n 1 2 3` and `--n=1 2 3` as `--n 1 --n 2 --n 3`, which is what the parser knows.

    A flag's first value is its own whatever it looks like; further ones are taken while
    `takes[flag](value)` holds. Nothing after `--` is touched.
    """
    spread: list[str] = []
    flag = None  # the flag whose further values may follow
    first_is_due = False
    for at, arg in enumerate(args):
        if arg == "--" and not first_is_due:
            return [*spread, *args[at:]]
        if first_is_due:
            first_is_due = False
        elif flag is not None and takes[flag](arg):
            spread.append(flag)
        else:
            name, equals, _ = arg.partition("=")
            flag = name if name in takes else None
            first_is_due = flag is not None and not equals
        spread.append(arg)
    return spread


def _is_count(arg: str) -> bool:
    return re.fullmatch(r"[0-9][0-9_]*", arg) is not None


def _is_policy_like(arg: str) -> bool:
    """A policy, or a plain word that names no file: then a misspelt policy, not the trace."""
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", arg) is not None
    return arg in _NAMES or (is_word and not os.path.exists(arg))
