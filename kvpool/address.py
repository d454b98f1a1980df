"""Where a node is found: addresses as people write them, and the socket that both sides assume.

Promises:  1. where `kvpool serve` listens by itself, kvpool.connect() of the same user and
              environment looks by itself;
           2. an address that cannot be meant is refused with the two forms that can.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.errors import BadArgument, BadType, shown

ADDRESS_VARIABLE = "KVPOOL_ADDRESS"
TOKEN_VARIABLE = "KVPOOL_TOKEN"
TENANT_VARIABLE = "KVPOOL_TENANT"
TOKEN_BYTES_MAX = 4096
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SYSTEM_FOLDER = "/run"
SOCKET_PATH_BYTES_MAX = 107  # sun_path, less its end
_KEEPALIVE = (15, 5, 3)  # seconds of silence, seconds from one probe to the next, probes
KEEPALIVE_S = 30  # what they come to
_FORMS = "write unix:/path/to/node.sock or tcp://host:port"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the filesystem: a node of this host."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    def open(self, timeout_s: float) -> socket.socket:
        """A connected socket. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.path)
        except BaseException:
            sock.close()
            raise
        return sock


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A node somewhere else, or here."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{host_and_port(self.host, self.port)}"

    def open(self, timeout_s: float) -> socket.socket:
        """A connected socket; a name with several addresses is tried at each. Raises OSError."""
        sock = socket.create_connection((self.host, self.port), timeout_s)
        try:
            set_up_tcp(sock)
        except BaseException:
            sock.close()
            raise
        return sock


Address = UnixAddress | TcpAddress


def set_up_tcp(sock: socket.socket) -> None:
    """Of either side: small messages go at once, and a peer that vanished is noticed.

    A host that lost its power or its network says no goodbye, and a connection on which nothing is
    said stays for ever; the kernel asks for a sign of life and ends it after KEEPALIVE_S in all.
    Raises OSError: the peer has gone already.
    """
    idle_s, between_s, times = _KEEPALIVE
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, times)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def parse_address(text: object) -> Address:
    """Raises BadArgument, BadType."""
    if not isinstance(text, str):
        raise BadType(f"address is {type(text).__name__}; {_FORMS}")
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "unix":
        return UnixAddress(check_socket_path("address", rest.removeprefix("//")))
    if colon and scheme == "tcp" and rest.startswith("//"):
        return TcpAddress(*parse_host_and_port("address", rest.removeprefix("//")))
    raise BadArgument(f"address is {shown(text)}; {_FORMS}")


def parse_host_and_port(name: str, text: str, *, port_min: int = 1) -> tuple[str, int]:
    """Of "host:port", where an IPv6 host stands in brackets."""
    host, colon, digits = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadArgument(f"{name} is {shown(text)}; put an IPv6 host in brackets: [::1]:7070")
    if not colon or not host or not (digits.isascii() and digits.isdigit()):
        raise BadArgument(f"{name} is {shown(text)}; write host:port, such as 127.0.0.1:7070")
    if len(digits) > 5 or not port_min <= int(digits) <= 65535:
        raise BadArgument(f"{name} has the port {digits[:20]}; it must be {port_min}..65535")
    return host, int(digits)


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_socket_path(name: str, path: str) -> str:
    """The absolute path of a unix socket. `~` is not expanded."""
    if not path or "\0" in path:
        raise BadArgument(f"{name} names no socket: its path is empty or has a NUL byte")
    whole = os.path.abspath(path)
    if len(os.fsencode(whole)) > SOCKET_PATH_BYTES_MAX:
        raise BadArgument(
            f"{name} is a path of {len(os.fsencode(whole))} bytes; "
            f"a unix socket has {SOCKET_PATH_BYTES_MAX} at most"
        )
    return whole


def default_sockets(environment: Mapping[str, str]) -> list[str]:
    """Where a node may listen that was told no socket; a client looks in this order."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    folders = [os.path.join(runtime, "kvpool")] if runtime else []
    folders += [os.path.join(SYSTEM_FOLDER, "kvpool"), own_temporary_folder()]
    return [os.path.join(folder, "node.sock") for folder in folders]


def default_socket(environment: Mapping[str, str]) -> str:
    """The first of default_sockets() that this process may make."""
    *earlier, last = default_sockets(environment)
    for path in earlier:
        folder = os.path.dirname(path)
        if os.access(folder if os.path.isdir(folder) else os.path.dirname(folder), os.W_OK):
            return path
    return last


def own_temporary_folder() -> str:
    """Anybody could make it before this user does: whoever uses it looks at its owner first."""
    return os.path.join(tempfile.gettempdir(), f"kvpool-{os.getuid()}")


def is_own_folder(path: str) -> bool:
    """Whether the folder belongs to this user or to root, and is no link."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.getuid())


def read_token(label: str, path: str) -> str:
    """The token that a file holds, without the space around it. Raises BadArgument."""
    try:
        # A pipe that nobody writes to would keep whoever reads it for ever.
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise BadArgument(f"{label} is {path!r}: a pipe; a token is read again and again")
        with open(path, encoding="utf-8") as file:
            token = file.read(TOKEN_BYTES_MAX + 2).strip()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise BadArgument(f"{label} is {path!r}: cannot be read: {reason}") from None
    if not token or len(token.encode()) > TOKEN_BYTES_MAX:
        raise BadArgument(f"{label} is {path!r}: a token is text of 1..{TOKEN_BYTES_MAX} bytes")
    return token


def check_tenant(label: str, name: object) -> str:
    """The name of a tenant: also that of a folder. Raises BadArgument, BadType."""
    if not isinstance(name, str):
        raise BadType(f"{label} is {type(name).__name__}; it must be str")
    if TENANT.fullmatch(name) is None:
        raise BadArgument(
            f"{label} is {shown(name)}; a tenant's name is 1..64 of A-Z, a-z, 0-9, _ and -, and"
            " begins with a letter or a digit"
        )
    return name
