// How this node reaches one other member: streams that were dialled for it, lent to whoever asks,
// and a circuit breaker before them.
//
//   closed     requests go out
//   open       none does, until the pause is over: .25 s, doubled at each failure up to 30 s
//   half-open  one request may: a success closes, a failure opens for longer
//
// Promises:  1. while it is open, asking costs no system call;
//            2. a failed request opens it at once; one that had less than `patience` and came too
//               late is no failure, since it says more of who asked than of the member;
//            3. no lock is held while anything waits for the member.
// Thread rule: every method from any thread.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "block/key.h"
#include "cluster/far_way.h"
#include "cluster/member_view.h"
#include "net/frame.h"
#include "net/stream_pool.h"

namespace kvpool {

class WantedStreams;

enum class BreakerState : std::uint8_t { closed, open, half_open };

struct PeerOptions {
  std::size_t streams = 4;  // one of them for short requests alone
  std::chrono::milliseconds pause_min{250}, pause_max{30'000};
  std::chrono::milliseconds patience{100};
};

struct PeerStats {
  MemberHandle member = kNoMember;
  Hash128 id;
  BreakerState breaker = BreakerState::closed;
  std::size_t streams = 0;
  std::uint64_t in_flight_bytes = 0;
  double latency_s = 0;  // of the first byte of an answer, smoothed; 0: none yet
  std::uint64_t requests = 0, failures = 0, opened = 0, refused_open = 0;
  std::uint64_t hurried = 0;  // requests that were given up too soon to blame the member
  std::uint64_t fetched_blocks = 0, fetched_bytes = 0, damaged = 0, stale = 0;
  FarWayStats far;  // of what was fetched: by one-sided reads
};

class Peer {
 public:
  using Clock = std::chrono::steady_clock;
  Peer(MemberHandle member, const Hash128& id, const PeerOptions& options,
       std::shared_ptr<WantedStreams> wanted, FarReads reads = {});

  MemberHandle member() const { return member_; }
  const Hash128& id() const { return id_; }

  // A socket that the other side serves as a peer's; taken over, also on failure. One more than
  // wanted is closed. `lane`: what the other side said of its arena at the hello; none: nothing.
  Result<void> add_stream(int descriptor, std::span<const std::byte> lane = {});
  // The dialer could not: it is asked again after a pause. Where no stream lives this is as a
  // failed request; else the member takes no more of them, and serves those that it has.
  void dial_failed();
  void close();

  // Whether asking makes sense now. Says so to one caller while half open: who was told yes asks.
  bool may_ask();
  // The same, without a claim to ask.
  bool is_open() const;
  // Empty: none lives (then the dialer is told), or none was free in time (`late`).
  StreamPool::Loan borrow_short(Deadline deadline, bool& late);
  // Without waiting; any stream will do.
  StreamPool::Loan try_short(bool& busy);
  StreamPool::Loan borrow_bulk(std::size_t wanted, Deadline deadline, bool& late);

  // What became of a request. `latency`: until its first byte came. `waited`: how long it had.
  void succeeded(Clock::duration latency);
  void failed(Miss why, Clock::duration waited = Clock::duration::max());
  // may_ask() said yes, and then nothing was asked.
  void not_asked();

  // The member's number of a namespace, with the size of its blocks; asked for once.
  struct Space {
    std::uint32_t number = 0;
    std::uint32_t block_bytes = 0;
  };
  // nullopt: `why`; absent: it has no such namespace.
  std::optional<Space> space(const Hash128& id, Deadline deadline, Miss& why);
  void forget_space(const Hash128& id);

  void add_in_flight(std::uint64_t bytes) { in_flight_.fetch_add(bytes); }
  void sub_in_flight(std::uint64_t bytes) { in_flight_.fetch_sub(bytes); }
  void count_fetched(std::uint64_t blocks, std::uint64_t bytes);
  void count_stale() { stale_.fetch_add(1, std::memory_order_relaxed); }
  // Seconds until so many bytes more would be here, as far as is known: smaller is better.
  double cost(std::uint64_t bytes) const;
  // As its last answer said.
  void note_load(MemberLoad load) {
    if (load.is_told != 0) load_.store(load, std::memory_order_relaxed);
  }
  MemberLoad load() const { return load_.load(std::memory_order_relaxed); }
  FarWay& far() { return far_; }
  std::size_t streams() const { return short_->live() + bulk_->live(); }
  PeerStats stats() const;

 private:
  struct HashOf {
    std::size_t operator()(const Hash128& id) const { return id.low ^ id.high; }
  };
  static constexpr std::size_t kSpacesMax = 4096;  // then all are asked for again

  void want();
  void open_breaker();

  const MemberHandle member_;
  const Hash128 id_;
  const PeerOptions options_;
  const std::shared_ptr<WantedStreams> wanted_;
  // Theirs is no descriptor: there may be thousands of members, and none is used yet.
  const std::unique_ptr<StreamPool> short_ = StreamPool::make_unwatched();
  const std::unique_ptr<StreamPool> bulk_ = StreamPool::make_unwatched();
  std::atomic<std::uint64_t> in_flight_{0}, fetched_blocks_{0}, fetched_bytes_{0}, stale_{0};

  std::atomic<MemberLoad> load_{MemberLoad{}};
  FarWay far_;

  mutable std::mutex mutex_;  // guards all below
  BreakerState state_ = BreakerState::closed;
  bool is_probing_ = false;  // half open, and somebody asks
  Clock::time_point closed_again_{};
  std::chrono::milliseconds pause_, dial_pause_{0};
  Clock::time_point dialled_again_{};
  double latency_s_ = 0;
  std::uint64_t requests_ = 0, failures_ = 0, opened_ = 0, refused_open_ = 0, damaged_ = 0;
  std::uint64_t hurried_ = 0;
  std::unordered_map<Hash128, Space, HashOf> spaces_;
  bool closed_ = false;
};

}  // namespace kvpool
