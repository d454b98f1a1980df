"""From changes to events, what is kept of them, and the bytes of a batch."""

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.events.encoding import (
    AllBlocksCleared,
    BadBatch,
    Batch,
    BlockRemoved,
    BlockStored,
    Snapshot,
    Source,
    decode,
    encode,
    pack_sequence,
    unpack_sequence,
)
from kvpool.events.history import History
from kvpool.events.runs import KEYS_PER_BATCH, Space, by_space, events_of
from tests.eventful import DRAM, NONE, SPACE, SSD, key, row


def told(rows: list[bytes]) -> list[list[object]]:
    """The batches of rows of one namespace."""
    (found,) = by_space(b"".join(rows)).values()
    return list(events_of(found, 16))


def test_a_chain_is_one_event() -> None:
    rows = [row(at, 0, DRAM, key(at - 1) if at > 1 else NONE) for at in range(1, 6)]
    assert told(rows) == [
        [
            BlockStored(
                block_hashes=[key(at) for at in range(1, 6)],
                parent_block_hash=None,
                block_size=16,
                medium="CPU",
            )
        ]
    ]


def test_chains_that_two_clients_put_at_a_time_are_two_events() -> None:
    rows = []
    for at in range(5):
        rows.append(row(10 + at, 0, DRAM, key(9 + at)))
        rows.append(row(50 + at, 0, DRAM, key(49 + at)))
    ((first, second),) = told(rows)
    assert (first.parent_block_hash, second.parent_block_hash) == (key(9), key(49))
    assert [len(first.block_hashes), len(second.block_hashes)] == [5, 5]


def test_blocks_that_follow_nothing_stand_alone() -> None:
    ((first, second),) = told([row(1, 0, DRAM), row(2, 0, DRAM)])
    assert [first.block_hashes, second.block_hashes] == [[key(1)], [key(2)]]


def test_every_move_says_where_a_block_is_and_where_no_more() -> None:
    rows = [
        row(1, 0, DRAM),
        row(1, DRAM, DRAM | SSD),
        row(1, DRAM | SSD, SSD),
        row(1, SSD, DRAM | SSD),
        row(1, DRAM | SSD, 0),
        row(2, 0, 0),
    ]
    ((*events,),) = told(rows)
    assert [(type(each).__name__, each.medium) for each in events] == [
        ("BlockStored", "CPU"),
        ("BlockStored", "STORAGE"),
        ("BlockRemoved", "CPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "CPU"),  # key 2 with it
        ("BlockRemoved", "STORAGE"),
    ]
    assert events[-1].block_hashes == [key(1), key(2)]


def test_a_full_pool_that_takes_and_evicts_makes_two_lists() -> None:
    rows = [
        each
        for at in range(100)
        for each in (row(at, DRAM, 0), row(1000 + at, 0, DRAM, key(999 + at)))
    ]
    ((removed, stored),) = told(rows)
    assert (len(removed.block_hashes), len(stored.block_hashes)) == (100, 100)


def test_namespaces_are_told_apart() -> None:
    other = b"other".ljust(16, b"\0")
    found = by_space(row(1, 0, 1) + row(2, 0, 1, space=other, number=5) + row(3, 0, 1))
    assert {space: len(rows) for space, rows in found.items()} == {
        Space(SPACE, 0): 2,
        Space(other, 5): 1,
    }


CHANGES = st.lists(st.tuples(st.integers(11, 16), st.integers(0, 3)), max_size=60)


@given(CHANGES)
def test_events_add_up_to_the_changes(changes: list[tuple[int, int]]) -> None:
    here: dict[int, int] = {}
    rows = []
    for at, after in changes:
        before = here.get(at, 0)
        rows.append(row(at, before, after, key(at - 1)))
        here[at] = after
    media: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    for batch in told(rows) if rows else []:
        for event in batch:
            if isinstance(event, BlockStored):
                media[event.medium] |= set(event.block_hashes)
                last = event.parent_block_hash
                for each in event.block_hashes:  # one chain, and no block without its own
                    assert int.from_bytes(each, "big") - 1 == int.from_bytes(last, "big")
                    last = each
            else:
                media[event.medium] -= set(event.block_hashes)
    assert media["CPU"] == {key(at) for at, tiers in here.items() if tiers & DRAM}
    assert media["STORAGE"] == {key(at) for at, tiers in here.items() if tiers & SSD}


def test_a_batch_is_bounded() -> None:
    rows = [row(at, 0, DRAM | SSD) for at in range(1, 5000)]
    sizes = [sum(len(each.block_hashes) for each in batch) for batch in told(rows)]
    assert sum(sizes) == 2 * 4999
    assert max(sizes) <= KEYS_PER_BATCH


# --- history -------------------------------------------------------------------------------------


def test_history_keeps_the_last_batches_and_bytes() -> None:
    history = History(3, bytes_max=100)
    assert history.has(0)
    assert not history.has(-1)
    for at in range(5):
        assert history.add(bytes([at])) == at
    assert [history.get(at) for at in range(6)] == [None, None, b"\2", b"\3", b"\4", None]
    assert [history.has(at) for at in (1, 2, 5, 6)] == [False, True, True, False]
    history.add(bytes(99))
    assert (len(history), history.bytes) == (2, 100)
    history.add(bytes(200))  # alone it is too much, too
    assert (len(history), history.bytes, history.first, history.next) == (0, 0, 7, 7)
    assert history.has(7)


# --- the bytes -----------------------------------------------------------------------------------

SOURCE = Source(node=b"n" * 16, incarnation=3, namespace=SPACE, name="chat")


def test_a_batch_is_an_array_whose_events_are_maps() -> None:
    stored = BlockStored(block_hashes=[key(1)], parent_block_hash=None, block_size=16, medium="CPU")
    removed = BlockRemoved(block_hashes=[key(2)], medium="STORAGE")
    payload = encode(Batch(1.5, [AllBlocksCleared(), stored, removed], None, SOURCE))
    assert msgpack.unpackb(payload) == [
        1.5,
        [
            {"type": "AllBlocksCleared"},
            {
                "type": "BlockStored",
                "block_hashes": [key(1)],
                "parent_block_hash": None,
                "block_size": 16,
                "medium": "CPU",
                "token_ids": [],
                "lora_id": None,
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [key(2)], "medium": "STORAGE"},
        ],
        None,
        {"node": b"n" * 16, "incarnation": 3, "namespace": SPACE, "name": "chat"},
    ]
    assert decode(payload).events == [AllBlocksCleared(), stored, removed]


class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As vLLM 0.32 declares its own."""

    ts: float
    events: list[AllBlocksCleared | BlockRemoved]
    data_parallel_rank: int | None = None


def test_a_reader_of_three_elements_leaves_ours_out() -> None:
    part = Snapshot(state="begin", next=4)
    source = msgspec.structs.replace(SOURCE, snapshot=part)
    payload = encode(Batch(1.0, [AllBlocksCleared()], None, source))
    found = msgspec.msgpack.decode(payload, type=TheirBatch)
    assert (found.events, found.data_parallel_rank) == ([AllBlocksCleared()], None)


@given(st.binary(max_size=200))
def test_garbage_is_no_batch(payload: bytes) -> None:
    with pytest.raises(BadBatch):
        decode(b"\x94" + payload)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 100_000, msgpack.packb([1.0, [{}]])])
def test_odd_bytes_are_no_batch(payload: bytes) -> None:
    with pytest.raises(BadBatch):
        decode(payload)


def test_a_sequence_has_eight_bytes() -> None:
    assert unpack_sequence(pack_sequence(-1)) == -1
    assert pack_sequence(258) == b"\0\0\0\0\0\0\1\2"
    for frame in (b"", b"1234567", b"123456789"):
        with pytest.raises(BadBatch):
            unpack_sequence(frame)
