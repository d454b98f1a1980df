"""The arguments of `kvpool bench`. The only part of bench/ that knows of the command line."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvpool.bench import vllm_plan
from kvpool.bench.scale import Scale
from kvpool.bench.vllm_plan import EngineOptions
from kvpool.replay.arguments import AsJson

_VLLM = "Engines (vllm only)"


class Bench(enum.StrEnum):
    """Kept beside suite, which is not imported for `--help`; a test compares the two."""

    ALL = "all"
    LOCAL = "local"
    KEYS = "keys"
    LOOKUP = "lookup"
    POLICY = "policy"
    MEMORY = "memory"
    SSD = "ssd"
    SHM = "shm"
    TCP = "tcp"
    OBSERVED = "observed"
    CLUSTER = "cluster"
    VLLM = "vllm"


def _engines(flag: str, metavar: str, help_text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        flag, metavar=metavar, help=help_text, rich_help_panel=_VLLM
    )
    return option


@dataclasses.dataclass(frozen=True)
class BenchArguments:
    """What `kvpool bench` was asked, as it was asked."""

    what: Annotated[
        Bench,
        typer.Argument(
            help="`all` is all of them but cluster, which needs root, and vllm, which needs an"
            " engine."
        ),
    ] = Bench.ALL
    as_json: AsJson = False
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to see that it runs; no figures to quote.")
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same workload.")] = 1
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            exists=True,
            file_okay=False,
            help="Where ssd makes its files, some GiB that are removed again (default: a folder"
            " for temporary files).",
        ),
    ] = None
    python: Annotated[
        Path | None,
        _engines(
            "--python",
            "PATH",
            f"The Python with vLLM and kvpool (default: {vllm_plan.USUAL_PYTHON}, or this one).",
        ),
    ] = None
    model: Annotated[
        Path | None,
        _engines(
            "--model",
            "DIR",
            "A model's folder; SmolLM2-135M is made in one that is absent or empty"
            " (default: build/models/smollm2-135m).",
        ),
    ] = None
    systems: Annotated[
        str | None,
        _engines(
            "--systems",
            "NAME,...",
            f"For ttft, of {', '.join(vllm_plan.SYSTEMS)}"
            f" (default: {','.join(vllm_plan.USUAL_SYSTEMS)}).",
        ),
    ] = None
    lengths: Annotated[
        str | None,
        _engines(
            "--lengths",
            "N,...",
            "For ttft, tokens of the prompts"
            f" (default: {','.join(map(str, vllm_plan.LENGTHS_TOKENS))}).",
        ),
    ] = None
    works: Annotated[
        str | None, _engines("--works", "NAME,...", f"Default: {','.join(vllm_plan.WORKS)}.")
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"Of each prompt of ttft (default: {vllm_plan.ROUNDS}).",
            rich_help_panel=_VLLM,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="That compute, of each engine on a CPU (default: as many as there are cores).",
            rich_help_panel=_VLLM,
        ),
    ] = None
    mooncake: Annotated[
        Path | None, _engines("--mooncake", "DIR", "Where Mooncake is installed, for its system.")
    ] = None
    lmcache: Annotated[
        Path | None, _engines("--lmcache", "DIR", "Where LMCache is installed, for its system.")
    ] = None

    def scale(self, say: Callable[[str], None]) -> Scale:
        """Sizes and places; raises a usage error for arguments that do not go together."""
        names = [field.name for field in dataclasses.fields(EngineOptions)]
        asked = {name: getattr(self, name) for name in names}
        if self.what != Bench.VLLM:
            for name, value in asked.items():
                if value is not None:
                    raise typer.BadParameter("is of vllm alone", param_hint=f"--{name}")
        return Scale(
            seed=self.seed,
            is_quick=self.quick,
            directory=self.directory,
            say=say,
            engines=EngineOptions(**asked),
        )
