// What is still to be told to one owner of slots, in the order in which it happened.
//
// Promises:  1. at most keys_max keys wait;
//            2. of a key that changed more than once in a batch only the last is told, so that the
//               rest of a batch may go out in any order: as one withdraw and one publish.
// Thread rule: its publisher's thread.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "cluster/wire.h"

namespace kvpool {

class OwnerQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Keys {
    std::vector<DirectoryKey> came, went;
  };

  explicit OwnerQueue(std::size_t keys_max) : keys_max_(keys_max) {}

  // False: it is full, and nothing was taken.
  bool push(const DirectoryKey& key, bool came, Time now);
  Keys take_batch(Time now);
  void clear() { waiting_.clear(); }
  // Only keys of these slots: the others are somebody else's to hear of.
  void keep(const SlotSet& slots) {
    std::erase_if(waiting_, [&](const Item& each) { return !slots.test(slot_of(each.key)); });
  }

  std::size_t size() const { return waiting_.size(); }
  std::size_t keys_max() const { return keys_max_; }
  // A whole batch, or one whose first has waited for company long enough.
  bool is_due(Time now, std::chrono::milliseconds linger) const {
    return waiting_.size() >= kKeysPerBatch || (!waiting_.empty() && now - since_ >= linger);
  }

 private:
  struct Item {
    DirectoryKey key;
    bool came;
  };
  const std::size_t keys_max_;
  std::deque<Item> waiting_;
  Time since_{};  // the first of them came, or the batch before was taken
};

}  // namespace kvpool
