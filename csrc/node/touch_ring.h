// Uses of blocks, on their way from readers to the policy. Lossy by design: a reader never waits.
//
// Readers push (any number), the holder of the node's lock drains. When the node is late by more
// than the ring, the oldest uses are overwritten: lost heat, nothing else. An entry is taken by its
// record and generation, so one that arrives late, torn or twice can only name a block that is
// still there.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace kvpool {

class TouchRing {
 public:
  static constexpr std::uint64_t kEntries = 8192;

  struct Touch {
    std::uint64_t generation = 0;
    std::uint32_t record = 0;
    Seconds when = 0;
  };

  // Room for `count` entries at once; write them with put(first + i, ...).
  std::uint64_t claim(std::uint64_t count) {
    return head_.fetch_add(count, std::memory_order_relaxed);
  }
  void put(std::uint64_t at, const Touch& touch) {
    Entry& entry = entries_[at % kEntries];
    entry.record.store(touch.record, std::memory_order_relaxed);
    entry.when.store(touch.when, std::memory_order_relaxed);
    entry.generation.store(touch.generation, std::memory_order_release);
  }

  bool half_full() const {
    return head_.load(std::memory_order_relaxed) - tail_.load(std::memory_order_relaxed) >
           kEntries / 2;
  }
  bool empty() const {
    return head_.load(std::memory_order_relaxed) == tail_.load(std::memory_order_relaxed);
  }

  // Oldest first. One drainer at a time. Returns how many were lost since the last time.
  template <typename Use>
  std::uint64_t drain(Use use) {
    const std::uint64_t head = head_.load(std::memory_order_acquire);
    std::uint64_t at = tail_.load(std::memory_order_relaxed), lost = 0;
    if (head - at > kEntries) {
      lost = head - at - kEntries;
      at = head - kEntries;
    }
    for (; at != head; ++at) {
      Entry& entry = entries_[at % kEntries];
      // Taken, so that an entry claimed but not yet written does not count its predecessor twice.
      const std::uint64_t generation = entry.generation.exchange(0, std::memory_order_acquire);
      if (generation == 0) continue;
      use(Touch{generation, entry.record.load(std::memory_order_relaxed),
                entry.when.load(std::memory_order_relaxed)});
    }
    tail_.store(head, std::memory_order_relaxed);
    return lost;
  }

 private:
  struct Entry {
    std::atomic<std::uint64_t> generation{0};
    std::atomic<std::uint32_t> record{0};
    std::atomic<Seconds> when{0};
  };
  alignas(64) std::atomic<std::uint64_t> head_{0};
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::array<Entry, kEntries> entries_;
};

}  // namespace kvpool
