// A node's part in a cluster: who the members are, this node's shard of the directory, how the
// others are reached, and what tells them of what is here.
//
//   node --asks-->  FarGate -> Finder -> LocateRound, RemoteFetch -> PeerBook    threads of callers
//   node --told-->  Publisher -> PeerWire -> PeerBook                            one thread, here
//   server of the node --asks--> PeerDesk -> DirectoryShard, Puller              its threads
//   what is hot, or asked for -> Replicator, Puller                              one thread, here
//   whoever dials --hands over--> PeerBook                                       threads of callers
//
// Order of their ends (close()): the node asks no more; servers answer no more from the shard;
// streams end, and with them what waits on them; nothing is told any more; those who are still
// inside leave. What calls of the node use goes with the last of them. The node may be closed
// before the cluster, or after it.
//
// Promises:  1. without members, or with none but this node, it serves alone;
//            2. every call ends by its deadline, whatever others do;
//            3. no thread is made for a fetch;
//            4. what is made for others' sake keeps to its budgets, and waits for nobody long.
// Thread rule: every method from any thread; views are taken up one at a time. Not after fork:
// is_forked() first, and then it is not to be destroyed.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "cluster/directory_shard.h"
#include "cluster/finder.h"
#include "cluster/member_view.h"
#include "cluster/peer_book.h"
#include "cluster/peer_desk.h"
#include "cluster/peer_wire.h"
#include "cluster/publisher.h"
#include "cluster/puller.h"
#include "cluster/replicator.h"

namespace kvpool {

class Server;

struct ClusterOptions {
  Hash128 id;                     // of the node
  std::uint64_t incarnation = 0;  // of its life
  DirectoryOptions directory;
  PeerOptions peers;
  Finder::Options finder;
  PublisherOptions publisher;
  ReplicaOptions replicas;
  PullOptions pulls;
  // Of a call of the node in which nothing comes.
  std::chrono::milliseconds fetch_max{1000};
};

struct ClusterMember {
  Hash128 id;
  std::uint64_t incarnation = 0;
  std::uint32_t weight = 1;
  bool is_draining = false;
};

struct ClusterStats {
  std::uint64_t views = 0, members = 0, voters = 0, slots_owned = 0;
  std::uint64_t owners = 0;  // fingerprint of who owns which slots
  bool is_member = false, has_left = false;
  bool is_told = false;     // all that is here, to all who keep the directory, as of a moment ago
  std::uint64_t turns = 0;  // of the thread that tells
  std::uint64_t calls_inside = 0, streams_refused = 0;
  ShardStats shard;
  FinderStats finder;
  PublisherStats publisher;
  WireStats wire;
  ReplicaStats replicas;
  PullStats pulls;
  DrainStats drain;
  bool has_lane = false;
  UcxTotals lane;               // what this node read
  std::uint64_t lane_used = 0;  // bytes of memory that reads land in, now
};

struct ClusterPeer {
  std::uint64_t incarnation = 0;
  bool is_draining = false;
  PeerStats stats;
};

class Cluster {
 public:
  static Result<std::unique_ptr<Cluster>> open(std::shared_ptr<Node> node,
                                               const ClusterOptions& options);
  ~Cluster();  // close(), without waiting for anybody
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  bool is_closed() const { return closed_.load(std::memory_order_acquire); }
  bool is_forked() const { return node_->is_forked(); }
  const Hash128& id() const { return options_.id; }

  // Its streams of peers are answered from this node's shard, until close(). Several may be told.
  Result<void> serve(std::shared_ptr<Server> server);

  // The whole view, this node included if it is a member, in any order. Refused, and everything as
  // before: as MemberView::set().
  Result<void> set_members(std::span<const ClusterMember> members);

  // From now on other members may read out of this node's arena, and this node out of theirs, where
  // both have such a lane (net/ucx_lane.h); what else is asked goes over streams as before. Before
  // the first view. Returns which library it is.
  Result<std::string> open_lane(const UcxOptions& options);
  // For who greets other members, to be told to them: what their add_stream() takes. Empty: there
  // is none.
  std::vector<std::byte> lane_address() const;

  // A socket that this member serves as a peer's; taken over, also on failure. `lane`: what it said
  // of its lane when it was greeted.
  Result<void> add_stream(const Hash128& id, std::uint64_t incarnation, int descriptor,
                          std::span<const std::byte> lane = {});
  // It could not be dialled. No such member (any more): nothing.
  void note_failed(const Hash128& id, std::uint64_t incarnation);
  // To whom streams are wanted; none at the deadline, and once it is closed.
  std::vector<WantedStream> wait_wanted(Deadline deadline);

  struct Holders {
    std::vector<std::vector<Hash128>> of;  // per key
    Miss why = Miss::none;                 // not all owners have answered
  };
  Holders locate(const Hash128& space, std::span<const Hash128> keys, Deadline deadline);

  // Everybody forgets what this node told, and it tells nothing any more. False: somebody was not
  // told by the deadline; he finds out by the next view. A batch that is under way has its own time
  // first, PublisherOptions::timeout.
  bool leave(Deadline deadline);
  // What is warm here and at no other member is fetched by others, hottest first; then leave().
  // Others are better told before that this node drains, so that they do not count on it. False:
  // the deadline came first, or there is nobody; it has left all the same. stats().drain says how
  // far it is. Streams of peers are served throughout.
  bool drain(Deadline deadline);

  ClusterStats stats() const;
  std::vector<ClusterPeer> peers() const;

  // False: a call that was inside had not ended by the deadline; nothing that it uses is gone.
  bool close(Deadline deadline);

 private:
  struct Shared;
  using SnapshotPtr = std::shared_ptr<const MemberView::Snapshot>;
  Cluster(std::shared_ptr<Node> node, const ClusterOptions& options,
          std::shared_ptr<Shared> shared);
  bool is_known(const Hash128& id, std::uint64_t incarnation) const;
  void take_over(const SnapshotPtr& before, const SnapshotPtr& now);
  bool begin_telling();
  void run();
  void run_copies();
  bool copy_some(std::chrono::steady_clock::time_point now);
  void tell_load(std::chrono::steady_clock::time_point now);
  void stop_telling();

  const std::shared_ptr<Node> node_;
  const ClusterOptions options_;
  const std::shared_ptr<Shared> shared_;  // with the node's calls
  std::atomic<bool> closed_{false};
  std::atomic<std::uint64_t> streams_refused_{0}, turns_{0};

  std::mutex views_mutex_;  // held while a view is taken up; before mutex_. Guards the next two
  SnapshotPtr view_;        // nullptr: none yet
  std::uint64_t times_back_ = 0;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable woken_;
  std::vector<std::weak_ptr<Server>> servers_;
  FarReads reads_;                        // until close(); no lane: nothing is read out of arenas
  std::unique_ptr<Publisher> publisher_;  // from the first view until close()
  bool has_left_ = false, stopping_ = false;
  std::thread thread_;  // tells, and sweeps the shard
  std::thread copies_;  // has copies made, here and elsewhere

  // Of the thread that has copies made alone.
  std::chrono::steady_clock::time_point load_at_{};
  std::uint64_t sent_ = 0;  // bytes, as of then
  double sent_per_s_ = 0;
};

}  // namespace kvpool
