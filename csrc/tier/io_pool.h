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
#include <algorithm>
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
#include "tier/tier.h"

namespace kvpool {

// A slot is moved in pieces of this size, so that a large one uses several threads.
inline constexpr std::uint64_t kIoPieceBytes = 1 << 20;
inline constexpr std::uint32_t kIoThreadsMax = 64;
inline constexpr std::size_t kIoSlotsMax = kIoPieceBytes / kSlotAlignBytes;  // in one transfer

// One transfer: a piece of a large slot, or small slots that lie one behind the other.
struct IoCut {
  std::size_t first = 0, slots = 1;  // in a list of slots
  std::uint64_t offset = 0;          // in the slot, if it is one
  std::uint64_t bytes = 0;
};

// Cuts `count` slots into transfers; `place_of(i)` is anything with offset() and slot_bytes().
// Slots of no bytes are in none.
template <typename PlaceOf>
std::vector<IoCut> cut_into_transfers(std::size_t count, PlaceOf place_of) {
  std::vector<IoCut> cuts;
  std::uint64_t end = 0;  // of the last cut, in the file
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t at = place_of(i).offset(), bytes = place_of(i).slot_bytes();
    if (!cuts.empty() && at == end && cuts.back().offset == 0 && bytes > 0 &&
        cuts.back().first + cuts.back().slots == i && cuts.back().bytes + bytes <= kIoPieceBytes) {
      ++cuts.back().slots;
      cuts.back().bytes += bytes;
    } else {
      for (std::uint64_t done = 0; done < bytes; done += kIoPieceBytes)
        cuts.push_back({i, 1, done, std::min(kIoPieceBytes, bytes - done)});
    }
    end = at + bytes;
  }
  return cuts;
}

struct IoTask {
  void (*run)(const IoTask&) = nullptr;
  void* owner = nullptr;
  void* item = nullptr;
  IoCut cut;
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
