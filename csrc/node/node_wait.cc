// Waiting for a prefix that somebody else computes, and the clients that read without asking.
#include "node/node.h"

namespace kvpool {
namespace {

constexpr auto kOverLimitMax = std::chrono::milliseconds(20);

}  // namespace

Namespace* Node::space(std::uint32_t number) const {
  Lock lock(mutex_);
  return store_->namespaces().numbered(number);
}

std::size_t Node::wait(const Namespace& space, std::span<const Hash128> keys, Deadline deadline,
                       const std::function<bool()>& given_up) {
  Lock lock(mutex_);
  for (;;) {
    // Under the lock that commits need, so that none comes between the look and the sleep.
    const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
    const std::size_t present = reader_.lookup(keys, incarnation, nullptr);
    if (present == keys.size() || stopping_ || waiters_.size() >= kWaitersMax) return present;
    if (std::chrono::steady_clock::now() >= deadline) return present;
    if (given_up) {
      lock.unlock();
      if (given_up()) return present;
      lock.lock();
      if (reader_.lookup(keys, incarnation, nullptr) > present) continue;
    }
    Waiter waiter;
    const auto place = waiters_.emplace(fingerprint(incarnation, keys[present]), &waiter);
    const auto until =
        given_up ? std::min(deadline, std::chrono::steady_clock::now() + kAskEvery) : deadline;
    waiter.came.wait_until(lock, until, [&] { return waiter.is_due || stopping_; });
    waiters_.erase(place);
  }
}

void Node::announce(const Namespace& space, const Hash128& key) {
  if (waiters_.empty()) return;
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  const auto [begin, end] = waiters_.equal_range(fingerprint(incarnation, key));
  for (auto it = begin; it != end; ++it) {
    it->second->is_due = true;
    it->second->came.notify_one();
  }
}

// They look again for themselves: the pool closes, or a namespace has another incarnation.
void Node::wake_waiters() {
  for (const auto& [name, waiter] : waiters_) {
    waiter->is_due = true;
    waiter->came.notify_one();
  }
}

void Node::attach(ClientPage& page, ClientLimit limit) {
  Lock lock(mutex_);
  attached_.push_back({&page, std::move(limit), std::nullopt});
  store_->attach(page.hazards);
}

void Node::detach(ClientPage& page) {
  Lock lock(mutex_);
  std::erase_if(attached_, [&](const Attached& client) { return client.page == &page; });
  departed_.add(page.counters);
  store_->detach(page.hazards);
  kick();  // a shrink may have waited for its pins
}

// Twice over the limit, with time in between: a view that is being taken or let go is half told.
void Node::hold_to_limit(Attached& client) {
  if (!store_->names_too_much(client.page->hazards, client.limit.pin_bytes)) {
    client.over_since.reset();
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!client.over_since) client.over_since = now;
  if (now - *client.over_since < kOverLimitMax || !client.limit.end) return;
  client.limit.end();
  client.limit.end = {};
  ++clients_ended_;
}

}  // namespace kvpool
