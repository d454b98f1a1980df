"""One POST over HTTP that ends by its deadline, whatever the other side does.

Promises:  1. names that resolve slowly, a handshake, a body that comes byte by byte: all of it is
              within the one deadline;
           2. no answer is larger than BODY_BYTES_MAX, no line of a stream than LINE_BYTES_MAX;
           3. end() from any thread makes a call under way fail at once.
A connection carries one call: etcd is asked a few times in a second at most.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any

from kvpool.address import host_and_port

BODY_BYTES_MAX = 16 << 20
LINE_BYTES_MAX = 16 << 20
_KEEPALIVE = (1, 1, 3)  # seconds of silence, seconds from one probe to the next, probes
_USER_TIMEOUT_MS = 4000  # what was sent and not acknowledged for so long ends the connection


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an etcd answers clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


class Resolver:
    """Names of hosts to addresses, without ever waiting longer than one may.

    A resolver of the system cannot be stopped: it runs in a thread of its own, at most one for each
    name, whose answer serves whoever asks next.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._known: dict[Endpoint, list[Any]] = {}
        self._failed: dict[Endpoint, OSError] = {}
        self._asking: set[Endpoint] = set()

    def addresses(self, endpoint: Endpoint, deadline: float) -> list[Any]:
        """(family, address) of each. Raises OSError."""
        try:
            number = ipaddress.ip_address(endpoint.host)
        except ValueError:
            return self._ask(endpoint, deadline)
        family = socket.AF_INET if number.version == 4 else socket.AF_INET6
        return [(family, (endpoint.host, endpoint.port))]

    def forget(self, endpoint: Endpoint) -> None:
        """After none of its addresses answered: it may have moved."""
        with self._turn:
            self._known.pop(endpoint, None)

    def _ask(self, endpoint: Endpoint, deadline: float) -> list[Any]:
        with self._turn:
            if endpoint not in self._known and endpoint not in self._asking:
                self._asking.add(endpoint)
                threading.Thread(
                    target=self._resolve, args=(endpoint,), name="kvpool-resolve", daemon=True
                ).start()
            while endpoint not in self._known:
                if endpoint not in self._asking:
                    raise self._failed[endpoint]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the name {endpoint.host} is not resolved in time")
                self._turn.wait(left)
            return self._known[endpoint]

    def _resolve(self, endpoint: Endpoint) -> None:
        found: list[Any] = []
        error = OSError(f"no such host: {endpoint.host}")
        try:
            rows = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys((family, address) for family, _, _, _, address in rows))
        except (OSError, UnicodeError) as failed:
            error = OSError(f"no such host: {endpoint.host}: {failed}")
        with self._turn:
            self._asking.discard(endpoint)
            self._failed[endpoint] = error
            if found:
                self._known[endpoint] = found
            self._turn.notify_all()


class Call:
    """A connection that asks once. Thread rule: one thread, but end() is for any."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, deadline: float) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._deadline: float | None = deadline
        self._sock: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._guard = threading.Lock()
        self._ended = False

    def open(self, resolver: Resolver) -> None:
        """Raises OSError."""
        addresses = resolver.addresses(self._endpoint, self._deadline or 0)
        for at, (family, address) in enumerate(addresses):
            is_last = at + 1 == len(addresses)
            try:
                self._connect(family, address, 1 if is_last else 2)
            except OSError:
                self._drop()
                if is_last or self._ended:
                    resolver.forget(self._endpoint)
                    raise
            else:
                return

    def ask(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """Sends it and reads up to the body. -> the status. Raises OSError, HTTPException."""
        head = [f"POST {path} HTTP/1.1", f"Host: {self._endpoint}", "Connection: close"]
        head += [f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        message = "\r\n".join([*head, "", ""]).encode("latin-1") + body
        sock = self._live()
        sock.settimeout(self._left())
        sock.sendall(message)
        source: Any = _Readable(self)  # all that it wants of a socket
        response = http.client.HTTPResponse(source, method="POST")
        response.begin()
        self._response = response
        return response.status

    def body(self) -> bytes:
        """All of it. Raises OSError, HTTPException."""
        assert self._response is not None
        body = self._response.read(BODY_BYTES_MAX + 1)
        if len(body) > BODY_BYTES_MAX:
            raise http.client.HTTPException(f"the answer is longer than {BODY_BYTES_MAX} bytes")
        if self._response.length:
            raise http.client.IncompleteRead(body[:0], self._response.length)
        return body

    def line(self) -> bytes:
        """The next line of a stream; b"" at its end. Raises OSError, HTTPException."""
        assert self._response is not None
        line = self._response.readline(LINE_BYTES_MAX + 1)
        if line and not line.endswith(b"\n"):
            raise http.client.HTTPException("a line of the stream is cut short, or has no end")
        return line

    def lift_deadline(self) -> None:
        """From now on it may be silent: a connection that died ends by the kernel's probes."""
        self._deadline = None

    def end(self) -> None:
        """What is read or sent at this moment fails. Never waits, never fails."""
        with self._guard:
            self._ended = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # not that of TLS, which would change its state
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that asks."""
        if self._response is not None:
            self._response.close()
        self._drop()

    def read_into(self, room: Any) -> int:
        sock = self._live()
        sock.settimeout(self._left())
        return sock.recv_into(room)

    def _connect(self, family: int, address: Any, share: int) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._adopt(sock)
        left = self._left() or 0.0
        sock.settimeout(left / share)
        idle_s, between_s, times = _KEEPALIVE
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, idle_s),
            (socket.TCP_KEEPINTVL, between_s),
            (socket.TCP_KEEPCNT, times),
            (socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.connect(address)
        if self._tls is not None:
            sock.settimeout(self._left())
            wrapped = self._tls.wrap_socket(
                sock, server_hostname=self._endpoint.host, do_handshake_on_connect=False
            )
            self._adopt(wrapped)
            wrapped.do_handshake()

    def _adopt(self, sock: socket.socket) -> None:
        with self._guard:
            self._sock = sock
            if self._ended:
                raise ConnectionAbortedError("closed from here")

    def _live(self) -> socket.socket:
        if self._sock is None or self._ended:
            raise ConnectionAbortedError("closed from here")
        return self._sock

    def _left(self) -> float | None:
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def _drop(self) -> None:
        with self._guard:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


class _Readable(io.RawIOBase):
    """What http.client takes for a socket: every read looks at the call's deadline first."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        return self._call.read_into(room)
