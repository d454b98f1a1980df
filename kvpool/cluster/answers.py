"""What etcd's JSON gateway answers, read with distrust: every field is looked at before it is used.

Promises:  1. whatever came back is an answer of the form that was asked for, or an EtcdError;
           2. an error says what to do where one can know: the gateway is off, a wrong port, a user
              who may not.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Any

from kvpool.errors import KvpoolError, shown

Map = dict[str, Any]

TEXT_MAX = 200  # of what a stranger said, in a message
_I64_MAX = 2**63 - 1
_U64_MAX = 2**64 - 1

# Codes of gRPC in an error's body.
_INVALID, _NOT_FOUND, _DENIED, _UNAUTHENTICATED = 3, 5, 7, 16
_ELSEWHERE = frozenset({4, 8, 14})  # out of time, exhausted, unavailable: another endpoint may do
_STALE = ("invalid auth token", "revision of auth store is old")
_AUTH_OFF = "authentication is not enabled"
_NO_USER = "user name is empty"


class EtcdError(KvpoolError):
    """etcd said no, or said what cannot be understood."""


class Unanswered(EtcdError):
    """No endpoint answered in time: the call may or may not have taken effect."""


class NotGateway(EtcdError):
    """Something answers there, but not etcd's JSON gateway."""


class Denied(EtcdError):
    """etcd knows no such user, or the user may not do this."""


class StaleToken(EtcdError):
    """The token of a login is good no more."""


class AuthIsOff(EtcdError):
    """This etcd knows no users: nobody needs to log in."""


class LeaseGone(EtcdError):
    """The lease ran out, or was never there."""


class Compacted(EtcdError):
    """What a watch asked for is forgotten: read everything, and watch from there."""


class Closed(EtcdError):
    """A watch is over, or was closed from here."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value with the revisions that made it and changed it last."""

    value: bytes
    created: int
    modified: int


@dataclass(frozen=True, slots=True)
class Found:
    """All keys with a prefix, as of one revision of one etcd."""

    cluster: int
    revision: int
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Put:
    """What became of a put with a condition. other: what is there instead, if anything."""

    done: bool
    revision: int
    other: Entry | None


@dataclass(frozen=True, slots=True)
class Event:
    """A key changed; None: it is gone."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What a watch brings at one time."""

    cluster: int
    revision: int
    is_created: bool  # the first message, which says that the watch stands
    events: list[Event] = field(default_factory=list)


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def range_end(prefix: str) -> bytes:
    """The first key behind every key with this prefix, which is never empty and never all 0xff."""
    whole = prefix.encode()
    return whole[:-1] + bytes([whole[-1] + 1])


def said(text: bytes | str) -> str:
    """What a stranger said, short and on one line."""
    whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    flat = " ".join(whole.split())
    printable = "".join(char if char.isprintable() else "?" for char in flat)
    return printable if len(printable) <= TEXT_MAX else printable[:TEXT_MAX] + "..."


# --- from a response to its content --------------------------------------------------------------


def answer_of(where: str, status: int, body: bytes) -> Map:
    """The content of an answer to one call. Raises EtcdError; Unanswered if another may do it."""
    answer = _json(where, status, body)
    error = answer.get("error")
    if status == 200 and error is None:
        result = answer.get("result", answer)
        return _is_map(where, "answer", result)
    # 3.4 has {"error": text, "code": n}, a stream {"error": {"grpc_code": n, "message": text}}.
    raise refusal(where, error if isinstance(error, dict) else answer, status)


def refusal(where: str, inner: Map, status: int = 200) -> EtcdError:
    """What an error of etcd is to whoever asked."""
    code = inner.get("code", inner.get("grpc_code", 0))
    code = code if isinstance(code, int) else 0
    text = inner.get("message", inner.get("error", ""))
    told = said(text if isinstance(text, str) and text else json.dumps(inner))
    if code == _UNAUTHENTICATED or any(words in told for words in _STALE):
        return StaleToken(f"{where}: {told}")
    if _AUTH_OFF in told:
        return AuthIsOff(f"{where}: {told}")
    if _NO_USER in told:
        return Denied(f"{where}: {told}: it asks who is there; set user and password_file")
    if code == _DENIED or "permission denied" in told:
        return Denied(f"{where}: {told}: the user needs a role that may read and write the prefix")
    if "authentication failed" in told:
        return Denied(f"{where}: {told}")
    if code == _NOT_FOUND and "lease" in told:
        return LeaseGone(f"{where}: {told}")
    if code in _ELSEWHERE or status == 503 or "no leader" in told:
        return Unanswered(f"{where}: {told}")
    return EtcdError(f"{where}: {told}")


def _json(where: str, status: int, body: bytes) -> Map:
    try:
        answer = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        return answer
    if status == 404:
        raise NotGateway(
            f"{where}: no JSON gateway is there (HTTP 404): this is not etcd's port for clients, or"
            " its gateway is off (a configuration file of etcd needs enable-grpc-gateway: true)"
        )
    if b"HTTPS" in body[:200]:
        raise NotGateway(f"{where}: etcd wants TLS there; write https:// or set ca_file")
    raise NotGateway(f"{where}: no etcd answers there: HTTP {status}, {said(body[:400])!r}")


# --- fields --------------------------------------------------------------------------------------


def number(where: str, answer: Map, name: str, most: int = _I64_MAX) -> int:
    """The gateway writes 64-bit numbers as text, and leaves out a zero."""
    value = answer.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise EtcdError(f"{where}: {name} of the answer is {shown(value)}")
    return value


def text(where: str, answer: Map, name: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise EtcdError(f"{where}: {name} of the answer is {shown(value)}")
    return value


def found_of(where: str, answer: Map) -> Found:
    cluster, revision = header_of(where, answer)
    if answer.get("more"):
        raise EtcdError(f"{where}: the answer is not all there is")
    entries = {}
    for each in _maps(where, answer, "kvs"):
        key, entry = _pair(where, each)
        entries[key] = entry
    return Found(cluster, revision, entries)


def put_of(where: str, answer: Map) -> Put:
    _, revision = header_of(where, answer)
    if answer.get("succeeded") is True:
        return Put(True, revision, None)
    responses = _maps(where, answer, "responses")
    ranged = responses[0].get("response_range", {}) if responses else {}
    kvs = _maps(where, _is_map(where, "response_range", ranged), "kvs")
    return Put(False, revision, _pair(where, kvs[0])[1] if kvs else None)


def batch_of(where: str, line: bytes) -> Batch:
    """One line of a watch. Raises Compacted, Closed, EtcdError."""
    answer = _json(where, 200, line)
    error = answer.get("error")
    if error is not None:
        raise refusal(where, error if isinstance(error, dict) else answer)
    result = _is_map(where, "result", answer.get("result"))
    cluster, revision = header_of(where, result)
    if compacted := number(where, result, "compact_revision"):
        raise Compacted(f"{where}: forgotten up to revision {compacted}")
    if result.get("canceled"):
        raise Closed(f"{where}: cancelled: {said(str(result.get('cancel_reason', '')))}")
    events = []
    for each in _maps(where, result, "events"):
        key, entry = _pair(where, _is_map(where, "kv", each.get("kv")))
        events.append(Event(key, None if each.get("type") == "DELETE" else entry))
    return Batch(cluster, revision, result.get("created") is True, events)


def header_of(where: str, answer: Map) -> tuple[int, int]:
    """(id of the etcd cluster, revision)."""
    header = _is_map(where, "header", answer.get("header"))
    return number(where, header, "cluster_id", _U64_MAX), number(where, header, "revision")


def _pair(where: str, kv: Map) -> tuple[str, Entry]:
    key = _bytes(where, kv, "key").decode("utf-8", "replace")
    created, modified = (number(where, kv, f"{word}_revision") for word in ("create", "mod"))
    return key, Entry(_bytes(where, kv, "value"), created, modified)


def _bytes(where: str, kv: Map, name: str) -> bytes:
    value = kv.get(name, "")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise EtcdError(f"{where}: {name} of the answer is not base64") from None


def _maps(where: str, answer: Map, name: str) -> list[Map]:
    value = answer.get(name, [])
    if not isinstance(value, list):
        raise EtcdError(f"{where}: {name} of the answer is no list")
    return [_is_map(where, name, each) for each in value]


def _is_map(where: str, name: str, value: Any) -> Map:
    if not isinstance(value, dict):
        raise EtcdError(f"{where}: {name} of the answer is {shown(value)}")
    return value
