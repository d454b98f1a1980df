"""The sockets of ZMQ that events go through. The only module that names pyzmq.

Promises:  1. nothing here waits;
           2. a message from a stranger has at most REQUEST_BYTES_MAX in a frame, or its connection
              is closed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any

from kvpool.errors import NoResource
from kvpool.events.answers import Message, Sent

HINT = "pip install 'kvpool[events]'"
REQUEST_BYTES_MAX = 64  # a sequence
REQUESTS_WAITING_MAX = 64  # of each subscriber, in the socket's queue
ANSWERS_WAITING_MAX = 16  # batches that a subscriber asked for and has not taken
EVENT_BYTES_MAX = 64 << 20  # of a message that a subscriber takes


def has_zmq() -> bool:
    return importlib.util.find_spec("zmq") is not None


def load_zmq() -> Any:
    """Raises NoResource."""
    try:
        import zmq
    except ImportError:
        raise NoResource(f"events need pyzmq, which is not installed: {HINT}") from None
    return zmq


class PublisherSockets:
    """A PUB socket, and a ROUTER where what was missed is asked for. Made by one thread, then used
    by one other."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, *, high_water: int, connect: bool
    ) -> None:
        """Raises NoResource, which names the endpoint."""
        self._zmq = load_zmq()
        self._pid = os.getpid()
        self._context = self._zmq.Context()
        self._replay: Any = None
        try:
            self._pub = self._context.socket(self._zmq.PUB)
            self._pub.set(self._zmq.SNDHWM, high_water)
            self._pub.set(self._zmq.MAXMSGSIZE, 4096)  # a subscription
            self.endpoint = self._bind(self._pub, endpoint, connect)
            self.replay_endpoint = ""
            if replay_endpoint is not None:
                self._replay = self._context.socket(self._zmq.ROUTER)
                self._replay.set(self._zmq.ROUTER_MANDATORY, 1)  # else what is too much is dropped
                self._replay.set(self._zmq.SNDHWM, ANSWERS_WAITING_MAX)
                self._replay.set(self._zmq.RCVHWM, REQUESTS_WAITING_MAX)
                self._replay.set(self._zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
                self.replay_endpoint = self._bind(self._replay, replay_endpoint, False)
        except BaseException:
            self.close(0)
            raise

    def publish(self, message: Message) -> None:
        """Subscribers that have `high_water` unread miss it."""
        self._pub.send_multipart(message, self._zmq.DONTWAIT)

    def answer(self, client: bytes, message: Message) -> Sent:
        assert self._replay is not None  # somebody asked
        try:
            self._replay.send_multipart((client, b"", *message), self._zmq.DONTWAIT)
        except self._zmq.Again:
            return Sent.FULL
        except self._zmq.ZMQError:  # EHOSTUNREACH: it has left
            return Sent.GONE
        return Sent.OK

    @property
    def has_replay(self) -> bool:
        return self._replay is not None

    def wait(self, timeout_s: float) -> None:
        """Until somebody asks; where there is a replay socket."""
        self._replay.poll(max(0, math.ceil(timeout_s * 1000)), self._zmq.POLLIN)

    def requests(self, most: int) -> Iterator[list[bytes]]:
        """What was asked, if anything was."""
        if self._replay is None:
            return
        for _ in range(most):
            try:
                yield self._replay.recv_multipart(self._zmq.DONTWAIT)
            except self._zmq.Again:
                return

    def close(self, linger_s: float) -> None:
        """What is not sent by then is lost. In a forked child they are the parent's."""
        if os.getpid() != self._pid:
            return
        self._context.destroy(linger=int(linger_s * 1000))

    def _bind(self, sock: Any, endpoint: str, connect: bool) -> str:
        sock.set(self._zmq.IPV6, int(connect or "[" in endpoint))
        try:
            (sock.connect if connect else sock.bind)(endpoint)
        except self._zmq.ZMQError as error:
            verb = "connect to" if connect else "bind"
            raise NoResource(f"events cannot {verb} {endpoint}: {error.strerror}") from None
        return str(sock.get(self._zmq.LAST_ENDPOINT).rstrip(b"\0").decode())


class SubscriberSockets:
    """A SUB socket, and a DEALER for each question. For one thread."""

    def __init__(self, endpoint: str, topic: bytes, *, high_water: int) -> None:
        """Raises NoResource: no such endpoint."""
        self._zmq = load_zmq()
        self._context = self._zmq.Context()
        self._asked: Any = None
        try:
            self._sub = self._open(self._zmq.SUB)
            self._sub.set(self._zmq.RCVHWM, high_water)
            self._sub.set(self._zmq.SUBSCRIBE, topic)
            self._connect(self._sub, endpoint)
        except BaseException:
            self.close()
            raise

    def ask(self, endpoint: str, sequence: bytes) -> None:
        """Whatever was asked before is answered no more."""
        if self._asked is not None:
            self._asked.close(0)
        self._asked = self._open(self._zmq.DEALER)
        self._asked.set(self._zmq.RCVHWM, ANSWERS_WAITING_MAX)
        self._connect(self._asked, endpoint)
        with contextlib.suppress(self._zmq.Again):
            self._asked.send_multipart((b"", sequence), self._zmq.DONTWAIT)

    def answer(self, timeout_s: float) -> list[bytes] | None:
        """The next part of it, without the empty frame; None at the timeout."""
        frames = self._receive(self._asked, timeout_s)
        return None if frames is None else frames[1:]

    def event(self, timeout_s: float) -> list[bytes] | None:
        return self._receive(self._sub, timeout_s)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _receive(self, sock: Any, timeout_s: float) -> list[bytes] | None:
        if not sock.poll(max(0, int(timeout_s * 1000)), self._zmq.POLLIN):
            return None
        try:
            found: list[bytes] = sock.recv_multipart(self._zmq.DONTWAIT)
        except self._zmq.Again:
            return None
        return found

    def _open(self, kind: int) -> Any:
        sock = self._context.socket(kind)
        sock.set(self._zmq.IPV6, 1)
        sock.set(self._zmq.LINGER, 0)
        sock.set(self._zmq.MAXMSGSIZE, EVENT_BYTES_MAX)
        sock.set(self._zmq.RECONNECT_IVL_MAX, 2000)
        return sock

    def _connect(self, sock: Any, endpoint: str) -> None:
        try:
            sock.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise NoResource(f"no such endpoint: {endpoint}: {error.strerror}") from None
