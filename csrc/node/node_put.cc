// The write side of the node: reserve -> copy -> commit.
#include "node/node.h"

namespace kvpool {

// Blocks of the running call: none of them may be evicted to make room for a later one.
struct Node::Pins {
  explicit Pins(Store& owner) : store(owner) {}
  Store& store;
  std::vector<BlockId> records;

  void add(BlockId record) {
    store.pin(record);
    records.push_back(record);
  }
  void release() {  // under the lock
    for (const BlockId record : records) store.unpin(record);
    records.clear();
  }
};

void Node::put(const PutRequest& request, BlockSource& source, PutStatus* statuses) {
  Lock lock(mutex_);
  drain_touches();
  Pins pins(*store_);
  if (request.parent != nullptr) {
    BlockId parent = kNoBlock;
    if (store_->find(request.space, *request.parent, parent)) pins.add(parent);
  }
  std::size_t done = 0;
  for (; done < request.keys.size(); ++done) {
    statuses[done] = store_block(lock, request, done, source, pins);
    if (statuses[done] > PutStatus::present) break;
  }
  pins.release();
  const std::size_t refused = request.keys.size() - done;
  for (std::size_t i = done + 1; i < request.keys.size(); ++i)
    statuses[i] = PutStatus::chain_broken;
  lock.unlock();
  not_stored_.fetch_add(refused, std::memory_order_relaxed);
  put_bytes_.fetch_add(done * request.space.block_bytes, std::memory_order_relaxed);
}

PutStatus Node::store_block(Lock& lock, const PutRequest& request, std::size_t index,
                            BlockSource& source, Pins& pins) {
  const BlockId parent = pins.records.empty() ? kNoBlock : pins.records.back();
  Store::Reserved reserved{};
  const PutStatus status = reserve_locked(lock, request, request.keys[index], reserved);
  if (status == PutStatus::present) {
    store_->touch(reserved.record, clock_->now());
    pins.add(reserved.record);
  }
  if (status != PutStatus::stored) return status;

  if (reserved.commit_slab) kick();  // the next slab had better be warm
  lock.unlock();
  Hash128 sum;
  const bool backed = back_with_pages(reserved);
  const bool filled = backed && !faults_.fires("put.copy") &&
                      source.fill(index, store_->arena().base() + reserved.offset, sum) &&
                      !faults_.fires("put.commit");
  lock.lock();
  if (!filled) {
    store_->abort(reserved.record);
    settled_.notify_all();
    return backed ? PutStatus::failed : PutStatus::no_memory;
  }
  const auto committed = store_->commit(reserved.record, sum, parent, clock_->now());
  settled_.notify_all();
  if (committed == Store::Committed::dropped) return PutStatus::dropped;
  if (committed == Store::Committed::index_full) return PutStatus::pool_index;
  pins.add(reserved.record);
  return PutStatus::stored;
}

// stored = reserved for us. Waits for another writer of the same key, holding nothing meanwhile;
// takes over when that writer gave up.
PutStatus Node::reserve_locked(Lock& lock, const PutRequest& request, const Hash128& key,
                               Store::Reserved& reserved) {
  using Outcome = Store::Reserved::Outcome;
  for (;;) {
    if (stopping_) return PutStatus::failed;
    if (faults_.fires("put.reserve")) return PutStatus::failed;
    reserved = store_->reserve(request.space, key, clock_->now());
    switch (reserved.outcome) {
      case Outcome::reserved:
        return PutStatus::stored;
      case Outcome::present:
        return PutStatus::present;
      case Outcome::no_room:
        return reserved.why == NoRoom::index_full ? PutStatus::pool_index : PutStatus::pool_pinned;
      case Outcome::pending:
        if (settled_.wait_until(lock, request.deadline) == std::cv_status::timeout)
          return PutStatus::timed_out;
    }
  }
}

// The first writer of a slab makes its pages, without the lock. A second one that comes before it
// is done takes page faults instead.
bool Node::back_with_pages(const Store::Reserved& reserved) {
  if (faults_.fires("put.pages")) return false;
  if (!reserved.commit_slab) return true;
  bool ok = true;
  commit_units(reserved.slab_offset, reserved.slab_bytes, ok);
  return ok;
}

PutStatus Node::reserve(const PutRequest& request, Ticket& ticket) {
  Lock lock(mutex_);
  drain_touches();
  ticket = {};
  if (request.parent != nullptr && store_->find(request.space, *request.parent, ticket.parent))
    store_->pin(ticket.parent);
  Store::Reserved reserved{};
  PutStatus status = reserve_locked(lock, request, request.keys[0], reserved);
  ticket.record = reserved.record;
  ticket.offset = reserved.offset;
  if (status == PutStatus::stored) {
    lock.unlock();
    const bool backed = back_with_pages(reserved);
    lock.lock();
    if (backed) return status;
    store_->abort(reserved.record);
    settled_.notify_all();
    status = PutStatus::no_memory;
  } else if (status == PutStatus::present) {
    store_->touch(reserved.record, clock_->now());
  }
  if (ticket.parent != kNoBlock) store_->unpin(ticket.parent);
  return status;
}

PutStatus Node::commit(const Ticket& ticket, const Hash128& sum) {
  Lock lock(mutex_);
  const auto committed = store_->commit(ticket.record, sum, ticket.parent, clock_->now());
  if (ticket.parent != kNoBlock) store_->unpin(ticket.parent);
  settled_.notify_all();
  switch (committed) {
    case Store::Committed::stored:
      return PutStatus::stored;
    case Store::Committed::dropped:
      return PutStatus::dropped;
    case Store::Committed::index_full:
      break;
  }
  return PutStatus::pool_index;
}

void Node::abort(const Ticket& ticket) {
  Lock lock(mutex_);
  store_->abort(ticket.record);
  if (ticket.parent != kNoBlock) store_->unpin(ticket.parent);
  settled_.notify_all();
}

}  // namespace kvpool
