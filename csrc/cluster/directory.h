// The memory of a part of the directory: which members hold a key.
//
// Of a key 64 bits are kept, the slot on top. Members are numbers here, 1 to 4,095; who they are is
// kept by whoever took the number (cluster/directory_shard.h).
// Promises:  1. memory stays below bytes_max, and follows what is kept;
//            2. dropping a holder is O(1): nobody hears of it from then on. Its entries are swept
//               bit by bit, and its number is taken again only after that;
//            3. what a holder told before it was dropped, and comes late, changes nothing;
//            4. a key has kHoldersPerKey holders at most; one more is counted, and not kept.
// Thread rule: any thread. A call holds the lock of one part at a time, for some keys.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cluster/directory_key.h"
#include "cluster/directory_segment.h"

namespace kvpool {

struct DirectoryOptions {
  std::uint64_t bytes_max = 64ull << 20;  // 16 bytes a key when it is full
  std::uint64_t salt = 0;  // random, so that nobody can choose keys that crowd one place
};

struct DirectoryStats {
  std::uint64_t entries = 0, bytes = 0, bytes_max = 0, holders = 0;
  std::uint64_t evicted = 0;        // keys that made room for others
  std::uint64_t crowded = 0;        // a fifth holder of a key
  std::uint64_t late = 0;           // told by a holder that was gone
  std::uint64_t swept_holders = 0;  // numbers that may be taken again
  double bytes_per_key = 0;
};

class Directory {
 public:
  using Numbers = DirectorySegment::Numbers;

  explicit Directory(const DirectoryOptions& options);

  // nullopt: no number is free, or none is swept yet.
  std::optional<Holder> take_holder();
  void drop_holder(Holder holder);
  // Half of all numbers wait to be swept: the rest is for those who have none yet.
  bool is_behind() const;

  // How many were changed. Keys of one call may be of any slots and come twice.
  std::size_t add(std::span<const DirectoryKey> keys, Holder holder);
  std::size_t remove(std::span<const DirectoryKey> keys, Holder holder);
  // A place per key.
  void find(std::span<const DirectoryKey> keys, std::span<Numbers> found);

  // All keys of these slots. Looks at every entry: some 5 ms for a million.
  void forget_slots(const SlotSet& slots);
  // Looks at so many parts for what dropped holders left. False: nothing is left.
  bool sweep(std::size_t parts);
  std::size_t parts() const { return segments_count_; }
  DirectoryStats stats() const;

 private:
  std::size_t part_of(std::uint64_t hash) const { return (hash >> 48) & (segments_count_ - 1); }
  // Keys in the order of their parts: each part is locked once, with its lines on their way.
  template <typename Visit>
  void by_part(std::span<const DirectoryKey> keys, Visit visit);

  const std::uint64_t bytes_max_, salt_;
  const std::size_t segments_count_;  // a power of two
  const std::unique_ptr<DirectorySegment[]> segments_;
  HolderLives lives_;
  std::atomic<std::uint64_t> late_{0};

  mutable std::mutex mutex_;  // guards the numbers, below
  struct Condemned {
    std::uint16_t number;
    std::size_t parts_left;
    bool is_due = false;  // a part that was being swept when it was dropped does not count
  };
  std::vector<std::uint16_t> free_;  // were in use before
  std::uint16_t never_used_ = 1;
  std::deque<Condemned> condemned_;  // in the order in which they were dropped
  std::size_t sweep_at_ = 0;
  std::uint64_t holders_ = 0, swept_holders_ = 0;
};

}  // namespace kvpool
