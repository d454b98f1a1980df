"""etcd v3 by its HTTP/JSON gateway: the few calls that a membership needs.

Promises:  1. a call ends within its timeout, in which it tries other endpoints as well;
           2. whatever goes wrong is an EtcdError, and the end of a watch is one too: nothing ends
              in silence but a watch on which nothing happens;
           3. close() from any thread ends calls and watches, and leaves neither threads nor
              descriptors.
Thread rule: any thread; a Watch is read by one, and closed by any.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvpool.cluster import answers
from kvpool.cluster.access import Access, Login
from kvpool.cluster.answers import (
    AuthIsOff,
    Batch,
    Closed,
    EtcdError,
    Found,
    Map,
    NotGateway,
    Put,
    StaleToken,
    Unanswered,
    encoded,
)
from kvpool.cluster.http_post import Call, Endpoint, Resolver

PAUSE_S = 0.05  # after every endpoint failed at once
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_TRANSPORT = (OSError, http.client.HTTPException, ValueError)

T = TypeVar("T")


class Gateway:
    """An etcd of one or several endpoints."""

    def __init__(self, endpoints: list[Endpoint], access: Access, timeout_s: float) -> None:
        self.endpoints = endpoints
        self.timeout_s = timeout_s
        self._tls = access.tls
        self._login = Login(access)
        self._resolver = Resolver()
        self._guard = threading.Lock()
        self._calls: set[Call] = set()
        self._at = 0
        self._moves = 0
        self._is_closed = False

    @property
    def moves(self) -> int:
        """How often an endpoint was given up. A watch may sit on the one that does not answer."""
        return self._moves

    @property
    def endpoint(self) -> Endpoint:
        """The one that is asked next."""
        return self.endpoints[self._at]

    def close(self) -> None:
        """Ends everything under way; later calls raise Closed."""
        with self._guard:
            self._is_closed = True
            calls = list(self._calls)
        for each in calls:
            each.end()

    # --- the calls -------------------------------------------------------------------------------

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """-> (lease, the seconds that etcd gives it)."""
        where, answer = self._ask("lease/grant", {"TTL": ttl_s})
        lease = answers.number(where, answer, "ID")
        ttl = answers.number(where, answer, "TTL")
        if lease == 0 or ttl == 0:
            raise EtcdError(f"{where}: no lease was given")
        return lease, ttl

    def keep(self, lease: int) -> int:
        """-> the seconds it lives on; 0: it is gone."""
        where, answer = self._ask("lease/keepalive", {"ID": lease})
        return answers.number(where, answer, "TTL")

    def revoke(self, lease: int, timeout_s: float | None = None) -> None:
        self._ask("lease/revoke", {"ID": lease}, timeout_s)

    def put_if(self, key: str, value: bytes, lease: int, modified: int) -> Put:
        """Puts it if the key was changed last at that revision; 0: if there is none.

        Not done may also mean that an earlier try was: look at what is there.
        """
        name = encoded(key)
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": modified}
        put = {"key": name, "value": encoded(value), "lease": lease}
        request = {
            "compare": [compare],
            "success": [{"request_put": put}],
            "failure": [{"request_range": {"key": name}}],
        }
        return answers.put_of(*self._ask("kv/txn", request))

    def read(self, prefix: str) -> Found:
        """All keys with it, as a majority of the etcd has them."""
        end = encoded(answers.range_end(prefix))
        request = {"key": encoded(prefix), "range_end": end}
        return answers.found_of(*self._ask("kv/range", request))

    def watch(self, prefix: str, revision: int) -> Watch:
        """What changes from that revision on. Look at its `cluster` before believing it."""
        at = self._at
        call = self._begin(time.monotonic() + self.timeout_s, at)
        try:
            return Watch(self, at, call, (prefix, revision))
        except BaseException:
            self._end(call)
            raise

    # --- how one call is made --------------------------------------------------------------------

    def _ask(self, path: str, request: Map, timeout_s: float | None = None) -> tuple[str, Map]:
        """-> (how messages name the call, its answer)."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        body = json.dumps(request).encode()
        last: EtcdError | None = None
        for number in range(2 * max(2, len(self.endpoints))):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            at = self._at
            where = f"{path} at {self.endpoints[at]}"
            # One silent endpoint may not take the time of the others.
            share = left / min(2, len(self.endpoints)) if number == 0 else left
            try:
                return where, self._once(at, (path, where, body), time.monotonic() + share)
            except (Unanswered, NotGateway) as error:
                last = error
                self._move_from(at)
            if (number + 1) % len(self.endpoints) == 0:
                time.sleep(min(PAUSE_S, max(0.0, deadline - time.monotonic())))
        raise last or Unanswered(f"{path}: no time was left to ask")

    def _once(self, at: int, asked: tuple[str, str, bytes], deadline: float) -> Map:
        """At one endpoint; logs in where it must, and once more where the login is old."""
        path, where, body = asked
        for is_last in (False, True):
            try:
                if self._login.is_needed:
                    self._log_in(at, deadline)
                with self._call(at, where, deadline) as call:
                    status = call.ask(f"/v3/{path}", body, self._headers())
                    return answers.answer_of(where, status, call.body())
            except StaleToken as error:
                self._login.forget()
                if is_last:
                    raise EtcdError(str(error)) from None
        raise AssertionError("unreachable")

    def _log_in(self, at: int, deadline: float) -> None:
        where = f"login at {self.endpoints[at]}"
        body = json.dumps(self._login.credentials()).encode()
        headers = {"Content-Type": "application/json"}
        with self._call(at, where, deadline) as call:
            status = call.ask("/v3/auth/authenticate", body, headers)
            content = call.body()
        try:
            token = answers.text(where, answers.answer_of(where, status, content), "token")
        except AuthIsOff:
            self._login.switch_off()
            return
        if not (token.isascii() and token.isprintable()):
            raise EtcdError(f"{where}: its token is not fit for a header")
        self._login.accept(token)

    def _headers(self) -> dict[str, str]:
        # hasleader: a member that lost the others must say so instead of being silent.
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        if (token := self._login.token) is not None:
            headers["Authorization"] = token
        return headers

    @contextmanager
    def _call(self, at: int, where: str, deadline: float) -> Iterator[Call]:
        call = self._begin(deadline, at)
        try:
            with self.told(where):
                call.open(self._resolver)
                yield call
        finally:
            self._end(call)

    @contextmanager
    def told(self, where: str) -> Iterator[None]:
        """Whatever fails in the transport is an EtcdError."""
        try:
            yield
        except _TRANSPORT as error:
            if self._is_closed:
                raise Closed(f"{where}: closed from here") from None
            text = answers.said(str(error) or repr(error))
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
                raise NotGateway(
                    f"{where}: no HTTP is spoken there ({text}): another port, or one with TLS, for"
                    " which write https:// or set ca_file"
                ) from None
            if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS:
                raise NotGateway(
                    f"{where}: no TLS is spoken there ({text}): another port, or one without, for"
                    " which write http:// and leave out ca_file"
                ) from None
            # Some releases of etcd answer an old token by hanging up.
            self._login.forget()
            raise Unanswered(f"{where}: {text}") from None

    def _begin(self, deadline: float, at: int) -> Call:
        call = Call(self.endpoints[at], self._tls, deadline)
        with self._guard:
            if self._is_closed:
                raise Closed("closed from here")
            self._calls.add(call)
        return call

    def _end(self, call: Call) -> None:
        with self._guard:
            self._calls.discard(call)
        call.close()

    def _move_from(self, at: int) -> None:
        with self._guard:
            self._moves += 1
            if self._at == at:
                self._at = (at + 1) % len(self.endpoints)


class Watch:
    """Iterate: a Batch each time something changed. Ends by an EtcdError and in no other way."""

    def __init__(self, gateway: Gateway, at: int, call: Call, what: tuple[str, int]) -> None:
        """what: a prefix, and the first revision that is of interest."""
        prefix, revision = what
        self._gateway = gateway
        self._call = call
        self._where = f"watch at {gateway.endpoints[at]}"
        if gateway._login.is_needed:
            gateway._log_in(at, time.monotonic() + gateway.timeout_s)
        request = {
            "key": encoded(prefix),
            "range_end": encoded(answers.range_end(prefix)),
            "start_revision": revision,
        }
        body = json.dumps({"create_request": request}).encode()

        def begin() -> int:
            call.open(gateway._resolver)
            return call.ask("/v3/watch", body, gateway._headers())

        status = self._told(begin)
        if status != 200:
            answers.answer_of(self._where, status, self._told(call.body))
        first = self._next()
        if not first.is_created or first.events:
            raise EtcdError(f"{self._where}: it did not begin as a watch does")
        self.cluster = first.cluster
        call.lift_deadline()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self._next()
            if batch.events:
                yield batch

    def close(self) -> None:
        """From any thread: who reads it gets Closed. Its reader calls release()."""
        self._call.end()

    def release(self) -> None:
        """Gives its connection back. By the thread that reads."""
        self._gateway._end(self._call)

    def _next(self) -> Batch:
        line = self._told(self._call.line)
        if not line:
            raise Closed(f"{self._where}: it ended")
        try:
            return answers.batch_of(self._where, line)
        except StaleToken as error:
            self._gateway._login.forget()
            raise Closed(str(error)) from None

    def _told(self, step: Callable[[], T]) -> T:
        with self._gateway.told(self._where):
            return step()


def timeout_for(ttl_s: float) -> float:
    """So that a lease survives a few calls that nobody answered."""
    return min(1.0, max(0.3, ttl_s / 4))
