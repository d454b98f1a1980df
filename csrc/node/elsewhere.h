// Whom a node asks for blocks that it does not have: the other members of its cluster.
//
// Promises:  1. every call ends by its deadline;
//            2. only a block of which arrived() was said may be shown to anybody: its bytes are the
//               ones that its holder made its checksum of. Until then a place holds anything;
//            3. when fetch() has returned, nobody writes to a place of its sink any more.
// Thread rule: every method from any thread. Nothing here is called under the node's lock.
#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "node/miss.h"
#include "node/namespaces.h"

namespace kvpool {

class BlockSink;

// Of a lookup's tiers, beside TierBits: not on this node, but some member says that it has it.
inline constexpr std::uint8_t kTierRemote = 8;

// How far a call goes for blocks that are not on this node, and until when.
struct Reach {
  using Deadline = std::chrono::steady_clock::time_point;
  bool is_far = true;
  // Nor, without anything coming, for longer than NodeOptions::far_timeout.
  std::optional<Deadline> until{};

  // Never further than this node: what other nodes ask, so that no request goes round.
  static Reach here() { return {.is_far = false}; }
  static Reach by(Deadline deadline) { return {.until = deadline}; }
};

class Elsewhere {
 public:
  using Deadline = Reach::Deadline;
  virtual ~Elsewhere() = default;

  struct Ask {
    const Namespace& space;
    std::span<const Hash128> keys;
    Deadline deadline;
  };
  // has[i] = 1: some other member says that it has keys[i]; as long as `keys`. Miss::none: all
  // whose word counts have answered; else why some have not.
  virtual Miss find(const Ask& ask, std::span<std::uint8_t> has) = 0;
  // Brings blocks, in any order, into sink.place(i), which may be asked for more than once; then
  // says sink.arrived(i, sum). All from the calling thread. What cannot be had does not hold up
  // what comes before it. Answers why the first that did not come did not; none: all did.
  virtual Miss fetch(const Ask& ask, BlockSink& sink) = 0;
};

}  // namespace kvpool
