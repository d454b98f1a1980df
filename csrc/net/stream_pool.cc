#include "net/stream_pool.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>

namespace kvpool {

Result<std::unique_ptr<StreamPool>> StreamPool::create() {
  Descriptor changed(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!changed.is_open()) return fail_for(errno, "eventfd");
  return std::unique_ptr<StreamPool>(new StreamPool(std::move(changed)));
}

std::unique_ptr<StreamPool> StreamPool::make_unwatched() {
  return std::unique_ptr<StreamPool>(new StreamPool(Descriptor()));
}

void StreamPool::tell_changed() {
  if (!changed_.is_open()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t told = write(changed_.get(), &one, sizeof one);  // full: is told
}

void StreamPool::replace(Streams streams) {
  const Lock lock(mutex_);
  for (const auto& stream : all_) stream->abandon();
  if (closed_)
    for (const auto& stream : streams) stream->abandon();
  all_ = idle_ = closed_ ? Streams{} : std::move(streams);
  wanted_ = all_.size();
  ++life_;
  free_.notify_all();
  tell_changed();
}

void StreamPool::add(std::shared_ptr<StreamClient> stream) {
  const Lock lock(mutex_);
  if (closed_) return stream->abandon();
  forget_dead();
  all_.push_back(stream);
  idle_.push_back(std::move(stream));
  wanted_ = std::max(wanted_, all_.size());
  free_.notify_one();
  tell_changed();
}

void StreamPool::close() {
  {
    const Lock lock(mutex_);
    closed_ = true;
  }
  replace({});
}

void StreamPool::forget_dead() {
  const auto is_dead = [](const std::shared_ptr<StreamClient>& stream) {
    return !stream->is_live();
  };
  std::erase_if(idle_, is_dead);
  if (std::erase_if(all_, is_dead) == 0) return;
  if (all_.empty()) free_.notify_all();  // nothing to wait for any more
  tell_changed();
}

void StreamPool::end_closed() {
  const Lock lock(mutex_);
  for (const auto& stream : idle_)
    if (is_peer_gone(stream->descriptor())) stream->abandon();
  forget_dead();
}

StreamPool::Loan StreamPool::borrow(std::size_t wanted, Deadline deadline, bool& late) {
  Lock lock(mutex_);
  return lend(lock, wanted, deadline, late);
}

StreamPool::Loan StreamPool::borrow_of(std::uint64_t life, Deadline deadline) {
  Loan loan;  // before the lock: it may be given back, which takes that
  Lock lock(mutex_);
  if (life_ != life) return loan;
  bool late = false;
  Loan lent = lend(lock, 1, deadline, late);
  const bool is_same = life_ == life;
  lock.unlock();
  if (is_same) return lent;
  return loan;
}

std::uint64_t StreamPool::life() const {
  const Lock lock(mutex_);
  return life_;
}

StreamPool::Loan StreamPool::lend(Lock& lock, std::size_t wanted, Deadline deadline, bool& late) {
  forget_dead();
  ++waiting_;
  const bool in_time =
      free_.wait_until(lock, deadline, [&] { return !idle_.empty() || all_.empty(); });
  --waiting_;
  late = !in_time;
  if (idle_.empty()) return {};
  // Several only if nobody is kept waiting for it.
  const std::size_t count = waiting_ > 0 ? 1 : std::min(wanted, idle_.size());
  Streams lent(idle_.end() - static_cast<std::ptrdiff_t>(count), idle_.end());
  idle_.resize(idle_.size() - count);
  return {*this, std::move(lent)};
}

StreamPool::Loan StreamPool::lend_now() {
  const Lock lock(mutex_);
  forget_dead();
  if (idle_.empty()) return {};
  Streams lent{std::move(idle_.back())};
  idle_.pop_back();
  return {*this, std::move(lent)};
}

void StreamPool::take_back(const Streams& streams) {
  const Lock lock(mutex_);
  for (const auto& stream : streams)
    // Not one that was replaced meanwhile.
    if (std::find(all_.begin(), all_.end(), stream) != all_.end()) idle_.push_back(stream);
  forget_dead();
  if (waiting_ > 0) free_.notify_all();
}

std::size_t StreamPool::live() const {
  const Lock lock(mutex_);
  return static_cast<std::size_t>(std::count_if(
      all_.begin(), all_.end(), [](const auto& stream) { return stream->is_live(); }));
}

bool StreamPool::wait_lost(Deadline deadline) {
  for (bool looked = false;; looked = true) {
    Streams watched;
    {
      const Lock lock(mutex_);
      forget_dead();
      const bool lost = closed_ || all_.empty() || all_.size() < wanted_;
      if (lost && (looked || all_.empty())) return true;
      watched = all_;  // holds their descriptors open
    }
    // The first look does not wait: it is for those that ended since.
    const int ms = poll_ms(deadline);
    if (ms == 0 && looked) return false;
    std::vector<pollfd> ends{{.fd = changed_.get(), .events = POLLIN, .revents = 0}};
    for (const auto& stream : watched)
      ends.push_back({.fd = stream->descriptor(), .events = POLLRDHUP, .revents = 0});
    if (poll(ends.data(), ends.size(), looked ? ms : 0) <= 0) continue;
    std::uint64_t count = 0;
    if (ends[0].revents != 0) [[maybe_unused]]
      const ssize_t told = read(changed_.get(), &count, sizeof count);
    for (std::size_t i = 0; i < watched.size(); ++i)
      if (ends[i + 1].revents != 0) watched[i]->abandon();
  }
}

}  // namespace kvpool
