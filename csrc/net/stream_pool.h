// The streams of one client, lent to its threads: a get takes several, everything else one.
//
// The circuit breaker is here: who asks while no stream lives is told so at once.
// Thread rule: every method from any thread.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "net/stream_client.h"

namespace kvpool {

class StreamPool {
 public:
  using Streams = std::vector<std::shared_ptr<StreamClient>>;

  // Streams that are one thread's; back in the pool, unless they ended, when this is gone.
  class Loan {
   public:
    Loan() = default;
    Loan(StreamPool& pool, Streams streams) : pool_(&pool), streams_(std::move(streams)) {}
    Loan(Loan&& other) noexcept : pool_(other.pool_), streams_(std::exchange(other.streams_, {})) {}
    Loan& operator=(Loan&&) = delete;
    ~Loan() {
      if (!streams_.empty()) pool_->take_back(streams_);
    }
    const Streams& streams() const { return streams_; }
    StreamClient& one() const { return *streams_.front(); }
    bool empty() const { return streams_.empty(); }

   private:
    StreamPool* pool_ = nullptr;
    Streams streams_;
  };

  static Result<std::unique_ptr<StreamPool>> create();
  // Without a descriptor of its own: not for wait_lost().
  static std::unique_ptr<StreamPool> make_unwatched();
  ~StreamPool() { close(); }
  StreamPool(const StreamPool&) = delete;
  StreamPool& operator=(const StreamPool&) = delete;

  // Instead of all there were, which are ended.
  void replace(Streams streams);
  void add(std::shared_ptr<StreamClient> stream);
  void close();

  // From 1 to `wanted`, without waiting for more than the first; empty: none lives, or the deadline
  // came before one was free (`late`).
  Loan borrow(std::size_t wanted, Deadline deadline, bool& late);
  // Of those that nobody uses, the ones whose other side has closed.
  void end_closed();
  // Without waiting.
  Loan try_borrow() { return lend_now(); }
  // Of the same node as when life() was asked; empty if there is another by now.
  Loan borrow_of(std::uint64_t life, Deadline deadline);
  // Changes with every replace().
  std::uint64_t life() const;

  std::size_t live() const;
  // Sleeps until fewer streams live than there were at the last replace() or add(), or until the
  // deadline: false. Sees the end of those that nobody uses.
  bool wait_lost(Deadline deadline);

 private:
  using Lock = std::unique_lock<std::mutex>;
  explicit StreamPool(Descriptor changed) : changed_(std::move(changed)) {}
  Loan lend_now();
  Loan lend(Lock& lock, std::size_t wanted, Deadline deadline, bool& late);
  void take_back(const Streams& streams);
  void forget_dead();  // under the lock
  void tell_changed();

  const Descriptor changed_;  // eventfd: wakes wait_lost(); not open: nobody waits
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable free_;
  Streams all_, idle_;
  std::size_t wanted_ = 0;
  std::uint64_t life_ = 0;
  std::size_t waiting_ = 0;
  bool closed_ = false;
};

}  // namespace kvpool
