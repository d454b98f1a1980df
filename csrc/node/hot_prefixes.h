// Which prefixes are in use now: the blocks where a chain's heat ends, hottest first.
//
// A block is such an end if its hottest child has less than half its heat: most of those who use
// the chain up to here do not go on, or not the same way. Two passes over all records, in slices
// that others may come between: what changes meanwhile is told as it was at one time or the other,
// and what leaves meanwhile is left out.
// Thread rule: the node's lock for each call; the constructor and take() without it.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "node/store.h"

namespace kvpool {

struct HotPrefix {
  std::uint32_t number = 0;  // of its namespace
  Hash128 key;               // of the last block
  std::uint32_t depth = 0;   // blocks up to and with it, as known when it came in
  double heat = 0;
  std::optional<Seconds> idle_s;
  std::uint64_t tiers = 0;     // TierBits
  std::uint32_t children = 0;  // resident blocks that go on from it; 65,535 = or more
};

class HotPrefixes {
 public:
  // Of the records below `records`.
  HotPrefixes(std::size_t count, std::uint32_t records, Seconds now);
  // A slice. False: that was the last.
  bool step(const Store& store);
  std::vector<HotPrefix> take() { return std::move(found_); }

 private:
  struct Child {
    std::uint16_t heat_steps = 0;  // of the hottest, see steps_of()
    std::uint16_t count = 0;
  };
  struct End {
    double heat;
    BlockId record;
    std::uint64_t generation;
    bool operator>(const End& other) const {
      return heat != other.heat ? heat > other.heat : record < other.record;
    }
  };
  enum class Stage : std::uint8_t { children, ends, facts };

  void count_child(const Store& store, BlockId record);
  void consider(const Store& store, BlockId record);
  void tell(const Store& store, const End& end);

  std::size_t count_;
  Seconds now_;
  Stage stage_ = Stage::children;
  std::uint32_t at_ = 0;
  std::vector<Child> children_;  // by record
  std::vector<End> ends_;        // a heap with the coldest on top; sorted at last
  std::vector<HotPrefix> found_;
};

}  // namespace kvpool
