// Threads that serve sources, without handing anything over between them.
//
//   all idle threads sleep in epoll_wait -> one takes an event -> is none left idle? start one
//   -> on_ready() -> arm the source again -> sleep
//
// Every source is armed for one event (EPOLLONESHOT), so it keeps one thread at most, and a thread
// that is held by a slow peer holds nobody up. There is at most one thread per source and one idle
// one; those that were idle for `idle_max` end, but for kThreadsKept.
// Thread rule: every method from any thread, but close() and the destructor not from a source.
#pragma once
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "net/source.h"
#include "tier/descriptor.h"

namespace kvpool {

class Reactor {
 public:
  static constexpr std::size_t kThreadsKept = 2;

  static Result<std::unique_ptr<Reactor>> create(
      std::uint32_t sources_max, std::chrono::milliseconds idle_max = std::chrono::seconds(10));
  ~Reactor() { close(); }
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // All or none; on failure none of them has been or will be called.
  Result<void> add(std::uint64_t owner, std::vector<std::shared_ptr<Source>> sources);
  // Returns at once; what is in a turn is interrupted and closed by the thread of that turn.
  void drop(std::uint64_t owner);
  // Waits until every turn that is under way now is over, or the deadline.
  bool drain(std::chrono::steady_clock::time_point deadline);
  // Ends the threads, closes all sources. add() fails from then on.
  void close();

  std::size_t threads() const;
  std::size_t sources() const;
  std::size_t sources_of(std::uint64_t owner) const;

 private:
  struct Entry {
    std::shared_ptr<Source> source;
    std::uint64_t owner = 0;
    bool in_turn = false;
    bool before_drain = false;  // this turn is one that drain() waits for
    bool closing = false;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Sources = std::vector<std::shared_ptr<Source>>;
  static constexpr std::size_t kStackBytes = 256 << 10;

  Reactor(Descriptor poller, Descriptor stop, std::uint32_t sources_max,
          std::chrono::milliseconds idle_max);
  static void* enter(void* reactor);
  void run();
  bool sleep(Lock& lock, std::uint64_t& number, std::uint32_t& events);
  void take_turn(Lock& lock, std::uint64_t number, std::uint32_t events);
  void start_thread();
  bool arm(int operation, std::uint64_t number, const Source& source);
  // Both under the lock: what is to be closed now, what is to be interrupted.
  void remove(std::uint64_t number, Sources& closed);
  void remove_all_of(std::uint64_t owner, Sources& closed, Sources& interrupted);
  static void finish(const Sources& closed, const Sources& interrupted);

  const Descriptor poller_, stop_;
  const std::uint32_t sources_max_;
  const int idle_ms_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable turn_over_;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> by_owner_;
  std::uint64_t next_number_ = 1;  // 0 is stop_; never given twice
  std::size_t turns_before_drain_ = 0;
  std::size_t threads_ = 0, idle_ = 0;
  std::vector<pthread_t> ended_;  // to be joined
  bool stopping_ = false;
};

}  // namespace kvpool
