"""`kvpool size`: how much memory is worth having, by model, by trace, or by what a daemon sees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.observe.curve import Curve, Table
    from kvpool.observe.sizing import Sizing
    from kvpool.operate.client import Operator

    Titled = tuple[str, Table]

CONFIG_BYTES_MAX = 4 << 20
_GIB = 1 << 30
_LEAST_BYTES = 1 << 20  # of a table of a trace: none begins below a sixty-fourth of that
_HALVINGS = 9  # of its rows
_MODEL_GIB = (1, 8, 64, 512)  # rows of the table of a model


def size(
    *,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Requests in the Mooncake format, instead of a daemon."),
    ] = None,
    block_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="With --trace: what a block takes of the pool.")
    ] = "64KiB",
    exact: Annotated[
        bool, typer.Option("--exact", help="With --trace: follow every block, not a sample.")
    ] = False,
    dram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The size to compare with (a daemon's own)."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of one namespace alone, at a daemon."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="CONFIG.json", help="A Hugging Face config: bytes per token."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="With --model: of the KV, such as fp8 (the weights')."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="With --model: ranks; figures are of one.")
    ] = 1,
    block_tokens: Annotated[
        int, typer.Option(min=1, max=4096, help="With --model: tokens of a block.")
    ] = 16,
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Say how much would hit with how much memory, from what a running daemon sees.

    --trace: from a file of requests; --model: what a model's KV takes per token.
    """
    if trace is not None and model is not None:
        options.fail("--trace and --model are two questions: ask one at a time", status=2)
    if model is not None:
        _of_model(model, kv_dtype, tensor_parallel, block_tokens, as_json=as_json)
    elif trace is not None:
        tables = [_of_trace(trace, block_bytes, dram, is_exact=exact)]
        _print_tables(tables, as_json=as_json)
    else:
        with options.reached(address, token_file, tenant) as operator:
            tables = _of_daemon(operator, dram, namespace)
        _print_tables(tables, as_json=as_json)


# --- of a daemon or a trace ----------------------------------------------------------------------


def _of_trace(path: str, block_bytes: str, dram: str | None, *, is_exact: bool) -> Titled:
    """Without a size to compare with: the next power of two that holds all of it, and less."""
    import msgspec

    from kvpool.config import parse_size
    from kvpool.observe import curve
    from kvpool.replay.trace import TraceError

    with options.told_plainly():
        try:
            found = curve.of_trace(path, parse_size(block_bytes), exact=is_exact)
        except TraceError as error:
            options.fail(str(error))
        if dram is not None:
            return path, _table(found, parse_size(dram), 0)
    whole = max(int(found.seen_bytes), _LEAST_BYTES)
    factors = [2.0**-power for power in range(_HALVINGS)]
    table = curve.table(found, 1 << (whole - 1).bit_length(), factors=factors)
    *others, last = table.rows  # larger than all that there is: that is known, and no doubt
    last = msgspec.structs.replace(last, doubt=table.doubt)
    return path, msgspec.structs.replace(table, rows=[*others, last])


def _of_daemon(operator: Operator, dram: str | None, namespace: str | None) -> list[Titled]:
    """One table for each tenant that has the namespace, or for each one."""
    from kvpool.config import parse_size
    from kvpool.errors import BadArgument
    from kvpool.observe import curve

    asked = None if dram is None else parse_size(dram)
    found = []
    for tenant, told in operator.raw("reuse").items():
        counts = told["all"] if namespace is None else told["spaces"].get(namespace)
        if counts is None:
            continue
        title = f"tenant {tenant}" + (f", namespace {namespace}" if namespace else "")
        dram_bytes = told["dram_bytes"] if asked is None else asked
        found.append((title, _table(curve.of_counts(counts), dram_bytes, told["ssd_bytes"])))
    if not found:
        what = "nothing" if namespace is None else f"no use of a namespace {namespace!r}"
        raise BadArgument(f"the daemon has seen {what} lately")
    return found


def _table(found: Curve, dram_bytes: int, ssd_bytes: int) -> Table:
    from kvpool.errors import BadArgument
    from kvpool.observe import curve

    if dram_bytes <= 0:
        raise BadArgument("--dram is 0: give the size to compare with")
    return curve.table(found, dram_bytes, ssd_bytes=ssd_bytes)


def _print_tables(tables: list[Titled], *, as_json: bool) -> None:
    if as_json:
        options.print_json([{"of": title, **options.plain(table)} for title, table in tables])
        return
    for at, (title, table) in enumerate(tables):
        if at:
            print()
        _show_table(title, table)


def _show_table(title: str, table: Table) -> None:
    from rich.text import Text

    from kvpool.operate import show

    behind = f", with {show.size(table.ssd_bytes)} of SSD behind" if table.ssd_bytes else ""
    lines = [Text(f"{title}{behind}", style="bold")]
    if table.doubt:
        lines.append(Text(table.doubt, style="yellow"))
    now, doubled = table.now(), next((row for row in table.rows if row.factor == 2), None)
    if doubled is not None:
        sizes = f"{show.size(now.dram_bytes)} -> {show.size(doubled.dram_bytes)}"
        lines.append(Text(f"doubling DRAM ({sizes}): hit {now.hit:.0%} -> {doubled.hit:.0%}"))
    made = show.table("", "DRAM", "", "hit", "in DRAM", "points", "note", left=("note",))
    for row in table.rows:
        change = round(100 * (row.hit - now.hit))
        note = "" if table.doubt else row.doubt
        made.add_row(
            *(show.size(row.dram_bytes), _factor(row.factor), f"{row.hit:.1%}"),
            *(f"{row.hit_dram:.1%}", "" if row is now else f"{change:+d}", note),
            style="bold" if row is now else "",
        )
    off = f"on average within {100 * table.error:.1f} points of an LRU of that size"
    show.show(*lines, "", made, Text(f"\n{off}", style="dim"))


def _factor(factor: float) -> str:
    return f"{factor:g}x" if factor >= 1 else f"1/{1 / factor:g}"


# --- of a model ----------------------------------------------------------------------------------


def _of_model(
    path: str, kv_dtype: str | None, tensor_parallel: int, block_tokens: int, *, as_json: bool
) -> None:
    from kvpool.errors import BadArgument
    from kvpool.observe.sizing import sizing

    with options.told_plainly():
        config = _read_config(path)
        try:
            found = sizing(config, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
        except BadArgument as error:
            options.fail(f"{path}: {error}")
    if as_json:
        more = {
            "block_tokens": block_tokens,
            "block_bytes": found.block_bytes(block_tokens),
            "tokens_per_gib": found.tokens_per_gib,
        }
        options.print_json({**dataclasses.asdict(found), **more})
    else:
        _show_model(found, block_tokens)


def _read_config(path: str) -> dict[str, Any]:
    """Raises BadArgument."""
    import json

    from kvpool.errors import BadArgument

    try:
        with open(path, "rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise BadArgument(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > CONFIG_BYTES_MAX:
        raise BadArgument(f"{path}: more than {CONFIG_BYTES_MAX} bytes; this is no config.json")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        raise BadArgument(f"{path}: is not JSON; give the config.json of the model") from None
    if not isinstance(config, dict):
        raise BadArgument(f"{path}: holds no object; give the config.json of the model")
    return config


def _show_model(found: Sizing, block_tokens: int) -> None:
    from rich.text import Text

    from kvpool.operate import show

    layers = [f"{found.layers_full} attend to all"]
    if found.layers_window:
        layers.append(f"{found.layers_window} to the last {found.window_tokens:,} tokens")
    if found.layers_state:
        layers.append(f"{found.layers_state} keep a state and make no KV")
    what = (
        f"one latent of {found.head_dim}"
        if found.kind == "mla"
        else f"{found.kv_heads} KV heads of {found.head_dim} (K and V)"
    )
    whose = f", for one of {found.tensor_parallel} ranks" if found.tensor_parallel > 1 else ""
    lines = [
        f"{found.model}: {found.kind}, {what}, {found.dtype}{whose}",
        f"layers: {', '.join(layers)}",
        f"a token takes {found.bytes_per_token:,} bytes ({show.size(found.bytes_per_token)}),"
        f" a block of {block_tokens} tokens {show.size(found.block_bytes(block_tokens))}",
    ]
    if found.window_bytes_per_token:
        share = show.percent(found.window_bytes_per_token, found.bytes_per_token)
        lines.append(f"of that {share} is of layers with a window, kept like the rest")
    lines += [f"note: {note}" for note in found.notes]
    made = show.table("", "memory", "tokens", "blocks")
    for gib in _MODEL_GIB:
        tokens = gib * _GIB // found.bytes_per_token
        blocks = gib * _GIB // found.block_bytes(block_tokens)
        made.add_row(f"{gib} GiB", f"{tokens:,}", f"{blocks:,}")
    show.show(*(Text(line) for line in lines), "", made)
