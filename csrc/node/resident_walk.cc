#include "node/resident_walk.h"

#include <algorithm>

namespace kvpool {

bool ResidentWalk::step(const Store& store, std::vector<Resident>& found) {
  constexpr std::uint32_t kAhead = 16;
  const bool has_chains = hears_ == Hears::moves;
  const std::uint32_t piece = has_chains ? kRecordsPerPieceWithChains : kRecordsPerPiece;
  const std::uint32_t used = store.records_used();
  const std::uint32_t until = std::min(used, at_ + std::min(piece, used - at_));
  for (; at_ < until; ++at_) {
    if (at_ + kAhead < until) __builtin_prefetch(&store.view().record(at_ + kAhead));
    if (!store.is_resident(at_)) continue;
    const auto [space, key] = store.name_of(at_);
    if (space == nullptr) continue;
    found.push_back({.space = space,
                     .key = key,
                     .parent = has_chains ? store.parent_key(at_) : Hash128{},
                     .tiers = store.tiers_of(at_)});
  }
  return at_ < used;
}

}  // namespace kvpool
