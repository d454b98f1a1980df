// Finds and fetches what a node does not have: asks the directory who holds it, chooses among the
// holders, fetches.
//
// Answers of the directory are kept for a moment, since a lookup and the get behind it ask the
// same; a hint that turned out stale is dropped at once.
// Thread rule: every method from any thread.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cluster/locate_round.h"
#include "node/elsewhere.h"

namespace kvpool {

struct FinderStats {
  std::uint64_t finds = 0, fetches = 0, rounds = 0, round_keys = 0, cached_keys = 0;
  std::uint64_t stale = 0, late_rounds = 0;
};

class Finder final : public Elsewhere {
 public:
  struct Options {
    // A hit is kept for so long, and that nobody has it for so long.
    std::chrono::milliseconds keep_found{2000}, keep_absent{50};
    std::chrono::milliseconds locate_max{250};  // of one round
    std::size_t cached_max = 1 << 17;           // keys, in two halves
  };
  // `own`: this node's shard; nullptr: it has none. All outlive this.
  Finder(const MemberView& members, const PeerBook& peers, DirectoryService* own,
         const Options& options);
  Finder(const MemberView& members, const PeerBook& peers, DirectoryService* own)
      : Finder(members, peers, own, Options{}) {}

  Miss find(const Ask& ask, std::span<std::uint8_t> has) override;
  Miss fetch(const Ask& ask, BlockSink& sink) override;
  FinderStats stats() const;

 private:
  struct Kept {
    Whereabouts where;
    Deadline until;
    std::uint64_t version = 0;  // of the members
  };
  struct HashOf {
    std::size_t operator()(const DirectoryKey& key) const { return key.low; }
  };
  using Cache = std::unordered_map<DirectoryKey, Kept, HashOf>;

  Miss locate(const MemberView::Snapshot& members, std::span<const DirectoryKey> keys,
              Deadline deadline, std::span<Whereabouts> answers);
  bool from_cache(const DirectoryKey& key, std::uint64_t version, Whereabouts& answer);
  void into_cache(const DirectoryKey& key, std::uint64_t version, const Whereabouts& answer);
  void forget(const DirectoryKey& key, MemberHandle holder);

  const MemberView& members_;
  const PeerBook& peers_;
  DirectoryService* const own_;
  const Options options_;
  std::atomic<std::uint64_t> finds_{0}, fetches_{0}, rounds_{0}, round_keys_{0}, cached_keys_{0},
      stale_{0}, late_rounds_{0};
  std::mutex mutex_;  // guards the two below
  Cache young_, old_;
};

}  // namespace kvpool
