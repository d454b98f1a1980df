// Least often used since it came in, first; on equal counts the least recently used. For
// comparison: counts are forgotten with the block and never fade, and it knows no chains.
#include <algorithm>

#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

// rank = count in the top 20 bits, serial number of the use below: 2^44 uses are years of any load.
constexpr int kSerialBits = 44;
constexpr std::uint64_t kSerialMask = (std::uint64_t{1} << kSerialBits) - 1;
constexpr std::uint64_t kCountMax = (std::uint64_t{1} << (64 - kSerialBits)) - 1;

class Lfu final : public OrderedPolicy {
 public:
  using OrderedPolicy::OrderedPolicy;

  bool insert(BlockId id, Fingerprint, BlockId, Group group, Seconds) override {
    order_.insert(id, kNoBlock, group, next_rank(0));
    return false;
  }
  void touch(BlockId id, Seconds) override {
    order_.set_rank(id, next_rank(order_.rank(id) >> kSerialBits));
  }

 private:
  std::uint64_t next_rank(std::uint64_t count) {
    return std::min(count + 1, kCountMax) << kSerialBits | (++uses_ & kSerialMask);
  }

  std::uint64_t uses_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_lfu(const PolicyOptions& options) {
  return std::make_unique<Lfu>(options);
}

}  // namespace kvpool
