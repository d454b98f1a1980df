// Threads that move pieces of slots. Blocking calls on a few threads, since a transfer spends its
// time in the device: the CPU it costs is the system call's.
//
// Reads are waited for, writes are not (as a rule), so reads go first; but each kind leaves the
// other some threads, so that a long group does not hold a read up and reads do not starve a
// group: writes never use the last quarter of the threads, nor do reads while writes wait.
//
// Bound: the queue holds what callers have under way and no more: one group of the writer
// (IndexStore::kChangesMax slots) and one batch of each reading thread.
// Promises:  every task that was submitted is run, once, before the destructor returns.
// Thread-safe.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"

namespace kvpool {

// A slot is moved in pieces of this size, so that a large one uses several threads.
inline constexpr std::uint64_t kIoPieceBytes = 1 << 20;
inline constexpr std::uint32_t kIoThreadsMax = 64;

struct IoTask {
  void (*run)(const IoTask&) = nullptr;
  void* owner = nullptr;
  void* item = nullptr;
  std::uint64_t offset = 0;  // in the slot
  std::uint64_t bytes = 0;
  std::shared_ptr<void> alive;  // kept until the task has run
};

class IoPool {
 public:
  enum class Kind : std::uint8_t { read, write };

  static Result<std::unique_ptr<IoPool>> create(std::uint32_t threads);
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  void submit(Kind kind, std::span<IoTask> tasks);  // moved from

 private:
  struct Lane {
    std::deque<IoTask> waiting;
    std::uint32_t running = 0;
  };

  IoPool() = default;
  void work();
  Lane* next_lane();

  std::mutex mutex_;  // guards all but threads_
  std::condition_variable wake_;
  Lane reads_, writes_;
  std::uint32_t lane_max_ = 1;  // threads that one kind may use while it has to leave some
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// Counts a batch of tasks down for the one thread that waits for all of them.
class IoBatch {
 public:
  explicit IoBatch(std::size_t count) : left_(count) {}
  void one_done() {
    // Told under the lock: the waiter may destroy this as soon as it can have the lock.
    std::lock_guard lock(mutex_);
    if (--left_ == 0) done_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  std::size_t left_;
};

}  // namespace kvpool
