// S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue with second chances,
// and ghosts that send a returning block straight to the main queue. For comparison: no chains.
//
// Here: the small queue aims at a tenth of the resident blocks of its group, two uses on probation
// promote, and there are as many ghosts as blocks in main queues (or ghosts_max, if that is less).
// The interface splits "choose" from "evict", so a block given back returns to the queue it left.
#include <algorithm>
#include <array>
#include <vector>

#include "base/check.h"
#include "policy/ghost_table.h"
#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

// rank = serial number of entering the queue << 2 | uses since, at most 3.
constexpr std::uint64_t kUses = 3;
constexpr std::uint64_t kUsesToPromote = 2;
constexpr std::uint64_t kSmallShare = 10;

class S3Fifo final : public OrderedPolicy {
 public:
  explicit S3Fifo(const PolicyOptions& options)
      : OrderedPolicy(options),
        ghosts_(std::min<std::uint64_t>(options.ghosts_max, options.blocks_max)),
        ghosts_max_(options.ghosts_max) {}

  bool insert(BlockId id, Fingerprint fp, BlockId, Group group, Seconds) override {
    const bool is_ghost = ghosts_.recall(fp).has_value();
    ghost_hits_ += is_ghost;
    enter(id, group, is_ghost ? kMain : kSmall, 0);
    return is_ghost;
  }

  void touch(BlockId id, Seconds) override {
    const std::uint64_t rank = order_.rank(id);
    if ((rank & kUses) < kUses) order_.set_rank(id, rank + 1);
  }

  void erase(BlockId id, Fingerprint fp, Leave why, Seconds) override {
    const Queue queue = queue_of(id);
    leave(id, order_.group(id) / 2, queue);
    if (why != Leave::evicted || queue != kSmall) return;
    ghosts_.set_max(std::min(ghosts_max_, std::max<std::uint64_t>(main_total_, 1)));
    ghosts_.remember(fp, 0);
  }

  BlockId take_coldest(Group group) override {
    for (;;) {
      const Queue queue = next_queue(group);
      const BlockId id = order_.first(group * 2 + queue);
      if (id == kNoBlock) return kNoBlock;
      const std::uint64_t uses = order_.rank(id) & kUses;
      if (uses < (queue == kSmall ? kUsesToPromote : 1))
        return order_.take_first(group * 2 + queue);
      leave(id, group, queue);
      enter(id, group, kMain, queue == kSmall ? 0 : uses - 1);
    }
  }

  BlockId peek_coldest(Group group) const override {
    return order_.first(group * 2 + next_queue(group));
  }

  void regroup(BlockId id, Group group) override {
    const Queue queue = queue_of(id);
    --sizes(order_.group(id) / 2)[queue];
    order_.set_group(id, group * 2 + queue);
    ++sizes(group)[queue];
  }

  void set_ghosts_max(std::uint64_t ghosts_max) override {
    ghosts_max_ = ghosts_max;
    if (ghosts_.max() > ghosts_max) ghosts_.set_max(ghosts_max);
  }

  PolicyStats stats() const override {
    PolicyStats stats = OrderedPolicy::stats();
    stats.ghosts = ghosts_.size();
    stats.ghost_hits = ghost_hits_;
    stats.ghost_bytes = ghosts_.bytes();
    stats.bytes += stats.ghost_bytes;
    return stats;
  }

  void check_invariants() const override {
    order_.check_invariants();
    ghosts_.check_invariants();
    std::uint64_t resident = 0;
    std::uint64_t in_main = 0;
    for (Group group = 0; group < sizes_.size(); ++group) {
      for (const Queue queue : {kSmall, kMain}) {
        const std::uint64_t size = sizes_[group][queue];
        KVP_CHECK(size <= order_.resident());  // none below zero
        KVP_CHECK(size > 0 || order_.first(group * 2 + queue) == kNoBlock);
        resident += size;
      }
      in_main += sizes_[group][kMain];
    }
    KVP_CHECK(resident == order_.resident() && in_main == main_total_);
  }

 private:
  enum Queue : Group { kSmall = 0, kMain = 1 };
  using Sizes = std::array<std::uint64_t, 2>;  // of each queue, taken blocks included

  Queue queue_of(BlockId id) const { return order_.group(id) % 2 == kMain ? kMain : kSmall; }

  Sizes& sizes(Group group) {
    if (group >= sizes_.size()) sizes_.resize(group + std::size_t{1});
    return sizes_[group];
  }

  void enter(BlockId id, Group group, Queue queue, std::uint64_t uses) {
    order_.insert(id, kNoBlock, group * 2 + queue, ++entries_ << 2 | uses);
    ++sizes(group)[queue];
    main_total_ += queue == kMain;
  }
  void leave(BlockId id, Group group, Queue queue) {
    order_.erase(id);
    --sizes(group)[queue];
    main_total_ -= queue == kMain;
  }

  // Where the next victim is looked for; the other queue when that one has nothing to give.
  Queue next_queue(Group group) const {
    if (group >= sizes_.size()) return kSmall;
    const Sizes& size = sizes_[group];
    const Queue wanted = size[kSmall] * kSmallShare >= size[kSmall] + size[kMain] ? kSmall : kMain;
    const Queue other = wanted == kSmall ? kMain : kSmall;
    return order_.first(group * 2 + wanted) != kNoBlock ? wanted : other;
  }

  std::vector<Sizes> sizes_;
  std::uint64_t main_total_ = 0;
  std::uint64_t entries_ = 0;
  std::uint64_t ghost_hits_ = 0;
  GhostTable ghosts_;
  std::uint64_t ghosts_max_;
};

}  // namespace

std::unique_ptr<Policy> make_s3fifo(const PolicyOptions& options) {
  return std::make_unique<S3Fifo>(options);
}

}  // namespace kvpool
