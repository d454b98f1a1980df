// A node of this host, through memory that it shares: looking, copying out and reading in place
// need no request; putting, and what lies on the SSD alone, goes through a lane; the rest is asked
// on a stream.
//
// A reconnect brings a new attachment: calls under way and what they gave (Pins, Room) keep the old
// one alive, and pinned blocks stay readable though their node be gone.
// Thread rule: every method from any thread.
#pragma once
#include <memory>
#include <mutex>

#include "net/channel.h"
#include "net/shm_client.h"

namespace kvpool {

struct ShmUse;

struct ShmChannelOptions {
  // Of calls that bring no deadline.
  std::chrono::milliseconds call_time_max{5000};
};

// Memory for blocks of one size in a row, born in the staging memory, to be put without a copy.
class StagedBlocks {
 public:
  ~StagedBlocks();
  StagedBlocks(const StagedBlocks&) = delete;
  StagedBlocks& operator=(const StagedBlocks&) = delete;

  std::size_t count() const { return count_; }
  std::uint64_t stride() const { return stride_; }
  std::byte* memory(std::size_t index) const { return payload_ + index * stride_; }
  // A put that was late is not answered yet: the node may still be reading there.
  bool is_awaited() const { return run_.use_count() > 1; }

 private:
  friend class ShmChannel;
  StagedBlocks() = default;
  std::shared_ptr<ShmClient> client_;
  // Shared with the lane of a put that was late, until that is answered: nobody else gets the
  // memory before both have let go of it.
  std::shared_ptr<StagingRun> run_;
  std::byte* payload_ = nullptr;
  std::size_t count_ = 0;
  std::uint64_t stride_ = 0, block_bytes_ = 0;
};

class ShmChannel final : public Channel {
 public:
  // `by_request`: remove, wait and acquire through streams to the same node; may be nullptr.
  explicit ShmChannel(std::shared_ptr<Channel> by_request, ShmChannelOptions options = {})
      : by_request_(std::move(by_request)), options_(options) {}

  // Reconnect, in this order: detach(), the new Space::number of every namespace, attach(). So no
  // call takes a number of one life of the node for another's.
  void detach();
  void attach(std::shared_ptr<ShmClient> client);
  void close();
  bool is_broken() const;  // or not attached
  // Sleeps until there is no node (any more), or the deadline has come. True: there is none.
  bool wait_until_broken(Deadline deadline);

  bool is_forked() const override { return fork_guard_.is_child(); }
  bool is_closed() const override { return closed_.load(std::memory_order_acquire); }
  bool looks_up_at_once() const override;
  std::size_t lookup(const Space& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                     Miss& why) override;
  std::size_t get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                  Miss& why) override;
  void put(const PutCall& call, BlockSource& source, PutStatus* statuses) override;
  std::unique_ptr<Pins> acquire(const Space& space, std::span<const Hash128> keys,
                                Miss& why) override;
  std::unique_ptr<Room> reserve(const PutCall& call, PutStatus& status) override;
  std::size_t remove(const Space& space, std::span<const Hash128> keys) override;
  std::size_t wait(const Space& space, std::span<const Hash128> keys, Deadline deadline) override;

  // Room for `count` blocks (at most kKeysPerLane) in a row. nullptr: `status` says which limit.
  std::unique_ptr<StagedBlocks> reserve_many(const Space& space, std::size_t count,
                                             PutStatus& status);
  // Puts the first blocks of `blocks` under call.keys. The memory may be filled again afterwards;
  // while it is_awaited() nothing is put from there: PutStatus::timed_out. Memory of a node that is
  // gone costs its next life a copy.
  void put_staged(const PutCall& call, StagedBlocks& blocks, PutStatus* statuses);

 private:
  // As lookup(), for another call's sake: not counted.
  std::size_t look(const Space& space, std::span<const Hash128> keys) const;
  // Of the attachment there is now, for one call; without a client: there is none.
  ShmUse use(const Space& space, Deadline deadline) const;
  Deadline call_deadline() const {
    return std::chrono::steady_clock::now() + options_.call_time_max;
  }

  const std::shared_ptr<Channel> by_request_;
  const ShmChannelOptions options_;
  ForkGuard fork_guard_;
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;  // guards client_
  std::shared_ptr<ShmClient> client_;
};

}  // namespace kvpool
