// What the cluster asks of a node for the sake of copies at other members: the lock around chains
// and around store_copies.cc. How blocks are fetched is in node_elsewhere.cc.
#include <algorithm>

#include "node/node.h"

namespace kvpool {
namespace {

constexpr std::size_t kBlocksPerLock = 256;  // some cold lines each

}  // namespace

// From the last block back to the first.
std::vector<Node::ChainBlock> Node::chain_of(const Namespace& space, const Hash128& last,
                                             std::size_t most) {
  std::vector<ChainBlock> chain;
  Lock lock(mutex_);
  drain_touches();
  const Seconds now = clock_->now();
  BlockId record = kNoBlock;
  if (!store_->find(space, last, record)) return chain;
  while (record != kNoBlock && store_->is_resident(record) && !stopping_) {
    const auto [of, key] = store_->name_of(record);
    if (of != &space) break;
    chain.push_back({key, store_->uses().heat(record, now)});
    if (chain.size() % kBlocksPerLock == 0) {
      let_others_in(lock);
      if (!store_->find(space, key, record)) break;  // its record may be another's by now
    }
    record = store_->uses().parent(record);
  }
  lock.unlock();
  std::ranges::reverse(chain);
  if (chain.size() > most) chain.resize(most);
  return chain;
}

bool Node::is_warm_copy(const Namespace& space, double heat) {
  const Lock lock(mutex_);
  return store_->is_warm_copy(space, heat, clock_->now());
}

void Node::be_last(const Namespace& space, std::span<const Hash128> keys) {
  Lock lock(mutex_);
  drain_touches();  // uses until now say what is worth a place on the SSD
  const Seconds now = clock_->now();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i > 0 && i % kBlocksPerLock == 0) let_others_in(lock);
    BlockId record = kNoBlock;
    if (store_->find(space, keys[i], record)) store_->be_last(record, now);
  }
  if (tier_) wake_writer();
}

}  // namespace kvpool
