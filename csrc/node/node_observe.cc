// What people ask of single blocks, and the reuse distances: the lock around store_observe.cc.
#include <algorithm>

#include "node/node.h"

namespace kvpool {
namespace {

constexpr std::size_t kKeysPerLock = 256;  // some cold lines each
// A long put that is refused must not push all that left before out of what is remembered.
constexpr std::size_t kRefusedPerCall = 256;

}  // namespace

// Under the lock. `from`: the first block that was not stored; none of those behind it is.
void Node::note_refused(const PutRequest& request, std::size_t from, const PutStatus* statuses) {
  const std::size_t until = std::min(request.keys.size(), from + kRefusedPerCall);
  if (from == until) return;
  const Seconds now = clock_->now();
  for (std::size_t i = from; i < until; ++i) {
    const PutStatus status = i == from ? statuses[i] : PutStatus::chain_broken;
    store_->note_refused(request.space, request.keys[i], static_cast<std::uint8_t>(status), now);
  }
}

std::vector<Node::Explained> Node::explain(const Namespace& space, std::span<const Hash128> keys) {
  std::vector<Explained> answers;
  answers.reserve(keys.size());
  Lock lock(mutex_);
  drain_touches();
  drain_clients(lock);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i > 0 && i % kKeysPerLock == 0) let_others_in(lock);
    const Seconds now = clock_->now();
    Explained answer{.block = store_->explain(space, keys[i], now)};
    if (answer.block.gone) answer.ago_s = std::max(now - answer.block.gone->when, 0.0);
    answers.push_back(std::move(answer));
  }
  return answers;
}

std::optional<double> Node::coldest_heat() {
  const Lock lock(mutex_);
  drain_touches();
  return store_->coldest_heat(clock_->now());
}

std::vector<HotPrefix> Node::ends(std::size_t count) {
  Lock lock(mutex_);
  drain_touches();
  drain_clients(lock);
  const std::uint32_t records = store_->records_used();
  lock.unlock();
  HotPrefixes search(std::min<std::size_t>(count, records), records, clock_->now());
  lock.lock();
  while (!stopping_ && search.step(*store_)) let_others_in(lock);
  lock.unlock();
  return search.take();
}

Node::ReuseCurves Node::reuse() {
  ReuseCurves curves;
  Lock lock(mutex_);
  drain_touches();
  drain_clients(lock);
  const Seconds now = clock_->now();
  const ReuseBook& book = store_->reuse();
  curves.all = book.all().curve(now);
  book.for_each_space([&](std::uint32_t number, const Reuse& own) {
    curves.spaces.emplace_back(number, own.curve(now));
  });
  curves.bytes = book.bytes();
  return curves;
}

}  // namespace kvpool
