"""Request traces in the Mooncake format, read as a stream.

One JSON object per line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`
(one per block; an id names the whole prefix up to and including its block).

Promises:  1. memory is bounded whatever the file: one line of at most LINE_BYTES_MAX at a time,
              and at most PROBLEMS_KEPT problems with their text (all are counted);
           2. a request that comes out is whole and in range, and times never go back;
           3. a bad line is skipped and counted, or ends the reading when `strict`; never guessed.
One thread per Trace.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

LINE_BYTES_MAX = 16 << 20  # a 1,000,000-token request in blocks of 16 needs about 1 MB
PROBLEMS_KEPT = 20
TIMESTAMP_MS_MAX = 1e15  # 31,000 years; a float64 of seconds still holds microseconds there
ID_MAX = 2**63 - 1

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=TIMESTAMP_MS_MAX)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_BlockId]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came, its tokens, and the blocks of its prompt in chain order."""

    time_s: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One line that could not be used. `line_number` counts from 1."""

    line_number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line_number}: {self.reason}"


class TraceError(Exception):
    """The trace cannot be replayed: no such file, not a trace, or a bad line under `strict`."""


class Trace:
    """A trace file; iterating opens it and yields its requests.

    Each iteration reads the file anew and starts the counts below from zero, so they describe the
    iteration that ran last: `requests`, `skipped` (bad lines), `clamped` (requests whose timestamp
    lay before an earlier one; they get that earlier time), `problems` (the first bad lines),
    `bytes_read`.

    Raises TraceError when the path is no readable file and, under `strict`, at the first bad line.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False) -> None:
        self.path = os.fspath(path)
        self.strict = strict
        self._start_over()

    def _start_over(self) -> None:
        self.requests = 0
        self.skipped = 0
        self.clamped = 0
        self.problems: list[Problem] = []
        self.bytes_read = 0

    def size_bytes(self) -> int | None:
        """Length of the file; None when it is not known (a pipe)."""
        try:
            facts = os.stat(self.path)
        except (OSError, ValueError):
            return None
        return facts.st_size if stat.S_ISREG(facts.st_mode) else None

    def __iter__(self) -> Iterator[Request]:
        self._start_over()
        with self._open() as file:
            try:
                yield from self._requests(file)
            except OSError as error:
                raise TraceError(f"cannot read {self.path}: {error.strerror}") from error

    def _open(self) -> BinaryIO:
        try:
            if stat.S_ISDIR(os.stat(self.path).st_mode):
                raise TraceError(f"{self.path} is a directory; name one trace file")
            return open(self.path, "rb", buffering=1 << 20)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise TraceError(f"cannot read {self.path}: {reason}") from error

    def _requests(self, file: BinaryIO) -> Iterator[Request]:
        decoder = msgspec.json.Decoder(_Line)
        last_s = 0.0
        for number, line in enumerate(self._lines(file), start=1):
            if number == 1:
                if line is not None and line.startswith(_GZIP_MAGIC):
                    raise TraceError(
                        f"{self.path} is compressed, which is not supported; unpack it first, as"
                        f" in: zcat {self.path} | kvpool replay /dev/stdin"
                    )
                line = line and line.removeprefix(_UTF8_MARK)
            if line is not None and not line.strip():
                continue
            parsed = _parse(decoder, line)
            if isinstance(parsed, str):
                self._refuse(Problem(number, parsed))
                continue
            time_s = parsed.timestamp / 1000
            if time_s < last_s:
                self.clamped += 1
                time_s = last_s
            last_s = time_s
            self.requests += 1
            yield Request(time_s, parsed.input_length, parsed.output_length, parsed.hash_ids)

    def _lines(self, file: BinaryIO) -> Iterator[bytes | None]:
        """Lines; None stands for one that is too long, of which no more than a part was held."""
        while line := file.readline(LINE_BYTES_MAX + 1):
            self.bytes_read += len(line)
            if len(line) <= LINE_BYTES_MAX or line.endswith(b"\n"):
                yield line
                continue
            while not line.endswith(b"\n") and (line := file.readline(LINE_BYTES_MAX)):
                self.bytes_read += len(line)
            yield None

    def _refuse(self, problem: Problem) -> None:
        if self.strict:
            raise TraceError(f"{self.path}, {problem}")
        self.skipped += 1
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)


def _parse(decoder: msgspec.json.Decoder[_Line], line: bytes | None) -> _Line | str:
    """The line's fields, or the reason why it has none."""
    if line is None:
        return f"longer than {LINE_BYTES_MAX:,} bytes"
    try:
        line.decode("utf-8")  # the JSON decoder does not look into fields that it skips
        fields = decoder.decode(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    except msgspec.DecodeError as error:  # ValidationError is one of these
        return str(error)
    except RecursionError:
        return "nested too deep"
    if len(set(fields.hash_ids)) != len(fields.hash_ids):
        return "hash_ids repeat; an id names a whole prefix, so a request holds it once"
    return fields


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive requests as flat arrays, the form the simulator takes.

    times_s: float64[n]; lengths: uint32[n], blocks of each request; ids: int64[sum of lengths];
    input_tokens: int64[n].
    """

    times_s: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int64]


def spread(requests: Iterable[Request], *, together_max: int = 4096) -> Iterator[Request]:
    """The requests, those of one time spread evenly over the time until the next.

    For traces whose clock is coarse: what comes in one tick did not come at once. The last ones
    stay as they are, and so do those of a tick with more than `together_max`.
    """
    held: list[Request] = []
    for request in requests:
        if held and (request.time_s > held[0].time_s or len(held) == together_max):
            yield from _spread_until(held, request.time_s)
            held = []
        held.append(request)
    yield from held


def _spread_until(held: list[Request], end_s: float) -> Iterator[Request]:
    start_s = held[0].time_s
    for at, request in enumerate(held):
        time_s = start_s + (end_s - start_s) * at / len(held)
        yield dataclasses.replace(request, time_s=time_s)


def batches(requests: Iterable[Request], *, blocks_max: int = 1 << 16) -> Iterator[Batch]:
    """Groups requests, each batch ending with the one that reaches `blocks_max` blocks.

    Requests without blocks count as one block, so that a batch is bounded by them as well.
    """
    held: list[Request] = []
    blocks = 0
    for request in requests:
        held.append(request)
        blocks += max(1, len(request.block_ids))
        if blocks >= blocks_max:
            yield pack(held)
            held, blocks = [], 0
    if held:
        yield pack(held)


def pack(requests: list[Request]) -> Batch:
    """The requests as one batch."""
    return Batch(
        np.array([request.time_s for request in requests], dtype=np.float64),
        np.array([len(request.block_ids) for request in requests], dtype=np.uint32),
        np.array([i for request in requests for i in request.block_ids], dtype=np.int64),
        np.array([request.input_tokens for request in requests], dtype=np.int64),
    )


def write_line(request: Request) -> bytes:
    """The request as one line of the format, with its newline. Times are kept to the ms."""
    fields = _Line(
        round(request.time_s * 1000),
        request.input_tokens,
        request.output_tokens,
        request.block_ids,
    )
    return msgspec.json.encode(fields) + b"\n"
