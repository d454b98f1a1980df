// How long leases have been held, without a look at each: those of the same tenth of a second are
// counted together, and all that are older than the last age that is told.
//
// Promise:   what is kept, and what counts() takes, is bounded by kOldest, however many leases
//            there are: some 6000 counts at worst, a few as a rule.
// Thread rule: none of its own.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <map>

namespace kvpool {

class LeaseAges {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Slot = std::uint64_t;  // a tenth of a second
  // Younger than each of these, in seconds; the last count is of those that are older.
  static constexpr std::array<Slot, 4> kBoundsS{1, 10, 60, 600};
  using Counts = std::array<std::uint64_t, kBoundsS.size() + 1>;

  static Slot slot_of(Time time);
  void add(Slot slot, std::uint64_t leases);  // slots come in order
  void take_off(Slot slot, std::uint64_t leases);
  bool has_before(Slot slot) const {
    return !leases_of_.empty() && leases_of_.begin()->first < slot;
  }
  void clear() { leases_of_.clear(); }
  void add_counts(Slot now, Counts& counts) const;
  std::size_t slots() const { return leases_of_.size(); }

 private:
  static constexpr Slot kSlotsPerS = 10;
  static constexpr Slot kOldest = kBoundsS.back() * kSlotsPerS;
  static constexpr Slot kOld = 0;  // of all that are older

  std::map<Slot, std::uint64_t> leases_of_;
};

}  // namespace kvpool
