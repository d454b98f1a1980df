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

Namespace* Node::find_namespace(const Hash128& id) const {
  Lock lock(mutex_);
  return store_->namespaces().find(id);
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
    Waiter waiter;
    const std::uint64_t name = fingerprint(incarnation, keys[present]);
    waiters_.emplace(name, &waiter);
    const bool is_due = sleep_until_due(lock, waiter, deadline, given_up);
    // Looked for anew: others came and went meanwhile, and a table that grew moved everybody.
    const auto [begin, end] = waiters_.equal_range(name);
    waiters_.erase(std::find_if(begin, end, [&](const auto& it) { return it.second == &waiter; }));
    if (!is_due) return present;
  }
}

// The waiter stays where commits find it while the lock is let go, so the keys are looked up again
// only when one of them says so.
bool Node::sleep_until_due(Lock& lock, Waiter& waiter, Deadline deadline, const GivenUp& given_up) {
  for (;;) {
    waiter.came.wait_until(lock, next_look(deadline, given_up),
                           [&] { return waiter.is_due || stopping_; });
    if (waiter.is_due || stopping_) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    lock.unlock();
    const bool is_given_up = given_up && given_up();
    lock.lock();
    if (is_given_up) return false;
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
  attached_.push_back({.page = &page, .limit = std::move(limit), .over_since = {}, .totals = {}});
  store_->attach(page.hazards);
}

void Node::detach(ClientPage& page) {
  Lock lock(mutex_);
  std::erase_if(attached_, [&](Attached& client) {
    if (client.page != &page) return false;
    take_client_traffic(client);
    return true;
  });
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
