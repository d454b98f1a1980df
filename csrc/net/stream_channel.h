// A node reached over sockets: N streams beside each other, and more of them for those who wait.
//
// get    contiguous parts on several streams at once; the count is the leading run over all parts
// put    one stream, in chain order, in requests of kPutBytes
// acquire, reserve   memory of this process: a copy, not the node's own bytes (but see Options)
// A stream whose deadline passes or whose answer does not fit is ended; the others go on. While
// none lives every call answers at once: Miss::disconnected, PutStatus::disconnected.
//
// Numbers of namespaces belong to a life of the node. Whoever reconnects first makes sure that all
// old streams are ended (is_broken(), or detach()), then stores the new numbers in the Spaces, then
// calls attach(): a call takes its stream first and reads the number after that.
// Thread rule: as Channel. attach(), add(), add_wait_connection(), detach(): one thread at a time.
#pragma once
#include "base/fork_guard.h"
#include "net/channel.h"
#include "net/stream_pool.h"

namespace kvpool {

class StreamChannel final : public Channel {
 public:
  struct Options {
    std::chrono::milliseconds timeout{5000};  // of every call that has no deadline of its own
    // acquire() leases blocks where they lie: for a client that has mapped the node's arena. Its
    // Pins have no base, and places in that arena. Else they are copies in memory of this process.
    bool leases_in_place = false;
  };
  static Result<std::unique_ptr<StreamChannel>> create(const Options& options);
  ~StreamChannel() override;

  // All take the descriptors over, also on failure. attach: instead of all there were.
  Result<void> attach(std::span<const int> descriptors);
  Result<void> add(int descriptor);                  // in place of one that was lost
  Result<void> add_wait_connection(int descriptor);  // at most kWaitConnections
  void detach();                                     // ends all streams
  void close();                                      // nothing in a forked child

  bool is_broken() const { return streams_->live() == 0; }
  std::size_t live() const { return streams_->live(); }
  // Sleeps until a stream has been lost since attach() or add(): true; or until the deadline.
  bool wait_broken(Deadline deadline) { return streams_->wait_lost(deadline); }

  // As wait() below. `refused` = not_here: no wait connection is free, nothing was asked; dial one,
  // add_wait_connection(), ask again.
  std::size_t wait(const Space& space, std::span<const Hash128> keys, Deadline deadline,
                   Refusal& refused);
  std::size_t wait_connections() const { return waits_->live(); }

  bool is_forked() const override { return fork_guard_.is_child(); }
  bool is_closed() const override { return closed_.load(std::memory_order_acquire); }
  bool looks_up_at_once() const override { return false; }
  std::size_t lookup(const Space& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                     Miss& why) override;
  std::size_t get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                  Miss& why) override;
  void put(const PutCall& call, BlockSource& source, PutStatus* statuses) override;
  std::unique_ptr<Pins> acquire(const Space& space, std::span<const Hash128> keys,
                                Miss& why) override;
  std::unique_ptr<Room> reserve(const PutCall& call, PutStatus& status) override;
  std::size_t remove(const Space& space, std::span<const Hash128> keys) override;
  // Without a free wait connection: how many are there now.
  std::size_t wait(const Space& space, std::span<const Hash128> keys, Deadline deadline) override;

  static constexpr std::size_t kWaitConnections = 64;

 private:
  class Copies;
  class InPlace;
  class OwnRoom;
  StreamChannel(const Options& options, std::unique_ptr<StreamPool> streams,
                std::unique_ptr<StreamPool> waits)
      : options_(options), streams_(std::move(streams)), waits_(std::move(waits)) {}

  struct Look {
    const Space& space;
    std::span<const Hash128> keys;
    bool is_part = false;  // of another call
  };
  std::size_t look(const Look& what, std::uint8_t* tiers, Miss& why);
  Deadline by_timeout() const { return std::chrono::steady_clock::now() + options_.timeout; }
  std::size_t get_some(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                       std::size_t first, Deadline deadline, Miss& why);
  std::unique_ptr<Pins> acquire_in_place(const Space& space, std::span<const Hash128> keys,
                                         Miss& why);
  std::size_t put_some(const PutCall& call, std::size_t first, std::size_t count,
                       BlockSource& source, PutStatus* statuses);

  const Options options_;
  const ForkGuard fork_guard_;
  std::shared_ptr<StreamPool> streams_, waits_;  // never another; let go in a forked child
  std::atomic<bool> closed_{false};
};

}  // namespace kvpool
