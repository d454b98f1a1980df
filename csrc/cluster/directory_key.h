// What a block is called between nodes: one name for its namespace and its key together.
//
//   namespace id (16 bytes) + key (16 bytes) -> 16 bytes, whose top 16 bits are the slot
//
// Every member must make the same name of the same block, so this function never changes (golden
// values in the tests). It is no secret and no proof: who finds two blocks of one name gets a miss,
// since whoever holds a block is asked for it by namespace and key.
#pragma once
#include <bitset>
#include <cstddef>
#include <cstdint>

#include "block/key.h"

namespace kvpool {

using DirectoryKey = Hash128;

inline constexpr std::size_t kDirectorySlots = 1u << 16;
using SlotSet = std::bitset<kDirectorySlots>;

constexpr DirectoryKey make_directory_key(const Hash128& space, const Hash128& key) {
  constexpr std::uint64_t kOther = 0x9e37'79b9'7f4a'7c15u;
  const std::uint64_t place = mix64(space.low + mix64(space.high + kOther));
  const std::uint64_t low = mix64(key.low + mix64(key.high ^ place));
  return {low, mix64(key.high + mix64(key.low ^ mix64(place + kOther)))};
}

// Which member keeps the entry: the owner of this slot (cluster/owner_table.h).
constexpr std::uint32_t slot_of(const DirectoryKey& key) {
  return static_cast<std::uint32_t>(key.high >> 48);
}

}  // namespace kvpool
