#include "net/reactor.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStackScale = 8;  // their frames are larger
#else
constexpr std::size_t kStackScale = 1;
#endif

}  // namespace

Result<std::unique_ptr<Reactor>> Reactor::create(std::uint32_t sources_max,
                                                 std::chrono::milliseconds idle_max) {
  Descriptor poller(epoll_create1(EPOLL_CLOEXEC));
  if (!poller.is_open()) return fail_for(errno, "epoll");
  Descriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.is_open()) return fail_for(errno, "eventfd");
  epoll_event event{};
  event.events = EPOLLIN;  // not one-shot: it wakes every thread
  if (epoll_ctl(poller.get(), EPOLL_CTL_ADD, stop.get(), &event) != 0)
    return fail_for(errno, "epoll");
  return std::unique_ptr<Reactor>(
      new Reactor(std::move(poller), std::move(stop), sources_max, idle_max));
}

Reactor::Reactor(Descriptor poller, Descriptor stop, std::uint32_t sources_max,
                 std::chrono::milliseconds idle_max)
    : poller_(std::move(poller)),
      stop_(std::move(stop)),
      sources_max_(sources_max),
      idle_ms_(static_cast<int>(idle_max.count())) {}

bool Reactor::arm(int operation, std::uint64_t number, const Source& source) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
  event.data.u64 = number;
  return epoll_ctl(poller_.get(), operation, source.descriptor(), &event) == 0;
}

Result<void> Reactor::add(std::uint64_t owner, std::vector<std::shared_ptr<Source>> sources) {
  const Lock lock(mutex_);
  if (stopping_) return fail(Code::refused, "the server is closed");
  if (entries_.size() + sources.size() > sources_max_)
    return fail(Code::no_resource, "the server has " + std::to_string(entries_.size()) +
                                       " connections and takes at most " +
                                       std::to_string(sources_max_));
  if (idle_ == 0) start_thread();
  if (threads_ == 0) return fail(Code::no_resource, "the machine gives no thread");
  const std::uint64_t first = next_number_;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (arm(EPOLL_CTL_ADD, first + i, *sources[i])) continue;
    const int error = errno;
    while (i-- > 0) epoll_ctl(poller_.get(), EPOLL_CTL_DEL, sources[i]->descriptor(), nullptr);
    next_number_ += sources.size();  // an event of those may be on its way
    return fail_for(error, "epoll");
  }
  for (std::shared_ptr<Source>& source : sources) {
    by_owner_[owner].push_back(next_number_);
    entries_.emplace(next_number_++, Entry{.source = std::move(source), .owner = owner});
  }
  return {};
}

// Under the lock. Where the machine gives none, those there are go on; the next event tries again.
void Reactor::start_thread() {
  for (const pthread_t thread : std::exchange(ended_, {})) pthread_join(thread, nullptr);
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setstacksize(&attributes, kStackBytes * kStackScale);
  sigset_t all, before;  // signals are for the threads of whoever has this process
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  if (pthread_create(&thread, &attributes, &Reactor::enter, this) == 0) {
    ++threads_;
    ++idle_;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
}

void* Reactor::enter(void* reactor) {
  pthread_setname_np(pthread_self(), "kvpool-net");
  static_cast<Reactor*>(reactor)->run();
  return nullptr;
}

void Reactor::run() {
  Lock lock(mutex_);
  std::uint64_t number = 0;
  std::uint32_t events = 0;
  while (sleep(lock, number, events)) take_turn(lock, number, events);
  --threads_;
  --idle_;
  ended_.push_back(pthread_self());
  turn_over_.notify_all();
}

// False: this thread is not needed any more.
bool Reactor::sleep(Lock& lock, std::uint64_t& number, std::uint32_t& events) {
  const bool may_end = idle_ > kThreadsKept;
  if (stopping_) return false;
  lock.unlock();
  epoll_event event{};
  const int found = epoll_wait(poller_.get(), &event, 1, may_end ? idle_ms_ : -1);
  lock.lock();
  number = found > 0 ? event.data.u64 : 0;
  events = event.events;
  return !stopping_ && !(found == 0 && idle_ > kThreadsKept);
}

void Reactor::take_turn(Lock& lock, std::uint64_t number, std::uint32_t events) {
  const auto found = entries_.find(number);
  if (found == entries_.end()) return;  // closed before this thread had the lock
  Entry& entry = found->second;  // stays: only this thread removes an entry that is in its turn
  entry.in_turn = true;
  if (--idle_ == 0) start_thread();
  lock.unlock();
  const Outcome outcome = entry.source->on_ready(events);
  lock.lock();
  ++idle_;
  entry.in_turn = false;
  if (std::exchange(entry.before_drain, false) && --turns_before_drain_ == 0)
    turn_over_.notify_all();
  Sources closed, interrupted;
  if (outcome == Outcome::close_client)
    remove_all_of(entry.owner, closed, interrupted);
  else if (entry.closing || outcome == Outcome::close || stopping_ ||
           !arm(EPOLL_CTL_MOD, number, *entry.source))
    remove(number, closed);
  if (closed.empty() && interrupted.empty()) return;
  lock.unlock();
  finish(closed, interrupted);
  closed.clear();
  interrupted.clear();
  lock.lock();
}

void Reactor::remove(std::uint64_t number, Sources& closed) {
  const auto found = entries_.find(number);
  const auto owned = by_owner_.find(found->second.owner);
  std::erase(owned->second, number);
  if (owned->second.empty()) by_owner_.erase(owned);
  epoll_ctl(poller_.get(), EPOLL_CTL_DEL, found->second.source->descriptor(), nullptr);
  closed.push_back(std::move(found->second.source));
  entries_.erase(found);
}

void Reactor::remove_all_of(std::uint64_t owner, Sources& closed, Sources& interrupted) {
  const auto owned = by_owner_.find(owner);
  if (owned == by_owner_.end()) return;
  for (const std::uint64_t number : std::vector(owned->second)) {
    Entry& entry = entries_.at(number);
    entry.closing = true;
    if (entry.in_turn)
      interrupted.push_back(entry.source);
    else
      remove(number, closed);
  }
}

void Reactor::finish(const Sources& closed, const Sources& interrupted) {
  for (const auto& source : interrupted) source->interrupt();
  for (const auto& source : closed) source->on_closed();
}

void Reactor::drop(std::uint64_t owner) {
  Sources closed, interrupted;
  {
    const Lock lock(mutex_);
    remove_all_of(owner, closed, interrupted);
  }
  finish(closed, interrupted);
}

bool Reactor::drain(std::chrono::steady_clock::time_point deadline) {
  Lock lock(mutex_);
  for (auto& [number, entry] : entries_) {
    if (!entry.in_turn || entry.before_drain) continue;
    entry.before_drain = true;
    ++turns_before_drain_;
  }
  return turn_over_.wait_until(lock, deadline, [&] { return turns_before_drain_ == 0; });
}

void Reactor::close() {
  Sources closed, interrupted;
  Lock lock(mutex_);
  stopping_ = true;
  for (const auto& [number, entry] : entries_)
    if (entry.in_turn) interrupted.push_back(entry.source);
  lock.unlock();
  const std::uint64_t one = 1;
  KVP_CHECK(write(stop_.get(), &one, sizeof one) == sizeof one || errno == EAGAIN);
  finish({}, interrupted);
  lock.lock();
  turn_over_.wait(lock, [&] { return threads_ == 0; });
  for (const pthread_t thread : std::exchange(ended_, {})) pthread_join(thread, nullptr);
  while (!entries_.empty()) remove(entries_.begin()->first, closed);
  lock.unlock();
  finish(closed, {});
}

std::size_t Reactor::threads() const {
  const Lock lock(mutex_);
  return threads_;
}

std::size_t Reactor::sources() const {
  const Lock lock(mutex_);
  return entries_.size();
}

std::size_t Reactor::sources_of(std::uint64_t owner) const {
  const Lock lock(mutex_);
  const auto found = by_owner_.find(owner);
  return found == by_owner_.end() ? 0 : found->second.size();
}

}  // namespace kvpool
