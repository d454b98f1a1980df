#include "net/lease_ages.h"

#include "base/check.h"

namespace kvpool {

LeaseAges::Slot LeaseAges::slot_of(Time time) {
  using Tenths = std::chrono::duration<Slot, std::ratio<1, kSlotsPerS>>;
  return std::chrono::duration_cast<Tenths>(time.time_since_epoch()).count() + 1;  // never kOld
}

void LeaseAges::add(Slot slot, std::uint64_t leases) {
  if (leases == 0) return;
  leases_of_.try_emplace(leases_of_.end(), slot, 0)->second += leases;
  for (auto oldest = leases_of_.begin(); oldest->first + kOldest <= slot;) {
    if (oldest->first == kOld) {
      oldest = std::next(oldest);
      continue;
    }
    leases_of_[kOld] += oldest->second;
    oldest = leases_of_.erase(oldest);
  }
}

// Slots grow old in order, so one that is there no more is among the old ones.
void LeaseAges::take_off(Slot slot, std::uint64_t leases) {
  auto found = leases_of_.find(slot);
  if (found == leases_of_.end()) found = leases_of_.find(kOld);
  KVP_CHECK(found != leases_of_.end() && found->second >= leases);
  found->second -= leases;
  if (found->second == 0) leases_of_.erase(found);
}

void LeaseAges::add_counts(Slot now, Counts& counts) const {
  for (const auto& [slot, leases] : leases_of_) {
    std::size_t age = slot == kOld ? kBoundsS.size() : 0;
    while (age < kBoundsS.size() && slot + kBoundsS[age] * kSlotsPerS <= now) ++age;
    counts[age] += leases;
  }
}

}  // namespace kvpool
