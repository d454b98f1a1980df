#include "node/index_reader.h"

#include <algorithm>

#include "block/copy.h"

namespace kvpool {
namespace {

// Between checks: bounds the work spent on a block that is gone, and the pages that a late read
// brings back into a punched range.
constexpr std::size_t kCopyChunkBytes = 256 << 10;
// A record of that key whose generation changed while it was read was moved (look again) or is
// leaving (its hint goes in some 20 ns).
constexpr int kChangingRetries = 64;

}  // namespace

IndexReader::Read IndexReader::read_record(std::uint32_t number, const Hash128& key,
                                           std::uint32_t incarnation, Found& found) const {
  const Record& record = view_.record(number);
  const std::uint64_t generation = record.generation.load(std::memory_order_acquire);
  const std::uint64_t low = record.key_low.load(std::memory_order_relaxed);
  const std::uint64_t high = record.key_high.load(std::memory_order_relaxed);
  const std::uint64_t both = record.namespace_and_bytes.load(std::memory_order_relaxed);
  if (low != key.low || high != key.high || static_cast<std::uint32_t>(both >> 32) != incarnation)
    return Read::no;
  if (generation == 0) return Read::changing;
  // The tier before the offset: see IndexWriter::promote.
  const std::uint64_t tier = record.tier.load(std::memory_order_acquire);
  found = {number, static_cast<std::uint32_t>(both), generation,
           record.offset.load(std::memory_order_relaxed), tier};
  std::atomic_thread_fence(std::memory_order_acquire);
  if (record.generation.load(std::memory_order_relaxed) != generation) return Read::changing;
  // An offset from shared memory is never trusted unchecked.
  const bool inside = found.offset <= arena_bytes_ && found.bytes <= arena_bytes_ - found.offset;
  return inside ? Read::yes : Read::no;
}

bool IndexReader::find(const Hash128& key, std::uint32_t incarnation, Found& found) const {
  return find_at(key, incarnation, KeyHash::of(key, incarnation, salt_), found);
}

bool IndexReader::find_at(const Hash128& key, std::uint32_t incarnation, const KeyHash& hash,
                          Found& found) const {
  int changing_left = kChangingRetries;
  for (;;) {
    const std::uint64_t root = view_.header().root.load(std::memory_order_acquire);
    if ((root & 63) > log2_max_) return false;
    const Bucket* table = view_.table(root);
    const std::uint64_t mask = IndexView::buckets(root) - 1;
    bool changing = false;
    for (std::uint32_t probe = 0; probe < kProbeMax; ++probe) {
      const Bucket& bucket = table[(hash.bucket + probe) & mask];
      const std::uint64_t passed = bucket.passed.load(std::memory_order_acquire);
      for (const auto& word : bucket.hint) {
        const std::uint64_t hint = word.load(std::memory_order_acquire);
        if (!hint_matches(hint, hash.tag) || hint_record(hint) >= records_max_) continue;
        const Read read = read_record(hint_record(hint), key, incarnation, found);
        if (read == Read::yes) return true;
        changing |= read == Read::changing;
      }
      if (passed == 0) break;
    }
    if (changing && changing_left-- > 0) continue;
    // A table that was outgrown meanwhile may already read as zeros: look again in the new one.
    if (view_.header().root.load(std::memory_order_acquire) == root) return false;
  }
}

// A cold key costs two misses, one after the other: its bucket, then its record. A group starts all
// its buckets at once, and the records of one group are fetched while the buckets of the next are
// on their way.
struct IndexReader::Group {
  const Bucket* table = nullptr;
  std::uint64_t mask = 0;
  std::size_t count = 0;
  KeyHash hash[kGroup];
};

void IndexReader::start(Group& group, std::span<const Hash128> keys,
                        std::uint32_t incarnation) const {
  const std::uint64_t root = view_.header().root.load(std::memory_order_acquire);
  group.count = std::min(keys.size(), kGroup);
  group.table = (root & 63) > log2_max_ ? nullptr : view_.table(root);
  group.mask = IndexView::buckets(root) - 1;
  for (std::size_t i = 0; i < group.count; ++i) {
    group.hash[i] = KeyHash::of(keys[i], incarnation, salt_);
    if (group.table != nullptr) __builtin_prefetch(&group.table[group.hash[i].bucket & group.mask]);
  }
}

void IndexReader::approach(const Group& group) const {
  if (group.table == nullptr) return;
  for (std::size_t i = 0; i < group.count; ++i)
    for (const auto& word : group.table[group.hash[i].bucket & group.mask].hint) {
      const std::uint64_t hint = word.load(std::memory_order_relaxed);
      if (!hint_matches(hint, group.hash[i].tag) || hint_record(hint) >= records_max_) continue;
      __builtin_prefetch(&view_.record(hint_record(hint)));
      break;
    }
}

void IndexReader::prefetch(std::span<const Hash128> keys, std::uint32_t incarnation) const {
  Group group;
  start(group, keys, incarnation);
  approach(group);
}

Looked IndexReader::look(std::span<const Hash128> keys, std::uint32_t incarnation,
                         std::uint8_t* tiers) const {
  Found found;
  std::size_t on_ssd = 0;
  Group groups[3];  // being looked at, records on their way, buckets on their way
  const auto begin = [&](std::size_t number) {
    const std::size_t first = std::min(keys.size(), number * kGroup);
    start(groups[number % 3], keys.subspan(first), incarnation);
  };
  begin(0);
  begin(1);
  approach(groups[0]);
  for (std::size_t number = 0; number * kGroup < keys.size(); ++number) {
    begin(number + 2);
    approach(groups[(number + 1) % 3]);
    const Group& group = groups[number % 3];
    for (std::size_t i = 0; i < group.count; ++i) {
      const std::size_t at = number * kGroup + i;
      if (!find_at(keys[at], incarnation, group.hash[i], found)) {
        if (tiers != nullptr) std::fill(tiers + at, tiers + keys.size(), std::uint8_t{0});
        return {at, on_ssd};
      }
      on_ssd += (found.tier & kTierDram) == 0;
      if (tiers != nullptr)
        tiers[at] = static_cast<std::uint8_t>((found.tier & kTierDram) != 0 ? kTierDram : kTierSsd);
    }
  }
  return {keys.size(), on_ssd};
}

bool IndexReader::copy(const Found& found, std::byte* destination) const {
  const std::byte* source = payload(found);
  for (std::size_t at = 0; at < found.bytes;) {
    const std::size_t bytes = std::min<std::size_t>(kCopyChunkBytes, found.bytes - at);
    racy_copy(destination + at, source + at, bytes);
    at += bytes;
    if (!still_there(found)) return false;
  }
  return true;
}

}  // namespace kvpool
