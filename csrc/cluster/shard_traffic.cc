#include "cluster/shard_traffic.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "net/frame.h"

namespace kvpool {
namespace {

constexpr std::chrono::milliseconds kLinger{20};  // PublisherOptions::linger
constexpr std::size_t kKeysQueuedMax = 1 << 16;   // of a queue that is sent at kKeysPerBatch

OwnerQueue::Time time_of(Seconds now) {
  using std::chrono::duration_cast;
  return OwnerQueue::Time(
      duration_cast<OwnerQueue::Time::duration>(std::chrono::duration<double>(now)));
}

}  // namespace

ShardTraffic::ShardTraffic(Sharding sharding, const OwnerTable& table,
                           std::span<const Hash128> members)
    : sharding_(sharding),
      table_(table),
      node_of_voter_(members.size()),
      asked_by_(members.size()),
      messages_to_(members.size()) {
  for (std::uint32_t node = 0; node < members.size(); ++node)
    node_of_voter_[table.index_of(members[node])] = node;
}

void ShardTraffic::learn(std::span<const Name> chain,
                         std::span<const DirectoryKey> directory_keys) {
  if (owners_.size() < directory_keys.size()) owners_.resize(directory_keys.size(), kUnknown);
  for (std::size_t i = 0; i < chain.size(); ++i) {
    std::uint32_t& owner = owners_[chain[i]];
    if (owner != kUnknown) continue;
    const std::size_t named = sharding_ == Sharding::by_key ? i : i - i % kRunBlocks;
    owner = node_of_voter_[table_.owner_of(directory_keys[chain[named]])];
  }
}

void ShardTraffic::ask(std::uint32_t node, std::span<const Name> names) {
  ++requests_;
  std::uint64_t asks = 0;
  for (std::size_t done = 0; done < names.size(); done += kKeysPerRequest) {
    // A round of questions: each owner has one. Its number tells it from all others.
    ++counts_.rounds;
    for (const Name name :
         names.subspan(done).first(std::min<std::size_t>(names.size() - done, kKeysPerRequest))) {
      const std::uint32_t asked = owners_[name];
      if (asked == node) continue;
      ++counts_.asked_keys;
      if (asked_by_[asked] == counts_.rounds) continue;
      asked_by_[asked] = counts_.rounds;
      ++messages_to_[asked];
      ++asks;
    }
  }
  if (asks_.size() <= asks) asks_.resize(asks + 1);
  ++asks_[asks];
  counts_.asks += asks;
}

void ShardTraffic::change(std::uint32_t node, Name name, const DirectoryKey& key, bool came,
                          Seconds now) {
  const std::uint32_t to = owners_[name];
  if (to == node) return;
  const Pair pair = Pair{node} << 32 | to;
  const Time time = time_of(now);
  const auto [at, is_new] = queues_.try_emplace(pair, kKeysQueuedMax);
  if (is_new) due_.push_back({time + kLinger, pair});
  KVP_CHECK(at->second.push(key, came, time));
  if (at->second.size() >= kKeysPerBatch) send(pair, time);
}

// A batch is a withdraw, a publish or both.
void ShardTraffic::send(Pair pair, Time now) {
  auto queue = queues_.extract(pair);
  const auto to = static_cast<std::uint32_t>(pair);
  while (queue.mapped().size() > 0) {
    const OwnerQueue::Keys keys = queue.mapped().take_batch(now);
    counts_.withdraws += !keys.went.empty();
    counts_.publishes += !keys.came.empty();
    counts_.told_keys += keys.went.size() + keys.came.size();
    messages_to_[to] += std::uint64_t{!keys.went.empty()} + std::uint64_t{!keys.came.empty()};
  }
}

void ShardTraffic::advance(Seconds now) {
  const Time time = time_of(now);
  for (; !due_.empty() && due_.front().at <= time; due_.pop_front()) {
    const auto found = queues_.find(due_.front().pair);
    if (found != queues_.end() && found->second.is_due(time, kLinger))
      send(due_.front().pair, time);
  }
}

void ShardTraffic::finish() {
  while (!queues_.empty()) send(queues_.begin()->first, Time{});
  due_.clear();
}

ShardCounts ShardTraffic::counts() const {
  ShardCounts counts = counts_;
  counts.busiest =
      messages_to_.empty() ? 0 : *std::max_element(messages_to_.begin(), messages_to_.end());
  counts.asks_max = asks_.empty() ? 0 : asks_.size() - 1;
  // The least number that 99 of 100 requests do not exceed.
  std::uint64_t seen = 0;
  for (std::size_t asks = 0; asks < asks_.size(); ++asks) {
    seen += asks_[asks];
    counts.asks_p99 = asks;
    if (seen * 100 >= requests_ * 99) break;
  }
  return counts;
}

}  // namespace kvpool
