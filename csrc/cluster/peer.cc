#include "cluster/peer.h"

#include <algorithm>
#include <array>

#include "cluster/wanted_streams.h"

namespace kvpool {
namespace {

constexpr double kSmooth = 0.2;           // share of the newest answer in the latency
constexpr double kUnknownLatency = 1e-3;  // of a member that was never asked
constexpr double kBytesPerSecond = 1e9;   // about, of a link: weighs what is under way

}  // namespace

Peer::Peer(MemberHandle member, const Hash128& id, const PeerOptions& options,
           std::shared_ptr<WantedStreams> wanted, FarReads reads)
    : member_(member),
      id_(id),
      options_(options),
      wanted_(std::move(wanted)),
      far_(std::move(reads)),
      pause_(options.pause_min) {}

Result<void> Peer::add_stream(int descriptor, std::span<const std::byte> lane) {
  auto stream = StreamClient::create(descriptor);
  if (!stream) return std::unexpected(stream.error());
  far_.set_address(lane);
  const std::lock_guard lock(mutex_);
  if (closed_ || streams() >= options_.streams) {
    (*stream)->abandon();
    return {};
  }
  (short_->live() == 0 ? short_ : bulk_)->add(std::move(*stream));
  // It was dialled and greeted: worth a try, though the pause be not over.
  if (state_ == BreakerState::open) state_ = BreakerState::half_open;
  is_probing_ = false;
  dial_pause_ = {};
  dialled_again_ = {};
  return {};
}

void Peer::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  short_->close();
  bulk_->close();
  far_.close();
}

// --- the breaker ---------------------------------------------------------------------------------

bool Peer::is_open() const {
  const std::lock_guard lock(mutex_);
  if (closed_) return true;
  if (state_ == BreakerState::open) return Clock::now() < closed_again_;
  return state_ == BreakerState::half_open && is_probing_;
}

bool Peer::may_ask() {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  if (state_ == BreakerState::open && Clock::now() >= closed_again_) {
    state_ = BreakerState::half_open;
    is_probing_ = false;
  }
  const bool may = state_ == BreakerState::closed ||
                   (state_ == BreakerState::half_open && !std::exchange(is_probing_, true));
  refused_open_ += !may;
  return may;
}

void Peer::not_asked() {
  const std::lock_guard lock(mutex_);
  is_probing_ = false;
}

void Peer::succeeded(Clock::duration latency) {
  const std::lock_guard lock(mutex_);
  const double took = std::chrono::duration<double>(latency).count();
  latency_s_ = latency_s_ == 0 ? took : latency_s_ + kSmooth * (took - latency_s_);
  ++requests_;
  state_ = BreakerState::closed;
  is_probing_ = false;
  pause_ = options_.pause_min;
}

void Peer::failed(Miss why, Clock::duration waited) {
  // Who closed one has closed others: they are not to fail one by one.
  short_->end_closed();
  bulk_->end_closed();
  const bool is_hurried = why == Miss::timed_out && waited < options_.patience;
  if (is_hurried) {
    const std::lock_guard lock(mutex_);
    ++requests_;
    ++hurried_;
    is_probing_ = false;
  } else {
    const std::lock_guard lock(mutex_);
    ++requests_;
    ++failures_;
    damaged_ += why == Miss::damaged;
    is_probing_ = false;
    // Of several requests that fail together, one makes the pause longer.
    if (state_ == BreakerState::open && Clock::now() < closed_again_) return;
    open_breaker();
  }
  want();
}

void Peer::dial_failed() {
  {
    const std::lock_guard lock(mutex_);
    ++failures_;
    if (streams() == 0) {
      open_breaker();
      dialled_again_ = closed_again_;
    } else {
      dial_pause_ = std::clamp(dial_pause_ * 2, options_.pause_min, options_.pause_max);
      dialled_again_ = Clock::now() + dial_pause_;
    }
  }
  want();
}

// Under the lock.
void Peer::open_breaker() {
  if (state_ != BreakerState::closed) pause_ = std::min(pause_ * 2, options_.pause_max);
  state_ = BreakerState::open;
  is_probing_ = false;
  closed_again_ = Clock::now() + pause_;
  ++opened_;
}

void Peer::want() {
  const std::size_t live = streams();
  if (live >= options_.streams) return;
  Clock::time_point not_before;
  {
    const std::lock_guard lock(mutex_);
    not_before = dialled_again_;
  }
  wanted_->want(
      {.member = member_, .id = id_, .count = options_.streams - live, .not_before = not_before});
}

// --- asking --------------------------------------------------------------------------------------

StreamPool::Loan Peer::borrow_short(Deadline deadline, bool& late) {
  if (short_->live() > 0) {
    auto loan = short_->borrow(1, deadline, late);
    if (!loan.empty() || late) return loan;
  }
  want();
  return bulk_->borrow(1, deadline, late);
}

StreamPool::Loan Peer::try_short(bool& busy) {
  auto loan = short_->try_borrow();
  if (!loan.empty()) return loan;
  auto other = bulk_->try_borrow();
  if (!other.empty()) return other;
  busy = streams() > 0;
  if (!busy) want();
  return other;
}

StreamPool::Loan Peer::borrow_bulk(std::size_t wanted, Deadline deadline, bool& late) {
  const std::size_t live = bulk_->live();
  if (live + 1 < options_.streams) want();  // the other one is for short requests
  if (live > 0) {
    auto loan = bulk_->borrow(wanted, deadline, late);
    if (!loan.empty() || late) return loan;
  }
  return short_->borrow(1, deadline, late);
}

std::optional<Peer::Space> Peer::space(const Hash128& id, Deadline deadline, Miss& why) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = spaces_.find(id); known != spaces_.end()) return known->second;
  }
  bool late = false;
  const auto loan = borrow_short(deadline, late);
  why = late ? Miss::timed_out : Miss::disconnected;
  if (loan.empty()) return std::nullopt;
  FoundSpace found;
  const auto began = Clock::now();
  const auto reply =
      loan.one().request({.op = Op::find_space, .keys = {&id, 1}, .deadline = deadline},
                         std::as_writable_bytes(std::span(&found, 1)));
  why = reply.is_good() ? Miss::absent : reply.trouble();
  if (!reply.is_good() || reply.body_bytes != sizeof found) return std::nullopt;
  succeeded(Clock::now() - began);
  if (found.block_bytes == 0) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (spaces_.size() >= kSpacesMax) spaces_.clear();
  const Space space{.number = found.number, .block_bytes = found.block_bytes};
  spaces_[id] = space;
  return space;
}

void Peer::forget_space(const Hash128& id) {
  const std::lock_guard lock(mutex_);
  spaces_.erase(id);
}

// --- what is known of it -------------------------------------------------------------------------

void Peer::count_fetched(std::uint64_t blocks, std::uint64_t bytes) {
  fetched_blocks_.fetch_add(blocks, std::memory_order_relaxed);
  fetched_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

double Peer::cost(std::uint64_t bytes) const {
  const auto ahead = static_cast<double>(in_flight_.load(std::memory_order_relaxed) + bytes);
  const std::lock_guard lock(mutex_);
  return (latency_s_ == 0 ? kUnknownLatency : latency_s_) + ahead / kBytesPerSecond;
}

PeerStats Peer::stats() const {
  const std::size_t live = streams();
  const std::lock_guard lock(mutex_);
  return {.member = member_,
          .id = id_,
          .breaker = state_,
          .streams = live,
          .in_flight_bytes = in_flight_.load(std::memory_order_relaxed),
          .latency_s = latency_s_,
          .requests = requests_,
          .failures = failures_,
          .opened = opened_,
          .refused_open = refused_open_,
          .hurried = hurried_,
          .fetched_blocks = fetched_blocks_.load(std::memory_order_relaxed),
          .fetched_bytes = fetched_bytes_.load(std::memory_order_relaxed),
          .damaged = damaged_,
          .stale = stale_.load(std::memory_order_relaxed),
          .far = far_.stats()};
}

}  // namespace kvpool
