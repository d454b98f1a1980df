"""What the commands share: how they are told where a daemon is, and how they end.

Promises:  1. an error that an operator can act on is one message on stderr and exit status 1, or 2
              where the command was asked wrongly;
           2. stdout holds nothing but what was asked for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from kvpool.operate.client import Operator

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="unix:/path/node.sock or tcp://host:port (default: $KVPOOL_ADDRESS, or where"
        " `kvpool serve` listens by itself).",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option("--token-file", metavar="FILE", help="Holds the token (default: $KVPOOL_TOKEN)."),
]
TenantName = Annotated[
    str | None,
    typer.Option(
        "--tenant", metavar="NAME", help="Who asks; an admin may name any ($KVPOOL_TENANT)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON on stdout.")]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="Token ids of the prefix: JSON list, or numbers with space or commas; - for stdin."
        " They are hashed here and never sent.",
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="HEX", help="A block's key, 32 hexadecimal digits; may repeat."),
]


@contextlib.contextmanager
def reached(address: str | None, token_file: str | None, tenant: str | None) -> Iterator[Operator]:
    """A connection for one command; its errors told as told_plainly() tells them."""
    from kvpool.operate.client import Operator, Reach

    with told_plainly(), Operator.connect(Reach(address, token_file, tenant)) as operator:
        yield operator


@contextlib.contextmanager
def told_plainly() -> Iterator[None]:
    """Failures that a user can act on become a message and an exit status; our bugs stay loud."""
    from kvpool.errors import BadArgument, KvpoolError

    try:
        yield
    except BadArgument as error:
        fail(str(error), status=2)
    except KvpoolError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def tell(line: str) -> None:
    """To stderr. Of what a daemon or a file gave nothing is taken for a control sequence."""
    shown = (
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in line
    )
    print(f"kvpool: {''.join(shown)}", file=sys.stderr)


def fail(reason: str, *, status: int = 1) -> NoReturn:
    """Ends the command."""
    tell(f"error: {reason}")
    raise typer.Exit(status) from None


def print_json(value: Any) -> None:
    """One line. Bytes are hexadecimal."""
    import msgspec

    text = msgspec.json.encode(plain(value))
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """What JSON has a form for: bytes, keys among them, as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "__struct_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value
