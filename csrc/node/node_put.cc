// The write side of the node: reserve -> copy -> commit.
#include "node/node.h"

namespace kvpool {
namespace {

PutStatus refusal(NoRoom why) {
  switch (why) {
    case NoRoom::index_full:
      return PutStatus::pool_index;
    case NoRoom::too_large:
      return PutStatus::too_large;
    case NoRoom::none:
    case NoRoom::pool_pinned:
      break;
  }
  return PutStatus::pool_pinned;
}

}  // namespace

// What one put holds while it runs: its blocks so far, none of which may be evicted to make room
// for a later one, and the incarnation they belong to.
struct Node::Call {
  Call(const PutRequest& put, Store& owner)
      : request(put),
        store(owner),
        incarnation(put.space.incarnation.load(std::memory_order_relaxed)) {}

  const PutRequest& request;
  Store& store;
  const std::uint32_t incarnation;
  std::vector<BlockId> pinned;

  bool dropped() const {
    return request.space.incarnation.load(std::memory_order_relaxed) != incarnation;
  }
  void pin(BlockId record) {
    store.pin(record);
    pinned.push_back(record);
  }
  BlockId last() const { return pinned.empty() ? kNoBlock : pinned.back(); }
  // Of the first so many keys, that all have been stored or were present.
  std::span<const BlockId> blocks(std::size_t count) const { return std::span(pinned).last(count); }
  void unpin_all() {
    for (const BlockId record : pinned) store.unpin(record);
  }
};

void Node::put(const PutRequest& request, BlockSource& source, PutStatus* statuses) {
  Lock lock(mutex_);
  drain_touches();
  Call call(request, *store_);
  if (request.parent != nullptr) {
    BlockId parent = kNoBlock;
    if (store_->find(request.space, *request.parent, parent)) call.pin(parent);
  }
  std::size_t done = 0;
  for (; done < request.keys.size(); ++done) {
    statuses[done] = store_block(lock, call, done, source);
    if (statuses[done] > PutStatus::present) break;
  }
  if (is_durable() && done > 0)
    wait_until_durable(lock, call.blocks(done), request.deadline, request.given_up, statuses);
  call.unpin_all();
  if (tier_) wake_writer();
  note_refused(request, done, statuses);
  lock.unlock();
  for (std::size_t i = done + 1; i < request.keys.size(); ++i)
    statuses[i] = PutStatus::chain_broken;
  if (!request.is_part) request.space.traffic->count_put({statuses, request.keys.size()});
}

PutStatus Node::store_block(Lock& lock, Call& call, std::size_t index, BlockSource& source) {
  // The rest of a chain whose head was dropped could never be reached.
  if (call.dropped()) return stopping_ ? PutStatus::failed : PutStatus::dropped;
  Store::Reserved reserved{};
  const PutStatus status = reserve_locked(lock, call.request, call.request.keys[index], reserved);
  if (status == PutStatus::present) {
    store_->refresh(reserved.record, clock_->now());
    call.pin(reserved.record);
    if (source.is_stream()) {
      lock.unlock();
      source.skip(index);
      lock.lock();
    }
  }
  if (status != PutStatus::stored) return status;

  const ClassId klass = call.request.space.size_class;
  if (reserved.makes_slab || store_->is_short(klass, options_.evict_ahead))
    kick();  // the next slab had better be warm, the next slots free
  lock.unlock();
  Hash128 sum;
  const bool backed = back_with_pages(reserved);
  const bool filled = backed && !faults_->fires("put.copy") &&
                      source.fill(index, store_->arena().base() + reserved.offset, sum) &&
                      !faults_->fires("put.commit");
  lock.lock();
  if (reserved.makes_slab) store_->pages_made(reserved.record, backed);
  if (!filled) {
    store_->abort(reserved.record);
    settled_.notify_all();
    return backed ? PutStatus::failed : PutStatus::no_memory;
  }
  const auto committed = store_->commit(reserved.record, sum, call.last(), clock_->now());
  settled_.notify_all();
  if (committed == Store::Committed::dropped)  // closing drops all there is
    return stopping_ ? PutStatus::failed : PutStatus::dropped;
  if (committed == Store::Committed::index_full) return PutStatus::pool_index;
  if (committed == Store::Committed::no_memory) return PutStatus::no_memory;
  call.pin(reserved.record);
  announce(call.request.space, call.request.keys[index]);
  queued_bytes_ += call.request.space.block_bytes;
  if (tier_ && queued_bytes_ >= (is_durable() ? kDurableGroupBytes : kGroupBytes)) wake_writer();
  return PutStatus::stored;
}

// stored = reserved for us. Waits for another writer of the same key, holding nothing meanwhile;
// takes over when that writer gave up.
PutStatus Node::reserve_locked(Lock& lock, const PutRequest& request, const Hash128& key,
                               Store::Reserved& reserved) {
  using Outcome = Store::Reserved::Outcome;
  const std::uint32_t incarnation = request.space.incarnation.load(std::memory_order_relaxed);
  for (;;) {
    if (stopping_) return PutStatus::failed;
    // Dropped during a wait: what came before in this chain is gone.
    if (request.space.incarnation.load(std::memory_order_relaxed) != incarnation)
      return PutStatus::dropped;
    if (faults_->fires("put.reserve")) return PutStatus::failed;
    reserved = store_->reserve(request.space, key, clock_->now());
    switch (reserved.outcome) {
      case Outcome::reserved:
        return PutStatus::stored;
      case Outcome::present:
        return PutStatus::present;
      case Outcome::no_room:
        return refusal(reserved.why);
      case Outcome::again:
        if (std::chrono::steady_clock::now() >= request.deadline) return PutStatus::timed_out;
        let_others_in(lock);
        break;
      case Outcome::pending:
        if (std::chrono::steady_clock::now() >= request.deadline) return PutStatus::timed_out;
        if (request.given_up && request.given_up()) return PutStatus::failed;
        settled_.wait_until(lock, next_look(request.deadline, request.given_up));
    }
  }
}

// Without the lock. No writer ever relies on page faults: where the machine has no page left, one
// of those would end the process.
bool Node::back_with_pages(const Store::Reserved& reserved) {
  if (faults_->fires("put.pages")) return false;
  if (reserved.pages_bytes == 0) return true;
  if (!reserved.makes_slab)
    return store_->arena().commit(reserved.pages_offset, reserved.pages_bytes);
  bool ok = true;
  commit_units(reserved.pages_offset, reserved.pages_bytes, ok);
  return ok;
}

// A put of one block in two steps: what became of it is known at the last of them.
PutStatus Node::reserve(const PutRequest& request, Ticket& ticket) {
  const PutStatus status = try_reserve(request, ticket);
  if (status != PutStatus::stored) request.space.traffic->count_put({&status, 1});
  return status;
}

PutStatus Node::try_reserve(const PutRequest& request, Ticket& ticket) {
  Lock lock(mutex_);
  drain_touches();
  ticket = {.space = &request.space};
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
    if (reserved.makes_slab) store_->pages_made(reserved.record, backed);
    if (backed) return status;
    store_->abort(reserved.record);
    settled_.notify_all();
    status = PutStatus::no_memory;
  } else if (status == PutStatus::present) {
    store_->refresh(reserved.record, clock_->now());
    if (is_durable()) {
      store_->pin(reserved.record);
      wait_until_durable(lock, {&reserved.record, 1}, request.deadline, request.given_up, &status);
      store_->unpin(reserved.record);
    }
  }
  if (ticket.parent != kNoBlock) store_->unpin(ticket.parent);
  if (status > PutStatus::present) note_refused(request, 0, &status);
  return status;
}

PutStatus Node::commit(const Ticket& ticket, const Hash128& sum, Deadline deadline) {
  const PutStatus status = try_commit(ticket, sum, deadline);
  ticket.space->traffic->count_put({&status, 1});
  return status;
}

PutStatus Node::try_commit(const Ticket& ticket, const Hash128& sum, Deadline deadline) {
  Lock lock(mutex_);
  const auto [space, key] = store_->name_of(ticket.record);
  const auto committed = store_->commit(ticket.record, sum, ticket.parent, clock_->now());
  settled_.notify_all();
  PutStatus status = PutStatus::stored;
  if (committed == Store::Committed::stored) announce(*space, key);
  if (committed == Store::Committed::stored && is_durable()) {
    store_->pin(ticket.record);
    wait_until_durable(lock, {&ticket.record, 1}, deadline, {}, &status);
    store_->unpin(ticket.record);
  }
  if (ticket.parent != kNoBlock) store_->unpin(ticket.parent);
  switch (committed) {
    case Store::Committed::stored:
      return status;
    case Store::Committed::dropped:
      return PutStatus::dropped;
    case Store::Committed::index_full:
      status = PutStatus::pool_index;
      break;
    case Store::Committed::no_memory:
      status = PutStatus::no_memory;
      break;
  }
  store_->note_refused(*space, key, static_cast<std::uint8_t>(status), clock_->now());
  return status;
}

void Node::abort(const Ticket& ticket) {
  Lock lock(mutex_);
  store_->abort(ticket.record);
  if (ticket.parent != kNoBlock) store_->unpin(ticket.parent);
  settled_.notify_all();
  const PutStatus status = PutStatus::failed;
  ticket.space->traffic->count_put({&status, 1});
}

}  // namespace kvpool
