#include "net/shm_channel.h"

#include <algorithm>

#include "net/shm_use.h"

namespace kvpool {

void ShmChannel::detach() {
  std::shared_ptr<ShmClient> gone;
  {
    const std::lock_guard lock(mutex_);
    gone.swap(client_);
  }
  if (gone) gone->break_off();
}

void ShmChannel::attach(std::shared_ptr<ShmClient> client) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_closed()) client_.swap(client);
  }
  if (client) client->break_off();  // the one before, or one that came too late
}

void ShmChannel::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_.store(true, std::memory_order_release);
  }
  detach();
}

bool ShmChannel::is_broken() const {
  const std::lock_guard lock(mutex_);
  return client_ == nullptr || client_->is_broken();
}

bool ShmChannel::wait_until_broken(Deadline deadline) {
  std::shared_ptr<ShmClient> client;
  {
    const std::lock_guard lock(mutex_);
    client = client_;
  }
  return client == nullptr || client->wait_until_broken(deadline);
}

ShmUse ShmChannel::use(const Space& space, Deadline deadline) const {
  ShmUse use{.client = nullptr, .space = space, .deadline = deadline};
  {
    const std::lock_guard lock(mutex_);
    use.client = client_;
  }
  if (use.client == nullptr) return use;
  use.number = space.number.load(std::memory_order_acquire);
  // A number of the node's next life is given after this one's client was broken off; whoever reads
  // it sees that here.
  if (use.client->is_broken()) {
    use.client = nullptr;
    return use;
  }
  use.incarnation = use.client->incarnation(use.number);
  return use;
}

std::size_t ShmChannel::lookup(const Space& space, std::span<const Hash128> keys,
                               std::uint8_t* tiers, Miss& why) {
  const ShmUse use = this->use(space, {});
  why = !use ? Miss::disconnected : Miss::absent;
  if (!use || use.incarnation == 0) {
    if (tiers != nullptr) std::fill_n(tiers, keys.size(), std::uint8_t{0});
    if (use) count_lookup(use, keys.size(), {});
    return 0;
  }
  const Looked looked = use.reader().look(keys, use.incarnation, tiers);
  const bool is_all = looked.present == keys.size();
  if (!is_all && by_request_ && use.client->asks_elsewhere()) {
    // The node counts what it is asked.
    if (looked.present > 0) count_lookup(use, looked.present, looked);
    return looked.present + by_request_->lookup(space, keys.subspan(looked.present),
                                                tiers ? tiers + looked.present : nullptr, why);
  }
  count_lookup(use, keys.size(), looked);
  if (is_all) why = Miss::none;
  return looked.present;
}

bool ShmChannel::looks_up_at_once() const {
  const std::lock_guard lock(mutex_);
  return client_ == nullptr || !client_->asks_elsewhere();
}

std::size_t ShmChannel::look(const Space& space, std::span<const Hash128> keys) const {
  const ShmUse use = this->use(space, {});
  if (!use || use.incarnation == 0) return 0;
  return use.reader().lookup(keys, use.incarnation, nullptr);
}

std::size_t ShmChannel::remove(const Space& space, std::span<const Hash128> keys) {
  return by_request_ ? by_request_->remove(space, keys) : 0;
}

std::size_t ShmChannel::wait(const Space& space, std::span<const Hash128> keys, Deadline deadline) {
  const std::size_t found = look(space, keys);
  if (found == keys.size() || !by_request_) return found;
  return by_request_->wait(space, keys, deadline);
}

void report_touches(ShmClient& client, std::span<const Found> found) {
  constexpr std::size_t kBatch = 256;
  if (found.empty()) return;
  TouchRing& ring = client.page().touches;
  const Seconds now = SystemClock().now();
  for (std::size_t left = found.size(); left > 0;) {
    const std::size_t count = std::min(left, kBatch);
    const std::uint64_t at = ring.claim(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Found& block = found[left - 1 - i];
      ring.put(at + i, {block.generation, block.record, now});
    }
    left -= count;
  }
}

}  // namespace kvpool
