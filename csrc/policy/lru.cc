// Least recently used first; of a chain, the tail first.
//
// Promises: 1. among blocks without resident children the one whose last use was earliest goes;
//           2. uses are counted, not timed, so equal timestamps keep the order of the calls.
#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

class Lru final : public OrderedPolicy {
 public:
  using OrderedPolicy::OrderedPolicy;

  void insert(BlockId id, Fingerprint, BlockId parent, Group group, Seconds) override {
    order_.insert(id, parent, group, ++uses_);
  }
  void touch(BlockId id, Seconds) override { order_.set_rank(id, ++uses_); }

 private:
  std::uint64_t uses_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_lru(const PolicyOptions& options) {
  return std::make_unique<Lru>(options);
}

}  // namespace kvpool
