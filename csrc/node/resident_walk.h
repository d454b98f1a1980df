// Which blocks a node has, in any tier, piece by piece.
//
// A block that is here throughout is visited once. One that comes or goes meanwhile may be visited
// or not: who has to know listens to Changes as well, and takes them before and after each piece.
// Thread rule: the node's lock for each piece; see Node::walk().
#pragma once
#include <cstdint>
#include <vector>

#include "node/store.h"

namespace kvpool {

struct Resident {
  const Namespace* space = nullptr;  // as long-lived as the node
  Hash128 key;
  Hash128 parent{};        // of a walk with chains; zero: none is known
  std::uint8_t tiers = 0;  // TierBits
};

class ResidentWalk {
 public:
  // Cold lines of memory, some 50 ns each: a piece takes 0.2 ms at worst.
  static constexpr std::uint32_t kRecordsPerPiece = 4096;
  // With a few more lines for the block before each.
  static constexpr std::uint32_t kRecordsPerPieceWithChains = 1024;

  explicit ResidentWalk(Hears hears = Hears::blocks) : hears_(hears) {}

  // Appends what is in the next piece. False: that was the last.
  bool step(const Store& store, std::vector<Resident>& found);

 private:
  Hears hears_;
  std::uint32_t at_ = 0;
};

}  // namespace kvpool
