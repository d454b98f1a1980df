// Counts the messages of a directory of which nothing else is simulated: those of lookups to the
// owners of keys, and the batches in which nodes tell owners what came and went.
//
// Owners come from the product's table, batches from the publisher's queue with its bounds. A
// node's words to its own shard are no messages.
// Thread rule: one caller at a time.
#pragma once
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "cluster/owner_queue.h"
#include "cluster/owner_table.h"
#include "policy/simulator.h"

namespace kvpool {

// What the owner of a block is drawn from.
enum class Sharding : std::uint8_t {
  by_key,  // its own key
  by_run,  // the key of the first of each kRunBlocks blocks of its chain
};
inline constexpr std::size_t kRunBlocks = 64;

struct ShardCounts {
  std::uint64_t asks = 0, asked_keys = 0;
  std::uint64_t rounds = 0;                  // of questions, all at once
  std::uint64_t asks_p99 = 0, asks_max = 0;  // of one request
  std::uint64_t publishes = 0, withdraws = 0, told_keys = 0;
  std::uint64_t busiest = 0;  // messages to the owner that had most
};

class ShardTraffic {
 public:
  using Name = BlockNames::Name;
  // `members`: by node; all of the table.
  ShardTraffic(Sharding sharding, const OwnerTable& table, std::span<const Hash128> members);

  // `directory_keys`: by name. A name that was seen before keeps its owner.
  void learn(std::span<const Name> chain, std::span<const DirectoryKey> directory_keys);
  // One request of a node: where are these?
  void ask(std::uint32_t node, std::span<const Name> names);
  // Something became resident on a node, or left it.
  void change(std::uint32_t node, Name name, const DirectoryKey& key, bool came, Seconds now);
  // Sends all batches that are due.
  void advance(Seconds now);
  void finish();

  std::uint32_t owner(Name name) const { return owners_[name]; }
  ShardCounts counts() const;
  const std::vector<std::uint64_t>& messages_to() const { return messages_to_; }  // by node

 private:
  using Time = OwnerQueue::Time;
  using Pair = std::uint64_t;  // who tells, and whom
  struct Due {
    Time at;
    Pair pair;
  };
  static constexpr std::uint32_t kUnknown = 0xffff'ffff;

  void send(Pair pair, Time now);

  const Sharding sharding_;
  const OwnerTable& table_;
  std::vector<std::uint32_t> node_of_voter_;
  std::vector<std::uint32_t> owners_;  // by name
  std::unordered_map<Pair, OwnerQueue> queues_;
  std::deque<Due> due_;                  // in order; may name queues that were sent early
  std::vector<std::uint64_t> asks_;      // how many requests asked so many owners
  std::vector<std::uint64_t> asked_by_;  // by node: the latest request that asked it
  std::vector<std::uint64_t> messages_to_;
  std::uint64_t requests_ = 0;
  ShardCounts counts_;
};

}  // namespace kvpool
