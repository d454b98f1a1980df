// How large an SSD tier must be for so many blocks: for who thinks in blocks, as a replay does.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>

#include "bindings/bind.h"
#include "bindings/raise.h"
#include "memory/slab_pool.h"
#include "tier/index_store.h"
#include "tier/ssd_format.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

constexpr std::uint64_t kBlocksMax = std::uint64_t{1} << 30;
constexpr std::uint64_t kBlockBytesMax = std::uint64_t{1} << 32;
constexpr std::uint64_t kUnitsThatMatter = 4096;  // a larger pool cuts its slabs no other way
// What a full tier keeps free at most, so that a group finds room before its victims' is free.
constexpr std::uint64_t kSpareShareInverse = 8;
constexpr std::uint64_t kSpareBlocksMax = 256;
constexpr std::uint64_t kSpareBytesMax = 64 << 20;

// Slots of that size in so many units, all of them cut for it.
std::uint64_t slots_in(std::uint64_t units, std::uint64_t slot_bytes) {
  const auto few = static_cast<std::uint32_t>(std::min<std::uint64_t>(units, kUnitsThatMatter));
  SlabPool pool(few, few);
  const auto klass = pool.class_of(slot_bytes);
  return units / pool.slab_units(*klass) * pool.slab_slots(*klass);
}

std::uint64_t ssd_capacity_for(std::uint64_t blocks, std::uint64_t block_bytes) {
  if (blocks == 0 || blocks > kBlocksMax) raise_bad_argument("blocks must be 1..2^30");
  if (block_bytes == 0 || block_bytes > kBlockBytesMax)
    raise_bad_argument("block_bytes must be 1..2^32");
  const std::uint64_t slot_bytes = SlabPool::slot_bytes(block_bytes);
  const std::uint64_t spare =
      std::min({blocks / kSpareShareInverse, kSpareBlocksMax, kSpareBytesMax / slot_bytes}) + 2;
  const std::uint64_t entries = blocks + std::min(blocks, 2 * kSpareBlocksMax) + 2;
  std::uint64_t capacity = (blocks + spare) * slot_bytes;
  while (true) {
    const std::uint64_t index_bytes = IndexStore::bytes_for(capacity);
    const std::uint64_t books = index_bytes + kSsdDataOffset;
    const std::uint64_t units = capacity > books ? (capacity - books) / kUnitBytes : 0;
    if (slots_in(units, slot_bytes) >= blocks + spare &&
        IndexStore::entries_max(index_bytes) >= entries)
      return capacity;
    capacity += std::max(capacity / 64, kUnitBytes);
  }
}

}  // namespace

void bind_ssd_sizes(nb::module_& m) {
  m.def("ssd_capacity_for", &ssd_capacity_for, "blocks"_a, "block_bytes"_a,
        "Bytes of an SSD tier that holds that many blocks, its index included; a few more may\n"
        "fit. Raises BadArgument.");
}

}  // namespace kvpool
