#include "tier/io_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace kvpool {
namespace {

// Signals are the host program's and belong on its own threads; here they would only interrupt
// transfers. A thread inherits the mask of the one that starts it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Result<std::unique_ptr<IoPool>> IoPool::create(std::uint32_t threads) {
  threads = std::clamp(threads, 1u, kIoThreadsMax);
  std::unique_ptr<IoPool> pool(new IoPool);
  pool->lane_max_ = threads - (threads > 1 ? std::max(1u, threads / 4) : 0);
  const SignalsBlocked blocked;
  try {
    pool->threads_.reserve(threads);
    for (std::uint32_t i = 0; i < threads; ++i)
      pool->threads_.emplace_back([raw = pool.get()] { raw->work(); });
  } catch (const std::system_error& error) {  // the destructor joins those that did start
    return fail(Code::no_resource, std::string("no thread for I/O: ") + error.what());
  }
  return pool;
}

IoPool::~IoPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void IoPool::submit(Kind kind, std::span<IoTask> tasks) {
  {
    std::lock_guard lock(mutex_);
    Lane& lane = kind == Kind::read ? reads_ : writes_;
    for (IoTask& task : tasks) lane.waiting.push_back(std::move(task));
  }
  for (std::size_t i = 0; i < std::min(tasks.size(), threads_.size()); ++i) wake_.notify_one();
}

IoPool::Lane* IoPool::next_lane() {
  const bool reads_may = writes_.waiting.empty() || reads_.running < lane_max_;
  if (!reads_.waiting.empty() && reads_may) return &reads_;
  if (!writes_.waiting.empty() && writes_.running < lane_max_) return &writes_;
  return nullptr;
}

void IoPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Lane* lane = nullptr;
    wake_.wait(lock, [&] {
      lane = next_lane();
      return lane != nullptr || (stopping_ && reads_.waiting.empty() && writes_.waiting.empty());
    });
    if (lane == nullptr) {
      wake_.notify_all();  // whoever was told to stop while its lane was full looks again
      return;
    }
    {
      const IoTask task = std::move(lane->waiting.front());
      lane->waiting.pop_front();
      ++lane->running;
      lock.unlock();
      task.run(task);
    }  // what it kept alive is let go without the lock
    lock.lock();
    --lane->running;
  }
}

}  // namespace kvpool
