"""Daemons with tenants: their files, and hellos that prove, lie and repeat."""

import socket
from pathlib import Path
from typing import Any

from kvpool import wire
from kvpool.serve_config import load
from kvpool.serve_plan import Plan, plan
from tests.daemons import WAIT_S, Running, connected

TOKENS = {"a": "token of a", "b": "token of b", "admin": "token of administrators"}
NOBODY = 65534


def configuration(folder: Path, tenants: dict[str, str], more: str = "") -> Path:
    """A file with tenants: name -> more lines of its table. Each has a token of its own."""
    tables = ""
    for name, lines in tenants.items():
        (folder / name).write_text(TOKENS.get(name, f"token of {name}"))
        tables += f'[tenants.{name}]\ntoken_file = "{folder / name}"\n{lines}\n'
    (folder / "admin").write_text(TOKENS["admin"] + "\n")
    path = folder / "kvpool.toml"
    path.write_text(f'[admin]\ntoken_file = "{folder / "admin"}"\n{more}\n{tables}')
    return path


def planned(path: Path, **flags: Any) -> Plan:
    told = {"socket": str(path.parent / "node.sock"), "dram": "64MiB", "listen": "127.0.0.1:0"}
    return plan(load(str(path), {}, {**told, **flags}), {})


def challenged(
    daemon: Running, *, tenant: str = "", nonce: bytes = b"n" * wire.NONCE_BYTES, tcp: bool = True
) -> tuple[socket.socket, bytes]:
    """A connection whose proof is awaited, and its challenge."""
    sock = connected(daemon, tcp=tcp)
    said = {"kind": "control", "nonce": nonce, "tenant": tenant}
    sock.sendall(wire.pack_hello(said))
    return sock, answer_of(sock)["challenge"]


def answer_of(sock: socket.socket) -> wire.Map:
    """The next answer, whatever it says."""
    sock.settimeout(WAIT_S)
    _, length = wire.read_head(exactly(sock, wire.HEAD_BYTES))
    return wire.read_map(exactly(sock, length))


def exactly(sock: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        assert part, f"closed after {len(parts)} of {count} bytes"
        parts += part
    return parts
