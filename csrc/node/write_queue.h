// Blocks that wait to be written to the SSD, oldest first. A block that goes meanwhile leaves the
// queue at once, so it is never longer than there are blocks.
//
// Promises:  1. push, pop and remove are O(1); a block is in the queue at most once;
//            2. tickets grow in the order of the queue: once first_ticket() is past the one that
//               last_ticket() gave, whatever was in the queue then has left it;
//            3. 16 bytes for each id that was ever queued.
// Thread rule: the node's lock.
#pragma once
#include <cstdint>
#include <optional>

#include "base/check.h"
#include "base/lazy_array.h"
#include "policy/policy.h"

namespace kvpool {

class WriteQueue {
 public:
  explicit WriteQueue(std::size_t ids_max) : links_(ids_max) {}

  void push(BlockId id) {
    links_.reach(id + std::size_t{1});
    KVP_CHECK(links_[id].ticket == 0);
    links_[id] = {++last_ticket_, last_, kNone};
    (last_ == kNone ? first_ : links_[last_ - 1].next) = id + 1;
    last_ = id + 1;
    ++size_;
  }
  std::optional<BlockId> first() const {
    if (first_ == kNone) return std::nullopt;
    return first_ - 1;
  }
  void remove(BlockId id) {
    Link& link = links_[id];
    KVP_CHECK(link.ticket != 0);
    (link.previous == kNone ? first_ : links_[link.previous - 1].next) = link.next;
    (link.next == kNone ? last_ : links_[link.next - 1].previous) = link.previous;
    link = {};
    --size_;
  }

  std::size_t size() const { return size_; }
  std::uint64_t last_ticket() const { return last_ticket_; }
  // Of the oldest that waits, or of the next to come when none does.
  std::uint64_t first_ticket() const {
    return first_ == kNone ? last_ticket_ + 1 : links_[first_ - 1].ticket;
  }
  std::size_t bytes() const { return links_.bytes(); }

 private:
  static constexpr std::uint32_t kNone = 0;  // else: id + 1
  struct Link {
    std::uint64_t ticket = 0;  // 0: not in the queue
    std::uint32_t previous = kNone, next = kNone;
  };
  LazyArray<Link> links_;
  std::uint32_t first_ = kNone, last_ = kNone;
  std::size_t size_ = 0;
  std::uint64_t last_ticket_ = 0;
};

}  // namespace kvpool
