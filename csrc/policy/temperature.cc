// Coldest first: each use adds 1 to a block's heat, heat halves every tau (policy/heat_clock.h).
// Where LRU is seen to do better, heat counts less (policy/lru_guard.h): its logarithm is scaled.
//
// Promises:  1. the victim is the coldest of its group without resident children; on equal
//               temperature the one whose last use is older, then the deeper one;
//            2. an evicted block leaves its heat behind (policy/ghost_table.h) and goes on from
//               there when it comes back; a removed block leaves nothing;
//            3. a use costs O(1) for a block with resident children, O(log n) for a last one.
//
// rank = temperature in 2^-14 half-lives above kTemperatureMin (44 bits), then the tick of the last
// use (20 bits). Ghosts keep the same word. Only heat that was set can be below zero: then it was
// counted long before this clock began.
#include <algorithm>
#include <cmath>

#include "policy/ghost_table.h"
#include "policy/heat_clock.h"
#include "policy/lru_guard.h"
#include "policy/ordered_policy.h"

namespace kvpool {

namespace {

constexpr int kTickBits = 20;
static_assert(kTickMask == (1u << kTickBits) - 1);
constexpr double kStepsPerHalfLife = 1 << 14;
constexpr double kColdGap = 20;  // a heat of 2^-20 changes no rank when 1 is added to it

constexpr double kTemperatureMin = -4096;  // the least double there is has a log2 of -1074
constexpr double kStepsMax = (std::uint64_t{1} << (64 - kTickBits)) - 1;
constexpr double kHeatMax = 0x1p64;  // no count of uses; it keeps infinities out of ranks

std::uint64_t packed(double temperature, std::uint32_t tick) {
  // Rounded before the offset is added, so that it is exact at any distance from it.
  const double steps =
      std::floor(temperature * kStepsPerHalfLife + 0.5) - kTemperatureMin * kStepsPerHalfLife;
  return static_cast<std::uint64_t>(std::clamp(steps, 0.0, kStepsMax)) << kTickBits | tick;
}
double temperature_of(std::uint64_t rank) {
  return static_cast<double>(rank >> kTickBits) / kStepsPerHalfLife + kTemperatureMin;
}
std::uint32_t tick_of(std::uint64_t rank) { return static_cast<std::uint32_t>(rank) & kTickMask; }

class Temperature final : public OrderedPolicy {
 public:
  explicit Temperature(const PolicyOptions& options)
      : OrderedPolicy(options), clock_(options.tau_s), ghosts_(options.ghosts_max) {}

  bool insert(BlockId id, Fingerprint fp, BlockId parent, Group group, Seconds now) override {
    clock_.advance(now);
    const bool is_watched = guard_.inserted(id, fp);
    const std::optional<std::uint64_t> ghost = ghosts_.recall(fp);
    ghost_hits_ += ghost.has_value();
    order_.insert(id, parent, group, ghost ? used_again(*ghost) : used_first());
    if (is_watched) order_.mark(id);
    guard_.saw_resident(order_.resident());
    return ghost.has_value();
  }

  void touch(BlockId id, Seconds now) override {
    clock_.advance(now);
    if (order_.is_marked(id)) guard_.touched(id);
    order_.set_rank(id, used_again(order_.rank(id)));
  }

  void erase(BlockId id, Fingerprint fp, Leave why, Seconds now) override {
    clock_.advance(now);
    if (order_.is_marked(id)) guard_.left(id);
    if (why == Leave::evicted) {
      guard_.saw_full(order_.resident());
      ghosts_.remember(fp, order_.rank(id));
    }
    order_.erase(id);
  }

  double temperature(BlockId id) const override { return temperature_of(order_.rank(id)); }

  double heat(BlockId id, Seconds now) const override {
    return std::exp2(temperature(id) - clock_.half_lives_at(now));
  }

  std::optional<Seconds> idle_s(BlockId id, Seconds now) const override {
    return ((clock_.tick_at(now) - tick_of(order_.rank(id))) & kTickMask) / kTicksPerSecond;
  }

  std::optional<double> ghost_heat(Fingerprint fp, Seconds now) const override {
    const auto rank = ghosts_.look(fp);
    if (!rank) return std::nullopt;
    return std::exp2(temperature_of(*rank) - clock_.half_lives_at(now));
  }

  bool has_ghosts() const override { return ghosts_.max() > 0; }

  void use_ghost(Fingerprint fp, Seconds now) override {
    clock_.advance(now);
    const std::optional<std::uint64_t> ghost = ghosts_.recall(fp);
    ghosts_.remember(fp, ghost ? used_again(*ghost) : used_first());
  }

  void set_heat(BlockId id, double heat, Seconds now) override {
    clock_.advance(now);
    const double temperature =
        heat > 0 ? clock_.half_lives() + std::log2(std::min(heat, kHeatMax)) : kTemperatureMin;
    order_.set_rank(id, packed(temperature, tick_of(order_.rank(id))));
  }

  void set_ghosts_max(std::uint64_t ghosts_max) override { ghosts_.set_max(ghosts_max); }

  PolicyStats stats() const override {
    PolicyStats stats = OrderedPolicy::stats();
    stats.ghosts = ghosts_.size();
    stats.ghost_hits = ghost_hits_;
    stats.ghost_bytes = ghosts_.bytes();
    stats.bytes += stats.ghost_bytes + guard_.bytes();
    stats.tau_s = clock_.tau_s();
    stats.heat_weight = guard_.weight();
    return stats;
  }

  void check_invariants() const override {
    order_.check_invariants();
    ghosts_.check_invariants();
    guard_.check_invariants();
  }

 private:
  std::uint64_t used_first() const { return packed(clock_.half_lives(), clock_.tick()); }

  std::uint64_t used_again(std::uint64_t rank) {
    clock_.saw_reuse(tick_of(rank));
    // log2 of what is left of its heat; 2^that + 1 is the heat with this use.
    const double left = temperature_of(rank) - clock_.half_lives();
    const double added = left < -kColdGap ? 0 : std::log2(1 + std::exp2(left));
    return packed(clock_.half_lives() + guard_.weight() * added, clock_.tick());
  }

  HeatClock clock_;
  GhostTable ghosts_;
  LruGuard guard_;
  std::uint64_t ghost_hits_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_temperature(const PolicyOptions& options) {
  return std::make_unique<Temperature>(options);
}

}  // namespace kvpool
