// What one group writes, in which order, and what becomes of its records afterwards.
#include <algorithm>

#include "base/check.h"
#include "node/store.h"

namespace kvpool {
namespace {

// Deletes and stamps of one group; with its writes well below IndexStore::kChangesMax.
constexpr std::size_t kDeletesPerGroup = 2048;
constexpr std::size_t kStampsPerGroup = 256;  // each may dirty a page of the index of its own

}  // namespace

void Store::begin_group(const GroupLimits& limits, WriteBack& batch, Seconds now) {
  add_moves(limits, batch, now);
}

bool Store::fill_group(const GroupLimits& limits, WriteBack& batch, std::size_t at_most,
                       Seconds now) {
  const std::size_t until = std::min(limits.blocks, batch.items.size() + at_most);
  while (batch.items.size() < limits.blocks && batch.bytes < limits.bytes) {
    if (batch.items.size() >= until) return true;
    const auto record = ssd_->queue().first();
    if (!record) break;
    const Added added = add_chain(*record, limits, batch, now);
    if (added == Added::not_now) break;
    unqueue(*record);  // unless it is in the group by now
  }
  return false;
}

void Store::end_group(const GroupLimits& limits, WriteBack& batch, Seconds now) {
  if (!batch.items.empty()) free_ssd_ahead(now);
  ssd_->take_doomed(kDeletesPerGroup, batch.group.deletes);
  add_stamps(limits, batch, now);
  ssd_->take_names(batch.group);
  if (ssd_->owes_commit()) {
    batch.must_commit = ssd_->queued() > 0 || draining_ || is_ssd_shrinking_;
    // A stamp of nobody: so it is a commit, whatever else there is or comes to nothing.
    if (!batch.empty()) batch.group.stamps.emplace_back();
  }
  batch.group.tau_s = ssd_->heat().stats().tau_s;
}

// A block goes only behind its parent, so the part of its chain that is not there yet goes first.
Store::Added Store::add_chain(BlockId record, const GroupLimits& limits, WriteBack& batch,
                              Seconds now) {
  std::vector<BlockId> path;
  for (BlockId at = record; at != kNoBlock; at = ssd_->heat().parent(at)) {
    if ((private_[at].flags & (kOnSsd | kWriting)) != 0) break;
    path.push_back(at);
  }
  for (const BlockId each : path) pin(each);  // whoever makes room for them, they do not
  Added added = Added::yes;
  for (std::size_t left = path.size(); added == Added::yes && left-- > 0;) {
    const bool is_full = batch.items.size() >= limits.blocks || batch.bytes >= limits.bytes;
    added = is_full ? Added::not_now : add_write(path[left], limits, batch, now);
  }
  for (const BlockId each : path) unpin(each);
  return added;
}

std::optional<ClassId> Store::ssd_class(BlockId record) const {
  return ssd_->class_of(SlabPool::slot_bytes(index_->fields(record).bytes));
}

Store::Added Store::may_be_named(std::uint32_t incarnation) {
  if (ssd_->number(incarnation) != 0) return Added::yes;
  if (ssd_->is_naming_full()) return Added::not_now;
  if (!ssd_->has_all_names()) return Added::yes;
  if (ssd_->has_names()) return Added::not_now;  // this group deletes some
  ++counters_.ssd_no_room;
  return Added::never;
}

Store::Added Store::add_write(BlockId record, const GroupLimits& limits, WriteBack& batch,
                              Seconds now) {
  const IndexWriter::Fields fields = index_->fields(record);
  if (namespaces_.of(fields.incarnation) == nullptr) return Added::never;
  const auto klass = ssd_class(record);
  if (!klass || ssd_->slots().slab_units(*klass) > ssd_->options().facts.units) {
    ++counters_.ssd_no_room;
    return Added::never;
  }
  if (const Added named = may_be_named(fields.incarnation); named != Added::yes) return named;
  auto place = ssd_->take(*klass, record, fields.bytes);
  if (!place) {
    const Added added = make_ssd_room(record, *klass, limits.must, now);
    // What this group writes stands in no order yet: the next one may find somebody among it.
    if (added == Added::no_room && !batch.items.empty()) return Added::not_now;
    counters_.ssd_no_room += added == Added::no_room;
    return added;
  }
  ssd_->entry_added();
  begin_write(record, *place, limits, batch, now);
  batch.items.push_back({.record = record, .is_move = false, .from = {}});
  return Added::yes;
}

void Store::begin_write(BlockId record, const SsdPlace& place, const GroupLimits& limits,
                        WriteBack& batch, Seconds now) {
  Private& mine = private_[record];
  unqueue(record);
  mine.flags |= kWriting;
  pin(record);
  const IndexWriter::Fields fields = index_->fields(record);
  const Namespace* space = namespaces_.of(fields.incarnation);
  const std::uint32_t number = ssd_->name_space(fields.incarnation, space->id, space->block_bytes);
  const BlockId parent = ssd_->heat().parent(record);
  const auto before = batch.index_of.find(parent);
  batch.index_of.emplace(record, static_cast<std::uint32_t>(batch.group.writes.size()));
  batch.bytes += place.slot_bytes();
  SsdWrite write;
  write.key = BlockKey::of(number, fields.key);
  write.place = place;
  write.sum = index_->sum(record);
  write.parent = parent_hash(record);
  write.heat = static_cast<float>(ssd_->heat().heat(record, now));
  write.stamp_s = limits.stamp_s;
  write.after = before == batch.index_of.end() ? SsdWrite::kNone : before->second;
  if (is_in_dram(record)) write.payload = arena_->base() + fields.offset;
  batch.group.writes.push_back(write);
}

Hash128 Store::parent_hash(BlockId record) const {
  const BlockId parent = ssd_->heat().parent(record);
  return parent == kNoBlock ? Hash128{} : index_->fields(parent).key;
}
// --- when it was used ----------------------------------------------------------------------------

void Store::add_stamps(const GroupLimits& limits, WriteBack& batch, Seconds now) {
  while (batch.group.stamps.size() < kStampsPerGroup) {
    const auto record = ssd_->next_used();
    if (!record) break;
    Private& mine = private_[*record];
    if (mine.state != State::resident || (mine.flags & kUsed) == 0) continue;
    mine.flags &= static_cast<std::uint8_t>(~kUsed);
    if ((mine.flags & (kOnSsd | kWriting)) != kOnSsd) continue;
    const IndexWriter::Fields fields = index_->fields(*record);
    batch.group.stamps.push_back({BlockKey::of(ssd_->number(fields.incarnation), fields.key),
                                  ssd_->place(*record, fields.bytes),
                                  static_cast<float>(ssd_->heat().heat(*record, now)),
                                  limits.stamp_s});
  }
}

// --- after the group -----------------------------------------------------------------------------

void Store::group_settled(const WriteBack& batch, bool committed) {
  ssd_->done_naming(batch.group, committed);
  ssd_->done_deleting(batch.group.deletes, committed);
}

void Store::writes_done(const WriteBack& batch, std::size_t from, std::size_t until, Seconds now) {
  for (std::size_t i = from; i < std::min(until, batch.items.size()); ++i)
    write_done(batch.group.writes[i], batch.items[i], now);
}

void Store::group_over(const WriteBack& batch) {
  // A device that takes some of it may take the rest. Each failure counts, so this comes to an end.
  if (std::ranges::any_of(batch.group.writes, &SsdWrite::written)) queue_unwritten();
}

void Store::write_done(const SsdWrite& write, const WriteBack::Item& item, Seconds now) {
  Private& mine = private_[item.record];
  mine.flags &= static_cast<std::uint8_t>(~kWriting);
  if (!write.written) {
    if (write.failed_io)
      ssd_->quarantine(write.place);
    else
      ssd_->give(write.place);
    if (!item.is_move) {
      ssd_->entry_not_added();
      ssd_->note_unwritten(item.record);
    }
  } else if (item.is_move) {
    ++counters_.ssd_moved;
    ssd_->set_place(item.record, write.place);
    ssd_->left_by_move(item.from);
  } else {
    mine.flags |= kOnSsd;
    ++on_ssd_;
    ssd_->set_place(item.record, write.place);
    if (mine.state == State::resident) {
      ssd_->heat().regroup(item.record, SsdBooks::group_of(*ssd_class(item.record)));
      policy_->let_go(item.record);
      index_->set_tier(item.record, kTierDram | kTierSsd);
      note_tiers(item.record, kInDram);
    }
  }
  // While it is pinned, so that the record is still this block's. If it stayed, its slab would be
  // emptied for ever.
  if (item.is_unreadable) lose_ssd_copy(item.record, /*quarantine=*/true, now);
  unpin(item.record);
}

}  // namespace kvpool
