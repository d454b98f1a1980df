"""`kvpool put`, `get` and `rm`: files and pipes in a pool."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from kvpool.operate import options

if TYPE_CHECKING:
    from kvpool.namespace import Namespace

Key = Annotated[str, typer.Argument(metavar="KEY", help="Any text.", show_default=False)]
File = Annotated[str, typer.Argument(metavar="[FILE]", help="A path, or - for a pipe.")]
Space = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="Files of one name are apart.")
]
BlockBytes = Annotated[
    str,
    typer.Option(
        "--block-bytes", metavar="SIZE", help="One for all files of a namespace; bounds a file."
    ),
]
_SPOOL_BYTES = 64 << 20  # in memory; more goes to a temporary file


def put(
    key: Key,
    file: File = "-",
    *,
    namespace: Space = "files",
    block_bytes: BlockBytes = "1MiB",
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Store a file, or what a pipe gives, under a key; what was under it is replaced."""
    from kvpool.operate import files

    with (
        _space(namespace, block_bytes, address, token_file, tenant) as space,
        _source(file) as source,
    ):
        done = files.put(space, key, source)
    if as_json:
        told = {"bytes": done.bytes, "blocks": done.blocks, "present": done.present}
        options.print_json({"key": key, **told, "replaced": done.is_replaced})
        return
    from kvpool.operate import show

    known = f", {done.present:,} of them known" if done.present else ""
    blocks = "1 block" if done.blocks == 1 else f"{done.blocks:,} blocks"
    print(f"{key}: {show.size(done.bytes)} in {blocks}{known}")


def get(
    key: Key,
    file: File = "-",
    *,
    stream: Annotated[
        bool, typer.Option("--stream", help="To stdout as it comes: a miss can come after a part.")
    ] = False,
    namespace: Space = "files",
    block_bytes: BlockBytes = "1MiB",
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Write what is stored under a key to a file or stdout, all of it or nothing.

    Exit status 1, and no output, where a part of it is missing.
    """
    from kvpool.operate import files

    if stream and file != "-":
        options.fail("--stream is for stdout; a file is written whole or not at all", status=2)
    with _space(namespace, block_bytes, address, token_file, tenant) as space:
        slices = files.get(space, key)
        if file == "-":
            _to_stdout(slices, is_streamed=stream)
        else:
            _to_file(slices, file)


def rm(
    key: Key,
    *,
    namespace: Space = "files",
    block_bytes: BlockBytes = "1MiB",
    as_json: options.AsJson = False,
    address: options.Address = None,
    token_file: options.TokenFile = None,
    tenant: options.TenantName = None,
) -> None:
    """Remove what is stored under a key."""
    from kvpool.operate import files

    with _space(namespace, block_bytes, address, token_file, tenant) as space:
        blocks = files.remove(space, key)
    if as_json:
        options.print_json({"key": key, "blocks": blocks})
    else:
        print(f"{key}: {blocks:,} blocks removed")


@contextlib.contextmanager
def _space(
    namespace: str,
    block_bytes: str,
    address: str | None,
    token_file: str | None,
    tenant: str | None,
) -> Iterator[Namespace]:
    from kvpool.config import parse_size
    from kvpool.operate import files
    from kvpool.operate.client import Reach, open_pool

    with options.told_plainly():
        manifest = files.manifest_of(namespace, parse_size(block_bytes))
        with open_pool(Reach(address, token_file, tenant)) as pool:
            yield pool.namespace(manifest)


@contextlib.contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        opened = open(file, "rb")  # noqa: SIM115  # its own failure only is to be told
    except OSError as error:
        options.fail(f"{file}: cannot be read: {error.strerror}")
    with opened:
        yield opened


def _to_stdout(slices: Iterator[bytes], *, is_streamed: bool) -> None:
    out = sys.stdout.buffer
    try:
        if is_streamed:
            for part in slices:
                out.write(part)
        else:
            with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
                for part in slices:
                    spool.write(part)
                spool.seek(0)
                while part := spool.read(1 << 20):
                    out.write(part)
        out.flush()
    except BrokenPipeError:  # whoever reads has had enough; nothing of ours failed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _to_file(slices: Iterator[bytes], file: str) -> None:
    """By a file beside it that takes its place when it is whole."""
    folder, name = os.path.split(os.path.abspath(file))
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as out:
            temporary = out.name
            for part in slices:
                out.write(part)
        os.chmod(temporary, _mode_of(file))
        os.replace(temporary, file)
        temporary = None
    except OSError as error:
        options.fail(f"{file}: cannot be written: {error.strerror}")
    finally:
        if temporary is not None:
            os.unlink(temporary)


def _mode_of(file: str) -> int:
    """That of the file which is replaced, or as the umask has it for a new one."""
    with contextlib.suppress(OSError):
        return os.stat(file).st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
