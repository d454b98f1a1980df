// Room on the SSD: who leaves it, and how slabs of the file pass between classes or are cut off.
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "node/store.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kEntriesAhead = 256;
constexpr double kAnyTemperature = std::numeric_limits<double>::infinity();
constexpr int kUncoverMax = 64;  // blocks of DRAM given up for one slot of the SSD
// Groups that moved nothing out of a slab before it is left alone, and until the next try: somebody
// may look at a removed block in it for hours.
constexpr std::uint32_t kIdleMovesMax = 8;
constexpr std::uint32_t kGroupsBetweenDrains = 64;
constexpr std::uint32_t kEvictionsPerShrink = 64;
constexpr std::size_t kSlabsLookedAt = 64;  // for one that can be emptied
}  // namespace

// Somebody colder goes, so that the group after this one finds a free slot.
Store::Added Store::make_ssd_room(BlockId record, ClassId klass, bool must, Seconds now) {
  const bool is_index_full = ssd_->is_index_full();  // then anybody's entry will do
  if (ssd_->coming_free(klass) > ssd_->slots().free_slots(klass) || ssd_->owes_commit() ||
      (is_index_full && ssd_->doomed() > 0))
    return Added::not_now;  // somebody is on the way out already
  const ClassId from = is_index_full ? coldest_ssd_class().value_or(klass) : klass;
  const double own = ssd_->heat().temperature(record);
  // First somebody of another size who is colder than both this block and its own kind.
  if (!is_index_full && start_draining(klass, must ? kAnyTemperature : own, now))
    return Added::not_now;
  const auto coldest = ssd_->heat().coldest(SsdBooks::group_of(from));
  if (!must && coldest && own <= *coldest) {
    ++counters_.not_worth;
    private_[record].unworthy = true;
    return Added::never;
  }
  return evict_from_ssd(from, now, kUncoverMax) ? Added::not_now : Added::no_room;
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

bool Store::evict_from_ssd(ClassId klass, Seconds now, int uncover_max) {
  Policy& heat = ssd_->heat();
  for (;;) {
    const BlockId record = heat.take_coldest(SsdBooks::group_of(klass));
    if (record == kNoBlock) {
      // Where the class has nothing there, nothing would come to light.
      const bool is_there = ssd_->slots().taken_slots(klass) > ssd_->doomed_in_class(klass);
      if (is_there && uncover_max-- > 0 && drop_coldest_unwritten(now)) continue;
      return false;
    }
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
      retire(record, Gone::evicted_ssd, now);
    }
    return true;
  }
}

// Every block on the SSD has a child in DRAM alone, as it comes where the SSD is no larger than
// DRAM: then the coldest of these children goes, since it holds its whole chain on the SSD.
bool Store::drop_coldest_unwritten(Seconds now) {
  for (;;) {
    const BlockId record = ssd_->heat().take_coldest(SsdBooks::kInDramOnly);
    if (record == kNoBlock) return false;
    Private& mine = private_[record];
    if (mine.pins_or_next > 0) {
      mine.flags |= kSsdParked;
      continue;
    }
    ++counters_.evictions;
    counters_.evicted_unwritten += is_due(record);
    retire(record, mine.unworthy ? Gone::not_worth : Gone::evicted, now);
    return true;
  }
}

// The block lives on in DRAM alone.
void Store::drop_ssd_copy(BlockId record) {
  ssd_->heat().regroup(record, SsdBooks::kInDramOnly);
  index_->set_tier(record, kTierDram);
  doom(record);
  note_tiers(record, kInDram | kOnSsd);
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
    // A slab of a colder class first: a class must not eat itself up beside blocks nobody wants.
    while (ssd_->coming_free(klass) < ssd_->wanted_free(klass))
      if (start_draining(klass, kAnyTemperature, now) || !evict_from_ssd(klass, now)) break;
  }
  const std::uint64_t entries_max = ssd_->options().facts.entries_max;
  const std::uint64_t ahead = std::min(kEntriesAhead, entries_max / 8 + 1);
  const auto room_needed = [&] {
    const std::uint64_t entries = ssd_->entries();
    return entries - std::min(entries, std::uint64_t{ssd_->doomed()}) + ssd_->spaces() + ahead;
  };
  while (room_needed() > entries_max) {
    const auto klass = coldest_ssd_class();
    if (!klass || !evict_from_ssd(*klass, now)) break;
  }
}

// --- moving blocks inside the slab file ----------------------------------------------------------

// A class that can get no slab takes one from the class that holds the coldest blocks: as many of
// them go as a slab has slots, and what is left in its emptiest slab moves into the holes.
bool Store::start_draining(ClassId klass, double bound, Seconds now) {
  SlabPool& slots = ssd_->slots();
  // One that gets no emptier may wait for just those who wait for this.
  if (draining_) return idle_moves_ < kIdleMovesMax;
  if (ssd_->can_add_slab(klass)) return false;
  if (drain_later_ > 0) {
    --drain_later_;
    return false;
  }
  const Policy& heat = ssd_->heat();
  bound = std::min(bound, heat.coldest(SsdBooks::group_of(klass)).value_or(kAnyTemperature));
  std::optional<ClassId> donor;
  double coldest = 0;
  for (ClassId id = 0; id < slots.class_count(); ++id) {
    const auto here = heat.coldest(SsdBooks::group_of(id));
    if (id == klass || !here || *here >= bound || (donor && *here >= coldest)) continue;
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
  fit_reach();
  is_ssd_shrinking_ = true;  // or so; the next group looks
  // Nothing more goes into what lies beyond the end.
  SlabPool& slots = ssd_->slots();
  for (const SlabId slab : slots.slabs_beyond(0))
    slots.set_draining(slab, slots.is_beyond_end(slab) || slab == draining_);
}

}  // namespace kvpool
