#include "net/ucx_worker.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "net/ucx_address.h"

namespace kvpool {
namespace {

constexpr int kProgressBurst = 64;  // then the others have their turn
constexpr std::chrono::seconds kCloseMax{1};

}  // namespace

Result<std::shared_ptr<UcxWorker>> UcxWorker::create(const UcxContext& context) {
  std::shared_ptr<UcxWorker> worker(new UcxWorker(context));
  if (auto made = worker->make(); !made) return std::unexpected(made.error());
  if (auto started = worker->start(); !started) return std::unexpected(started.error());
  return worker;
}

Result<void> UcxWorker::make() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made here, used there
  ucs_status_t status = library_.ucp_worker_create(context_->handle(), &params, &handle_);
  if (status != UCS_OK) {
    handle_ = nullptr;
    return library_.failure(status, "making a worker");
  }
  status = library_.ucp_worker_get_efd(handle_, &events_);
  if (status != UCS_OK) return library_.failure(status, "the worker's descriptor");
  ucp_address_t* address = nullptr;
  std::size_t bytes = 0;
  status = library_.ucp_worker_get_address(handle_, &address, &bytes);
  if (status != UCS_OK) return library_.failure(status, "the worker's address");
  const auto* const first = reinterpret_cast<const std::byte*>(address);
  address_.assign(first, first + bytes);
  library_.ucp_worker_release_address(handle_, address);
  if (bytes > kUcxWorkerAddressMax)
    return fail(Code::refused, "UCX: a worker's address of " + std::to_string(bytes) +
                                   " bytes; at most " + std::to_string(kUcxWorkerAddressMax) +
                                   ": name fewer devices");
  bell_ = Descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bell_.is_open()) return fail_for(errno, "eventfd");
  return {};
}

Result<void> UcxWorker::start() {
  sigset_t all, before;  // signals are for the threads of whoever has this process
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread_, nullptr, &UcxWorker::enter, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) return fail(Code::no_resource, "the machine gives no thread");
  has_thread_ = true;
  return {};
}

bool UcxWorker::post(Step step) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_ || steps_.size() >= kStepsMax) return false;
    steps_.push_back(std::move(step));
  }
  wake();
  return true;
}

void UcxWorker::wake() {
  const std::uint64_t one = 1;
  KVP_CHECK(write(bell_.get(), &one, sizeof one) == sizeof one || errno == EAGAIN);
}

void UcxWorker::close() {
  if (context_ == nullptr) return;
  if (context_->is_child()) {
    // Nothing here is this process's.
  } else if (has_thread_) {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    wake();
    pthread_join(thread_, nullptr);
    has_thread_ = false;
  } else if (handle_ != nullptr) {
    library_.ucp_worker_destroy(handle_);
    handle_ = nullptr;
  }
  context_ = nullptr;
}

void* UcxWorker::enter(void* worker) {
  pthread_setname_np(pthread_self(), "kvpool-ucx");
  static_cast<UcxWorker*>(worker)->run();
  return nullptr;
}

void UcxWorker::run() {
  Time give_up = Time::max();
  for (;;) {
    if (!take_steps() && !is_ending_) {
      is_ending_ = true;
      give_up = std::chrono::steady_clock::now() + kCloseMax;
      for (const auto& guest : guests_) guest->begin_close();
    }
    const bool has_moved = progress();
    const UcxGuest::Turn turn = take_turns();
    if (is_ending_ && (guests_.empty() || std::chrono::steady_clock::now() > give_up)) break;
    if (has_moved || turn.has_acted) continue;
    if (library_.ucp_worker_arm(handle_) == UCS_ERR_BUSY) continue;
    sleep(std::min(turn.next, give_up));
  }
  end();
}

bool UcxWorker::take_steps() {
  std::vector<Step> steps;
  bool is_closed = false;
  {
    const std::lock_guard lock(mutex_);
    steps.swap(steps_);
    is_closed = is_closed_;
  }
  for (Step& step : steps) step();
  return !is_closed;
}

bool UcxWorker::progress() {
  int made = 0;
  while (made < kProgressBurst && library_.ucp_worker_progress(handle_) != 0) ++made;
  return made > 0;
}

UcxGuest::Turn UcxWorker::take_turns() {
  UcxGuest::Turn all;
  const Time now = std::chrono::steady_clock::now();
  for (const auto& guest : guests_) {
    const UcxGuest::Turn one = guest->turn(now);
    all.next = std::min(all.next, one.next);
    all.has_acted = all.has_acted || one.has_acted;
  }
  std::erase_if(guests_, [](const auto& guest) { return guest->is_closed(); });
  return all;
}

void UcxWorker::sleep(Time until) {
  int wait_ms = -1;
  if (until != Time::max()) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    wait_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000));
  }
  pollfd sources[2] = {{events_, POLLIN, 0}, {bell_.get(), POLLIN, 0}};
  if (poll(sources, 2, wait_ms) <= 0 || sources[1].revents == 0) return;
  std::uint64_t rings = 0;
  (void)!read(bell_.get(), &rings, sizeof rings);
}

// Destroying a worker takes its queues from the devices: nothing lands any more once that is done.
void UcxWorker::end() {
  library_.ucp_worker_destroy(handle_);
  handle_ = nullptr;
  for (const auto& guest : std::exchange(guests_, {})) guest->abandon();
}

bool UcxWorker::admit(std::shared_ptr<UcxGuest> guest) {
  if (is_ending_ || guests_.size() >= kGuestsMax) return false;
  guests_.push_back(std::move(guest));
  return true;
}

}  // namespace kvpool
