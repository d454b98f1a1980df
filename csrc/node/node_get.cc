// The read side of the node: lookup -> copy -> deliver, or acquire -> ... -> release.
#include <algorithm>

#include "node/node.h"

namespace kvpool {
namespace {

constexpr std::size_t kTouchBatch = 256;
constexpr int kCopyAttempts = 3;           // without a pin; then one with a pin, which cannot fail
constexpr int kElsewhereTries = 8;         // a block that changes its tier whenever it is looked at
constexpr std::size_t kKeysPerLock = 256;  // acquire and remove let others in between

}  // namespace

Looked Node::look(const Namespace& space, std::span<const Hash128> keys,
                  std::uint8_t* tiers) const {
  return reader_.look(keys, space.incarnation.load(std::memory_order_acquire), tiers);
}

std::size_t Node::lookup(const Namespace& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                         const Reach& reach, Miss* why) const {
  Miss miss{};
  const Looked looked = look_far(space, keys, tiers, reach, miss);
  space.traffic->count_lookup(keys.size(), looked);
  if (why != nullptr) *why = miss;
  return looked.present;
}

std::size_t Node::get(const Namespace& space, std::span<const Hash128> keys, BlockSink& sink,
                      Miss* why, const Reach& reach) {
  Loaded loaded;
  const std::size_t done = get_part(space, keys, sink, loaded, reach);
  space.traffic->count_get(keys.size(), loaded);
  if (why != nullptr) *why = loaded.why;
  return done;
}

std::size_t Node::get_part(const Namespace& space, std::span<const Hash128> keys, BlockSink& sink,
                           Loaded& loaded, const Reach& reach) {
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_acquire);
  Found found[kTouchBatch];
  std::vector<Found> more;  // only for long calls: touches go out tail first, all together
  if (keys.size() > kTouchBatch) more.resize(keys.size());
  Found* all = more.empty() ? found : more.data();
  std::size_t done = 0, from_ssd = 0, from_far = 0;
  Miss miss = Miss::none;
  FarCall far{.space = space, .keys = keys, .reach = reach};
  for (int tries = kElsewhereTries; done < keys.size();) {
    if (done % IndexReader::kGroup == 0 && keys.size() > 1)
      reader_.prefetch(keys.subspan(done, std::min(IndexReader::kGroup, keys.size() - done)),
                       incarnation);
    const Got got = get_one(space, keys[done], done, sink, all[done], miss);
    if (got == Got::missing) {
      if (miss != Miss::absent || !may_go_far(far)) break;
      const std::size_t came = get_from_elsewhere(far, done, sink, miss);
      std::fill(all + done, all + done + came, Found{});  // its coming was its use
      done += came;
      from_far += came;
      if (miss != Miss::none) break;
      if (came > 0) far.deadline = far_deadline(reach);
      continue;
    }
    if (got == Got::whole) {
      ++done;
      continue;
    }
    miss = Miss::none;
    const std::size_t fetched = get_from_ssd(space, keys.subspan(done), done, sink, miss);
    if (fetched == 0 && miss == Miss::none && --tries == 0) miss = Miss::moved;
    if (fetched == 0 && miss != Miss::none) break;
    std::fill(all + done, all + done + fetched, Found{});  // touched already
    done += fetched;
    from_ssd += fetched;
  }
  loaded = {.dram = done - from_ssd - from_far,
            .ssd = from_ssd,
            .remote = from_far,
            .why = done < keys.size() ? miss : Miss::none};
  report_touches({all, done});
  return done;
}

Node::Got Node::get_one(const Namespace& space, const Hash128& key, std::size_t index,
                        BlockSink& sink, Found& found, Miss& why) {
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_acquire);
  if (faults_->fires("get.lookup")) {
    why = Miss::fault;
    return Got::missing;
  }
  for (int attempt = 0; attempt < kCopyAttempts; ++attempt) {
    if (!reader_.find(key, incarnation, found)) {
      why = attempt == 0 ? Miss::absent : Miss::moved;
      return Got::missing;
    }
    if ((found.tier & kTierDram) == 0) return Got::on_ssd;
    // A fault here stands for a block that was evicted under the copy.
    if (faults_->fires("get.copy")) continue;
    if (sink.deliver(index, reader_, found)) return Got::whole;
  }
  why = Miss::moved;
  return get_pinned(space, key, index, sink, found) ? Got::whole : Got::missing;
}

// After three blocks in a row went away under the copy (a pool that is far too small, or blocks
// being moved): pin first, so that the copy can only succeed.
bool Node::get_pinned(const Namespace& space, const Hash128& key, std::size_t index,
                      BlockSink& sink, Found& found) {
  Lease lease;
  Loaded leased;
  if (acquire_part(space, {&key, 1}, &lease, leased, Reach::here()) == 0) return false;
  const bool delivered =
      reader_.find(key, space.incarnation.load(std::memory_order_acquire), found) &&
      found.record == lease.record && !faults_->fires("get.deliver") &&
      sink.deliver(index, reader_, found);
  release({&lease, 1});
  return delivered;
}

// Of a pinned block in DRAM, under the lock.
Lease Node::leased(BlockId record, std::uint32_t bytes, std::uint64_t offset) const {
  const Record& shared = store_->view().record(record);
  return {record, bytes, offset, shared.generation.load(std::memory_order_relaxed),
          store_->sum_of(record)};
}

std::size_t Node::acquire(const Namespace& space, std::span<const Hash128> keys, Lease* leases,
                          Miss* why, const Reach& reach) {
  Loaded loaded;
  const std::size_t done = acquire_part(space, keys, leases, loaded, reach);
  space.traffic->count_view(keys.size(), loaded);
  if (why != nullptr) *why = loaded.why;
  return done;
}

std::size_t Node::acquire_part(const Namespace& space, std::span<const Hash128> keys, Lease* leases,
                               Loaded& loaded, const Reach& reach) {
  const auto deadline = std::chrono::steady_clock::now() + options_.ssd_timeout;
  FarCall far{.space = space, .keys = keys, .reach = reach};
  std::size_t done = 0, from_ssd = 0, from_far = 0;
  Miss miss = Miss::none;
  for (int tries = kElsewhereTries; done < keys.size();) {
    const std::size_t until = std::min(keys.size(), done + kKeysPerLock);
    Lock lock(mutex_);
    drain_touches();
    const Seconds now = clock_->now();
    bool missed = false, on_ssd = false;
    for (; done < until; ++done) {
      BlockId record = kNoBlock;
      const bool fails = faults_->fires("get.acquire");
      missed = fails || !store_->find(space, keys[done], record);
      if (missed) {
        miss = fails ? Miss::fault : Miss::absent;
        break;
      }
      on_ssd = !store_->is_in_dram(record);
      if (on_ssd) break;
      store_->pin(record);
      store_->touch(record, now);
      const Record& shared = store_->view().record(record);
      leases[done] =
          leased(record, space.block_bytes, shared.offset.load(std::memory_order_relaxed));
    }
    if (!missed && !on_ssd) continue;
    lock.unlock();
    if (missed) {
      if (miss != Miss::absent || !may_go_far(far)) break;
      const std::size_t came = lease_from_elsewhere(far, done, leases, miss);
      done += came;
      from_far += came;
      if (miss != Miss::none) break;
      if (came > 0) far.deadline = far_deadline(reach);
      continue;
    }
    miss = Miss::none;
    const std::size_t fetched = lease_from_ssd(space, keys.subspan(done), leases + done, miss);
    const bool is_late = std::chrono::steady_clock::now() >= deadline;
    if (fetched == 0 && miss == Miss::none && (is_late || --tries == 0)) miss = Miss::no_room;
    if (fetched == 0 && miss != Miss::none) break;
    done += fetched;
    from_ssd += fetched;
  }
  loaded = {.dram = done - from_ssd - from_far,
            .ssd = from_ssd,
            .remote = from_far,
            .why = done < keys.size() ? miss : Miss::none};
  return done;
}

void Node::release(std::span<const Lease> leases) {
  for (std::size_t start = 0; start < leases.size(); start += kKeysPerLock) {
    Lock lock(mutex_);
    for (const Lease& lease : leases.subspan(start, std::min(kKeysPerLock, leases.size() - start)))
      store_->unpin(lease.record);
    if (store_->bytes_committed() > store_->bytes_limit()) kick();  // a shrink waits for pins
  }
}

std::size_t Node::remove(const Namespace& space, std::span<const Hash128> keys) {
  std::size_t removed = 0;
  for (std::size_t start = 0; start < keys.size(); start += kKeysPerLock) {
    const std::size_t until = std::min(keys.size(), start + kKeysPerLock);
    Lock lock(mutex_);
    const Seconds now = clock_->now();
    for (std::size_t i = start; i < until; ++i) {
      BlockId record = kNoBlock;
      if (!store_->find(space, keys[i], record)) continue;
      store_->remove(record, now);
      ++removed;
    }
  }
  return removed;
}

// Tail first: of a chain used at one moment the head is then the most recently used, so a policy
// that goes by order alone drops suffixes before prefixes.
void Node::report_touches(std::span<const Found> found) {
  if (found.empty()) return;
  const Seconds now = clock_->now();
  for (std::size_t left = found.size(); left > 0;) {
    const std::size_t count = std::min(left, kTouchBatch);
    const std::uint64_t at = touches_.claim(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Found& block = found[left - 1 - i];
      touches_.put(at + i, {block.generation, block.record, now});
    }
    left -= count;
    if (!touches_.half_full()) continue;
    if (Lock lock(mutex_, std::try_to_lock); lock.owns_lock()) drain_touches();
  }
}

void Node::drain_touches() {
  if (touches_.empty()) return;
  const Seconds now = clock_->now();
  touches_lost_ += touches_.drain([&](const TouchRing::Touch& touch) {
    store_->touch(touch.record, touch.generation, std::min(touch.when, now));
  });
}

// What clients report, as of now: their clocks are theirs. One client at a time, since each may
// have a ring full of it. True: some ring was half full, so look again soon.
bool Node::drain_clients(Lock& lock) {
  bool is_busy = false;
  for (std::size_t i = 0; i < attached_.size(); ++i) {
    hold_to_limit(attached_[i]);
    TouchRing& ring = attached_[i].page->touches;
    if (ring.empty()) continue;
    is_busy |= ring.half_full();
    const Seconds now = clock_->now();
    const std::uint64_t lost = ring.drain(
        [&](const TouchRing::Touch& touch) { store_->touch(touch.record, touch.generation, now); });
    touches_lost_ += std::min(lost, TouchRing::kEntries);  // a client may have written anything
    if (i + 1 < attached_.size()) let_others_in(lock);
  }
  return is_busy;
}

}  // namespace kvpool
