// Time measured in half-lives of heat, and a half-life that follows the workload.
//
// Heat halves every tau. A block has the order key  log2(heat) + last use / tau,  which only a use
// changes. Were tau simply replaced in that formula, keys written under the old one would jump past
// or behind all others; so time itself is counted in half-lives: it runs on at 1/tau a second,
// whatever tau is at the moment, and keys of all ages stay comparable.
//
// tau is 1.5 x the median of the latest reuse intervals, between 10 s and 1 h.
//
// Promises:  1. half_lives() never goes back, whatever times are given;
//            2. a change of tau changes no difference between keys already written;
//            3. O(1), 300 bytes.
#pragma once
#include <array>
#include <cstdint>

#include "base/clock.h"

namespace kvpool {

// Times of use are kept in few bits: counted in ticks, modulo 2^20 of them (36 hours). A longer
// pause is taken for a shorter one, which the median hardly feels.
inline constexpr double kTicksPerSecond = 8;
inline constexpr std::uint32_t kTickMask = (1u << 20) - 1;

class HeatClock {
 public:
  // `tau_s` 0: follow the workload. Otherwise fixed, between 0.1 s and 1e9 s.
  explicit HeatClock(double tau_s);

  // A time earlier than the latest one, or no number, leaves the clock where it is.
  void advance(Seconds now);
  double half_lives() const { return half_lives_; }
  // What half_lives() would be after advance(now), were tau to stay.
  double half_lives_at(Seconds now) const;
  std::uint32_t tick() const { return tick_; }
  std::uint32_t tick_at(Seconds now) const;
  double tau_s() const { return tau_s_; }

  // A block last used at `last_tick` was used again.
  void saw_reuse(std::uint32_t last_tick);

 private:
  // Bins of a quarter octave, from one tick to 2^16 ticks (2.3 h).
  static constexpr int kBinsPerOctave = 4;
  static constexpr int kBins = 16 * kBinsPerOctave;
  // The median is of the latest few thousand uses: older ones fade by halves.
  static constexpr std::uint32_t kReusesMax = 8192;
  static constexpr std::uint32_t kReusesPerUpdate = 64;

  void follow_median();
  double median_s() const;
  void set_tau(double tau_s);

  bool is_fixed_;
  bool is_started_ = false;
  double tau_s_;
  Seconds now_ = 0;
  Seconds tau_since_ = 0;         // when tau_s_ began,
  double half_lives_at_tau_ = 0;  // and what half_lives_ was then
  double half_lives_ = 0;
  Seconds origin_ = 0;  // of ticks
  std::uint32_t tick_ = 0;
  std::uint32_t reuses_ = 0;  // sum of bins_
  std::uint32_t until_update_ = 1;
  std::array<std::uint32_t, kBins> bins_{};
};

}  // namespace kvpool
