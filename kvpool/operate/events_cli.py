"""`kvpool events`: follows what a pool publishes, and prints it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvpool.events.encoding import AllBlocksCleared, Batch, BlockStored, Event
from kvpool.operate import options

_LOOK_S = 0.5
KEY_DIGITS = 8  # of a key in a line; --json has all


def events(
    endpoint: Annotated[
        str, typer.Argument(help="Where events are published: tcp://HOST:PORT or ipc://PATH.")
    ] = "tcp://127.0.0.1:5557",
    *,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay",
            metavar="ENDPOINT",
            help="Where to ask for what is missed. With it all that is there is told first.",
        ),
    ] = None,
    topic: Annotated[str, typer.Option(help="Only messages that begin with it.")] = "",
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End after so many batches with events.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="End after so long.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Follow the blocks that come to a pool and leave it, as routers do. Ctrl-C ends it."""
    from kvpool.events.follower import Follower
    from kvpool.events.plans import checked_endpoint

    deadline = None if seconds is None else time.monotonic() + seconds
    with options.told_plainly():
        at, _ = checked_endpoint("ENDPOINT", endpoint)
        asked = None if replay is None else checked_endpoint("--replay", replay)[0]
        with Follower(at, asked, topic=topic) as follower:
            told = gaps = 0
            while (count is None or told < count) and (
                deadline is None or time.monotonic() < deadline
            ):
                batch = follower.next(_LOOK_S)
                if batch is None:
                    continue
                if asked is None and follower.counts["gaps"] > gaps:
                    gaps = follower.counts["gaps"]
                    options.tell("something was missed: give --replay to be told all of it")
                if batch.events or batch.source.snapshot is not None:
                    told += 1
                    _show(follower.sequence, batch, as_json)


def _show(sequence: int, batch: Batch, as_json: bool) -> None:
    if as_json:
        options.print_json(_plain(sequence, batch))
        return
    from kvpool.operate import show

    for line in _lines(sequence, batch):
        print(show.clean(line), flush=True)


def _plain(sequence: int, batch: Batch) -> dict[str, Any]:
    """Bytes become hexadecimal."""
    import msgspec

    return {
        "sequence": sequence,
        "ts": batch.ts,
        "events": [
            {"type": type(each).__name__, **msgspec.structs.asdict(each)} for each in batch.events
        ],
        "source": batch.source,
    }


def _lines(sequence: int, batch: Batch) -> Iterator[str]:
    source = batch.source
    part = source.snapshot
    begin = f"{time.strftime('%H:%M:%S', time.localtime(batch.ts))} {sequence}"
    if part is not None and part.state != "blocks":
        of_all = f", {part.blocks:,} blocks" if part.state == "whole" else ""
        yield f"{begin} snapshot {part.state}{of_all}"
    name = source.name or source.namespace.hex()
    where = f"{source.tenant}/{name}" if source.tenant else name
    for each in batch.events:
        yield f"{begin} {_told(each, where)}"


def _told(event: Event, where: str) -> str:
    """Without the keys between the first and the last."""
    words = [type(event).__name__]
    if isinstance(event, AllBlocksCleared):
        return words[0]
    keys = event.block_hashes
    words += [event.medium or "-", where, f"{len(keys):,}", _short(keys[0])]
    if len(keys) > 1:
        words[-1] += f"..{_short(keys[-1])}"
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        words.append(f"after {_short(event.parent_block_hash)}")
    return " ".join(words)


def _short(key: bytes) -> str:
    return key.hex()[:KEY_DIGITS]
