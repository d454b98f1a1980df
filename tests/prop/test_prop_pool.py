"""Any order of calls against a model that a child could check.

The model is a dict of what was put and a list of who looks at what. It knows nothing of slots,
slabs, records or heat. What it cannot know is which blocks were evicted, so a block it believes
in may be absent, but only if the pool says that it evicted: right bytes or a miss. After every
step the pool's own books are checked, and its counts are compared with the model's.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import kvpool
from kvpool import Put, Reason
from tests.pools import key, opaque, payload

MIB = 1 << 20
PAGE = 4096
# Block sizes that share slabs badly: less than a page, a few pages, and a good part of a slab.
SIZES = (100, PAGE, 5 * PAGE, 700_000)
SALTS = ("a", "b")
KEYS = [key(number) for number in range(24)]
LIMITS = ("2MiB", "4MiB", "8MiB")

spaces = st.sampled_from([(size, salt) for size in SIZES for salt in SALTS])
chains = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)


def content(space: tuple[int, str], of: bytes) -> bytes:
    """Bytes that tell apart every key, size and namespace."""
    size, salt = space
    return payload(of + salt.encode(), size)


@dataclass
class Look:
    """A view that is open: what it showed first must stay what it shows."""

    space: tuple[int, str]
    keys: list[bytes]
    view: kvpool.View
    blocks: list[memoryview]
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)


@dataclass
class Writing:
    space: tuple[int, str]
    key: bytes
    slot: kvpool.Slot


class PoolAgainstDict(RuleBasedStateMachine):
    looks: Bundle[Look] = Bundle("looks")
    writings: Bundle[Writing] = Bundle("writings")

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[tuple[tuple[int, str], bytes], bytes] = {}
        self.looking: list[Look] = []
        self.writing: list[Writing] = []
        self.dropped_writings: list[Writing] = []

    @initialize(
        policy=st.sampled_from(["temperature", "lru", "lfu", "fifo", "s3fifo"]),
        limit=st.sampled_from(LIMITS),
        max_blocks=st.sampled_from([0, 0, 6]),
        evict_ahead=st.sampled_from([0.0, 0.25]),
        huge_pages=st.booleans(),
    )
    def open_pool(
        self, policy: str, limit: str, max_blocks: int, evict_ahead: float, huge_pages: bool
    ) -> None:
        self.clock = kvpool.ManualClock()
        self.pool = kvpool.open(
            limit,
            dram_max="8MiB",
            policy=policy,
            max_blocks=max_blocks,
            evict_ahead=evict_ahead,
            huge_pages=huge_pages,
            prefault="off",
            clock=self.clock,
        )
        self.spaces = {
            (size, salt): self.pool.namespace(opaque(salt=salt, block_bytes=size))
            for size in SIZES
            for salt in SALTS
        }

    def teardown(self) -> None:
        for look in self.looking:
            self.close_look(look)
        for writing in [*self.writing, *self.dropped_writings]:
            writing.slot.abort()
        if hasattr(self, "pool"):
            self.pool.check()
            stats = self.pool.stats()
            assert (stats["blocks_pinned"], stats["blocks_reserved"]) == (0, 0)
            self.pool.close()

    # --- writing ---

    @rule(space=spaces, chain=chains, shape=st.sampled_from(["buffer", "list", "stride", "region"]))
    def put(self, space: tuple[int, str], chain: list[bytes], shape: str) -> None:
        size, _ = space
        contents = [content(space, each) for each in chain]
        call = self.spaces[space].put
        if shape == "buffer":
            result = call(chain, b"".join(contents), timeout=0)
        elif shape == "list":
            result = call(chain, [bytearray(each) for each in contents], timeout=0)
        elif shape == "stride":
            wide = b"".join(each.ljust(size + 7, b"\xee") for each in contents)
            result = call(chain, wide, size + 7, timeout=0)
        else:
            region = self.pool.register(b"".join(contents))
            offsets = [size * number for number in range(len(chain))]
            result = call(chain, region, offsets=offsets, timeout=0)
        self.learn(space, chain, result)

    def learn(self, space: tuple[int, str], chain: list[bytes], result: kvpool.PutResult) -> None:
        writing = {(each.space, each.key) for each in self.writing}
        broken = False
        for each, outcome, reason in zip(chain, result, result.reasons, strict=True):
            if broken:
                assert reason is Reason.CHAIN_BROKEN
            elif outcome is Put.NO_ROOM:
                # Somebody else writes that key, there is no room beside what is pinned, or room
                # takes more than one slab of others: more time than these calls have.
                assert reason in (Reason.POOL_PINNED, Reason.TIMED_OUT)
                if (space, each) in writing:
                    assert reason is Reason.TIMED_OUT
                broken = True
            elif outcome is Put.STORED:
                self.stored[space, each] = content(space, each)
            else:
                assert (space, each) in self.stored  # present: somebody must have put it

    @rule(
        target=writings,
        space=spaces,
        each=st.sampled_from(KEYS),
        parent=st.none() | st.sampled_from(KEYS),
    )
    def reserve(self, space: tuple[int, str], each: bytes, parent: bytes | None) -> Any:
        taken = any((one.space, one.key) == (space, each) for one in self.writing)
        slot = self.spaces[space].reserve(each, parent=parent, timeout=0)
        if slot.buffer is None:
            if slot.status is Put.PRESENT:
                assert (space, each) in self.stored
            elif taken:
                assert slot.reason is Reason.TIMED_OUT
            else:
                assert slot.reason in (Reason.POOL_PINNED, Reason.TIMED_OUT)
            return multiple()
        assert not taken
        # What was there before must not shine through if the writer gives up.
        slot.buffer[:] = b"\xee" * len(slot.buffer)
        writing = Writing(space, each, slot)
        self.writing.append(writing)
        return writing

    @rule(writing=consumes(writings), commit=st.booleans())
    def finish(self, writing: Writing, commit: bool) -> None:
        was_dropped = writing in self.dropped_writings
        (self.dropped_writings if was_dropped else self.writing).remove(writing)
        assert writing.slot.buffer is not None
        if not commit:
            writing.slot.abort()
            return
        expected = content(writing.space, writing.key)
        writing.slot.buffer[:] = expected
        writing.slot.commit()
        if was_dropped:
            assert writing.slot.reason is Reason.DROPPED
        else:
            assert writing.slot.status is Put.STORED
            self.stored[writing.space, writing.key] = expected

    # --- reading ---

    @rule(space=spaces, chain=chains)
    def get(self, space: tuple[int, str], chain: list[bytes]) -> None:
        size, _ = space
        out = np.full(size * len(chain), 0xEE, np.uint8)
        count = self.spaces[space].get_into(chain, out)
        for number, each in enumerate(chain[:count]):
            found = out[number * size : (number + 1) * size].tobytes()
            assert found == self.stored[space, each]
        self.believe(space, chain, count)

    @rule(space=spaces, chain=chains)
    def lookup(self, space: tuple[int, str], chain: list[bytes]) -> None:
        hit = self.spaces[space].lookup(chain)
        assert list(hit.tiers) == [1] * hit.blocks + [0] * (len(chain) - hit.blocks)
        assert all((space, each) in self.stored for each in chain[: hit.blocks])
        self.believe(space, chain, hit.blocks)

    def believe(self, space: tuple[int, str], chain: list[bytes], count: int) -> None:
        """A block of the model that is missing was evicted: the pool must have said so."""
        if count < len(chain) and (space, chain[count]) in self.stored:
            assert self.pool.stats()["evictions"] > 0
            del self.stored[space, chain[count]]

    @rule(target=looks, space=spaces, chain=chains, keep_array=st.booleans())
    def look(self, space: tuple[int, str], chain: list[bytes], keep_array: bool) -> Any:
        view = self.spaces[space].view(chain)
        blocks = view.__enter__()
        self.believe(space, chain, len(blocks))
        if not blocks:
            view.__exit__(None, None, None)
            return multiple()
        look = Look(space, chain[: len(blocks)], view, blocks)
        if keep_array:
            look.arrays = [np.frombuffer(blocks[-1], np.uint8)]
        self.looking.append(look)
        self.see(look)
        return look

    @rule(look=consumes(looks))
    def stop_looking(self, look: Look) -> None:
        self.see(look)
        self.close_look(look)
        self.looking.remove(look)

    def see(self, look: Look) -> None:
        for block, each in zip(look.blocks, look.keys, strict=True):
            assert block == content(look.space, each)

    def close_look(self, look: Look) -> None:
        look.view.__exit__(None, None, None)
        for array in look.arrays:
            assert array.tobytes() == content(look.space, look.keys[-1])
        look.arrays.clear()
        look.blocks.clear()

    # --- taking away ---

    @rule(space=spaces, chain=chains)
    def remove(self, space: tuple[int, str], chain: list[bytes]) -> None:
        count = self.spaces[space].remove(chain)
        believed = {each for each in chain if (space, each) in self.stored}
        assert count <= len(believed)
        for each in believed:
            del self.stored[space, each]
        assert not any(self.spaces[space].lookup([each]) for each in chain)

    @rule(space=spaces)
    def drop(self, space: tuple[int, str]) -> None:
        believed = [where for where in self.stored if where[0] == space]
        assert self.spaces[space].drop() <= len(believed)
        for where in believed:
            del self.stored[where]
        gone = [each for each in self.writing if each.space == space]
        self.dropped_writings += gone
        self.writing = [each for each in self.writing if each.space != space]

    @rule(limit=st.sampled_from(LIMITS), max_blocks=st.sampled_from([None, 0, 3, 30]))
    def resize(self, limit: str, max_blocks: int | None) -> None:
        committed = self.pool.resize(limit, max_blocks=max_blocks, timeout=5)
        nothing_held = not self.looking and not self.writing and not self.dropped_writings
        if nothing_held:
            assert committed <= kvpool.parse_size(limit)

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        stats = self.pool.stats()
        assert stats["bytes_committed"] == stats["bytes_in_slabs"]

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.set(self.clock.now() + seconds)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule()
    def settle(self) -> None:
        assert self.pool._node.settle(10)

    # --- after each step ---

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        stats = self.pool.stats()
        assert stats["blocks_reserved"] == len(self.writing) + len(self.dropped_writings)
        assert stats["blocks_pinned"] >= sum(len(look.blocks) for look in self.looking)
        assert stats["blocks"] - stats["blocks_dropped_not_swept"] <= len(self.stored)
        # Every slot in use is a block, a writing, or one that is gone but still looked at.
        slots = stats["blocks"] + stats["blocks_reserved"] + stats["blocks_removed_while_pinned"]
        assert (stats["bytes_taken"] == 0) == (slots == 0)
        assert slots * PAGE <= stats["bytes_taken"] <= stats["bytes_in_slabs"]
        for look in self.looking:
            self.see(look)


PoolAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestPoolAgainstDict = PoolAgainstDict.TestCase
