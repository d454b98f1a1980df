"""A publisher and its subscribers over real sockets, with nodes that a test makes up."""

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import NoResource
from kvpool.events import answers, publisher
from kvpool.events.answers import Answers, Sent
from kvpool.events.encoding import END, SNAPSHOT, Batch, pack_sequence
from kvpool.events.follower import Follower, Residents
from kvpool.events.history import History
from tests.eventful import (
    DRAM,
    SSD,
    WAIT_S,
    MadeUpNode,
    PlainReader,
    follow_until,
    following,
    key,
    publishing,
    wait_for,
    zmq,
)


def held_by(node: MadeUpNode, medium: str) -> set[bytes]:
    tier = DRAM if medium == "CPU" else SSD
    return {name for name, tiers in node.here.items() if tiers & tier}


def agrees(known: Residents, node: MadeUpNode) -> bool:
    return all(known.of(medium) == held_by(node, medium) for medium in ("CPU", "STORAGE"))


# --- the wire ------------------------------------------------------------------------------------


def test_the_stream_begins_with_a_clear_and_counts_on(tmp_path: Path) -> None:
    node = MadeUpNode()
    node.note(1, DRAM)
    with (
        publishing(tmp_path, node) as published,
        PlainReader(published.endpoint, published.replay_endpoint) as reader,
    ):
        wait_for(lambda: published.stats()["stored"] >= 1)
        found = reader.asked(0)
        assert [number for _, number, _ in found] == list(range(len(found)))
        assert {topic for topic, _, _ in found} == {b"kvpool"}
        first = found[0][2]
        assert first[1] == [{"type": "AllBlocksCleared"}]
        assert first[3] == {"node": b"n" * 16, "incarnation": 7}
        stored = [batch for _, _, batch in found if batch[1] and len(batch[1][0]) > 1]
        assert stored[0][1][0]["block_hashes"] == [key(1)]
        assert stored[0][3]["name"] == "made-up"
        # The same batches as the stream has them; it was joined late.
        topic, number, live = reader.event()
        assert topic == b"kvpool"
        assert next(one for one in reader.asked(number) if one[1] == number)[2] == live


def test_an_idle_stream_says_that_it_is_there(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, MadeUpNode()) as published,
        PlainReader(published.endpoint, published.replay_endpoint) as reader,
    ):
        numbers = [reader.event()[1] for _ in range(2)]
        assert numbers[1] == numbers[0] + 1


def test_a_late_joiner_gets_all_there_is_and_where_to_go_on(tmp_path: Path) -> None:
    node = MadeUpNode()
    for at in range(1, 20):
        node.note(at, DRAM)
    node.note(3, SSD)
    node.note(4, DRAM | SSD)
    with (
        publishing(tmp_path, node, buffer=1) as published,
        PlainReader(published.endpoint, published.replay_endpoint) as reader,
    ):
        for sequence in (SNAPSHOT, 0, 1 << 40):  # none, one that is not kept, another life's
            found = reader.asked(sequence)
            marks = [batch[3]["snapshot"] for _, _, batch in found]
            assert [mark["state"] for mark in marks] == [
                "begin",
                *["blocks"] * (len(marks) - 2),
                "whole",
            ]
            following = marks[0]["next"]
            assert {mark["next"] for mark in marks} == {following}
            assert {number for _, number, _ in found} == {following - 1}
            assert marks[-1]["blocks"] == 20
            names = [
                (each, event["medium"])
                for _, _, batch in found
                for event in batch[1]
                for each in event.get("block_hashes", [])
            ]
            assert len(names) == 20
            assert {name for name, medium in names if medium == "STORAGE"} == {key(3), key(4)}


def test_a_plain_request_socket_gets_the_first_of_it(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, MadeUpNode()) as published,
        PlainReader(published.endpoint, published.replay_endpoint) as reader,
    ):
        sock = reader.asker(zmq.REQ)
        sock.send(pack_sequence(0))
        assert sock.poll(WAIT_S * 1000)
        assert sock.recv_multipart()[1] == pack_sequence(0)


# --- following -----------------------------------------------------------------------------------


def test_puts_and_evictions_during_a_snapshot_end_up_right(tmp_path: Path) -> None:
    """Each piece of the walk is made between changes of keys behind it and before it."""
    node = MadeUpNode()
    for at in range(1, 200):
        node.note(at, DRAM)
    state = {"at": 0}

    def change() -> None:
        state["at"] += 1
        at = state["at"]
        if at > 2000:
            return
        node.note(1 + at * 7 % 199, 0 if at % 3 else SSD)
        node.note(1 + at * 31 % 199, DRAM if at % 5 else DRAM | SSD)
        node.note(200 + at, DRAM)  # behind all
        node.note(1 + at * 13 % 199, 0)

    with publishing(tmp_path, node, buffer=4) as published:
        wait_for(lambda: published.stats()["announced"] >= 199)
        node.between = change  # from the publisher's thread, as a walk has the node's lock
        for _ in range(3):
            known = Residents()
            with following(tmp_path) as follower:
                follow_until(follower, known, lambda: True)
                node.between = lambda: None
                follow_until(follower, known, partial(agrees, known, node))
            node.between = change
        assert published.stats()["snapshots"] >= 3


def test_a_gap_is_asked_for_and_closed(tmp_path: Path) -> None:
    node = MadeUpNode()
    known = Residents()
    with publishing(tmp_path, node) as published, following(tmp_path) as follower:
        follow_until(follower, known, lambda: True)
        snapshots = published.stats()["snapshots"]
        for at in range(1, 50):
            node.note(at, DRAM)
            wait_for(lambda: not node.rows)
        lost = [follower._sockets.event(WAIT_S) for _ in range(5)]  # as a network would
        assert all(lost)
        follow_until(follower, known, lambda: agrees(known, node))
        assert follower.counts["gaps"] >= 1
        assert published.stats()["snapshots"] == snapshots
        assert published.stats()["replays"] >= 1


def test_a_slow_subscriber_is_dropped_and_comes_back_by_a_snapshot(tmp_path: Path) -> None:
    node = MadeUpNode()
    node.piece = 1000
    known = Residents()
    with (
        publishing(tmp_path, node, high_water=2, buffer=8) as published,
        following(tmp_path, high_water=2) as follower,
    ):
        follow_until(follower, known, lambda: True)
        for round_ in range(30):  # nobody reads
            for at in range(1, 400):
                node.note(at, 1 + (round_ + at) % 3)
            sent = published.stats()["batches"]
            wait_for(lambda before=sent: published.stats()["batches"] > before)
        node.note(7, 0)
        follow_until(follower, known, lambda: agrees(known, node))
        assert follower.counts["gaps"] >= 1
        assert published.stats()["snapshots"] >= 2


def test_changes_that_a_node_lost_are_told_anew(tmp_path: Path) -> None:
    node = MadeUpNode()
    for at in range(1, 30):
        node.note(at, DRAM)
    known = Residents()
    with publishing(tmp_path, node) as published, following(tmp_path) as follower:
        follow_until(follower, known, lambda: agrees(known, node))
        asked = follower.counts["asked"]
        for at in range(1, 20):  # in silence
            del node.here[key(at)]
        node.is_lost = True
        follow_until(follower, known, lambda: agrees(known, node))
        assert follower.counts["asked"] == asked  # the stream alone said it
        assert published.stats()["lost"] == 1
        assert published.stats()["anew"] == 2


def test_another_life_of_the_node_is_noticed(tmp_path: Path) -> None:
    known = Residents()
    with contextlib.ExitStack() as stack:
        first = MadeUpNode()
        for at in range(1, 9):
            first.note(at, DRAM)
        with publishing(tmp_path, first, incarnation=1):
            follower = stack.enter_context(following(tmp_path))
            follow_until(follower, known, lambda: agrees(known, first))
        # Its last word was that nothing is to be had.
        follow_until(follower, known, lambda: len(known) == 0)
        second = MadeUpNode()
        second.note(100, DRAM)
        with publishing(tmp_path, second, incarnation=2):
            follow_until(follower, known, lambda: agrees(known, second))
            assert known.of("CPU") == {key(100)}


def test_without_a_replay_endpoint_gaps_are_counted(tmp_path: Path) -> None:
    node = MadeUpNode()
    with (
        publishing(tmp_path, node, replay_endpoint=None) as published,
        Follower(published.endpoint) as follower,
    ):
        assert published.replay_endpoint == ""
        assert follower.next(WAIT_S) is not None
        follower._sockets.event(WAIT_S)
        assert follower.next(WAIT_S) is not None
        assert follower.counts["gaps"] == 1


def test_two_subscribers_follow_side_by_side_while_all_changes(tmp_path: Path) -> None:
    node = MadeUpNode()
    is_over = threading.Event()
    turn = threading.Lock()  # of the node, as the core has one
    original = node.take

    def take() -> tuple[bool, bytes]:
        with turn:
            return original()

    node.take = take  # type: ignore[method-assign]
    node.between = lambda: None

    def change() -> None:
        for at in range(4000):
            with turn:
                node.note(1 + at * 17 % 300, (at * 7) % 4)
            time.sleep(0)
        is_over.set()

    changing = threading.Thread(target=change)
    walk = node.walk

    class Locked:
        def __init__(self) -> None:
            self._walk = walk()

        def step(self) -> tuple[bool, bytes]:
            with turn:
                found: tuple[bool, bytes] = self._walk.step()
                return found

    node.walk = Locked  # type: ignore[method-assign]
    with publishing(tmp_path, node), following(tmp_path) as one, following(tmp_path) as other:
        changing.start()
        for follower in (one, other):
            known = Residents()
            follow_until(
                follower, known, lambda known=known: is_over.is_set() and agrees(known, node)
            )
        changing.join()


# --- strangers -----------------------------------------------------------------------------------

HOSTILE: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"", b"1234567"],
    [b"", b"123456789"],
    [b"x", pack_sequence(0)],
    [b"", pack_sequence(0), b""],
    [b"", b"", pack_sequence(0)],
    [pack_sequence(0)],
    [b"", *[b"12345678"] * 200],
]


def test_requests_that_are_none_are_counted_and_nothing_else(tmp_path: Path) -> None:
    node = MadeUpNode()
    known = Residents()
    with (
        publishing(tmp_path, node) as published,
        PlainReader(published.endpoint, published.replay_endpoint) as reader,
        following(tmp_path) as follower,
    ):
        stranger = reader.asker()
        for frames in HOSTILE:
            stranger.send_multipart(frames)
        wait_for(lambda: published.stats()["malformed"] == len(HOSTILE))
        huge = reader.asker()
        huge.send_multipart([b"", bytes(8 << 20)])  # its connection is closed
        reader.sub.subscribe(b"x" * 100_000)
        node.note(1, DRAM)
        follow_until(follower, known, lambda: agrees(known, node) and len(known) == 1)
        assert not stranger.poll(0)
        assert published.stats()["failures"] == 0
        assert reader.asked(0)


def test_many_who_ask_and_do_not_read_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STALLED_S", 0.5)
    node = MadeUpNode()
    node.piece = 100
    for at in range(1, 20_000):
        node.note(at, DRAM)
    known = Residents()
    with (
        publishing(tmp_path, node) as published,
        PlainReader(published.endpoint, published.replay_endpoint) as reader,
    ):
        idle = []
        for _ in range(2 * answers.SESSIONS_MAX):
            sock = reader.asker()
            sock.set(zmq.RCVHWM, 1)
            sock.send_multipart([b"", pack_sequence(SNAPSHOT)])
            idle.append(sock)
        wait_for(lambda: published.stats()["answering"] == answers.SESSIONS_MAX)
        with following(tmp_path) as follower:
            node.note(1, 0)
            follow_until(follower, known, lambda: agrees(known, node))
        assert published.stats()["answering"] <= answers.SESSIONS_MAX


# --- answers by themselves -----------------------------------------------------------------------


class Client:
    """Takes so many messages."""

    def __init__(self) -> None:
        self.room = 0
        self.got: list[Any] = []
        self.is_gone = False

    def send(self, client: bytes, message: Any) -> Sent:
        if self.is_gone:
            return Sent.GONE
        if self.room == 0:
            return Sent.FULL
        self.room -= 1
        self.got.append((client, *message))
        return Sent.OK


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def history() -> History:
    history = History(3)
    for at in range(5):
        history.add(b"batch %d" % at)
    return history


@pytest.fixture
def asked(client: Client, history: History) -> Answers:
    pieces = [(b"piece", 2), None, (b"piece", 1)]
    return Answers(
        history,
        b"t",
        client.send,
        lambda following: iter(pieces),
        lambda events, part: f"{part.state} {part.next} {part.blocks}".encode(),
    )


def test_an_answer_waits_for_room_and_loses_nothing(asked: Answers, client: Client) -> None:
    asked.ask([b"c", b"", pack_sequence(3)], now=0)
    for _ in range(5):
        assert not asked.step(1)
    client.room = 1
    assert asked.step(2)
    assert not asked.step(2)
    client.room = 9
    for _ in range(4):
        asked.step(3)
    assert [(each[2], each[3]) for each in client.got] == [
        (pack_sequence(3), b"batch 3"),
        (pack_sequence(4), b"batch 4"),
        (END, b""),
    ]
    assert len(asked) == 0


def test_what_is_overtaken_while_it_is_answered_becomes_a_snapshot(
    asked: Answers, client: Client, history: History
) -> None:
    asked.ask([b"c", b"", pack_sequence(2)], now=0)
    client.room = 1
    asked.step(0)
    for _ in range(9):
        history.add(b"new")
    client.room = 9
    for _ in range(9):
        asked.step(0)
    assert [each[3] for each in client.got] == [
        b"batch 2",
        b"begin 14 0",
        b"piece",
        b"piece",
        b"whole 14 3",
        b"",
    ]


def test_who_stops_taking_or_leaves_is_forgotten(asked: Answers, client: Client) -> None:
    asked.ask([b"c", b"", pack_sequence(4)], now=0)
    asked.step(answers.STALLED_S)
    assert len(asked) == 1
    asked.step(answers.STALLED_S + 0.1)
    assert (len(asked), asked.counts["stalled"]) == (0, 1)
    asked.ask([b"c", b"", pack_sequence(4)], now=0)
    client.is_gone = True
    asked.step(0)
    assert len(asked) == 0


def test_another_request_takes_the_place_of_the_first(asked: Answers, client: Client) -> None:
    for sequence in (2, 4):
        asked.ask([b"c", b"", pack_sequence(sequence)], now=0)
    client.room = 9
    for _ in range(4):
        asked.step(0)
    assert [each[3] for each in client.got] == [b"batch 4", b""]


# --- begin and end -------------------------------------------------------------------------------


def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, MadeUpNode(), endpoint="tcp://127.0.0.1:*") as first,
        pytest.raises(NoResource, match=f"events cannot bind {first.endpoint}: "),
        publishing(tmp_path / "other", MadeUpNode(), endpoint=first.endpoint),
    ):
        pass


def test_a_publisher_that_never_began_closes(tmp_path: Path) -> None:
    with publishing(tmp_path, MadeUpNode(), begins=False):
        pass


def test_a_turn_that_fails_is_counted_and_all_is_told_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_FAILED_PAUSE_S", 0.01)
    node = MadeUpNode()
    known = Residents()
    with publishing(tmp_path, node) as published, following(tmp_path) as follower:
        follow_until(follower, known, lambda: True)
        node.note(1, DRAM)
        node.rows = [b"no rows"]
        wait_for(lambda: published.stats()["failures"] == 1)
        follow_until(follower, known, lambda: agrees(known, node))


def test_a_batch_that_a_stranger_published_is_left_out(tmp_path: Path) -> None:
    context = zmq.Context()
    sock = context.socket(zmq.PUB)
    sock.bind(f"ipc://{tmp_path}/events")
    try:
        with Follower(f"ipc://{tmp_path}/events") as follower:
            deadline = time.monotonic() + WAIT_S
            while follower.counts["malformed"] < 3:
                assert time.monotonic() < deadline
                for frames in ([b"x"], [b"", b"short", b""], [b"", bytes(8), b"\x93\1\2\3"]):
                    sock.send_multipart(frames)
                found: Batch | None = follower.next(0.02)
                assert found is None
    finally:
        context.destroy(linger=0)
