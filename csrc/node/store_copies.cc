// Copies of blocks that other nodes have. A reader's is kept where there is room, or where it was
// asked for before; others are delivered and forgotten.
//
// Of two equally warm blocks the copy goes first: it counts half. It goes without being written to
// the SSD, whose place is for what nobody else has.
#include <algorithm>
#include <array>

#include "node/store.h"

namespace kvpool {
namespace {

constexpr std::size_t kSamples = 64;
constexpr std::uint64_t kFreeShareInverse = 16;
constexpr Seconds kQuarterFor = 0.1;  // heat changes over minutes
// Of one use a half-life ago: what was asked for since is warmer.
constexpr double kAskedBefore = 0.5;
constexpr double kCopyCounts = 0.5;
// As warm as two uses just now: worth a place on the SSD.
constexpr double kSecondUse = 1;

}  // namespace

// Some slots are always free where the node evicts ahead of need.
bool Store::has_room_for_copies(ClassId klass) const {
  return !is_full(klass) ||
         slabs_.free_slots(klass) > slabs_.taken_slots(klass) / kFreeShareInverse;
}

bool Store::is_worth_a_copy(const Namespace& space, const Hash128& key, Seconds now) {
  if (has_room_for_copies(space.size_class) || !policy_->has_ghosts()) return true;
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  const Fingerprint name = fingerprint(incarnation, key);
  if (policy_->ghost_heat(name, now).value_or(0) >= kAskedBefore) return true;
  policy_->use_ghost(name, now);
  return false;
}

bool Store::is_warm_copy(const Namespace& space, double heat, Seconds now) {
  if (has_room_for_copies(space.size_class)) return true;
  if (now >= quarter_until_) {
    quarter_heat_ = coldest_quarter(now);
    quarter_until_ = now + kQuarterFor;
  }
  return heat * kCopyCounts >= quarter_heat_;
}

// Of records that lie evenly over all there are: cheap, and no worse than any other sample.
double Store::coldest_quarter(Seconds now) const {
  std::array<double, kSamples> heats;
  std::size_t count = 0;
  const std::size_t step = std::max<std::size_t>(records_used_ / kSamples, 1);
  for (std::size_t record = 0; record < records_used_ && count < kSamples; record += step) {
    const Private& mine = private_[static_cast<BlockId>(record)];
    if (mine.state != State::resident || (mine.flags & kInDram) == 0) continue;
    heats[count++] = policy_->heat(static_cast<BlockId>(record), now);
  }
  if (count == 0) return 0;
  const auto quarter = heats.begin() + static_cast<std::ptrdiff_t>(count / 4);
  std::nth_element(heats.begin(), quarter, heats.begin() + static_cast<std::ptrdiff_t>(count));
  return *quarter;
}

Store::Committed Store::commit_copy(BlockId record, const Hash128& sum, BlockId parent, double heat,
                                    Seconds now) {
  const std::uint64_t aborted = counters_.aborted;
  private_[record].copy = true;
  const Committed committed = commit(record, sum, parent, now);
  counters_.aborted = aborted;
  if (committed != Committed::stored) return committed;
  --counters_.puts;
  ++counters_.copies;
  // Policies without ghosts order by time alone: there this would make it the next to go.
  if (policy_->has_ghosts())
    policy_->set_heat(record, kCopyCounts * std::max(policy_->heat(record, now), heat), now);
  return committed;
}

void Store::abandon_copy(BlockId record) {
  abort(record);
  --counters_.aborted;
}

void Store::be_last(BlockId record, Seconds now) {
  Private& mine = private_[record];
  if (!mine.copy) return;
  mine.copy = false;
  if (!ssd_ || is_on_ssd(record)) return;
  if (ssd_->options().admit == SsdAdmit::all || ssd_->heat().heat(record, now) > kSecondUse)
    write_soon(record);
}

}  // namespace kvpool
