// One kind of KV each: an id, a block size, and an incarnation that readers compare.
//
// Dropping a namespace gives it a new incarnation, so every old key becomes a miss at once,
// however many there are. Entries are never removed: a handle stays valid as long as the node.
// Thread rule: the node's lock; but `incarnation` is read, and `traffic` added to, by anyone.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "block/key.h"
#include "node/index_layout.h"
#include "node/traffic.h"

namespace kvpool {

inline constexpr std::uint64_t kBlockBytesMax = 1ull << 31;  // a record counts bytes in 32 bits

struct Namespace {
  Hash128 id;
  std::uint32_t block_bytes = 0;
  std::uint32_t size_class = 0;
  std::uint32_t number = 0;  // in order of opening; what other processes call it
  std::atomic<std::uint32_t> incarnation{0};
  std::uint32_t dropped_incarnation = 0;  // the one before; 0 = none
  std::uint64_t blocks = 0;               // resident, of this incarnation
  const std::unique_ptr<Traffic> traffic = std::make_unique<Traffic>();
};

class Namespaces {
 public:
  bool contains(const Hash128& id) const { return by_id_.contains(id); }

  Result<Namespace*> open(const Hash128& id, std::uint32_t block_bytes, std::uint32_t size_class) {
    if (auto it = by_id_.find(id); it != by_id_.end()) {
      if (it->second->block_bytes != block_bytes)
        return fail(Code::bad_argument, "this namespace has blocks of " +
                                            std::to_string(it->second->block_bytes) +
                                            " bytes, not " + std::to_string(block_bytes));
      return it->second.get();
    }
    if (by_id_.size() >= kNamespacesMax)
      return fail(Code::bad_argument,
                  "a pool holds at most " + std::to_string(kNamespacesMax) + " namespaces");
    auto made = std::make_unique<Namespace>();
    made->id = id;
    made->block_bytes = block_bytes;
    made->size_class = size_class;
    made->number = static_cast<std::uint32_t>(by_number_.size());
    Namespace* space = made.get();
    by_id_.emplace(id, std::move(made));
    by_number_.push_back(space);
    renew(*space);
    return space;
  }

  void renew(Namespace& space) {
    if (const std::uint32_t old = space.incarnation.load(std::memory_order_relaxed); old != 0)
      by_incarnation_[old] = nullptr;
    space.dropped_incarnation = space.incarnation.load(std::memory_order_relaxed);
    space.incarnation.store(static_cast<std::uint32_t>(by_incarnation_.size()),
                            std::memory_order_release);
    by_incarnation_.push_back(&space);
    space.blocks = 0;
  }

  // nullptr: there is none.
  Namespace* find(const Hash128& id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second.get();
  }
  // nullptr: dropped since.
  Namespace* of(std::uint32_t incarnation) const { return by_incarnation_[incarnation]; }
  // nullptr: there is none.
  Namespace* numbered(std::uint32_t number) const {
    return number < by_number_.size() ? by_number_[number] : nullptr;
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& [id, space] : by_id_) visit(*space);
  }
  std::size_t count() const { return by_id_.size(); }
  // By number. Those that are there stay where they are, whatever is opened later.
  std::vector<Namespace*> all() const { return by_number_; }
  std::size_t bytes() const { return by_incarnation_.size() * sizeof(Namespace*); }

 private:
  struct IdHash {
    std::size_t operator()(const Hash128& id) const { return id.low; }
  };
  std::unordered_map<Hash128, std::unique_ptr<Namespace>, IdHash> by_id_;
  std::vector<Namespace*> by_number_;
  std::vector<Namespace*> by_incarnation_{nullptr};  // 8 bytes per drop, for as long as the node
};

}  // namespace kvpool
