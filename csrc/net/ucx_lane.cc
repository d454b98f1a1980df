#include "net/ucx_lane.h"

#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <utility>

#include "base/check.h"
#include "net/ucx_address.h"
#include "net/ucx_context.h"
#include "net/ucx_counters.h"
#include "net/ucx_endpoint.h"
#include "net/ucx_memory.h"
#include "net/ucx_worker.h"

namespace kvpool {
namespace {

// UCX starts a thread of its own, which is not to take signals either.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// An endpoint that is being made on the worker's thread, for somebody who may have gone.
class Connecting {
 public:
  using Made = Result<std::shared_ptr<UcxEndpoint>>;

  void give(Made made) {
    const std::lock_guard lock(mutex_);
    if (is_left_ && made) (*made)->drop();
    made_ = std::move(made);
    has_come_.notify_one();
  }
  std::optional<Made> wait(UcxLane::Time deadline) {
    std::unique_lock lock(mutex_);
    has_come_.wait_until(lock, deadline, [&] { return made_.has_value(); });
    is_left_ = true;
    return made_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable has_come_;
  std::optional<Made> made_;
  bool is_left_ = false;
};

}  // namespace

UcxLane::UcxLane() : counters_(std::make_shared<UcxCounters>()) {}

Result<std::unique_ptr<UcxLane>> UcxLane::open(const Arena& arena, const UcxOptions& options) {
  if (auto good = check(options); !good) return std::unexpected(good.error());
  const SignalsBlocked blocked;
  std::unique_ptr<UcxLane> lane(new UcxLane);
  auto context = UcxContext::create(options);
  if (!context) return std::unexpected(context.error());
  lane->context_ = std::move(*context);
  auto memory = UcxMemory::create(*lane->context_, arena);
  if (!memory) return std::unexpected(memory.error());
  lane->memory_ = std::move(*memory);
  auto worker = UcxWorker::create(*lane->context_);
  if (!worker) return std::unexpected(worker.error());
  lane->worker_ = std::move(*worker);
  lane->describe(arena);
  return lane;
}

void UcxLane::describe(const Arena& arena) {
  const UcxLibrary& library = context_->library();
  const std::span<const std::byte> worker = worker_->address();
  std::random_device random;
  number_ = std::max<std::uint64_t>(std::uint64_t{random()} << 32 | random(), 1);
  UcxAddress address;
  address.head.lane = number_;
  address.head.library_major = static_cast<std::uint16_t>(library.major());
  address.head.library_minor = static_cast<std::uint16_t>(library.minor());
  address.head.arena_bytes = arena.bytes();
  address.head.arena_base = reinterpret_cast<std::uint64_t>(arena.base());
  address.head.chunk_bytes = ucx_chunk_bytes(arena.bytes());
  address.worker.assign(worker.begin(), worker.end());
  address.remote_keys = memory_->remote_keys();
  address_ = encode(address);
  library_ = library.path() + " (UCX " + std::to_string(library.major()) + "." +
             std::to_string(library.minor()) + ")";
}

UcxLane::~UcxLane() {
  if (worker_ != nullptr) worker_->close();
}

Result<std::unique_ptr<UcxPeer>> UcxLane::connect(std::span<const std::byte> address,
                                                  Time deadline) {
  auto decoded = decode_ucx_address(address);
  if (!decoded) return std::unexpected(decoded.error());
  const UcxAddressHead head = decoded->head;
  if (head.library_major != context_->library().major())
    return fail(Code::refused, "the peer has UCX " + std::to_string(head.library_major) +
                                   ", this is UCX " + std::to_string(context_->library().major()));
  const auto connecting = std::make_shared<Connecting>();
  const bool is_taken = worker_->post(
      [connecting, counters = counters_, worker = worker_.get(), peer = std::move(*decoded)] {
        connecting->give(UcxEndpoint::connect(*worker, peer, counters));
      });
  if (!is_taken) return fail(Code::no_resource, "UCX: too much is asked for at once");
  auto made = connecting->wait(deadline);
  if (!made) return fail(Code::no_resource, "UCX: connecting took too long");
  if (!*made) return std::unexpected(made->error());
  return std::make_unique<UcxPeer>(worker_, std::move(**made), counters_, head);
}

UcxTotals UcxLane::totals() const {
  const auto read = [](const std::atomic<std::uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {.whole = read(counters_->whole),
          .damaged = read(counters_->damaged),
          .failed = read(counters_->failed),
          .bytes = read(counters_->bytes),
          .late = read(counters_->late),
          .errors = read(counters_->errors)};
}

}  // namespace kvpool
