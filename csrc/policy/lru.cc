// Least recently used first; of a chain, the tail first.
//
// Promises: 1. among blocks without resident children the one whose last use was earliest goes;
//           2. equal times, and times that go back, keep the order of the calls;
//           3. heat() and set_heat() keep the order too, over a restart and from tier to tier.
//
// rank = time of the last use in units of 2^-22 s, or one more than the rank before where that is
// later: uses closer than a unit, or told in the wrong order, are counted on, and time catches up.
// So ranks order like a count of uses, and yet tell an age, which a count does not: an age is what
// can be compared with that of a block used by another process. Time begins at kStart, which leaves
// 34 years below it for blocks used earlier, and every rank in the 53 bits of a double.
#include <algorithm>
#include <cmath>

#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

constexpr double kUnitsPerSecond = 1 << 22;
constexpr double kHalfLife_s = 3600;
constexpr std::uint64_t kStart = std::uint64_t{1} << 52;
constexpr double kUnitsMax = 0x1p51;  // of time; uses are counted from there on

class Lru final : public OrderedPolicy {
 public:
  using OrderedPolicy::OrderedPolicy;

  bool insert(BlockId id, Fingerprint, BlockId parent, Group group, Seconds now) override {
    order_.insert(id, parent, group, next_use(now));
    return false;
  }
  void touch(BlockId id, Seconds now) override { order_.set_rank(id, next_use(now)); }

  // Seconds since the first use of all.
  double temperature(BlockId id) const override {
    return (static_cast<double>(order_.rank(id)) - double{kStart}) / kUnitsPerSecond;
  }

  double heat(BlockId id, Seconds now) const override {
    const auto age = static_cast<double>(latest_at(now) - order_.rank(id));
    return std::exp2(-age / (kUnitsPerSecond * kHalfLife_s));
  }

  std::optional<Seconds> idle_s(BlockId id, Seconds now) const override {
    return static_cast<double>(latest_at(now) - order_.rank(id)) / kUnitsPerSecond;
  }

  void set_heat(BlockId id, double heat, Seconds now) override {
    start(now);
    latest_ = latest_at(now);  // so that the next use is later than the block is now
    const double age = heat > 0 ? -std::log2(std::min(heat, 1.0)) * kHalfLife_s : INFINITY;
    const double rank = static_cast<double>(latest_) - age * kUnitsPerSecond;
    order_.set_rank(id, static_cast<std::uint64_t>(std::max(rank, 0.0)));
  }

 private:
  std::uint64_t next_use(Seconds now) {
    start(now);
    latest_ = std::max(latest_ + 1, latest_at(now));
    return latest_;
  }

  void start(Seconds now) {
    if (is_started_ || !std::isfinite(now)) return;
    is_started_ = true;
    origin_ = now;
  }

  // The latest rank given, or what the time says where that is later.
  std::uint64_t latest_at(Seconds now) const {
    if (!is_started_ || !std::isfinite(now)) return latest_;
    const double units = std::clamp((now - origin_) * kUnitsPerSecond, 0.0, kUnitsMax);
    return std::max(latest_, kStart + static_cast<std::uint64_t>(units));
  }

  bool is_started_ = false;
  Seconds origin_ = 0;
  std::uint64_t latest_ = kStart;
};

}  // namespace

std::unique_ptr<Policy> make_lru(const PolicyOptions& options) {
  return std::make_unique<Lru>(options);
}

}  // namespace kvpool
