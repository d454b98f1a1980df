// The node's side of the SSD tier: opening it, the writer's thread, waiting for a commit, resizing,
// closing. Which blocks are written is the Store's affair (store_ssd.cc), how is the tier's.
#include <algorithm>
#include <cmath>

#include "block/copy.h"
#include "node/node.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr auto kLinger = 5ms;       // for company, when nobody waits and little is queued
constexpr auto kLookEvery = 100ms;  // an idle writer
constexpr auto kStuckPause = 2ms;   // work is left, but not for now: pins, draining
constexpr auto kLastStamps = 2s;    // of a closing tier
constexpr std::size_t kGroupBlocks = 256;
constexpr std::size_t kBlocksPerTurn = 32;       // then the lock is let go: some 1.5 us each
constexpr std::byte kZeros[kPageBytes] = {};     // more than a slot is longer than its block
constexpr std::uint64_t kGroupShareInverse = 8;  // of DRAM: what is being written cannot be evicted

// Heat left of heat 1, so many seconds later. A clock that went back counts as none passed.
double decay(double age_s, double tau_s) {
  return tau_s > 0 ? std::exp2(-std::max(age_s, 0.0) / tau_s) : 1;
}

}  // namespace

Result<void> Node::attach(std::unique_ptr<Ssd> tier) {
  const SsdFacts facts = tier->facts();
  store_->attach_ssd(
      {.facts = facts,
       .units_max = facts.units * 4,
       .records_max = 0,
       .policy = options_.store.policy,
       .tau_s = options_.store.tau_s,
       .ghosts_max = 0,
       .admit = options_.ssd.durability == Durability::durable ? SsdAdmit::all : options_.ssd_admit,
       .free_late = options_.ssd.durability == Durability::relaxed});
  store_->restore_spaces(tier->spaces(), tier->classes(), facts.entries);
  std::vector<BlockKey> forgotten = tier->forgotten();
  std::vector<Hash128> parents;
  std::vector<float> heats;
  const double now_s = clock_->wall_s();
  const auto visited = tier->for_each_entry([&](const BlockKey& key, const BlockEntry& entry) {
    if (!store_->restore_entry(key, entry)) {
      forgotten.push_back(key);
      return;
    }
    parents.push_back(entry.parent);  // records of a fresh store are numbered as they come
    heats.push_back(entry.heat * static_cast<float>(decay(now_s - entry.stamp_s, facts.tau_s)));
  });
  if (!visited) return visited;
  if (const auto restored = store_->entries_restored(); !restored)
    return fail(restored.error().code,
                "SSD tier in " + options_.ssd.path + ": " + restored.error().message);
  store_->restore_chains([&](BlockId record) { return parents[record]; },
                         [&](BlockId record) { return heats[record]; }, clock_->now());
  if (!forgotten.empty()) tier->forget_these(std::move(forgotten));
  tier_ = std::move(tier);
  ssd_open_ = true;
  const std::uint64_t asked = options_.ssd.capacity_bytes;
  if (asked == 0 || asked >= tier_->facts().capacity_bytes) return {};
  if (tier_->units_for(asked) == 0)
    return fail(Code::bad_argument,
                "SSD tier in " + options_.ssd.path + ": " + std::to_string(asked) +
                    " bytes are too few for a tier whose index alone has " +
                    std::to_string(facts.index_bytes) + "; leave the capacity out to keep " +
                    std::to_string(facts.capacity_bytes) + ", or start in an empty directory");
  resize_ssd_to_ = asked;  // the writer's first work
  return {};
}

// --- the writer's thread -------------------------------------------------------------------------

// What could not be kept goes from the index before any slot is given out that it may name.
void Node::delete_forgotten() {
  SsdGroup nothing;
  while (tier_->has_forgotten() && tier_->commit(nothing)) {
  }
}

void Node::write_back() {
  delete_forgotten();
  Lock lock(mutex_);
  while (!writer_ends_) {
    if (resize_ssd_to_ != 0) carry_out_resize(lock);
    if (syncs_asked_ > syncs_done_ && !tier_->is_read_only()) sync_index(lock);
    const auto is_urgent = [&] {
      return writer_ends_ || urgent_ > 0 || resize_ssd_to_ != 0 ||
             queued_bytes_ >= (is_durable() ? kDurableGroupBytes : kGroupBytes) ||
             store_->ssd().queued() >= kGroupBlocks;
    };
    if (tier_->is_read_only()) store_->stop_queueing();  // a resize may have found out
    if (tier_->is_read_only() || !store_->has_group_work()) {
      written_.notify_all();
      write_work_.wait_for(lock, kLookEvery, [&] {
        return writer_ends_ || resize_ssd_to_ != 0 ||
               (!tier_->is_read_only() && (store_->has_group_work() || syncs_asked_ > syncs_done_));
      });
      continue;
    }
    if (!is_urgent()) write_work_.wait_for(lock, kLinger, is_urgent);
    if (!write_group(lock)) write_work_.wait_for(lock, kStuckPause);
  }
  write_last_stamps(lock);
}

Store::GroupLimits Node::group_limits() const {
  const std::uint64_t blocks_limit = store_->blocks_limit();
  const std::uint64_t blocks =
      blocks_limit == 0
          ? kGroupBlocks
          : std::clamp<std::uint64_t>(blocks_limit / kGroupShareInverse, 1, kGroupBlocks);
  return {.blocks = blocks,
          .bytes = std::min(2 * kGroupBytes, store_->bytes_limit() / kGroupShareInverse),
          .must = is_durable(),
          .stamp_s = static_cast<std::uint32_t>(std::max(clock_->wall_s(), 0.0))};
}

// False: there was nothing that could be done now.
bool Node::write_group(Lock& lock) {
  drain_touches();
  WriteBack batch;
  queued_bytes_ = 0;
  group_under_way_ = true;
  make_group(lock, batch);
  const bool is_work = !batch.empty();
  bool committed = false;
  if (is_work) {
    lock.unlock();
    std::vector<Bounce> bounces;
    prepare_payload(batch, bounces);
    committed = tier_->commit(batch.group);
    lock.lock();
  }
  store_->group_settled(batch, committed);
  for (std::size_t done = 0; done < batch.items.size(); done += kBlocksPerTurn) {
    if (done > 0) let_others_in(lock);
    store_->writes_done(batch, done, done + kBlocksPerTurn, clock_->now());
  }
  store_->group_over(batch);
  group_under_way_ = false;
  settled_before_ = store_->ssd().queue().first_ticket();
  if (tier_->is_read_only()) store_->stop_queueing();
  written_.notify_all();
  return is_work;
}

void Node::make_group(Lock& lock, WriteBack& batch) {
  const Store::GroupLimits limits = group_limits();
  store_->begin_group(limits, batch, clock_->now());
  while (store_->fill_group(limits, batch, kBlocksPerTurn, clock_->now())) let_others_in(lock);
  store_->end_group(limits, batch, clock_->now());
}

// Without the lock; the blocks are pinned. What lies behind a block in its slot is of no block and
// goes to the disk as zeros. A block that moves inside the slab file and is not in DRAM is read
// first; if there is no memory for that it stays where it is, if that fails it is lost.
void Node::prepare_payload(WriteBack& batch, std::vector<Bounce>& bounces) {
  auto reads = std::make_shared<SsdReads>(static_cast<std::size_t>(std::ranges::count_if(
      batch.group.writes, [](const SsdWrite& write) { return write.payload == nullptr; })));
  std::vector<std::size_t> read;  // which items, in the order of the reads
  for (std::size_t i = 0; i < batch.group.writes.size(); ++i) {
    SsdWrite& write = batch.group.writes[i];
    if (write.payload != nullptr) {
      auto* slot = const_cast<std::byte*>(write.payload);  // of our own arena
      // Late readers of a longer block that was here before may still look: they see no tear.
      racy_fill(slot + write.place.bytes, kZeros, write.place.slot_bytes() - write.place.bytes);
      continue;
    }
    SsdReads::Item& item = reads->items[read.size()];
    bounces.push_back(bounces_.take(write.place.slot_bytes()));
    item.place = batch.items[i].from;
    item.sum = write.sum;
    item.into = bounces.back().memory();
    read.push_back(i);
  }
  if (read.empty()) return;
  tier_->read(reads);
  // The device answers or fails; the buffers must not go before.
  while (!reads->wait(std::chrono::steady_clock::now() + 1h)) {
  }
  for (std::size_t i = 0; i < read.size(); ++i) {
    std::byte* into = reads->items[i].into;
    if (reads->items[i].outcome.load(std::memory_order_acquire) == ReadOutcome::whole)
      batch.group.writes[read[i]].payload = into;
    else
      batch.items[read[i]].is_unreadable = into != nullptr;
  }
}

// --- waiting for it ------------------------------------------------------------------------------

void Node::wait_until_durable(Lock& lock, std::span<const BlockId> records, Deadline deadline,
                              const GivenUp& given_up, PutStatus* statuses) {
  for (const BlockId record : records)  // one that failed before gets another chance
    if (!store_->is_on_ssd(record)) store_->write_soon(record);
  const Urgent urgent(*this);
  const auto is_due = [&](BlockId record) { return store_->is_due(record); };
  const auto is_over = [&] { return stopping_ || std::ranges::none_of(records, is_due); };
  while (!written_.wait_until(lock, next_look(deadline, given_up), is_over))
    if (std::chrono::steady_clock::now() >= deadline || (given_up && given_up())) break;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (store_->is_on_ssd(records[i])) continue;
    statuses[i] = stopping_ ? PutStatus::failed : PutStatus::not_durable;
    not_durable_.fetch_add(1, std::memory_order_relaxed);
  }
}

// What is in the queue now, or in the group under way; later puts are not waited for. Twice: what
// that group cannot write is tried again as well. False: the deadline came first, or the writer
// writes no more.
bool Node::write_queued(Lock& lock, Deadline deadline) {
  const Urgent urgent(*this);
  bool is_settled = false;
  std::uint64_t seen = 0;
  for (int round = 0; round < 2; ++round) {
    store_->queue_unwritten();
    seen = store_->ssd().last_retry();
    const std::uint64_t ticket = store_->ssd().queue().last_ticket();
    written_.wait_until(lock, deadline, [&] {
      is_settled = settled_before_ > ticket || (store_->ssd().queued() == 0 && !group_under_way_);
      return writer_ends_ || tier_->is_read_only() || is_settled;
    });
  }
  // What failed again beside others stands in the queue once more, behind our ticket.
  const bool is_all = store_->ssd().last_retry() == seen;
  return is_settled && is_all && !writer_ends_ && !tier_->is_read_only();
}

bool Node::flush(Deadline deadline) {
  Lock lock(mutex_);
  if (!tier_) return true;
  drain_touches();
  const Urgent urgent(*this);  // of the sync below as well
  if (!write_queued(lock, deadline) || store_->ssd().has_unwritten()) return false;
  if (options_.ssd.durability != Durability::relaxed) return true;
  const std::uint64_t turn = ++syncs_asked_;
  wake_writer();
  written_.wait_until(lock, deadline,
                      [&] { return writer_ends_ || tier_->is_read_only() || syncs_done_ >= turn; });
  return syncs_done_ >= turn;
}

// On the writer's thread, which alone may touch the index. A failure is tried again until it is one
// too many and the tier only reads.
void Node::sync_index(Lock& lock) {
  const std::uint64_t asked = syncs_asked_;
  lock.unlock();
  const bool is_synced = tier_->sync();
  lock.lock();
  if (is_synced) syncs_done_ = asked;
  written_.notify_all();
}

// --- another size --------------------------------------------------------------------------------

Result<std::uint64_t> Node::resize_ssd(std::uint64_t capacity_bytes, Deadline deadline) {
  Lock lock(mutex_);
  if (!tier_) return fail(Code::bad_argument, "this pool has no SSD tier to resize");
  if (capacity_bytes == 0)
    return fail(Code::bad_argument, "the SSD tier cannot be resized to 0 bytes");
  const std::uint64_t units_max = store_->ssd().options().units_max;
  if (tier_->units_for(capacity_bytes) > units_max)
    return fail(Code::bad_argument, "a capacity of " + std::to_string(capacity_bytes) +
                                        " bytes is too much for now: until it is opened again the "
                                        "SSD tier can grow to " +
                                        std::to_string(units_max * kUnitBytes) +
                                        " bytes of payload, four times what it began with");
  ssd_resized_.reset();
  resize_ssd_to_ = capacity_bytes;
  const Urgent urgent(*this);
  written_.wait_until(lock, deadline, [&] { return writer_ends_ || ssd_resized_.has_value(); });
  if (ssd_resized_ && !*ssd_resized_) return std::unexpected(ssd_resized_->error());
  return tier_->facts().capacity_bytes;
}

// On the writer's thread. A smaller file is emptied beyond its new end first, group by group.
// Leaves resize_ssd_to_ as it is only where another size was asked for meanwhile, or the node
// closes.
void Node::carry_out_resize(Lock& lock) {
  const std::uint64_t capacity = resize_ssd_to_;
  SsdFacts facts = tier_->facts();
  const std::uint64_t units = tier_->units_for(capacity);
  if (units != 0 && units < facts.units) {
    facts.units = units;
    if (store_->ssd().options().facts.units != units) store_->set_ssd_units(facts);
    while (!writer_ends_ && resize_ssd_to_ == capacity && store_->is_ssd_shrinking() &&
           !tier_->is_read_only())
      if (!write_group(lock)) write_work_.wait_for(lock, kStuckPause);
    if (resize_ssd_to_ != capacity) return;
    if (writer_ends_ && store_->is_ssd_shrinking()) return;
  }
  resize_ssd_to_ = 0;
  lock.unlock();
  Result<void> resized = tier_->resize(capacity);  // refused by a tier that only reads
  lock.lock();
  store_->set_ssd_units(tier_->facts());
  if (resize_ssd_to_ == 0) ssd_resized_ = std::move(resized);
  written_.notify_all();
}

// --- the end -------------------------------------------------------------------------------------

// Heat that the index has not heard of, and what was removed. If there is no time for it, warmth is
// lost, and what was removed may be back.
void Node::write_last_stamps(Lock& lock) {
  const auto until = std::chrono::steady_clock::now() + kLastStamps;
  store_->stop_queueing();
  store_->stop_moving();
  while (!tier_->is_read_only() && std::chrono::steady_clock::now() < until && write_group(lock)) {
  }
}

// From any number of threads: the one that joins the writer closes, the others wait for it.
void Node::close_ssd(Deadline flush_until) {
  Lock lock(mutex_);
  if (!ssd_open_) return;
  if (!writer_ends_ && flush_until > std::chrono::steady_clock::now()) {
    drain_touches();
    store_->queue_all();
    write_queued(lock, flush_until);
  }
  writer_ends_ = true;
  write_work_.notify_all();
  written_.notify_all();
  std::thread writer = std::move(writer_);
  if (!writer.joinable()) return written_.wait(lock, [&] { return !ssd_open_; });
  lock.unlock();
  writer.join();
  lock.lock();
  // Who waited for a commit has been told to go. A fetch ends when the device has answered, also
  // one that was given up at its deadline: its memory is ours until then.
  written_.wait(lock, [&] { return fetches_ == 0 && urgent_ == 0; });
  store_->detach_ssd();
  std::unique_ptr<Ssd> tier = std::move(tier_);
  lock.unlock();
  tier.reset();  // joins the I/O threads and lets the directory go
  lock.lock();
  ssd_open_ = false;
  written_.notify_all();
}

void Node::add_ssd_stats(NodeStats& stats) {
  stats.not_durable = not_durable_.load(std::memory_order_relaxed);
  stats.ssd_hits = ssd_hits_.load(std::memory_order_relaxed);
  stats.ssd_hit_bytes = ssd_hit_bytes_.load(std::memory_order_relaxed);
  stats.ssd_timeouts = ssd_timeouts_.load(std::memory_order_relaxed);
  if (!tier_) return;
  stats.has_ssd = true;
  stats.ssd_facts = tier_->facts();
  stats.ssd = tier_->counters();
  stats.ssd.damaged -= ssd_stale_reads_;  // counted by the tier before they were by us
  stats.ssd_read_only = tier_->is_read_only();
  stats.ssd_read_only_reason = tier_->why_read_only();
  stats.ssd_blocks = store_->ssd_blocks();
  stats.ssd_bytes_taken = store_->ssd().bytes_taken();
  stats.ssd_queued = store_->ssd().queued();
  stats.ssd_busy = !stats.ssd_read_only && (group_under_way_ || store_->has_group_work());
  stats.ssd_quarantined = store_->ssd().quarantined();
}

}  // namespace kvpool
