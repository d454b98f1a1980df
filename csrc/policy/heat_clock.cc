#include "policy/heat_clock.h"

#include <algorithm>
#include <cmath>

namespace kvpool {

namespace {
constexpr double kTauPerMedian = 1.5;
constexpr double kTauMin_s = 10;
constexpr double kTauMax_s = 3600;
constexpr double kTauStart_s = 60;  // until the first reuse is seen
constexpr double kFixedTauMin_s = 0.1;
constexpr double kFixedTauMax_s = 1e9;
constexpr double kHalfLivesMax = 1e9;  // three years of the shortest tau there is
}  // namespace

HeatClock::HeatClock(double tau_s)
    : is_fixed_(tau_s > 0),
      tau_s_(is_fixed_ ? std::clamp(tau_s, kFixedTauMin_s, kFixedTauMax_s) : kTauStart_s) {}

void HeatClock::advance(Seconds now) {
  if (!std::isfinite(now)) return;
  if (!is_started_) {
    is_started_ = true;
    origin_ = tau_since_ = now_ = now;
    return;
  }
  if (now <= now_) return;
  half_lives_ = half_lives_at(now);
  tick_ = tick_at(now);
  now_ = now;
}

std::uint32_t HeatClock::tick_at(Seconds now) const {
  if (!is_started_ || !std::isfinite(now) || now <= now_) return tick_;
  const double ticks = std::fmod((now - origin_) * kTicksPerSecond, double{kTickMask} + 1);
  return static_cast<std::uint32_t>(ticks) & kTickMask;
}

double HeatClock::half_lives_at(Seconds now) const {
  if (!is_started_ || !std::isfinite(now) || now <= now_) return half_lives_;
  return std::min(half_lives_at_tau_ + (now - tau_since_) / tau_s_, kHalfLivesMax);
}

void HeatClock::saw_reuse(std::uint32_t last_tick) {
  const std::uint32_t ticks = (tick_ - last_tick) & kTickMask;
  if (is_fixed_ || ticks == 0) return;  // Uses within one tick are one use, seen more than once.
  const double octaves = std::log2(static_cast<double>(ticks));
  const int bin = std::min(static_cast<int>(octaves * kBinsPerOctave), kBins - 1);
  ++bins_[static_cast<std::size_t>(bin)];
  if (++reuses_ >= kReusesMax) {
    reuses_ = 0;
    for (std::uint32_t& count : bins_) reuses_ += (count /= 2);
  }
  if (--until_update_ == 0) follow_median();
}

void HeatClock::follow_median() {
  until_update_ = kReusesPerUpdate;
  set_tau(std::clamp(kTauPerMedian * median_s(), kTauMin_s, kTauMax_s));
}

double HeatClock::median_s() const {
  const double half = static_cast<double>(reuses_) / 2;
  double below = 0;
  std::size_t bin = 0;
  while (bin + 1 < bins_.size() && below + bins_[bin] < half) below += bins_[bin++];
  const double inside = bins_[bin] > 0 ? (half - below) / bins_[bin] : 0;
  return std::exp2((static_cast<double>(bin) + inside) / kBinsPerOctave) / kTicksPerSecond;
}

void HeatClock::set_tau(double tau_s) {
  half_lives_at_tau_ = half_lives_;
  tau_since_ = now_;
  tau_s_ = tau_s;
}

}  // namespace kvpool
