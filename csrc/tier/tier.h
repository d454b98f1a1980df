// The Tier contract: what every place that can hold blocks promises to the node above it.
//
//   DRAM   an Arena cut by a SlabPool (memory/): a slot is an address, copying is a load
//   SSD    a slab file cut by a SlabPool, and an index of what lies in it (tier/ssd.h)
//
// A tier knows bytes, places and damage. It knows nothing of keys that are wanted, of heat or of
// chains: which block goes where and when is decided in node/, by one temperature for all tiers.
//
// Every tier promises:
//  1. a slot holds one block at a time, and is whole pages at an offset of whole pages, so that a
//     block goes from tier to tier without a bounce (O_DIRECT, page granularity of the arena);
//  2. what it gives back is what it was given, checked by length and XXH3-128, or it says so:
//     damage is an answer, never other bytes and never an end of the process;
//  3. free + held + quarantined = total, at every moment;
//  4. it never holds more than its capacity, its own books included, and it has all of that at
//     open: no later write can find the tier's room taken by somebody else;
//  5. its slots are freed by the node, which knows who still reads them.
//
// Order of a block's life, and who says it:
//     reserved   the node has a slot, its bytes may be half there          (nobody reads it)
//     dram       committed: readable                                       (the index says so)
//     dram+ssd   written, synced, its entry committed: survives            (the tier says so)
//     ssd        its DRAM slot went to somebody else
//     gone       unreadable first, then its entry deleted, then its slot free: in that order,
//                since a slot written again under an entry that still stands would be wrong bytes
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvpool {

// Slots begin and end on these in every tier.
inline constexpr std::uint64_t kSlotAlignBytes = 4096;

}  // namespace kvpool
