"""Any order of calls through two channels of one daemon, against a dict of what was put.

One client shares memory with the daemon, the other has sockets only; what one did, the other sees
at once. As in test_prop_pool.py the model cannot know what was evicted: a block that it believes in
may be absent if the daemon says that it evicted. Right bytes or a miss.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

import kvpool
from kvpool import Miss, Put, Reason
from tests.pools import key, opaque, payload
from tests.served import Served, held, wait_for

PAGE = 4096
SIZES = (100, PAGE, 5 * PAGE, 700_000)
SALTS = ("a", "b")
KEYS = [key(number) for number in range(24)]
CHANNELS = ("shm", "tcp")

channels = st.sampled_from(CHANNELS)
spaces = st.sampled_from([(size, salt) for size in SIZES for salt in SALTS])
chains = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)

Where = tuple[int, str]


class Shared:
    """The daemon and both clients, for all examples; each example leaves the pool empty."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvpool-test-")
        options = {"dram": "4MiB", "dram_max": "8MiB", "pin_share": 0.5, "evict_ahead": 0.1}
        self.daemon = Served(Path(self.folder.name), **options).start()
        self.pools = {channel: self.daemon.connect(channel) for channel in CHANNELS}
        self.spaces = {
            (channel, (size, salt)): pool.namespace(opaque(salt=salt, block_bytes=size))
            for channel, pool in self.pools.items()
            for size in SIZES
            for salt in SALTS
        }

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        try:
            self.daemon.stop()
        finally:
            self.daemon.close()
            self.folder.cleanup()


_shared: list[Shared] = []


def setup_module() -> None:
    _shared.append(Shared())


def teardown_module() -> None:
    _shared.pop().close()


def content(space: Where, of: bytes) -> bytes:
    """Bytes that tell apart every key, size and namespace."""
    size, salt = space
    return payload(of + salt.encode(), size)


@dataclass
class Look:
    """A view that is open: what it showed first must stay what it shows."""

    space: Where
    keys: list[bytes]
    view: kvpool.View
    blocks: list[memoryview]
    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)


@dataclass
class Writing:
    space: Where
    key: bytes
    slot: kvpool.Slot


class ServedAgainstDict(RuleBasedStateMachine):
    looks: Bundle[Look] = Bundle("looks")
    writings: Bundle[Writing] = Bundle("writings")

    def __init__(self) -> None:
        super().__init__()
        self.shared = _shared[0]
        self.stored: dict[tuple[Where, bytes], bytes] = {}
        self.looking: list[Look] = []
        self.writing: list[Writing] = []
        self.evictions_before = self.stats()["evictions"]

    def stats(self) -> dict[str, Any]:
        return self.shared.pools["shm"].stats()

    def space(self, channel: str, space: Where) -> kvpool.Namespace:
        return self.shared.spaces[channel, space]

    def teardown(self) -> None:
        for look in self.looking:
            self.close_look(look)
        for writing in self.writing:
            writing.slot.abort()
        for (channel, _), space in self.shared.spaces.items():
            if channel == "tcp":
                space.drop()
        wait_for(lambda: self.stats()["bytes_taken"] == 0, what="every slot is free again")
        self.shared.pools["shm"].resize("4MiB")
        assert not any(held(self.shared.pools["tcp"]).values())
        server = self.stats()["server"]
        assert (server["closed_garbage"], server["closed_late"]) == (0, 0), server

    # --- writing ---

    @rule(channel=channels, space=spaces, chain=chains, shape=st.sampled_from(["buffer", "list"]))
    def put(self, channel: str, space: Where, chain: list[bytes], shape: str) -> None:
        contents = [content(space, each) for each in chain]
        data = b"".join(contents) if shape == "buffer" else contents
        result = self.space(channel, space).put(chain, data)
        for number, (each, outcome, reason) in enumerate(
            zip(chain, result, result.reasons, strict=True)
        ):
            if outcome is Put.NO_ROOM:
                assert reason is Reason.POOL_PINNED
                assert self.looking or number > 0, self.stats()  # a chain keeps its own blocks
                assert set(result.reasons[number + 1 :]) <= {Reason.CHAIN_BROKEN}
                break
            if outcome is Put.PRESENT:
                assert (space, each) in self.stored
            self.stored[space, each] = content(space, each)

    @rule(
        target=writings,
        channel=channels,
        space=spaces,
        each=st.sampled_from(KEYS),
        parent=st.none() | st.sampled_from(KEYS),
    )
    def reserve(self, channel: str, space: Where, each: bytes, parent: bytes | None) -> Any:
        slot = self.space(channel, space).reserve(each, parent=parent)
        if slot.buffer is None:
            assert slot.status is Put.PRESENT
            assert (space, each) in self.stored
            return multiple()
        self.believe(space, [each], 0)
        slot.buffer[:] = b"\xee" * len(slot.buffer)
        writing = Writing(space, each, slot)
        self.writing.append(writing)
        return writing

    @rule(writing=consumes(writings), commit=st.booleans())
    def finish(self, writing: Writing, commit: bool) -> None:
        """What was put under that key meanwhile stays."""
        self.writing.remove(writing)
        assert writing.slot.buffer is not None
        if not commit:
            writing.slot.abort()
            return
        expected = content(writing.space, writing.key)
        writing.slot.buffer[:] = expected
        writing.slot.commit()
        if writing.slot.status is Put.NO_ROOM:
            assert writing.slot.reason is Reason.POOL_PINNED
            assert self.looking
        else:
            if writing.slot.status is Put.PRESENT:
                assert (writing.space, writing.key) in self.stored
            self.stored[writing.space, writing.key] = expected

    # --- reading ---

    @rule(channel=channels, space=spaces, chain=chains)
    def get(self, channel: str, space: Where, chain: list[bytes]) -> None:
        size, _ = space
        out = np.full(size * len(chain), 0xEE, np.uint8)
        misses = bytearray(len(chain))
        count = self.space(channel, space).get_into(chain, out, misses=misses)
        for number, each in enumerate(chain[:count]):
            found = out[number * size : (number + 1) * size].tobytes()
            assert found == self.stored[space, each]
        missing = len(chain) - count
        assert list(misses) == [Miss.NONE] * count + (
            [Miss.ABSENT] + [Miss.BEHIND] * (missing - 1) if missing else []
        )
        self.believe(space, chain, count)

    @rule(channel=channels, space=spaces, chain=chains)
    def lookup(self, channel: str, space: Where, chain: list[bytes]) -> None:
        hit = self.space(channel, space).lookup(chain)
        assert list(hit.tiers) == [1] * hit.blocks + [0] * (len(chain) - hit.blocks)
        assert hit.miss is (Miss.ABSENT if hit.blocks < len(chain) else Miss.NONE)
        assert all((space, each) in self.stored for each in chain[: hit.blocks])
        self.believe(space, chain, hit.blocks)

    @rule(channel=channels, space=spaces, chain=chains)
    def wait(self, channel: str, space: Where, chain: list[bytes]) -> None:
        count = self.space(channel, space).wait(chain, 0)
        assert all((space, each) in self.stored for each in chain[:count])
        self.believe(space, chain, count)

    def believe(self, space: Where, chain: list[bytes], count: int) -> None:
        """A block of the model that is missing was evicted: the daemon must have said so."""
        if count < len(chain) and (space, chain[count]) in self.stored:
            assert self.stats()["evictions"] > self.evictions_before
            del self.stored[space, chain[count]]

    @rule(target=looks, channel=channels, space=spaces, chain=chains, keep_array=st.booleans())
    def look(self, channel: str, space: Where, chain: list[bytes], keep_array: bool) -> Any:
        view = self.space(channel, space).view(chain)
        blocks = view.__enter__()
        look = Look(space, chain[: len(blocks)], view, blocks)
        if not blocks:
            self.close_look(look)
        if not self.looking:  # else it may be the limit of pins
            self.believe(space, chain, len(look.keys))
        if not look.keys:
            return multiple()
        if keep_array:
            look.arrays = [np.frombuffer(blocks[-1], np.uint8)]
        self.looking.append(look)
        return look

    @rule(look=consumes(looks))
    def stop_looking(self, look: Look) -> None:
        self.looking.remove(look)
        self.close_look(look)

    def close_look(self, look: Look) -> None:
        look.view.__exit__(None, None, None)
        for array in look.arrays:
            assert array.tobytes() == content(look.space, look.keys[-1])
        look.arrays.clear()
        look.blocks.clear()

    # --- taking away ---

    @rule(channel=channels, space=spaces, chain=chains)
    def remove(self, channel: str, space: Where, chain: list[bytes]) -> None:
        count = self.space(channel, space).remove(chain)
        believed = {each for each in chain if (space, each) in self.stored}
        assert count <= len(believed)
        for each in believed:
            del self.stored[space, each]
        for other in CHANNELS:
            assert not any(self.space(other, space).lookup([each]) for each in set(chain))

    @rule(channel=channels, space=spaces)
    def drop(self, channel: str, space: Where) -> None:
        believed = [where for where in self.stored if where[0] == space]
        assert self.space(channel, space).drop() <= len(believed)
        for where in believed:
            del self.stored[where]

    @rule(limit=st.sampled_from(["2MiB", "4MiB", "8MiB"]))
    def resize(self, limit: str) -> None:
        committed = self.shared.pools["shm"].resize(limit, timeout=0.05)
        if not self.looking:
            assert committed <= 8 << 20

    # --- after each step ---

    @invariant()
    def books_add_up(self) -> None:
        stats = self.stats()
        assert stats["blocks_reserved"] == 0
        assert stats["blocks"] - stats["blocks_dropped_not_swept"] <= len(self.stored)
        slots = stats["blocks"] + stats["blocks_removed_while_pinned"]
        slots += stats["slots_held_for_views"]
        assert slots * PAGE <= stats["bytes_taken"] <= stats["bytes_in_slabs"]
        for look in self.looking:
            for block, each in zip(look.blocks, look.keys, strict=True):
                assert block == content(look.space, each)


ServedAgainstDict.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestServedAgainstDict = ServedAgainstDict.TestCase
