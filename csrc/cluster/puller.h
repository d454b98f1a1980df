// The side that is asked to have copies: takes in what peers ask for, and has it fetched piece by
// piece, within a budget, by whoever calls step().
//
// Refuses what it would let go soon (too_cold), what does not fit (no_room), and what it does not
// get to soon (busy). Who asks the same again learns how far it is. One that begins empty gets no
// burst: from its first second on it takes in what its budget allows, whoever asks.
// Bounds: one pull of each member, kPullsMax in all, of kKeysPerRequest keys each; with more than
// kQueueSeconds of the budget ahead it is busy.
// Thread rule: step() by one thread at a time; the rest by any.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "net/frame.h"
#include "net/rate_limit.h"
#include "node/node.h"

namespace kvpool {

struct PullOptions {
  std::uint64_t bytes_per_s = 64ull << 20;
  // Of blocks that would be lost otherwise.
  std::uint64_t last_bytes_per_s = 256ull << 20;
  std::chrono::milliseconds piece_max{2000};  // one step may take so long
};

struct PullStats {
  std::uint64_t asked = 0, taken = 0;  // pulls
  std::uint64_t busy = 0, too_cold = 0, no_room = 0, refused = 0;
  std::uint64_t blocks = 0, bytes = 0;  // that came
  std::uint64_t missed = 0;             // blocks that did not
  std::uint64_t queued = 0;             // pulls, now
};

class Puller {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::size_t kPullsMax = 16;
  static constexpr std::size_t kOverKept = 64;  // of which it is known how they ended
  static constexpr double kQueueSeconds = 4;
  static constexpr std::uint64_t kPieceBytes = 8ull << 20;

  Puller(std::shared_ptr<Node> node, const PullOptions& options, Time now);

  PullAnswer ask(const PullHead& head, std::span<const Hash128> keys, bool are_last);
  // Fetches one piece, if the budget allows it now. False: there was nothing to do.
  bool step(Time now);
  // From now on it takes nothing in; what it has taken in is forgotten.
  void stop();
  PullStats stats() const;

 private:
  struct Pull {
    Hash128 from;
    std::uint64_t number = 0;
    const Namespace* space = nullptr;
    std::vector<Hash128> keys;  // with the one before the first, if it is known
    std::size_t first = 0, next = 0;
    double heat = 0;
    bool are_last = false;
    Pulling ended = Pulling::over;
  };
  using PullPtr = std::shared_ptr<Pull>;

  std::uint32_t count_here(const Namespace& space, std::span<const Hash128> keys) const;
  Namespace* space_of(const PullHead& head);
  PullPtr known(const PullHead& head, Pulling& state);
  bool is_busy(std::uint64_t bytes, bool are_last) const;
  void take_in(const PullHead& head, const Namespace& space, std::span<const Hash128> keys,
               bool are_last);
  std::size_t next_piece(Pull& pull, std::uint64_t& bytes) const;
  void end(const PullPtr& pull, Pulling how);
  bool step(const PullPtr& pull, Time now);

  const std::shared_ptr<Node> node_;
  const PullOptions options_;
  RateLimit rate_, last_rate_;
  mutable std::mutex mutex_;  // guards all below
  std::deque<PullPtr> queue_;
  std::deque<PullPtr> over_;  // oldest first
  std::uint64_t queued_bytes_ = 0;
  bool is_stopped_ = false;
  PullStats counts_;
};

}  // namespace kvpool
