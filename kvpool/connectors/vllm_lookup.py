"""How much of a prompt the pool has: for all ranks and KV cache groups at once, and leased.

A prefix counts where every rank has it in every group. Layers that attend to all tokens need all
its blocks; layers with a window need those that a token after the prefix can see, no others.

Promises:  1. what is offered is present in every namespace and pinned until released, where the
              pool shares memory; elsewhere a load may fail, and is then computed;
           2. nothing is pinned once release() ran, or when nothing is offered.
Thread rule: an Offer has one owner; find() may run on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.namespace import Namespace, View
from kvpool.types import Hit, Miss, Tier

_PIECE = 256  # blocks that are looked up at a time, until one is missing
_LEASE_TRIES = 3  # a prefix that shrinks as often while it is leased is being evicted


@dataclass(frozen=True)
class GroupShape:
    """What a lookup needs to know of a KV cache group."""

    block_tokens: int
    hashes_per_block: int
    window: int | None  # tokens that a token sees, itself included; None: all

    def first_needed(self, tokens: int) -> int:
        """The first block that the token after `tokens` tokens can see."""
        if self.window is None:
            return 0
        return max(0, tokens - self.window + 1) // self.block_tokens

    def hashes(self, all_hashes: Sequence[bytes], tokens: int) -> list[bytes]:
        """Hashes of the group's blocks: the last of those that a block spans covers them all."""
        step = self.hashes_per_block
        return list(all_hashes[step - 1 : tokens // self.block_tokens * step : step])


Ranks = list[list[Namespace]]  # by rank, by group


@dataclass
class Offer:
    """Tokens that can be loaded, and the leases that keep them."""

    tokens: int = 0
    tiers: bytes = b""  # of the blocks of the first group, by index
    miss: Miss = Miss.NONE  # why it is not longer; NONE where it reaches the limit
    pins: int = 0  # blocks that the leases keep, in all namespaces
    _leases: list[View] = field(default_factory=list, repr=False)

    def release(self) -> None:
        """Unpin. Idempotent."""
        leases, self._leases, self.pins = self._leases, [], 0
        for lease in leases:
            lease.__exit__()

    def tokens_by_tier(self, first: int, block_tokens: int) -> dict[Tier, int]:
        """How many tokens after the first `first` ones come from where."""
        counts: dict[Tier, int] = {}
        for tier in self.tiers[first // block_tokens : self.tokens // block_tokens]:
            counts[Tier(tier)] = counts.get(Tier(tier), 0) + block_tokens
        return counts


@dataclass
class _Seen:
    """What lookups of several groups said."""

    tiers: bytearray  # the farthest that any group has a block in
    miss: Miss = Miss.NONE

    def note(self, first: int, hit: Hit) -> None:
        if hit.miss is not Miss.NONE:
            self.miss = hit.miss
        for at, tier in enumerate(hit.tiers[: len(self.tiers) - first], first):
            self.tiers[at] = max(self.tiers[at], tier)


@dataclass(frozen=True)
class Lookup:
    """Shapes of the groups; `unit`: tokens in which hits are counted."""

    shapes: tuple[GroupShape, ...]
    unit: int

    def find(self, ranks: Ranks, hashes: Sequence[bytes], limit: int) -> Offer:
        """The longest prefix of at most `limit` tokens. Pins nothing.

        Cost: some 200 us per 256 blocks that are found, per rank and group, most of it to make keys
        of hashes; a miss of the first block costs one lookup. Where the pool is elsewhere: a round
        trip per rank and group, and one per 256 blocks.
        """
        at_most, miss = self._at_most(ranks, hashes, limit)
        tokens = at_most // self.unit * self.unit
        keys = self._keys(ranks, hashes, tokens)
        seen = _Seen(bytearray(tokens // self.shapes[0].block_tokens), miss)
        while tokens > 0:
            found = self._whole(ranks, keys, tokens, seen)
            found = self._windows(ranks, keys, found, seen)
            if found == tokens:
                break
            tokens = found // self.unit * self.unit
        return Offer(tokens, bytes(seen.tiers), seen.miss)

    def _at_most(self, ranks: Ranks, hashes: Sequence[bytes], limit: int) -> tuple[int, Miss]:
        """Tokens that the first rank has in its first group without a window, piece by piece.

        So that a prompt of which nothing is there costs little, however long it is.
        """
        for shape, space in zip(self.shapes, ranks[0], strict=True):
            if shape.window is not None:
                continue
            wanted = shape.hashes(hashes, limit)
            first, size = 0, 1  # the first block alone: it is the one that most prompts miss
            while first < len(wanted):
                piece = wanted[first : first + size]
                hit = space.lookup(space.fold(piece))
                first, size = first + hit.blocks, _PIECE
                if hit.blocks < len(piece):
                    return first * shape.block_tokens, hit.miss
            break
        return limit, Miss.NONE

    def lease(self, ranks: Ranks, hashes: Sequence[bytes], offer: Offer) -> Offer:
        """The same prefix pinned, or what of it can be. May wait for the SSD, which reads it."""
        for _ in range(_LEASE_TRIES):
            if offer.tokens == 0 or self._pin(ranks, hashes, offer):
                return offer
            pins = offer.pins
            offer.release()
            found = self.find(ranks, hashes, offer.tokens)
            if found.tokens == offer.tokens:  # all of it is there: a client may not pin so much
                share = pins // (len(ranks) * len(self.shapes))
                found = self.find(ranks, hashes, share * min(s.block_tokens for s in self.shapes))
                found.miss = Miss.PIN_LIMIT
            offer = found
        offer.release()
        return Offer(miss=offer.miss)

    def _pin(self, ranks: Ranks, hashes: Sequence[bytes], offer: Offer) -> bool:
        keys = self._keys(ranks, hashes, offer.tokens)
        for rank, spaces in enumerate(ranks):
            for at, (shape, space) in enumerate(zip(self.shapes, spaces, strict=True)):
                needed = keys[rank][at][shape.first_needed(offer.tokens) :]
                lease = space.view(needed)
                pinned = len(lease.__enter__())
                offer._leases.append(lease)
                offer.pins += pinned
                if pinned < len(needed):
                    return False
        return True

    def _keys(self, ranks: Ranks, hashes: Sequence[bytes], tokens: int) -> list[list[Any]]:
        wanted = [shape.hashes(hashes, tokens) for shape in self.shapes]
        return [
            [space.fold(part) for space, part in zip(spaces, wanted, strict=True)]
            for spaces in ranks
        ]

    def _whole(self, ranks: Ranks, keys: list[list[Any]], tokens: int, seen: _Seen) -> int:
        """Tokens that all groups without a window have from the start on."""
        for rank, spaces in enumerate(ranks):
            for at, (shape, space) in enumerate(zip(self.shapes, spaces, strict=True)):
                if shape.window is not None or tokens == 0:
                    continue
                hit = space.lookup(keys[rank][at][: tokens // shape.block_tokens])
                tokens = min(tokens, hit.blocks * shape.block_tokens)
                seen.note(0, hit)
        return tokens

    def _windows(self, ranks: Ranks, keys: list[list[Any]], tokens: int, seen: _Seen) -> int:
        """The longest of at most `tokens` whose last window every group with one has."""
        for rank, spaces in enumerate(ranks):
            for at, (shape, space) in enumerate(zip(self.shapes, spaces, strict=True)):
                if shape.window is None:
                    continue
                while tokens > 0:
                    first, last = shape.first_needed(tokens), tokens // shape.block_tokens
                    hit = space.lookup(keys[rank][at][first:last])
                    seen.note(first, hit)
                    if hit.blocks == last - first:
                        break
                    # The block after the last one found is missing: no window may reach it.
                    tokens = min((first + hit.blocks) * shape.block_tokens, tokens - 1)
                    tokens = tokens // self.unit * self.unit
        return tokens
