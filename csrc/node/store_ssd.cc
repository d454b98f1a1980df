// How blocks pass between DRAM and the SSD tier: what a group writes, what it moves and deletes, and
// what becomes of a record before and after. The books are in ssd_books.h; bytes are the node's.
#include <algorithm>

#include "base/check.h"
#include "node/store.h"

namespace kvpool {
namespace {

// Deletes and stamps of one group; with its writes well below IndexStore::kChangesMax.
constexpr std::size_t kDeletesPerGroup = 2048;
constexpr std::size_t kStampsPerGroup = 256;  // each may dirty a page of the index of its own
constexpr std::uint64_t kEntriesAhead = 256;
// Groups that moved nothing out of a slab before it is left alone, and until the next try: somebody
// may look at a removed block in it for hours.
constexpr std::uint32_t kIdleMovesMax = 8;
constexpr std::uint32_t kGroupsBetweenDrains = 64;
constexpr std::uint32_t kEvictionsPerShrink = 64;
constexpr std::size_t kSlabsLookedAt = 64;  // for one that can be emptied

}  // namespace

void Store::attach_ssd(const SsdBooksOptions& options) {
  SsdBooksOptions full = options;
  full.records_max = records_max_;
  full.ghosts_max = std::min<std::uint64_t>(options.facts.entries_max * 16,
                                            bytes_limit() / 100 / 32);  // as for DRAM
  ssd_ = std::make_unique<SsdBooks>(full);
  takes_writes_ = true;
}

// The files are closed: what lies in them stays there, and is nothing to us any more.
void Store::detach_ssd() {
  if (!ssd_) return;
  takes_writes_ = false;
  for (BlockId record = 0; record < records_used_; ++record) {
    Private& mine = private_[record];
    if (mine.state == State::free) continue;
    const bool is_only_there = mine.state == State::resident && !is_in_dram(record);
    if (is_on_ssd(record)) --on_ssd_;
    mine.flags &= kInDram | kLoading;
    if (is_only_there) retire(record, Leave::removed, 0);
  }
  ssd_.reset();
}

// --- a block comes in ----------------------------------------------------------------------------

void Store::has_come(BlockId record, BlockId parent, bool is_remembered, Seconds now) {
  const IndexWriter::Fields fields = index_->fields(record);
  const bool came_back = ssd_->heat().insert(record, fingerprint(fields.incarnation, fields.key),
                                             parent, SsdBooks::kInDramOnly, now);
  if (ssd_->options().admit == SsdAdmit::all || is_remembered || came_back) write_soon(record);
}

void Store::write_soon(BlockId record) {
  Private& mine = private_[record];
  if (!takes_writes_ || (mine.flags & (kOnSsd | kQueued | kWriting)) != 0) return;
  mine.flags |= kQueued;
  ssd_->push(record);
}

void Store::queue_all() {
  if (ssd_->options().admit != SsdAdmit::all) return;  // the others stand in the queue already
  for (BlockId record = 0; record < records_used_; ++record)
    if (private_[record].state == State::resident) write_soon(record);
}

void Store::queue_unwritten() {
  for (const BlockId record : ssd_->take_unwritten())
    if (private_[record].state == State::resident) write_soon(record);
}

void Store::stop_queueing() {
  takes_writes_ = false;
  while (const auto record = ssd_->pop())
    private_[*record].flags &= static_cast<std::uint8_t>(~kQueued);
}

// --- what the next group does --------------------------------------------------------------------

void Store::next_group(const GroupLimits& limits, WriteBack& batch, Seconds now) {
  add_moves(limits, batch, now);
  while (batch.items.size() < limits.blocks && batch.bytes < limits.bytes) {
    const auto record = ssd_->pop();
    if (!record) break;
    Private& mine = private_[*record];
    if ((mine.flags & kQueued) == 0) continue;  // gone since, or written as somebody's parent
    const Added added = add_chain(*record, limits, batch, now);
    if (added == Added::not_now) {
      ssd_->push_front(*record);
      break;
    }
    if (added != Added::yes) mine.flags &= static_cast<std::uint8_t>(~kQueued);
  }
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
  for (std::size_t left = path.size(); left-- > 0;) {
    if (batch.items.size() >= limits.blocks || batch.bytes >= limits.bytes) return Added::not_now;
    const Added added = add_write(path[left], limits, batch, now);
    if (added != Added::yes) return added;
  }
  return Added::yes;
}

std::optional<ClassId> Store::ssd_class(BlockId record) const {
  return ssd_->class_of(SlabPool::slot_bytes(index_->fields(record).bytes));
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
  mine.flags = static_cast<std::uint8_t>((mine.flags & ~kQueued) | kWriting);
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

// --- room on the SSD -----------------------------------------------------------------------------

// Somebody colder goes, so that the group after this one finds a free slot.
Store::Added Store::make_ssd_room(BlockId record, ClassId klass, bool must, Seconds now) {
  const bool is_index_full = ssd_->is_index_full();  // then anybody's entry will do
  if (ssd_->coming_free(klass) > ssd_->slots().free_slots(klass) || ssd_->owes_commit() ||
      (is_index_full && ssd_->doomed() > 0))
    return Added::not_now;  // somebody is on the way out already
  const ClassId from = is_index_full ? coldest_ssd_class().value_or(klass) : klass;
  const auto coldest = ssd_->heat().coldest(SsdBooks::group_of(from));
  if (!must && coldest && ssd_->heat().temperature(record) <= *coldest) {
    ++counters_.not_worth;
    return Added::never;
  }
  if (!is_index_full && start_draining(klass, now)) return Added::not_now;
  return evict_from_ssd(from, now) ? Added::not_now : Added::no_room;
}

std::optional<ClassId> Store::coldest_ssd_class() const {
  std::optional<ClassId> found;
  double coldest = 0;
  for (ClassId klass = 0; klass < ssd_->slots().class_count(); ++klass) {
    const auto here = ssd_->heat().coldest(SsdBooks::group_of(klass));
    if (!here || (found && *here >= coldest)) continue;
    found = klass;
    coldest = *here;
  }
  return found;
}

bool Store::evict_from_ssd(ClassId klass, Seconds now) {
  Policy& heat = ssd_->heat();
  for (;;) {
    const BlockId record = heat.take_coldest(SsdBooks::group_of(klass));
    if (record == kNoBlock) return false;
    Private& mine = private_[record];
    if (mine.pins_or_next > 0) {
      mine.flags |= kSsdParked;
      continue;
    }
    ++counters_.ssd_evictions;
    if (is_in_dram(record)) {
      drop_ssd_copy(record);
      heat.give_back(record);
    } else {
      retire(record, Leave::evicted, now);
    }
    return true;
  }
}

// The block lives on in DRAM alone.
void Store::drop_ssd_copy(BlockId record) {
  ssd_->heat().regroup(record, SsdBooks::kInDramOnly);
  index_->set_tier(record, kTierDram);
  doom(record);
}

// Its entry goes with the next group, then its slot.
void Store::doom(BlockId record) {
  const IndexWriter::Fields fields = index_->fields(record);
  ssd_->doom(BlockKey::of(ssd_->number(fields.incarnation), fields.key),
             ssd_->place(record, fields.bytes));
  private_[record].flags &= static_cast<std::uint8_t>(~(kOnSsd | kUsed | kRestored));
  --on_ssd_;
}

void Store::free_ssd_ahead(Seconds now) {
  const SlabPool& slots = ssd_->slots();
  for (ClassId klass = 0; klass < slots.class_count(); ++klass) {
    if (slots.slabs_of(klass) == 0 || ssd_->can_add_slab(klass)) continue;
    while (ssd_->coming_free(klass) < ssd_->wanted_free(klass))
      if (!evict_from_ssd(klass, now)) break;
  }
  const std::uint64_t entries_max = ssd_->options().facts.entries_max;
  const std::uint64_t ahead = std::min(kEntriesAhead, entries_max / 8 + 1);
  while (ssd_->entries() - std::min(ssd_->entries(), std::uint64_t{ssd_->doomed()}) + ahead >
         entries_max) {
    const auto klass = coldest_ssd_class();
    if (!klass || !evict_from_ssd(*klass, now)) break;
  }
}

// --- moving blocks inside the slab file ----------------------------------------------------------

// A class that can get no slab takes one from the class that holds the coldest blocks: as many of
// them go as a slab has slots, and what is left in its emptiest slab moves into the holes.
bool Store::start_draining(ClassId klass, Seconds now) {
  SlabPool& slots = ssd_->slots();
  // One that gets no emptier may wait for just those who wait for this.
  if (draining_) return idle_moves_ < kIdleMovesMax;
  if (ssd_->can_add_slab(klass)) return false;
  if (drain_later_ > 0) {
    --drain_later_;
    return false;
  }
  const Policy& heat = ssd_->heat();
  const auto own = heat.coldest(SsdBooks::group_of(klass));
  std::optional<ClassId> donor;
  double coldest = 0;
  for (ClassId id = 0; id < slots.class_count(); ++id) {
    const auto here = heat.coldest(SsdBooks::group_of(id));
    if (id == klass || !here || (own && *here >= *own) || (donor && *here >= coldest)) continue;
    donor = id;
    coldest = *here;
  }
  if (!donor) return false;
  const std::uint64_t wanted = slots.slab_slots(*donor);
  while (ssd_->coming_free(*donor) < wanted && evict_from_ssd(*donor, now)) {
  }
  const std::vector<SlabId> emptiest = slots.emptiest(*donor, kSlabsLookedAt);
  const auto whole = std::ranges::find_if(
      emptiest, [&](SlabId slab) { return !ssd_->has_nobody(slab); });  // others never get empty
  if (whole == emptiest.end()) return false;
  draining_ = *whole;
  idle_moves_ = 0;
  slots.set_draining(*draining_, true);
  return true;
}

std::optional<SlabId> Store::slab_to_empty() {
  SlabPool& slots = ssd_->slots();
  if (draining_ && !slots.is_draining(*draining_)) draining_.reset();  // empty, and gone
  if (draining_ || !is_ssd_shrinking_) return draining_;
  const std::vector<SlabId> beyond =
      slots.slabs_beyond(static_cast<std::uint32_t>(ssd_->options().facts.units));
  if (beyond.empty()) {
    is_ssd_shrinking_ = false;
    ssd_->settle_end();
    return std::nullopt;
  }
  slots.set_draining(beyond.front(), true);
  draining_ = beyond.front();
  idle_moves_ = 0;
  return draining_;
}

void Store::add_moves(const GroupLimits& limits, WriteBack& batch, Seconds now) {
  const auto slab = slab_to_empty();
  if (!slab) return;
  SlabPool& slots = ssd_->slots();
  const std::size_t before = batch.items.size();
  bool is_stuck = true;
  for (const std::uint32_t owner : slots.owners(*slab)) {
    if (batch.items.size() >= limits.blocks || batch.bytes >= limits.bytes) return;
    if (SsdBooks::is_nobody(owner)) continue;  // nothing is there that anybody wants
    is_stuck = false;
    const Private& mine = private_[owner];
    if (mine.state != State::resident || (mine.flags & (kOnSsd | kWriting)) != kOnSsd) continue;
    // A doomed slot still has the number of its old record, which may be another block's by now.
    if (ssd_place(owner).slab_unit * kUnitBytes != slots.slab_offset(*slab)) continue;
    add_move(owner, limits, batch, now);
  }
  // What is left are slots that nobody may use: the slab goes back to its class as it is.
  idle_moves_ = batch.items.size() > before ? 0 : idle_moves_ + 1;
  if (!is_stuck && (is_ssd_shrinking_ || idle_moves_ < kIdleMovesMax)) return;
  if (is_stuck && is_ssd_shrinking_ && slots.is_beyond_end(*slab))
    return ssd_->give_up_nobodies(*slab);
  drain_later_ = kGroupsBetweenDrains;
  slots.set_draining(*slab, false);
  draining_.reset();
}

bool Store::add_move(BlockId record, const GroupLimits& limits, WriteBack& batch, Seconds now) {
  const IndexWriter::Fields fields = index_->fields(record);
  if (namespaces_.of(fields.incarnation) == nullptr) return false;  // the sweep will take it
  const auto klass = ssd_class(record);
  const auto place = ssd_->take(*klass, record, fields.bytes);
  if (!place) {
    if (ssd_->coming_free(*klass) <= ssd_->slots().free_slots(*klass))
      make_room_to_move(*klass, now);
    return false;
  }
  const SsdPlace from = ssd_->place(record, fields.bytes);
  begin_write(record, *place, limits, batch, now);
  batch.items.push_back({.record = record, .is_move = true, .from = from});
  return true;
}

// A file that gets shorter has to lose many blocks anyway. Where none of the class may go, because
// blocks that lie in DRAM alone hang on all of them, those go first.
void Store::make_room_to_move(ClassId klass, Seconds now) {
  std::uint32_t left = is_ssd_shrinking_ ? kEvictionsPerShrink : 1;
  while (left > 0 && evict_from_ssd(klass, now)) --left;
  if (!is_ssd_shrinking_ || left < kEvictionsPerShrink) return;
  while (left > 0) {
    const BlockId record = ssd_->heat().take_coldest(SsdBooks::kInDramOnly);
    if (record == kNoBlock) return;
    if (private_[record].pins_or_next > 0) {
      private_[record].flags |= kSsdParked;
      continue;
    }
    leave_dram(record, now);
    --left;
  }
}

void Store::set_ssd_units(const SsdFacts& facts) {
  ssd_->set_facts(facts);
  is_ssd_shrinking_ = true;  // or so; the next group looks
  // Nothing more goes into what lies beyond the end.
  SlabPool& slots = ssd_->slots();
  for (const SlabId slab : slots.slabs_beyond(0))
    slots.set_draining(slab, slots.is_beyond_end(slab) || slab == draining_);
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

void Store::group_done(const WriteBack& batch, bool committed, Seconds now) {
  ssd_->done_naming(batch.group, committed);
  ssd_->done_deleting(batch.group.deletes, committed);
  for (std::size_t i = 0; i < batch.items.size(); ++i)
    write_done(batch.group.writes[i], batch.items[i]);
  // A device that takes some of it may take the rest. Each failure counts, so this comes to an end.
  if (std::ranges::any_of(batch.group.writes, &SsdWrite::written)) queue_unwritten();
  // Else a slab that holds such a block would be emptied for ever.
  for (const WriteBack::Item& item : batch.items)
    if (item.is_unreadable) lose_ssd_copy(item.record, /*quarantine=*/true, now);
}

void Store::write_done(const SsdWrite& write, const WriteBack::Item& item) {
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
    }
  }
  unpin(item.record);
}

// --- back into DRAM ------------------------------------------------------------------------------

bool Store::is_warm_enough(BlockId record) const {
  const ClassId klass = private_[record].klass;
  const bool is_full = slabs_.units_in_slabs() + slabs_.slab_units(klass) > slabs_.limit() ||
                       (blocks_limit_ != 0 && spare_blocks() == 0);
  if (!is_full) return true;
  const BlockId victim = policy_->peek_coldest(klass);
  if (victim == kNoBlock) return false;
  return ssd_->heat().temperature(record) > ssd_->heat().temperature(victim);
}

Store::Reserved Store::reserve_promotion(BlockId record, bool forced, Seconds now) {
  using Outcome = Reserved::Outcome;
  Private& mine = private_[record];
  KVP_CHECK(mine.pins_or_next > 0);
  if (mine.state != State::resident) return {.outcome = Outcome::no_room};
  if (is_in_dram(record)) return {.outcome = Outcome::present, .record = record};
  if ((mine.flags & kLoading) != 0) return {.outcome = Outcome::pending, .record = record};
  const ClassId klass = mine.klass;
  if (slabs_.slab_units(klass) > slabs_.limit())
    return {.outcome = Outcome::no_room, .why = NoRoom::too_large};
  if (!forced && !is_warm_enough(record)) return {.outcome = Outcome::no_room};
  const Room room = make_room(klass, now);
  if (room == Room::again) return {.outcome = Outcome::again};
  if (room == Room::none) return {.outcome = Outcome::no_room, .why = NoRoom::pool_pinned};
  const auto slot = slabs_.take(klass, record);
  mine.flags |= kLoading;
  ++loading_;
  Reserved answer{.outcome = Outcome::reserved, .record = record, .offset = slot->offset};
  claim_pages(*slot, klass, answer);
  return answer;
}

void Store::promotion_pages_made(std::uint64_t offset, bool made) {
  slabs_.pages_made(slabs_.slot_at(offset).slab, made);
}

bool Store::promote(BlockId record, std::uint64_t offset, Seconds now) {
  Private& mine = private_[record];
  if (mine.state != State::resident) {
    abandon_promotion(record, offset);
    return false;
  }
  KVP_CHECK((mine.flags & kLoading) != 0 && !is_in_dram(record));
  mine.flags = static_cast<std::uint8_t>((mine.flags & ~kLoading) | kInDram);
  --loading_;
  ++in_dram_;
  ++counters_.promotions;
  index_->promote(record, offset);
  enter_dram_order(record, ssd_->heat().parent(record), now);
  policy_->set_heat(record, ssd_->heat().heat(record, now), now);
  return true;
}

void Store::abandon_promotion(BlockId record, std::uint64_t offset) {
  Private& mine = private_[record];
  KVP_CHECK((mine.flags & kLoading) != 0);
  mine.flags &= static_cast<std::uint8_t>(~kLoading);
  --loading_;
  slabs_.give(slabs_.slot_at(offset));
}

// Nobody pins it, and the SSD has a copy. The record goes on, so no reader of it is turned away.
void Store::demote(BlockId record, Seconds now) {
  Private& mine = private_[record];
  KVP_CHECK(mine.state == State::resident && mine.pins_or_next == 0);
  const IndexWriter::Fields fields = index_->fields(record);
  index_->demote(record);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  policy_->erase(record, fingerprint(fields.incarnation, fields.key), Leave::evicted, now);
  mine.parked = false;
  mine.flags &= static_cast<std::uint8_t>(~kInDram);
  --in_dram_;
  ++counters_.demotions;
  slabs_.give(slabs_.slot_at(fields.offset));
}

void Store::lose_ssd_copy(BlockId record, bool quarantine, Seconds now) {
  const Private& mine = private_[record];
  // One that is gone already loses its copy with its last pin.
  if (mine.state != State::resident || !is_on_ssd(record)) return;
  if (quarantine) ssd_->condemn(ssd_place(record));
  // On its way to another slot, with bytes that are compared, or from DRAM.
  if ((mine.flags & kWriting) != 0) return;
  ++counters_.ssd_lost;
  if (!is_in_dram(record)) return retire(record, Leave::removed, now);
  ssd_->heat().let_go(record);  // children there must not name a parent that is not
  drop_ssd_copy(record);
  write_soon(record);
}

Hash128 Store::sum_of(BlockId record) const { return index_->sum(record); }

// --- what was there at open ----------------------------------------------------------------------

Result<void> Store::restore_spaces(const std::vector<SsdSpace>& spaces,
                                   const std::vector<SsdClass>& classes) {
  for (const SsdClass& found : classes)
    if (!ssd_->restore_class(found))
      return fail(Code::refused, "slabs for slots of " + std::to_string(found.slot_bytes) +
                                     " bytes, " + std::to_string(found.slab_units) +
                                     " units long, cannot be");
  for (const SsdSpace& found : spaces) {
    auto space = open_namespace(found.id, found.block_bytes);
    if (!space)
      return fail(
          Code::bad_argument,
          "the SSD directory holds a namespace that this pool cannot: " + space.error().message);
    ssd_->set_number((*space)->incarnation.load(std::memory_order_relaxed), found.number);
    restoring_.emplace(found.number, *space);
  }
  return {};
}

bool Store::restore_entry(const BlockKey& key, const BlockEntry& entry) {
  const auto known = restoring_.find(key.space());
  if (known == restoring_.end() || entry.bytes != known->second->block_bytes) return false;
  Namespace& space = *known->second;
  const auto record = take_record();
  if (!record) return false;
  const SsdPlace place{entry.slab_unit, entry.slot, entry.bytes};
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  private_[*record] = {.pins_or_next = 0,
                       .state = State::resident,
                       .klass = static_cast<std::uint8_t>(space.size_class),
                       .parked = false,
                       .flags = kOnSsd | kRestored};
  if (!ssd_->restore_slot(place, *record)) {
    free_record(*record);
    return false;
  }
  index_->prepare(*record, {key.hash128(), incarnation, entry.bytes, 0});
  index_->publish(*record, entry.sum, kTierSsd);
  if (!index_->insert(key.hash128(), incarnation, *record)) {
    index_->withdraw(*record);
    ssd_->give(place);
    free_record(*record);
    return false;
  }
  ssd_->set_place(*record, place);
  ssd_->entry_added();
  ++on_ssd_;
  ++resident_;
  ++space.blocks;
  ++counters_.restored;
  return true;
}

// Parents before children, wherever they come in the order of keys. A child whose parent is not
// there could never be reached: it goes, and what hangs on it.
void Store::restore_chains(const ParentOf& parent_of, const HeatOf& heat_of, Seconds now) {
  enum class Seen : std::uint8_t { no, open, kept, orphan };
  std::vector<Seen> seen(records_used_, Seen::no);
  std::vector<BlockId> parents(records_used_, kNoBlock), path, orphans;
  for (BlockId start = 0; start < records_used_; ++start) {
    if (private_[start].state != State::resident) continue;
    bool is_orphan = false;
    for (BlockId at = start; seen[at] == Seen::no;) {
      seen[at] = Seen::open;
      path.push_back(at);
      const Hash128 hash = parent_of(at);
      if (hash == Hash128{}) break;
      BlockId parent = kNoBlock;
      const bool found = index_->find(hash, index_->fields(at).incarnation, parent);
      is_orphan = !found || seen[parent] == Seen::orphan || seen[parent] == Seen::open;
      if (is_orphan) break;
      parents[at] = parent;
      at = parent;
    }
    for (; !path.empty(); path.pop_back()) {
      const BlockId record = path.back();
      const IndexWriter::Fields fields = index_->fields(record);
      seen[record] = is_orphan ? Seen::orphan : Seen::kept;
      if (is_orphan) orphans.push_back(record);
      ssd_->heat().insert(record, fingerprint(fields.incarnation, fields.key), parents[record],
                          SsdBooks::group_of(*ssd_class(record)), now);
      ssd_->heat().set_heat(record, heat_of(record), now);
    }
  }
  for (auto it = orphans.rbegin(); it != orphans.rend(); ++it) retire(*it, Leave::removed, now);
  counters_.restored_orphans = orphans.size();
  counters_.restored -= orphans.size();
  restoring_.clear();
}

void Store::check_ssd_invariants() const {
  std::uint64_t on_ssd = 0, resident = 0;
  for (BlockId record = 0; record < records_used_; ++record) {
    const Private& mine = private_[record];
    if (mine.state == State::free) continue;
    resident += mine.state == State::resident;
    KVP_CHECK((mine.flags & kWriting) == 0 || mine.pins_or_next > 0);
    if (!is_on_ssd(record)) continue;
    ++on_ssd;
    const SsdPlace place = ssd_place(record);
    KVP_CHECK(ssd_->slots().owner(ssd_->slots().slot_at(place.offset())) == record);
    if (mine.state != State::resident) continue;
    const BlockId parent = ssd_->heat().parent(record);
    KVP_CHECK(parent == kNoBlock || is_on_ssd(parent));
    const std::uint64_t tier = view().record(record).tier.load(std::memory_order_relaxed);
    KVP_CHECK(tier == (kTierSsd | (is_in_dram(record) ? std::uint64_t{kTierDram} : 0)));
  }
  KVP_CHECK(on_ssd == on_ssd_ && ssd_->heat().stats().resident == resident);
  ssd_->check_invariants();
}

}  // namespace kvpool
