#include "node/index_reader.h"

#include <algorithm>

#include "block/copy.h"

namespace kvpool {
namespace {

constexpr std::size_t kPrefetchGroup = 16;
// Between checks: bounds the work spent on a block that is gone, and the pages that a late read
// brings back into a punched range.
constexpr std::size_t kCopyChunkBytes = 256 << 10;
// A record that matches a tag but is unreadable may be in the middle of a move (some 20 ns).
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
  found = {number, static_cast<std::uint32_t>(both), generation,
           record.offset.load(std::memory_order_relaxed),
           record.tier.load(std::memory_order_relaxed)};
  std::atomic_thread_fence(std::memory_order_acquire);
  if (record.generation.load(std::memory_order_relaxed) != generation) return Read::changing;
  // An offset from shared memory is never trusted unchecked.
  const bool inside = found.offset <= arena_bytes_ && found.bytes <= arena_bytes_ - found.offset;
  return inside ? Read::yes : Read::no;
}

bool IndexReader::find(const Hash128& key, std::uint32_t incarnation, Found& found) const {
  const KeyHash hash = KeyHash::of(key, incarnation, salt_);
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

void IndexReader::prefetch(std::span<const Hash128> keys, std::uint32_t incarnation) const {
  const std::uint64_t root = view_.header().root.load(std::memory_order_acquire);
  if ((root & 63) > log2_max_) return;
  const Bucket* table = view_.table(root);
  const std::uint64_t mask = IndexView::buckets(root) - 1;
  std::uint64_t at[kPrefetchGroup];
  std::uint32_t tag[kPrefetchGroup];
  const std::size_t count = std::min(keys.size(), kPrefetchGroup);
  for (std::size_t i = 0; i < count; ++i) {
    const KeyHash hash = KeyHash::of(keys[i], incarnation, salt_);
    at[i] = hash.bucket & mask;
    tag[i] = hash.tag;
    __builtin_prefetch(&table[at[i]]);
  }
  for (std::size_t i = 0; i < count; ++i)
    for (const auto& word : table[at[i]].hint) {
      const std::uint64_t hint = word.load(std::memory_order_relaxed);
      if (!hint_matches(hint, tag[i]) || hint_record(hint) >= records_max_) continue;
      __builtin_prefetch(&view_.record(hint_record(hint)));
      break;
    }
}

std::size_t IndexReader::lookup(std::span<const Hash128> keys, std::uint32_t incarnation,
                                std::uint8_t* tiers) const {
  Found found;
  for (std::size_t start = 0; start < keys.size(); start += kPrefetchGroup) {
    const std::size_t count = std::min(kPrefetchGroup, keys.size() - start);
    if (count > 1) prefetch(keys.subspan(start, count), incarnation);
    for (std::size_t i = start; i < start + count; ++i) {
      if (!find(keys[i], incarnation, found)) {
        if (tiers != nullptr) std::fill(tiers + i, tiers + keys.size(), std::uint8_t{0});
        return i;
      }
      if (tiers != nullptr) tiers[i] = static_cast<std::uint8_t>(found.tier);
    }
  }
  return keys.size();
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
