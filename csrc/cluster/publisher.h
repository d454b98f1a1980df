// Tells the members that keep the directory what came to this node and what left it.
//
//   changes of the node -> a queue per owner -> batches -> the wire, or this node's own shard
//
// Nothing of this is on the path of a put: a block is noted under the lock that its commit holds
// anyway, and all else is done by one thread of its own.
// Promises:  1. an owner that answers knows what this node has, but for what the queues still hold;
//            2. what did not fit, or got lost on the way, is not guessed: the owner is told that
//               all it knew of this node is void, and then all of it anew (cluster/announcer.h);
//            3. memory is bounded: keys_queued_max keys for each owner and two batches;
//            4. owners are told side by side: those that do not answer cost the others one timeout,
//               all of them together, in each of their pauses, which double;
//            5. an owner that has forgotten this node, because it was no member for a while without
//               seeing so itself, is found out within check_every.
// Thread rule: turn() by one thread, which start() makes; the rest by any.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cluster/announcer.h"
#include "cluster/owner_queue.h"
#include "cluster/wire.h"
#include "net/directory_service.h"
#include "node/node.h"

namespace kvpool {

struct PublisherOptions {
  std::chrono::milliseconds linger{20};
  std::size_t changes_max = 1 << 16;  // noted between two turns; 32 bytes each
  // For each owner; 24 bytes each. At least two pieces of a walk, since one may be all for it.
  std::size_t keys_queued_max = 1 << 16;
  std::chrono::milliseconds timeout{500};
  std::chrono::milliseconds pause_min{250}, pause_max{30'000};
  std::chrono::milliseconds announce_every{600'000};
  std::chrono::milliseconds check_every{5000};  // a batch of no keys, where there was none so long
  std::uint64_t announced_per_s = 500'000;      // keys
};

struct PublisherStats {
  std::uint64_t owners = 0, owners_anew = 0, owners_paused = 0, queued = 0;
  std::uint64_t published = 0, withdrawn = 0;  // keys that were answered for
  std::uint64_t batches = 0, retries = 0, gaps = 0, begun_anew = 0;
  std::uint64_t overflows = 0;  // of a queue
  std::uint64_t lost = 0;       // times that changes were not named to owners that knew the rest
  std::uint64_t rounds = 0, announced = 0;
};

class Publisher {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Who this node is: `self` without a sequence. All of these outlive the publisher.
  struct Parts {
    Node& node;
    DirectoryService& own_shard;
    Wire& wire;
    Announcement self;
  };
  Publisher(const Parts& parts, const PublisherOptions& options);
  ~Publisher();  // stop()
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  void set_view(OwnerView view);  // in force with the next turn
  void start();
  void stop();
  // Takes what changed, tells what is due. True: more is to be done at once.
  bool turn(Time now);
  // Nothing waits to be told to anybody, as of the last turn.
  bool is_done() const;
  PublisherStats stats() const;

 private:
  struct Unanswered {  // sent again as it is, until there is an answer
    Announcement from;
    bool is_withdraw = false, is_fresh = false;
    std::vector<DirectoryKey> keys;
  };
  struct Owner {
    explicit Owner(std::size_t keys_max) : queue(keys_max) {}
    std::uint64_t incarnation = 0;
    std::uint16_t voter = 0;
    bool is_anew = true;   // nothing is queued: all is told once it has heard that we begin anew
    bool is_gone = false;  // until the next view
    bool is_busy = false;  // until the next turn
    OwnerQueue queue;
    std::deque<Unanswered> unanswered;  // a withdraw and a publish at most
    std::uint64_t sequence = 0;
    Time heard_at{};  // its last answer
    Time not_before{};
    std::chrono::milliseconds pause{0};
  };

  void run();
  void take_view();
  void take_changes(Time now);
  void push(const DirectoryKey& key, bool came, Time now);
  bool announce(Time now);
  bool make_room(Time now);
  bool tell(Time now);
  bool may_tell(const Owner& owner, Time now) const {
    return !owner.is_gone && !owner.is_busy && now >= owner.not_before;
  }
  const Unanswered* next_for(Owner& owner, Time now);
  void next_batch(Owner& owner, Time now);
  void begin_anew(Owner& owner);
  void heard(Owner& owner, Sent sent, Time now);
  void pause(Owner& owner, Time now);
  Sent tell_own(const Batch& batch);
  void note_stats();

  const Parts parts_;
  const PublisherOptions options_;
  Announcer announcer_;
  OwnerView view_;
  std::map<MemberHandle, Owner> owners_;
  std::vector<Change> changes_;
  std::vector<Wire::Parcel> parcels_;
  std::uint64_t times_anew_ = 0;  // the upper half of a sequence
  Time next_announcement_{};

  mutable std::mutex mutex_;  // guards the fields below
  std::condition_variable woken_;
  std::optional<OwnerView> new_view_;
  bool stopping_ = false;
  PublisherStats stats_;
  bool is_done_ = false;
  PublisherStats counts_;  // the turn's own
  std::thread thread_;
};

}  // namespace kvpool
