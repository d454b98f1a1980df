#include "node/resident_walk.h"

#include <algorithm>

namespace kvpool {

bool ResidentWalk::step(const Store& store, std::vector<Resident>& found) {
  constexpr std::uint32_t kAhead = 16;
  const std::uint32_t used = store.records_used();
  const std::uint32_t until = std::min(used, at_ + std::min(kRecordsPerPiece, used - at_));
  for (; at_ < until; ++at_) {
    if (at_ + kAhead < until) __builtin_prefetch(&store.view().record(at_ + kAhead));
    if (!store.is_resident(at_)) continue;
    const auto [space, key] = store.name_of(at_);
    if (space != nullptr) found.push_back({space, key});
  }
  return at_ < used;
}

}  // namespace kvpool
