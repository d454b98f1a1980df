"""`kvpool size`: how much memory is worth having, by model, by trace, or by what a daemon sees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.observe.sizing import Sizing

CONFIG_BYTES_MAX = 4 << 20
_GIB = 1 << 30
_MODEL_GIB = (1, 8, 64, 512)  # rows of the table of a model


def size(
    *,
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

    --model: what a model's KV takes, instead.
    """
    if model is not None:
        _of_model(model, kv_dtype, tensor_parallel, block_tokens, as_json=as_json)


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
