// Copies of blocks that other nodes have: kept where there is room, or where they are warmer than
// the coldest quarter of what is here. Others are delivered and forgotten.
#include <algorithm>
#include <array>

#include "node/store.h"

namespace kvpool {
namespace {

constexpr std::size_t kSamples = 64;
constexpr std::uint64_t kFreeShareInverse = 16;
constexpr Seconds kQuarterFor = 0.1;  // heat changes over minutes

}  // namespace

bool Store::is_worth_a_copy(const Namespace& space, const Hash128& key, Seconds now) {
  const ClassId klass = space.size_class;
  // Some are always free where the node evicts ahead of need.
  const bool has_slots = slabs_.free_slots(klass) > slabs_.taken_slots(klass) / kFreeShareInverse;
  if (!is_full(klass) || has_slots) return true;
  if (now >= quarter_until_) {
    quarter_heat_ = coldest_quarter(now);
    quarter_until_ = now + kQuarterFor;
  }
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  // This use, and those before it, if the block was here once.
  const double heat = 1 + policy_->ghost_heat(fingerprint(incarnation, key), now).value_or(0);
  return heat >= quarter_heat_;
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

Store::Committed Store::commit_copy(BlockId record, const Hash128& sum, BlockId parent,
                                    Seconds now) {
  const std::uint64_t aborted = counters_.aborted;
  const Committed committed = commit(record, sum, parent, now);
  counters_.aborted = aborted;
  if (committed != Committed::stored) return committed;
  --counters_.puts;
  ++counters_.copies;
  return committed;
}

void Store::abandon_copy(BlockId record) {
  abort(record);
  --counters_.aborted;
}

}  // namespace kvpool
