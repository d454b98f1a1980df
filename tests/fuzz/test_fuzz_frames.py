"""Frames that no client of ours sends, to a daemon that is a process of its own.

Whatever a stream says, the worst is that it is closed, for a reason that the daemon tells. Others
are served meanwhile, nothing is held for a stream that is gone, and what is stored under a key is
what its checksum says.
"""

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpool
from kvpool import wire
from tests import frames
from tests.frames import Block, RawClient, Request, raw_client
from tests.pools import key, keys, opaque, payload
from tests.served import WAIT_S, Served, assert_all_comes_back, held, nobody_holds, served, wait_for

BLOCK_BYTES = 600
OURS = keys(range(32))  # the witness's, in a namespace of the same manifest
THEIRS = keys(range(100, 108))
MANIFEST = opaque(block_bytes=BLOCK_BYTES)
KEYS_MAX = 8192


class Scene:
    """A daemon, a witness that must be served well at all times, and a client that misbehaves."""

    def __init__(self, daemon: Served, witness: kvpool.Pool, raw: RawClient) -> None:
        self.daemon = daemon
        self.witness = witness
        self.raw = raw
        self.ours = witness.namespace(MANIFEST)
        self.number = raw.space(MANIFEST)
        assert self.ours.put(OURS, [payload(each, BLOCK_BYTES) for each in OURS]).no_room == 0

    def said(self, name: str) -> int:
        return int(self.witness.stats()["server"][name])

    def check_unharmed(self) -> None:
        out = np.zeros(len(OURS) * BLOCK_BYTES, np.uint8)
        assert self.ours.get_into(OURS, out) == len(OURS)
        assert out.tobytes() == b"".join(payload(each, BLOCK_BYTES) for each in OURS)
        for each in THEIRS:
            one = np.zeros(BLOCK_BYTES, np.uint8)
            if self.ours.get_into([each], one):
                assert one.tobytes() == payload(each, BLOCK_BYTES)
        wait_for(
            lambda: nobody_holds(self.witness, but_clients=2), what=f"{held(self.witness)} is free"
        )

    def expect_closed(self, said: bytes, why: str) -> None:
        before = self.said("closed_garbage")
        stream = self.raw.stream()
        stream.send(said)
        stream.rest()
        stream.close()
        wait_for(lambda: self.said("closed_garbage") > before, what=f"closed: {why}")
        reason = self.witness.stats()["server"]["last_closed"]
        assert why in reason
        self.check_unharmed()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("frames"), dram="8MiB", log_level="error") as running:
        yield running


@pytest.fixture(scope="module", params=["unix", "tcp"])
def scene(daemon: Served, request: pytest.FixtureRequest) -> Iterator[Scene]:
    address = daemon.unix_address if request.param == "unix" else daemon.tcp_address
    with daemon.connect("shm", name="witness") as witness:
        with raw_client(address) as raw:
            made = Scene(daemon, witness, raw)
            yield made
            made.check_unharmed()
        wait_for(lambda: nobody_holds(witness), what="the client is gone")
        assert_all_comes_back(witness, made.ours)


Change = Callable[[Request], Request]


def but(**fields: int) -> Change:
    return lambda request: dataclasses.replace(request, **fields)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (but(magic=0), "not a request"),
        (but(version=2), "version 2"),
        (but(op=0), "kind 0"),
        (but(op=14), "kind 14"),
        (but(op=255), "kind 255"),
        (but(flags=2), "unknown flags"),
        (but(flags=frames.HAS_PARENT), "unknown flags"),
        (but(count=0), "of 0 keys"),
        (but(count=KEYS_MAX + 1), "8193 keys"),
        (but(count=0xFFFFFFFF), "4294967295 keys"),
        (but(skip=1), "skips too much"),
        (but(deadline_ms=0xFFFFFFFF), "deadline"),
    ],
)
def test_a_request_that_cannot_be(scene: Scene, change: Change, why: str) -> None:
    scene.expect_closed(change(Request(frames.GET, scene.number, THEIRS)).pack(), why)


@pytest.mark.parametrize(
    "wrong",
    [
        {"magic": 7},
        {"version": 3},
        {"id": 9},
        {"index": 1},
        {"size": BLOCK_BYTES + 1},
        {"size": 0xFFFFFFFF},
        {"key": THEIRS[1]},
        {"check": 5},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_block_that_does_not_fit(scene: Scene, wrong: dict[str, int]) -> None:
    block = Block(1, 0, THEIRS[0], payload(THEIRS[0], BLOCK_BYTES))
    head = Request(frames.PUT, scene.number, THEIRS[:1]).pack()
    scene.expect_closed(head + dataclasses.replace(block, **wrong).pack(), "does not fit")


def test_payload_that_is_not_what_its_checksum_says(scene: Scene) -> None:
    block = Block(1, 0, key(777), bytes(BLOCK_BYTES), sum=bytes(16))
    head = Request(frames.PUT, scene.number, [key(777)]).pack()
    scene.expect_closed(head + block.pack(), "checksum")
    assert scene.ours.lookup([key(777)]).blocks == 0


def test_out_of_order(scene: Scene) -> None:
    request, first, second = frames.put(
        scene.number, THEIRS[:2], [payload(each, BLOCK_BYTES) for each in THEIRS[:2]]
    )
    scene.expect_closed(first + request + second, "not a request")
    scene.expect_closed(request + second + first, "does not fit")
    scene.expect_closed(request + request + first, "does not fit")
    scene.expect_closed(request + first + second + second, "not a request")


def test_replayed(scene: Scene) -> None:
    """The same put again and again, on one stream and on others, stores its blocks once."""
    fresh = keys(range(200, 204))
    whole = b"".join(
        frames.put(scene.number, fresh, [payload(each, BLOCK_BYTES) for each in fresh], id=5)
    )
    puts = scene.witness.stats()["puts"]
    for _ in range(3):
        stream = scene.raw.stream()
        for turn in range(3):
            stream.send(whole)
            answer = stream.answer()
            assert (answer.id, answer.failed, len(answer.body)) == (5, 0, 4)
            assert set(answer.body) <= {kvpool.Put.STORED, kvpool.Put.PRESENT}, (turn, answer)
        stream.close()
    assert scene.witness.stats()["puts"] - puts == 4
    scene.check_unharmed()


def test_truncated_at_every_frame(scene: Scene) -> None:
    """Ends in the middle are no offence, and leave nothing."""
    fresh = keys(range(300, 303))
    parts = frames.put(scene.number, fresh, [payload(each, BLOCK_BYTES) for each in fresh])
    whole = b"".join(parts)
    garbage = scene.said("closed_garbage")
    for cut in [
        1,
        31,
        32,
        50,
        len(parts[0]) + 71,
        len(parts[0]) + 72,
        *range(100, len(whole), 177),
    ]:
        stream = scene.raw.stream()
        stream.send(whole[:cut])
        stream.close()
    scene.check_unharmed()
    assert scene.said("closed_garbage") == garbage
    assert scene.ours.lookup(fresh[2:]).blocks == 0


def test_a_put_that_never_goes_on(scene: Scene) -> None:
    """Who says nothing more in the middle of a payload is closed after five seconds."""
    late = scene.said("closed_late")
    stream = scene.raw.stream()
    request, block = frames.put(scene.number, [key(400)], [payload(key(400), BLOCK_BYTES)])
    stream.send(request + block[:100])
    wait_for(lambda: held(scene.witness)["blocks_reserved"] == 1, what="it is being put")
    begin = time.monotonic()
    stream.rest()
    assert time.monotonic() - begin < 8
    wait_for(lambda: scene.said("closed_late") == late + 1, what="it is counted")
    stream.close()
    scene.check_unharmed()


def test_an_unknown_namespace_and_leases_of_others(scene: Scene) -> None:
    """Said no to, and the stream goes on."""
    stream = scene.raw.stream()
    for space in (scene.number + 1, 77, 0xFFFFFFFF):
        stream.send(Request(frames.LOOKUP, space, THEIRS, id=space).pack())
        answer = stream.answer()
        assert (answer.id, answer.failed, answer.count) == (space, 1, 0)
    numbers = [number.to_bytes(16, "little") for number in (0, 1, 2, 1 << 40)]
    stream.send(Request(frames.RELEASE, 0, numbers).pack())
    assert stream.answer().count == 0
    stream.send(Request(frames.LOOKUP, scene.number, OURS, id=3).pack())
    assert stream.answer().count == len(OURS)
    stream.close()
    scene.check_unharmed()


HELLOS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"kvpool\x01\x00\xff\xff\xff\xff",
    b"kvpool\x09\x00\x01\x00\x00\x00\x80",
    wire.pack_hello({"kind": "stream", "client": bytes(16)}),
    wire.pack_hello({"kind": "shm", "client": bytes(16)}),
    wire.pack_hello({"kind": "control", "client": bytes(16)}),
    wire.pack_hello({"kind": "stream", "client": bytes(5)}),
    wire.pack_hello({}),
    bytes(12),
    b"",
]


@pytest.mark.parametrize("said", HELLOS)
def test_no_hello(scene: Scene, said: bytes) -> None:
    with scene.raw.connected() as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        answered = b""
        while part := sock.recv(1 << 16):
            answered += part
    if said:
        with pytest.raises(wire.RefusedByPeer) as refused:
            wire.read_answer(1, answered[wire.HEAD_BYTES :])
        assert str(refused.value)
    scene.check_unharmed()


# --- at random -----------------------------------------------------------------------------------

words = st.sampled_from([0, 1, 2, 7, 255, KEYS_MAX, 1 << 31, (1 << 32) - 1])
some_keys = st.lists(st.sampled_from(THEIRS), min_size=1, max_size=4)


@st.composite
def requests(draw: st.DrawFn) -> list[Callable[[int], bytes]]:
    """The frames of one request, each made when the namespace's number is known."""
    wanted = draw(some_keys)
    id = draw(st.integers(0, 3))
    op = draw(st.sampled_from(range(1, 8)))
    fields = draw(
        st.just({})
        | st.dictionaries(st.sampled_from(["skip", "flags", "deadline_ms", "count"]), words)
    )
    fields = {name: value & 0xFFFF if name == "flags" else value for name, value in fields.items()}
    deadline_ms = {"deadline_ms": 50, **fields}
    head = Request(op, 0, wanted, id, **deadline_ms)
    made: list[Callable[[int], bytes]] = [
        lambda space: dataclasses.replace(head, space=space).pack()
    ]
    if op == frames.PUT:
        for index, each in enumerate(wanted):
            block = Block(id, index, each, payload(each, BLOCK_BYTES))
            wrong = draw(
                st.just({})
                | st.dictionaries(st.sampled_from(["index", "size", "generation"]), words)
            )
            block = dataclasses.replace(block, **wrong)
            made.append(lambda space, block=block: block.pack())  # type: ignore[misc]
    return made


@st.composite
def streams(draw: st.DrawFn) -> Callable[[int], bytes]:
    """Requests, of which frames were taken away, doubled or exchanged, and bytes changed."""
    made = [each for request in draw(st.lists(requests(), max_size=4)) for each in request]
    for kind, at, to in draw(
        st.lists(
            st.tuples(
                st.sampled_from(["drop", "copy", "swap"]), st.integers(0, 30), st.integers(0, 30)
            ),
            max_size=2,
        )
    ):
        if not made:
            break
        one, other = at % len(made), to % len(made)
        if kind == "drop":
            del made[one]
        elif kind == "copy":
            made.insert(other, made[one])
        else:
            made[one], made[other] = made[other], made[one]
    edits = draw(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), max_size=2))
    cut = draw(st.none() | st.integers(0, 1 << 14))
    tail = draw(st.binary(max_size=40))

    def packed(space: int) -> bytes:
        data = bytearray(b"".join(each(space) for each in made))
        for at, change in edits:
            if data:
                data[at % len(data)] ^= change
        return bytes(data[:cut]) + tail

    return packed


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(said=streams(), pieces=st.lists(st.integers(1, 2000), max_size=3))
def test_anything(scene: Scene, said: Callable[[int], bytes], pieces: list[int]) -> None:
    data = said(scene.number)
    stream = scene.raw.stream()
    for piece in pieces:
        stream.send(data[:piece])
        data = data[piece:]
    stream.send(data)
    stream.end()
    begin = time.monotonic()
    stream.rest()
    assert time.monotonic() - begin < WAIT_S
    stream.close()
    scene.check_unharmed()
