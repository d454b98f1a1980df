"""Eviction takes leaves: no suffix is left that nobody could reach.

Random prefix trees (token lists over a tiny alphabet, so that they share prefixes) go through a
pool that is far too small for them. Whatever was put, got, pinned or shrunk meanwhile, a block is
never in the pool without the block before it. Only lookups of single keys are used to find out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from tests.pools import opaque

MIB = 1 << 20
TOKEN_LISTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "put the tail", "get", "look", "shrink", "grow"]),
        TOKEN_LISTS,
        st.sampled_from([0.01, 1.0, 50.0]),
    ),
    min_size=5,
    max_size=60,
)


@contextmanager
def tiny(policy: str, bounded_by: str, clock: kvpool.ManualClock) -> Iterator[kvpool.Namespace]:
    """Room for 12 blocks, either by their number or by memory."""
    block_bytes = 64 if bounded_by == "number" else MIB // 6 - 4096
    with kvpool.open(
        "2MiB",
        dram_max="2MiB",
        max_blocks=12 if bounded_by == "number" else None,
        policy=policy,
        prefault="off",
        evict_ahead=0.1 if policy == "temperature" else 0.0,
        clock=clock,
    ) as pool:
        yield pool.namespace(opaque(block_bytes=block_bytes))


class Tree:
    """Every block that was ever put, with the one before it."""

    def __init__(self, space: kvpool.Namespace) -> None:
        self.space = space
        self.parents: dict[bytes, bytes | None] = {}

    def keys(self, tokens: list[int]) -> list[bytes]:
        chain = [key.tobytes() for key in self.space.keys(tokens)]
        for key, parent in zip(chain, [None, *chain], strict=False):
            self.parents[key] = parent
        return chain

    def is_there(self, key: bytes) -> bool:
        return self.space.lookup([key]).blocks == 1

    def check(self) -> None:
        assert self.space.pool._node.settle(10)  # nobody evicts while we look
        there = {key for key in self.parents if self.is_there(key)}
        for key in there:
            parent = self.parents[key]
            assert parent is None or parent in there


def take(tree: Tree, step: str, tokens: list[int]) -> None:
    space = tree.space
    size = space.block_bytes
    chain = tree.keys(tokens)
    if step == "put":
        space.put(chain, bytes(size * len(chain)))
    elif step == "put the tail":
        # An engine that has got the head goes on from there.
        head = space.lookup(chain).blocks
        if head:
            tail = chain[head:]
            space.put(tail, bytes(size * len(tail)), parent=chain[head - 1])
    elif step == "get":
        space.get_into(chain, bytearray(size * len(chain)))
    elif step == "look":
        with space.view(chain) as blocks:
            other = tree.keys([*tokens, 1, 1])
            space.put(other, bytes(size * len(other)))
            tree.check()
            assert space.lookup(chain).blocks >= len(blocks)
    elif step == "shrink":
        space.pool.resize(max_blocks=5)
    else:
        space.pool.resize(max_blocks=12)


@settings(max_examples=60)
@given(
    policy=st.sampled_from(["temperature", "lru"]),
    bounded_by=st.sampled_from(["number", "memory"]),
    steps=STEPS,
)
def test_no_block_is_left_without_the_one_before_it(
    policy: str, bounded_by: str, steps: list[tuple[str, list[int], float]]
) -> None:
    clock = kvpool.ManualClock()
    with tiny(policy, bounded_by, clock) as space:
        tree = Tree(space)
        for step, tokens, seconds in steps:
            take(tree, step, tokens)
            tree.check()
            clock.set(clock.now() + seconds)
        space.pool.check()


def test_the_check_sees_a_missing_parent() -> None:
    with tiny("temperature", "number", kvpool.ManualClock()) as space:
        tree = Tree(space)
        chain = tree.keys([1, 2, 3])
        space.put(chain, bytes(64 * 3))
        tree.check()
        space.remove(chain[1:2])  # somebody asked for it
        try:
            tree.check()
        except AssertionError:
            return
        raise AssertionError("a block without its parent was not seen")
