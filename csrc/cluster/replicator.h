// Sees to it that hot prefixes lie at more than one member, and that nothing warm is lost when this
// node goes.
//
//   search the hottest prefixes -> ask the directory who has their blocks -> ask the member with
//   the least to do to fetch what too few have -> ask it again how far it is
//
// Payload has one path: a member that is asked fetches as for its own clients (cluster/puller.h).
// No storms: a prefix begins to be copied at heat_begin and stays so down to heat_end; what is
// asked for keeps to a budget; each member is asked for one run of blocks at a time; a prefix that
// was refused is left alone for a while. Where several have a block, the one with the smallest id
// asks.
// Bounds: a turn sends one request to each of kJobsMax members at most, each with its deadline.
// Thread rule: turn() by one thread at a time, drain() by any other; the rest by any.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cluster/locate_round.h"
#include "net/rate_limit.h"
#include "node/node.h"

namespace kvpool {

struct ReplicaOptions {
  std::uint32_t max_replicas = 2;  // members that have a hot block; 1: no copies are made
  std::uint64_t bytes_per_s = 64ull << 20;
  double heat_begin = 4, heat_end = 2;
  double heat_warm = 0.125;   // what a drain does not leave behind
  std::size_t prefixes = 64;  // looked at
  std::chrono::milliseconds search_every{5000};
  int search_share =
      50;  // a search takes this part of a thread's time at most; 0: whatever it takes
  std::chrono::milliseconds ask_max{250};  // of one request
  std::chrono::milliseconds busy_pause{2000}, refused_pause{60'000}, stuck_max{30'000};
};

struct ReplicaStats {
  std::uint64_t searches = 0, hot = 0;  // prefixes of the last one that are copied, or would be
  std::uint64_t paused = 0, under_way = 0;
  std::uint64_t asked = 0, asked_blocks = 0, asked_bytes = 0;  // runs, and what they hold
  std::uint64_t copied_blocks = 0, copied_bytes = 0;           // that came where they were asked to
  std::uint64_t busy = 0, too_cold = 0, no_room = 0, refused = 0, unanswered = 0, given_up = 0;
};

struct DrainStats {
  bool is_running = false, is_over = false;
  std::uint64_t prefixes = 0, prefixes_left = 0;
  std::uint64_t moved_blocks = 0, moved_bytes = 0;
  std::uint64_t refused_blocks = 0;  // nobody wanted them: colder than what they have
};

class Replicator {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Deadline = Time;
  static constexpr std::size_t kJobsMax = 16;
  static constexpr std::size_t kEndsMax = 1 << 20;  // of a drain

  struct Parts {  // all outlive this
    Node& node;
    const MemberView& members;
    const PeerBook& peers;
    DirectoryService* own;  // this node's shard
  };
  Replicator(const Parts& parts, const ReplicaOptions& options);

  // False: nothing is under way.
  bool turn(Time now);
  // What is warm here and nobody else has is fetched by others, hottest first. False: not all of it
  // by the deadline, or stop() came. What others do not want counts as refused, and is no failure.
  bool drain(Deadline deadline);
  void stop();
  ReplicaStats stats() const;
  DrainStats drain_stats() const;

 private:
  struct Prefix {
    const Namespace* space = nullptr;
    Hash128 last;
    int refusals = 0;
  };
  struct Name {
    std::uint32_t number = 0;
    Hash128 key;
    friend bool operator==(const Name&, const Name&) = default;
  };
  struct HashOf {
    std::size_t operator()(const Name& name) const { return name.key.low ^ name.number; }
    std::size_t operator()(const DirectoryKey& key) const { return key.low; }
  };
  struct Known {  // of a prefix
    bool is_hot = false;
    Time paused_until{};
    std::chrono::milliseconds pause{0};  // the last one, of what was asked for and did not come
  };
  struct Job {
    Prefix prefix;
    MemberHandle target = kNoMember;
    std::vector<Hash128> keys;
    Hash128 before;
    double heat = 0;
    std::size_t from = 0, to = 0;  // what it has been asked for last; equal: nothing
    std::uint64_t number = 0;
    std::optional<std::uint32_t> here_first{};  // as of its first answer
    std::uint32_t here = 0;
    Time moved;  // when something came last
  };
  struct Chain {
    std::vector<Node::ChainBlock> blocks;
    std::vector<Whereabouts> where;
  };
  struct Run {
    std::size_t from = 0, to = 0;
  };

  void search(Time now);
  Chain chain_of(const Prefix& prefix, const MemberView::Snapshot& members);
  Run wanted_run(const Chain& chain, const Prefix& prefix, const MemberView::Snapshot& members);
  bool is_wanted(const Whereabouts& where, const MemberView::Snapshot& members) const;
  bool begin(const Prefix& prefix, Time now);
  std::optional<MemberHandle> choose(const Chain& chain, std::size_t first,
                                     const MemberView::Snapshot& members, Time now);
  bool may_ask(const MemberView::Member& member, const MemberView::Snapshot& members,
               Time now) const;
  void advance(Time now);
  bool advance(Job& job, Time now);
  bool next_batch(Job& job, Time now);
  std::optional<PullAnswer> ask(const Job& job);
  bool take(Job& job, const PullAnswer& answer, Time now);
  void refused(const Job& job, Pulling how, Time now);
  void pause(const Prefix& prefix, MemberHandle target, Time prefix_until, Time target_until);
  void give_up(const Job& job, Time target_until, Time now);
  // What it holds from there on is not on its way any more.
  void forget(const Job& job, std::size_t from);
  bool drain_pass(Deadline deadline);
  void try_again(const Job& job, bool is_refused);
  void count_refused(const Prefix& prefix);
  static bool has_others(const MemberView::Snapshot& members);
  template <typename Change>
  void count(Change change) {
    const std::lock_guard lock(mutex_);
    change();
  }

  const Parts parts_;
  const ReplicaOptions options_;

  std::timed_mutex turning_;  // guards what follows, down to mutex_
  RateLimit rate_;
  std::optional<Time> search_at_;
  std::uint64_t version_ = 0;  // of the members
  std::unordered_map<Name, Known, HashOf> known_;
  std::deque<Prefix> wanted_;
  std::vector<Job> jobs_;
  std::unordered_map<MemberHandle, Time> resting_;  // members that are not asked until then
  std::uint64_t next_number_;
  bool is_draining_ = false;
  // Asked for by now, whether or not the directory knows: since the last search and since the one
  // before; a drain knows only the first.
  std::unordered_set<DirectoryKey, HashOf> asked_, asked_before_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable stopped_;
  bool is_stopped_ = false;
  ReplicaStats counts_;
  DrainStats drain_;
};

}  // namespace kvpool
