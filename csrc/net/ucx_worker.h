// A worker of UCX and the one thread that may touch it.
//
//   steps that others posted -> progress -> each guest's turn -> arm -> sleep in poll()
//
// It sleeps on the worker's descriptor and on a bell: it never spins, but for progress that makes
// progress. UCX's rule is kept: armed only after progress has found nothing, and when arming says
// busy, progress again.
// Thread rule: post(), wake() and is_closed() from any thread. create() and close() by the owner;
// close() not on the worker's thread. Guests, and every call of UCX on the worker or on what hangs
// on it, on the worker's thread only.
#pragma once
#include <pthread.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "net/ucx_context.h"
#include "tier/descriptor.h"

namespace kvpool {

// What lives on a worker's thread: an endpoint.
class UcxGuest {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Turn {
    Time next = Time::max();  // when it wants another turn at the latest
    bool has_acted = false;   // progress is to be made before anything else
  };
  virtual ~UcxGuest() = default;
  virtual Turn turn(Time now) = 0;
  virtual void begin_close() = 0;
  virtual bool is_closed() const = 0;
  // The worker is no more, and with it whatever was under way.
  virtual void abandon() = 0;
};

class UcxWorker {
 public:
  using Step = std::function<void()>;
  static constexpr std::size_t kStepsMax = 1024;
  static constexpr std::size_t kGuestsMax = 1024;

  static Result<std::shared_ptr<UcxWorker>> create(const UcxContext& context);
  ~UcxWorker() { close(); }
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  std::span<const std::byte> address() const { return address_; }

  // False: closed, or kStepsMax wait already. A step that was taken runs, also while closing.
  bool post(Step step);
  void wake();
  // Closes all guests by force, waits for them a second at most, ends the thread. The context may
  // go afterwards, though others still hold this.
  void close();

  // The rest on the worker's thread.
  ucp_worker_h handle() const { return handle_; }
  const UcxLibrary& library() const { return library_; }
  // False: kGuestsMax are there, or it is closing.
  bool admit(std::shared_ptr<UcxGuest> guest);

 private:
  using Time = UcxGuest::Time;

  explicit UcxWorker(const UcxContext& context) : context_(&context), library_(context.library()) {}
  Result<void> make();
  Result<void> start();
  static void* enter(void* worker);
  void run();
  bool take_steps();  // false: none is to come
  bool progress();    // true: some was made
  UcxGuest::Turn take_turns();
  void sleep(Time until);
  void end();

  const UcxContext* context_;
  const UcxLibrary library_;  // a copy of the table: it outlives the context
  ucp_worker_h handle_ = nullptr;
  Descriptor bell_;
  int events_ = -1;  // the worker's own descriptor
  std::vector<std::byte> address_;
  pthread_t thread_{};
  bool has_thread_ = false;

  std::mutex mutex_;  // guards the two below
  std::vector<Step> steps_;
  bool is_closed_ = false;

  std::vector<std::shared_ptr<UcxGuest>> guests_;  // the thread's
  bool is_ending_ = false;                         // the thread's
};

}  // namespace kvpool
