// What is remembered of blocks that are gone: a 64-bit word for each, the oldest forgotten first.
//
// Relies on: one caller at a time.
// Promises:  1. at most ghosts_max entries; past it exactly the oldest goes, by last remember();
//            2. remember() and recall() take a few steps at any size: the hash grows by a bucket
//               at a time (linear hashing), entries stay dense, nothing is rehashed as a whole;
//            3. 32 bytes an entry at the most it ever held (28, and 4 for its bucket), and pages
//               beyond a lowered bound are given back.
// set_max() drops a bounded number at once and leaves the rest to the calls that follow.
#pragma once
#include <cstdint>
#include <optional>

#include "base/lazy_array.h"
#include "policy/policy.h"

namespace kvpool {

class GhostTable {
 public:
  explicit GhostTable(std::uint64_t ghosts_max);

  // Newest from now on; replaces what was remembered under `fp`.
  void remember(Fingerprint fp, std::uint64_t word);
  std::optional<std::uint64_t> look(Fingerprint fp) const;
  // Takes the entry out.
  std::optional<std::uint64_t> recall(Fingerprint fp);

  void set_max(std::uint64_t ghosts_max);
  std::uint64_t max() const { return ghosts_max_; }

  std::uint64_t size() const { return size_; }
  std::size_t bytes() const { return entries_.bytes() + buckets_.bytes(); }
  void check_invariants() const;

 private:
  using Slot = std::uint32_t;  // index into entries_ plus one; 0 = none, as fresh pages read
  static constexpr Slot kNone = 0;
  static constexpr std::uint64_t kGhostsMax = 0xfffffff0;
  static constexpr int kDropsPerCall = 8;
  static constexpr int kDropsAtOnce = 4096;

#pragma pack(push, 4)
  struct Entry {
    Fingerprint fp;
    std::uint64_t word;
    Slot older;
    Slot newer;
    Slot next;  // in its bucket
  };
#pragma pack(pop)
  static_assert(sizeof(Entry) == 28);

  Entry& entry(Slot slot) { return entries_[slot - 1]; }
  const Entry& entry(Slot slot) const { return entries_[slot - 1]; }

  std::uint64_t bucket_of(Fingerprint fp) const;
  Slot find(Fingerprint fp) const;
  void chain_in(Slot slot);
  void chain_out(Slot slot);
  void age_in(Slot slot);
  void age_out(Slot slot);

  void drop(Slot slot);
  void drop_surplus(int drops_max);
  void add_bucket();
  void fold_bucket();
  std::uint64_t low_half() const;

  LazyArray<Entry> entries_;  // dense: [0, size_) are in use
  LazyArray<Slot> buckets_;   // heads of chains; [0, bucket_count_) are in use
  std::uint64_t ghosts_max_ = 0;
  std::uint64_t size_ = 0;
  std::uint64_t bucket_count_ = 1;
  Slot oldest_ = kNone;
  Slot newest_ = kNone;
};

}  // namespace kvpool
