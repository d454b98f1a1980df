// The best that could have been done, in hindsight. For replay only: it needs the whole future.
//
// Rule `guarded` (the one to report):
//   1. blocks of the running request are pinned;
//   2. a block is passed over when its next use is no nearer than that of every block that could go
//      instead; one that is never used again never enters a full cache.
// Rule `plain` has neither: it inserts every block and evicts the farthest next use, even of the
// chain that it is serving. It maximises block hits and can lose to LRU on prefix hits, as a test
// shows.
//
// Memory: 4 bytes a block of the trace, 8 more at finish().
#pragma once
#include <queue>
#include <vector>

#include "policy/simulator.h"

namespace kvpool {

enum class BeladyRule : std::uint8_t { guarded, plain };

class BeladySimulator final : public Simulator {
 public:
  BeladySimulator(BlockId capacity_blocks, BeladyRule rule)
      : capacity_(capacity_blocks), is_guarded_(rule == BeladyRule::guarded) {}

  void request(std::span<const BlockNames::Name> blocks, Seconds now) override;
  void finish() override;
  SimulatorReport report() const override { return report_; }

 private:
  using Name = BlockNames::Name;
  using Use = std::uint64_t;  // position in the trace
  static constexpr Use kNever = ~Use{0};

  struct Candidate {
    Use next_use;
    Name name;
    auto operator<=>(const Candidate&) const = default;
  };

  void find_next_uses();
  void serve(std::size_t begin, std::size_t end);
  void see(std::size_t position);
  bool make_room(Use next_use);

  BlockId capacity_;
  bool is_guarded_;
  std::vector<Name> trace_;
  std::vector<std::size_t> ends_;            // of requests, in trace_
  std::vector<Use> next_uses_;               // by position
  std::vector<Use> due_;                     // by name: next use of a resident block
  std::vector<bool> is_resident_;            // by name
  std::vector<std::uint32_t> pinned_by_;     // by name: the latest request it was in, plus one
  std::priority_queue<Candidate> farthest_;  // may hold entries that due_ has overtaken
  std::vector<Candidate> pinned_;
  std::uint64_t resident_ = 0;
  SimulatorReport report_;
};

}  // namespace kvpool
