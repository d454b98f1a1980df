#include "policy/lru_guard.h"

#include <algorithm>
#include <cmath>

namespace kvpool {

LruGuard::LruGuard() : recent_(kSampleMax), residents_(2 * kSampleMax) {}

bool LruGuard::inserted(BlockId id, Fingerprint fp) {
  if (!is_sampled(fp)) return false;
  residents_.remember(id, fp);
  used(fp, false);
  return true;
}

void LruGuard::touched(BlockId id) {
  const std::optional<std::uint64_t> fp = residents_.look(id);
  if (fp && is_sampled(*fp)) used(*fp, true);
}

void LruGuard::left(BlockId id) { residents_.recall(id); }

bool LruGuard::is_sampled(Fingerprint fp) const {
  // The top bits of a product that differs from the one in the tables: their chains stay short.
  return sample_shift_ == 0 || (fp * 0x9fb21c651e98df25u) >> (64 - sample_shift_) == 0;
}

void LruGuard::used(Fingerprint fp, bool is_hit) {
  const bool is_lru_hit = recent_.recall(fp).has_value();
  recent_.remember(fp, 0);
  ++uses_;
  lead_ += static_cast<double>(is_lru_hit) - static_cast<double>(is_hit);
  differences_ += is_lru_hit != is_hit;
  if (uses_ >= std::max(kUsesMin, 32.0 * static_cast<double>(recent_.max()))) fade();
  if (--until_adjust_ == 0) adjust();
}

void LruGuard::fade() {
  uses_ /= 2;
  lead_ /= 2;
  differences_ /= 2;
}

void LruGuard::adjust() {
  until_adjust_ = std::max<std::uint64_t>(64, recent_.max() / 16);
  if (!is_full_) return;
  const double chance = kDeviations * std::sqrt(differences_);
  const double lead = (lead_ - chance) / uses_ - kLead;
  weight_ = std::clamp(weight_ - (lead > 0 ? kWeightPerLead * lead : -kRecovery), 0.0, 1.0);
}

void LruGuard::saw_resident(std::uint64_t resident) {
  if (resident >> sample_shift_ > kSampleMax) resample(resident);
}

void LruGuard::saw_full(std::uint64_t resident) {
  is_full_ = true;
  if (sample_shift_ > 0 && resident >> sample_shift_ < kSampleMax / 4) resample(resident);
  const std::uint64_t share = std::max<std::uint64_t>(resident >> sample_shift_, 1);
  if (share != recent_.max()) recent_.set_max(share);
}

// Another share of the blocks is watched from now on: the old counts do not speak for it. What is
// no longer watched is never used again in the list, and leaves it first.
void LruGuard::resample(std::uint64_t resident) {
  sample_shift_ = 0;
  while (resident >> sample_shift_ > kSampleMax) ++sample_shift_;
  uses_ = lead_ = differences_ = 0;
}

}  // namespace kvpool
