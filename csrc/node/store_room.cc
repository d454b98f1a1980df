// Making room: what leaves, in which order, and how slabs pass between size classes.
#include <algorithm>
#include <array>
#include <limits>

#include "base/check.h"
#include "block/copy.h"
#include "node/store.h"

namespace kvpool {
namespace {

// Slots looked at, in the emptiest slabs, for a slab whose blocks can all be moved: the others hold
// something pinned. One of them is often the emptiest of all, since nothing else stayed in it.
constexpr std::size_t kSlotsLookedAt = 16384;
constexpr std::uint32_t kUnitsPunchedPerStep = 4;  // 1.6 ms
constexpr double kAnyTemperature = std::numeric_limits<double>::infinity();
// Records looked at before a reservation evicts, when dropped namespaces still hold some.
constexpr std::uint32_t kSweepForRoom = 4096;
// Blocks on their way to the SSD that are passed over for one that is there.
constexpr std::uint32_t kDueLookedAt = 128;
// Threads of a client that hold a block while they copy it, beside what its views pin.
constexpr std::uint64_t kReadersPerClient = 32;

}  // namespace

// The one way a block leaves. First it becomes unreadable, then the fence, then who pins it is
// looked at; only after that may its slot be reused, moved or punched.
void Store::retire(BlockId record, Gone why, Seconds now) {
  Private& mine = private_[record];
  KVP_CHECK(mine.state == State::resident);
  const IndexWriter::Fields fields = index_->fields(record);
  note_gone(record, fields, why, now);
  index_->withdraw(record);
  index_->erase(fields.key, fields.incarnation, record);
  const std::uint64_t name = fingerprint(fields.incarnation, fields.key);
  const Leave leave = why <= Gone::evicted_ssd ? Leave::evicted : Leave::removed;
  if (is_in_dram(record)) {
    policy_->erase(record, name, leave, now);
    --in_dram_;
  }
  if (ssd_) ssd_->heat().erase(record, name, leave, now);
  mine.parked = false;
  unqueue(record);
  mine.flags &= static_cast<std::uint8_t>(~(kSsdParked | kUsed));
  --resident_;
  if (Namespace* space = namespaces_.of(fields.incarnation)) {
    --space->blocks;
    if (listeners_.is_any()) listeners_.note({space, fields.key, {}, tiers_of(record), 0});
  } else {
    --dead_;  // whoever listens was told that its namespace was dropped
  }
  if (leave == Leave::removed) ++counters_.removed;
  if (mine.pins_or_next > 0) {
    mine.state = State::zombie;
    ++zombies_;
    return;
  }
  release_slots(record);
}

// The one way a slot that readers may have seen is given back. Its record has another generation by
// now: after the fence, who named the slot in time is seen, and who names it later sees that the
// generation has changed. A slot that is named keeps its bytes, and its pages, until
// poll_hazards() finds it free.
void Store::vacate(std::uint64_t offset) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const Slot slot = slabs_.slot_at(offset);
  if (!hazards_.names(offset)) return slabs_.give(slot);
  slabs_.set_owner(slot, kHeldOwner);
  held_.push_back(offset);
}

bool Store::names_too_much(const Hazards& hazards, std::uint64_t bytes_max) const {
  std::uint64_t bytes = 0, largest = 0;
  hazards.for_each([&](std::uint64_t offset) {
    const std::uint64_t slot_bytes = slabs_.slot_bytes_at(offset);
    bytes += slot_bytes;
    largest = std::max(largest, slot_bytes);
  });
  return bytes > bytes_max && bytes - bytes_max > kReadersPerClient * largest;
}

bool Store::poll_hazards() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::size_t before = held_.size() + named_.size();
  std::erase_if(held_, [&](std::uint64_t offset) {
    if (hazards_.names(offset)) return false;
    slabs_.give(slabs_.slot_at(offset));
    return true;
  });
  std::erase_if(named_, [&](BlockId record) {
    Private& mine = private_[record];
    // Gone meanwhile, or pinned by request as well: then the last unpin takes care of it.
    if (mine.state != State::resident || !mine.parked || mine.pins_or_next > 0) return true;
    if (is_named(record)) return false;
    mine.parked = false;
    policy_->give_back(record);
    return true;
  });
  return held_.size() + named_.size() < before;
}

// Of a block that nobody can find or read any more.
void Store::release_slots(BlockId record) {
  if (is_in_dram(record)) vacate(index_->fields(record).offset);
  if (is_on_ssd(record)) doom(record);
  free_record(record);
}

// A block that must give up its slot of the arena goes on living on the SSD, if it is there.
void Store::leave_dram(BlockId record, Seconds now) {
  ++counters_.evictions;
  if (is_on_ssd(record)) return demote(record, now);
  counters_.evicted_unwritten += is_due(record);
  retire(record, private_[record].unworthy ? Gone::not_worth : Gone::evicted, now);
}

// `made`: the class has a free slot, and one more block is within the limit.
Store::Room Store::make_room(ClassId klass, Seconds now) {
  if (blocks_limit_ != 0) {
    if (zombies_ + held_.size() + pending_.size() + loading_ >= blocks_limit_)
      return Room::none;  // no eviction would help
    while (spare_blocks() == 0)
      if (!sweep_some(now) && !evict_one(now)) return Room::none;
  }
  while (!slabs_.has_room(klass)) {
    if (sweep_some(now)) continue;
    std::vector<UnitRun> runs;
    const bool added = slabs_.add_slab(klass, runs);
    punch(runs);
    if (added) continue;
    const Room stolen = steal_slab(klass, now);
    if (stolen == Room::again) return Room::again;
    if (stolen == Room::none && !evict_from(klass, now) && !poll_hazards()) return Room::none;
  }
  return Room::made;
}

bool Store::evict_from(ClassId klass, Seconds now) {
  const BlockId record = take_victim(klass);
  if (record == kNoBlock) return false;
  leave_dram(record, now);
  return true;
}

BlockId Store::take_unpinned(ClassId klass) {
  for (;;) {
    const BlockId record = policy_->take_coldest(klass);
    if (record == kNoBlock) return record;
    Private& mine = private_[record];
    if (mine.pins_or_next == 0 && !is_named(record)) return record;
    mine.parked = true;  // comes back with its last unpin, or from poll_hazards()
    if (mine.pins_or_next == 0) named_.push_back(record);
  }
}

// The coldest that nobody pins. One that waits to be written would be lost, where the next one may
// only have to go back to the SSD: so a burst of puts into a pool of warm blocks is passed over
// while it is being written. When puts outrun the disk all that is cold waits; then looking for
// better costs something, so it is done rarely, and the coldest goes.
BlockId Store::take_victim(ClassId klass) {
  const BlockId coldest = take_unpinned(klass);
  if (coldest == kNoBlock || !is_due(coldest)) return coldest;
  if (due_later_ > 0) {
    --due_later_;
    return coldest;
  }
  std::array<BlockId, kDueLookedAt> passed;
  std::size_t count = 0;
  BlockId victim = kNoBlock;
  while (count < passed.size()) {
    victim = take_unpinned(klass);
    if (victim == kNoBlock || !is_due(victim)) break;
    passed[count++] = victim;
    victim = kNoBlock;
  }
  for (std::size_t i = 0; i < count; ++i) policy_->give_back(passed[i]);
  if (victim == kNoBlock) {
    due_later_ = kDueLookedAt;
    return coldest;
  }
  policy_->give_back(coldest);
  return victim;
}

// What nobody wants goes before what somebody may want. True: some of it did.
bool Store::sweep_some(Seconds now) {
  const std::uint64_t before = dead_;
  if (dead_ > 0) sweep(kSweepForRoom, now);
  return dead_ != before;
}

std::optional<ClassId> Store::coldest_class(const Classes& except) const {
  std::optional<ClassId> found;
  double coldest = 0;
  for (ClassId id = 0; id < slabs_.class_count(); ++id) {
    if (except[id]) continue;
    const auto temperature = policy_->coldest(id);
    if (!temperature || (found && *temperature >= coldest)) continue;
    found = id;
    coldest = *temperature;
  }
  return found;
}

bool Store::evict_one(Seconds now) {
  while (const auto klass = coldest_class({}))
    if (evict_from(*klass, now)) return true;
  return false;
}

// A class that is short takes a slab from the class that holds the coldest blocks, if a slab's
// worth of them is colder than anything the class could evict itself. One slab a call, since its
// blocks are copied: `made` if add_slab() now has room, `again` if it takes more than that one.
Store::Room Store::steal_slab(ClassId klass, Seconds now) {
  // Only while it has blocks of its own to give up: one that has none would be refused meanwhile.
  if (steal_later_[klass] > 0 && policy_->coldest(klass)) {
    --steal_later_[klass];
    return Room::none;
  }
  const std::uint32_t units = slabs_.slab_units(klass);
  const auto is_room = [&] { return slabs_.units_in_slabs() + units <= slabs_.limit(); };
  if (is_room()) return Room::none;  // nothing that others give would help
  const double own = policy_->coldest(klass).value_or(kAnyTemperature);
  Classes asked;
  asked[klass] = true;
  while (const auto donor = coldest_class(asked)) {
    if (!colder_than(*donor, slabs_.slab_slots(*donor), own)) {
      steal_later_[klass] = slabs_.slab_slots(*donor);  // it costs O(slots): not at every put
      break;
    }
    if (free_slab(*donor, own, now)) {
      ++counters_.slabs_moved;
      return is_room() ? Room::made : Room::again;
    }
    asked[*donor] = true;
  }
  return Room::none;
}

bool Store::colder_than(ClassId donor, std::uint32_t count, double bound) {
  std::vector<BlockId> taken;
  bool colder = true;
  while (taken.size() < count) {
    const auto temperature = policy_->coldest(donor);
    if (!temperature) break;
    if (*temperature >= bound) {
      colder = false;
      break;
    }
    taken.push_back(policy_->take_coldest(donor));
  }
  for (const BlockId record : taken) {
    if (private_[record].pins_or_next > 0)
      private_[record].parked = true;
    else
      policy_->give_back(record);
  }
  return colder && !taken.empty();
}

// Evicts a slab's worth of the donor's blocks, as far as they are colder than `bound`, then gathers
// the holes into one slab. A chain shows its tail only: what it hides may be much warmer.
bool Store::free_slab(ClassId donor, double bound, Seconds now) {
  const std::uint32_t before = slabs_.slabs_of(donor);
  while (slabs_.slabs_of(donor) == before && slabs_.free_slots(donor) < slabs_.slab_slots(donor)) {
    const auto coldest = policy_->coldest(donor);
    if (!coldest || *coldest >= bound || !evict_from(donor, now)) break;
  }
  if (slabs_.slabs_of(donor) < before) return true;
  if (slabs_.free_slots(donor) < slabs_.slab_slots(donor)) return false;
  std::size_t looked_at = 0;
  for (const SlabId slab : slabs_.emptiest(donor, kSlotsLookedAt)) {
    const std::vector<std::uint32_t> owners = slabs_.owners(slab);
    if (std::all_of(owners.begin(), owners.end(), [&](BlockId id) { return is_movable(id); }))
      return empty_slab(slab, owners);
    looked_at += owners.size();
    if (looked_at > kSlotsLookedAt) break;
  }
  return false;
}

bool Store::is_movable(BlockId record) const {
  return record != kHeldOwner && private_[record].state == State::resident &&
         private_[record].pins_or_next == 0 && !is_named(record);
}

// Moves the blocks of a slab into other slabs of its class. The bytes are copied while the block
// is readable at its old place, and it is readable throughout.
bool Store::empty_slab(SlabId slab, const std::vector<std::uint32_t>& owners) {
  const ClassId klass = slabs_.slab_class(slab);
  slabs_.set_draining(slab, true);
  for (const BlockId record : owners) {
    const auto slot = slabs_.take(klass, record);
    const bool backed = slot && (slabs_.has_pages(slot->slab) ||
                                 arena_->commit(slot->offset, slabs_.slot_bytes_of(klass)));
    if (!backed) {
      if (slot) slabs_.give(*slot);
      slabs_.set_draining(slab, false);
      return false;
    }
    const IndexWriter::Fields fields = index_->fields(record);
    fence_before_overwrite();
    racy_fill(arena_->base() + slot->offset, arena_->base() + fields.offset, fields.bytes);
    index_->move(record, slot->offset);
    vacate(fields.offset);
    ++counters_.blocks_moved;
  }
  return true;
}

// Free slots a class should have: none while it can still get a slab.
std::uint64_t Store::wanted_slots(ClassId klass, double share) const {
  if (slabs_.units_in_slabs() + slabs_.slab_units(klass) <= slabs_.limit()) return 0;
  const std::uint64_t slots = slabs_.taken_slots(klass) + slabs_.free_slots(klass);
  return static_cast<std::uint64_t>(static_cast<double>(slots) * share);
}

std::uint64_t Store::wanted_blocks(double share) const {
  return static_cast<std::uint64_t>(static_cast<double>(blocks_limit_) * share);
}

std::uint64_t Store::spare_blocks() const {
  const std::uint64_t held = in_dram_ + zombies_ + held_.size() + pending_.size() + loading_;
  return held < blocks_limit_ ? blocks_limit_ - held : 0;
}

bool Store::is_short(ClassId klass, double share) const {
  return 2 * slabs_.free_slots(klass) < wanted_slots(klass, share) ||
         2 * spare_blocks() < wanted_blocks(share);
}

std::uint32_t Store::evict_ahead(double share, std::uint32_t at_most, Seconds now) {
  const std::uint64_t before = counters_.evictions;
  const auto is_left = [&] { return counters_.evictions - before < at_most; };
  while (is_left() && spare_blocks() < wanted_blocks(share) && evict_one(now)) {
  }
  for (ClassId id = 0; id < slabs_.class_count(); ++id)
    // A slab of a colder class first: a class must not eat itself up beside blocks nobody wants.
    while (is_left() && slabs_.free_slots(id) < wanted_slots(id, share) &&
           (steal_slab(id, now) != Room::none || evict_from(id, now))) {
    }
  return static_cast<std::uint32_t>(counters_.evictions - before);
}

bool Store::sweep(std::uint32_t records, Seconds now) {
  for (; records > 0 && dead_ > 0; --records) {
    if (sweep_at_ >= records_used_) sweep_at_ = 0;
    const BlockId record = sweep_at_++;
    if (private_[record].state != State::resident) continue;
    if (namespaces_.of(index_->fields(record).incarnation) == nullptr)
      retire(record, Gone::dropped, now);
  }
  return dead_ > 0;
}

void Store::set_limit(std::uint64_t bytes, std::uint64_t blocks_limit) {
  slabs_.set_limit(static_cast<std::uint32_t>(bytes / kUnitBytes));
  blocks_limit_ = blocks_limit;
  fit_ghosts();
  fit_reach();
}

bool Store::shrink_step(Seconds now) {
  if (blocks_limit_ != 0 && in_dram_ > blocks_limit_) return evict_one(now);
  if (slabs_.committed() <= slabs_.limit()) return false;
  std::vector<UnitRun> runs;
  slabs_.trim_to_limit(kUnitsPunchedPerStep, runs);
  punch(runs);
  if (!runs.empty()) return slabs_.committed() > slabs_.limit();
  Classes asked;
  while (const auto donor = coldest_class(asked)) {
    if (free_slab(*donor, kAnyTemperature, now)) return true;
    asked[*donor] = true;
  }
  return false;
}

void Store::warmed(std::uint32_t unit, bool has_pages) {
  if (!slabs_.warmed(unit, has_pages)) punch({{unit, 1}});
}

std::uint32_t Store::trim_step() {
  const std::uint32_t before = warm_units();
  std::vector<UnitRun> runs;
  slabs_.trim(0, kUnitsPunchedPerStep, runs);
  punch(runs);
  return before - warm_units();
}

bool Store::empty_step(Seconds now) {
  namespaces_.for_each([&](Namespace& space) {
    if (space.blocks > 0) drop(space);
  });
  return sweep(kSweepForRoom, now) || trim_step() > 0;
}

void Store::punch_strays() {
  if (arena_->is_sealed()) return;
  // A margin for pages that a slab's first writer has made and the books do not know yet.
  if (arena_->committed_bytes() <= bytes_committed() + kUnitBytes) return;
  punch(slabs_.empty_units());
}

void Store::punch(const std::vector<UnitRun>& runs) {
  if (arena_->is_sealed()) return;  // its pages stay, and count as given back
  for (const UnitRun& run : runs)
    arena_->punch(std::uint64_t{run.first} * kUnitBytes, std::uint64_t{run.count} * kUnitBytes);
}

}  // namespace kvpool
