#include "policy/ghost_table.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvpool {

namespace {

// Buckets use the low bits, and a caller's fingerprints may have poor ones.
std::uint64_t mixed(Fingerprint fp) {
  fp ^= fp >> 32;
  fp *= 0xd6e8feb86659fd93u;
  return fp ^ (fp >> 32);
}

}  // namespace

GhostTable::GhostTable(std::uint64_t ghosts_max) { set_max(ghosts_max); }

void GhostTable::set_max(std::uint64_t ghosts_max) {
  ghosts_max_ = std::min(ghosts_max, kGhostsMax);
  entries_.extend(ghosts_max_);
  buckets_.extend(std::max<std::uint64_t>(ghosts_max_, 1));
  drop_surplus(kDropsAtOnce);
}

void GhostTable::remember(Fingerprint fp, std::uint64_t word) {
  drop_surplus(kDropsPerCall);
  if (ghosts_max_ == 0) return;
  Slot slot = find(fp);
  if (slot != kNone) {
    age_out(slot);
    entry(slot).word = word;
    age_in(slot);
    return;
  }
  if (size_ >= ghosts_max_) {
    slot = oldest_;  // Its room serves at once, so that no entry has to move.
    chain_out(slot);
    age_out(slot);
  } else {
    entries_.reach(++size_);
    slot = static_cast<Slot>(size_);
    if (bucket_count_ < size_) add_bucket();
  }
  entry(slot) = {fp, word, kNone, kNone, kNone};
  chain_in(slot);
  age_in(slot);
}

std::optional<std::uint64_t> GhostTable::look(Fingerprint fp) const {
  const Slot slot = find(fp);
  if (slot == kNone) return std::nullopt;
  const std::uint64_t word = entry(slot).word;  // copied: entries are packed
  return word;
}

std::optional<std::uint64_t> GhostTable::recall(Fingerprint fp) {
  drop_surplus(kDropsPerCall);
  const Slot slot = find(fp);
  if (slot == kNone) return std::nullopt;
  const std::uint64_t word = entry(slot).word;
  drop(slot);
  return word;
}

// The greatest power of two that is not above the bucket count.
std::uint64_t GhostTable::low_half() const { return std::bit_floor(bucket_count_); }

std::uint64_t GhostTable::bucket_of(Fingerprint fp) const {
  const std::uint64_t half = low_half();
  const std::uint64_t bucket = mixed(fp) & (2 * half - 1);
  return bucket < bucket_count_ ? bucket : bucket - half;
}

GhostTable::Slot GhostTable::find(Fingerprint fp) const {
  if (size_ == 0) return kNone;
  Slot slot = buckets_[bucket_of(fp)];
  while (slot != kNone && entry(slot).fp != fp) slot = entry(slot).next;
  return slot;
}

void GhostTable::chain_in(Slot slot) {
  const std::uint64_t bucket = bucket_of(entry(slot).fp);
  entry(slot).next = buckets_[bucket];
  buckets_[bucket] = slot;
}

void GhostTable::chain_out(Slot slot) {
  const std::uint64_t bucket = bucket_of(entry(slot).fp);
  if (buckets_[bucket] == slot) {
    buckets_[bucket] = entry(slot).next;
    return;
  }
  Slot before = buckets_[bucket];
  while (entry(before).next != slot) before = entry(before).next;
  entry(before).next = entry(slot).next;
}

void GhostTable::age_in(Slot slot) {
  entry(slot).older = newest_;
  entry(slot).newer = kNone;
  (newest_ == kNone ? oldest_ : entry(newest_).newer) = slot;
  newest_ = slot;
}

void GhostTable::age_out(Slot slot) {
  const Entry& gone = entry(slot);
  (gone.older == kNone ? oldest_ : entry(gone.older).newer) = gone.newer;
  (gone.newer == kNone ? newest_ : entry(gone.newer).older) = gone.older;
}

// Frees the entry and moves the last one into its room.
void GhostTable::drop(Slot slot) {
  chain_out(slot);
  age_out(slot);
  const auto last = static_cast<Slot>(size_--);
  if (slot == last) return;
  chain_out(last);
  Entry& moved = entry(slot);
  moved = entry(last);
  (moved.older == kNone ? oldest_ : entry(moved.older).newer) = slot;
  (moved.newer == kNone ? newest_ : entry(moved.newer).older) = slot;
  chain_in(slot);
}

void GhostTable::drop_surplus(int drops_max) {
  const std::uint64_t buckets_max = std::max<std::uint64_t>(ghosts_max_, 1);
  if (size_ <= ghosts_max_ && bucket_count_ <= buckets_max) return;
  for (int i = 0; i < drops_max; ++i) {
    const bool is_long = size_ > ghosts_max_;
    const bool is_wide = bucket_count_ > std::max(buckets_max, size_);
    if (!is_long && !is_wide) break;
    if (is_long) drop(oldest_);
    if (is_wide) fold_bucket();
  }
  // Only now, page by page as they empty: in normal running the arrays stay at their longest.
  entries_.trim(size_);
  buckets_.trim(bucket_count_);
}

void GhostTable::add_bucket() {
  const std::uint64_t split = bucket_count_ - low_half();
  buckets_.reach(++bucket_count_);
  Slot slot = buckets_[split];
  buckets_[split] = kNone;
  while (slot != kNone) {
    const Slot next = entry(slot).next;
    chain_in(slot);
    slot = next;
  }
}

void GhostTable::fold_bucket() {
  const std::uint64_t gone = --bucket_count_;
  Slot slot = buckets_[gone];
  buckets_[gone] = kNone;
  while (slot != kNone) {
    const Slot next = entry(slot).next;
    chain_in(slot);
    slot = next;
  }
}

void GhostTable::check_invariants() const {
  std::uint64_t aged = 0;
  Slot newer = kNone;
  for (Slot slot = newest_; slot != kNone; slot = entry(slot).older) {
    KVP_CHECK(slot <= size_ && entry(slot).newer == newer && ++aged <= size_);
    newer = slot;
  }
  KVP_CHECK(aged == size_ && oldest_ == newer);
  std::uint64_t chained = 0;
  for (std::uint64_t bucket = 0; bucket < bucket_count_; ++bucket) {
    for (Slot slot = buckets_[bucket]; slot != kNone; slot = entry(slot).next) {
      KVP_CHECK(bucket_of(entry(slot).fp) == bucket && ++chained <= size_);
    }
  }
  KVP_CHECK(chained == size_);
}

}  // namespace kvpool
