// Which blocks came to this node, and which left it, for those who tell others: the directory of a
// cluster, a stream of events.
//
// A block comes when it becomes readable in any tier and goes when it is in none. Who listens for
// moves, too, hears of every tier that a block comes to or leaves, and which block it follows. What
// the node had before somebody listened is no change: a walk over it tells
// (node/resident_walk.h).
// Promises:  1. changes of one key come in their order;
//            2. memory is bounded: what does not fit is not noted, and is_lost() says so. Then, and
//               when a namespace was dropped, only a walk tells what is here;
//            3. what one listener does not take costs the others nothing.
// Thread rule: the node's lock.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "node/namespaces.h"

namespace kvpool {

struct Change {
  const Namespace* space = nullptr;  // as long-lived as the node
  Hash128 key;
  // With a block that came, for who listens for moves: the one before it. Zero: none is known.
  Hash128 parent{};
  std::uint8_t before = 0, after = 0;  // TierBits
  bool came() const { return after != 0; }
};

enum class Hears : std::uint8_t {
  blocks,  // that come and go
  moves,   // between tiers as well, and chains
};

class Changes {
 public:
  Changes(std::size_t changes_max, Hears hears) : max_(changes_max), hears_(hears) {
    noted_.reserve(changes_max);
  }

  Hears hears() const { return hears_; }
  void note(const Change& change) {
    const bool is_move = change.before != 0 && change.after != 0;
    if (is_move && hears_ == Hears::blocks) return;
    if (noted_.size() < max_)
      noted_.push_back(change);
    else
      is_lost_ = true;
  }
  // Said again, for somebody who thinks otherwise. Only where there is plenty of room, so that who
  // asks for it often makes nothing else get lost.
  void repeat_gone(const Namespace& space, const Hash128& key) {
    if (noted_.size() <= max_ / kRepeatsShare) noted_.push_back({&space, key});
  }
  // More changed at once than is worth naming one by one.
  void lose() { is_lost_ = true; }

  // Into `taken`, whose memory is used for what comes next. False: some were lost.
  bool take(std::vector<Change>& taken) {
    taken.clear();
    taken.reserve(max_);  // no memory is asked for while blocks are noted
    noted_.swap(taken);
    return !std::exchange(is_lost_, false);
  }

 private:
  static constexpr std::size_t kRepeatsShare = 64;
  const std::size_t max_;
  const Hears hears_;
  std::vector<Change> noted_;
  bool is_lost_ = false;
};

// Everybody who listens to one node: a few.
class Listeners {
 public:
  static constexpr std::size_t kMax = 4;

  bool is_any() const { return count_ > 0; }
  bool is_full() const { return count_ == kMax; }
  // Somebody hears of moves: finding them, and chains, costs a little.
  bool hear_moves() const { return movers_ > 0; }
  void add(Changes* changes) {
    each_[count_++] = changes;
    movers_ += changes->hears() == Hears::moves;
  }
  void remove(const Changes* changes) {
    for (std::size_t i = 0; i < count_; ++i) {
      if (each_[i] != changes) continue;
      movers_ -= changes->hears() == Hears::moves;
      each_[i] = each_[--count_];
      return;
    }
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::size_t i = 0; i < count_; ++i) visit(*each_[i]);
  }
  void note(const Change& change) const {
    for_each([&](Changes& each) { each.note(change); });
  }

 private:
  std::array<Changes*, kMax> each_{};
  std::size_t count_ = 0, movers_ = 0;
};

}  // namespace kvpool
