// What one client has leased by request: blocks that stay where they are in the arena it maps.
//
// Leases are the client's, not the stream's that asked: a stream may end for a deadline while what
// was leased through it is still being read. They end when they are released through any stream of
// the client, when its attachment ends, or with the client, whichever is first.
// Those of peers are in one such book for all of them: they are the stream's, which gives them back
// when it ends, and end by time as well, since a host that is gone says nothing.
// Promise:   at most kLeasesMax, and so many bytes as acquire() is told, however many streams ask.
// Thread rule: every method from any thread. Takes its own lock, never while it holds the node's.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "net/frame.h"
#include "net/lease_ages.h"
#include "node/node.h"

namespace kvpool {

inline constexpr std::uint64_t kLeasesMax = 65'536;

class Leases {
 public:
  // `all`: of all clients, for statistics.
  Leases(Node& node, std::atomic<std::uint64_t>& all) : node_(node), all_(all) {}
  ~Leases() { close(); }
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  void open();   // nothing can be leased before
  void close();  // releases all

  // The leading blocks; `why`: of the first that is not leased.
  std::vector<LeasePlace> acquire(const Namespace& space, std::span<const Hash128> keys,
                                  std::uint64_t bytes_max, Miss& why);
  // For who reads from elsewhere: what is here is leased, and no other node is asked.
  std::vector<FarPlace> acquire_far(const Namespace& space, std::span<const Hash128> keys,
                                    std::uint64_t bytes_max, Loaded& loaded);
  // Ends those that were acquired before; a tenth of a second more or less. How many.
  std::size_t expire(LeaseAges::Time before);
  // Adds how many were acquired so long ago. Short, however many there are.
  void add_ages(LeaseAges::Counts& counts) const;
  // By numbers, in the low halves. Unknown ones are passed by; how many were known.
  std::size_t release(std::span<const Hash128> numbers);

  std::uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Wanted {
    const Namespace& space;
    std::span<const Hash128> keys;
    std::uint64_t bytes_max = 0;
    Reach reach;
  };
  std::vector<Lease> take(const Wanted& wanted, Loaded& loaded, std::uint64_t& number);
  void give_back(std::span<const Lease> leases);

  Node& node_;
  std::atomic<std::uint64_t>& all_;
  // Counted before they are leased, so that several streams do not pass the limit together.
  std::atomic<std::uint64_t> count_{0}, bytes_{0};
  struct Held {
    Lease lease;
    LeaseAges::Slot since = 0;
  };
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<std::uint64_t, Held> leases_;
  LeaseAges ages_;
  std::uint64_t next_ = 1;  // never given twice
  bool open_ = false;
};

}  // namespace kvpool
