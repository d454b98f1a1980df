// What all policies share: a ChainOrder does the work, a policy chooses the ranks.
#pragma once
#include "policy/chain_order.h"
#include "policy/policy.h"

namespace kvpool {

class OrderedPolicy : public Policy {
 public:
  explicit OrderedPolicy(const PolicyOptions& options) : order_(options.blocks_max) {}

  void erase(BlockId id, Fingerprint, Leave, Seconds) override { order_.erase(id); }
  void regroup(BlockId id, Group group) override { order_.set_group(id, group); }
  BlockId parent(BlockId id) const override { return order_.parent(id); }
  std::uint32_t depth(BlockId id) const override { return order_.depth(id); }
  void let_go(BlockId id) override { order_.let_go(id); }
  BlockId take_coldest(Group group) override { return order_.take_first(group); }
  void give_back(BlockId id) override { order_.give_back(id); }

  BlockId peek_coldest(Group group) const override { return order_.first(group); }

  std::optional<double> coldest(Group group) const override {
    const BlockId id = peek_coldest(group);
    if (id == kNoBlock) return std::nullopt;
    return temperature(id);
  }
  double temperature(BlockId id) const override { return static_cast<double>(order_.rank(id)); }

  double heat(BlockId, Seconds) const override { return 1; }
  void set_heat(BlockId, double, Seconds) override {}

  void set_ghosts_max(std::uint64_t) override {}
  PolicyStats stats() const override {
    PolicyStats stats;
    stats.resident = order_.resident();
    stats.bytes = order_.bytes();
    return stats;
  }
  void check_invariants() const override { order_.check_invariants(); }

 protected:
  ChainOrder order_;
};

std::unique_ptr<Policy> make_temperature(const PolicyOptions& options);
std::unique_ptr<Policy> make_lru(const PolicyOptions& options);
std::unique_ptr<Policy> make_lfu(const PolicyOptions& options);
std::unique_ptr<Policy> make_fifo(const PolicyOptions& options);
std::unique_ptr<Policy> make_s3fifo(const PolicyOptions& options);

}  // namespace kvpool
