// Tells what this node has, slot by slot, to whoever keeps the slots now: after a view has moved
// them, after something was lost, and from time to time all of it.
//
// A round is one walk over all blocks; what is asked for while it goes on waits for the next.
// Promises:  1. a block of an asked slot that is here throughout is told;
//            2. at most so many keys a second on average, so that a member that joins is not
//               flooded; the node's lock is held for under 1 ms at a time.
// Thread rule: its publisher's thread.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "cluster/directory_key.h"
#include "node/node.h"

namespace kvpool {

class Announcer {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Tell = std::function<void(const DirectoryKey&)>;

  Announcer(Node& node, std::uint64_t keys_per_s) : node_(node), keys_per_s_(keys_per_s) {}

  void ask(const SlotSet& slots) { asked_ |= slots; }
  // A piece of a round, if one is asked for and it is time. True: more could be told at once.
  bool step(Time now, const Tell& tell);
  bool is_idle() const { return !walk_ && asked_.none(); }
  std::uint64_t rounds() const { return rounds_; }
  std::uint64_t told() const { return told_; }

 private:
  Node& node_;
  const std::uint64_t keys_per_s_;
  SlotSet asked_, telling_;
  std::optional<ResidentWalk> walk_;
  std::vector<Resident> piece_;
  Time next_{};
  std::uint64_t rounds_ = 0, told_ = 0;
};

}  // namespace kvpool
