// First in, first out; uses do not count. For comparison: it knows no chains, so it may leave a
// suffix behind that nothing can reach.
#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

class Fifo final : public OrderedPolicy {
 public:
  using OrderedPolicy::OrderedPolicy;

  bool insert(BlockId id, Fingerprint, BlockId, Group group, Seconds) override {
    order_.insert(id, kNoBlock, group, ++inserts_);
    return false;
  }
  void touch(BlockId, Seconds) override {}

 private:
  std::uint64_t inserts_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_fifo(const PolicyOptions& options) {
  return std::make_unique<Fifo>(options);
}

}  // namespace kvpool
