#include "memory/slab_pool.h"

#include <algorithm>

namespace kvpool {
namespace {

constexpr std::uint32_t kFreeBit = 0x80000000;
constexpr std::uint32_t kEndOfList = 0x7fffffff;
constexpr std::uint32_t kSlabUnitsMax = 32;  // 64 MiB; a slot that is larger gets a slab of its own

// The shortest run whose waste is at most 1/32, or the least wasteful one that leaves a small pool
// four of them. A slab is what moves between classes, so short is good: emptying it costs evictions
// and copies.
std::uint32_t units_for(std::uint64_t slot_bytes, std::uint32_t limit) {
  const auto least = static_cast<std::uint32_t>((slot_bytes + kUnitBytes - 1) / kUnitBytes);
  std::uint32_t best = least;
  double best_waste = 1;
  for (std::uint32_t units = least; units <= std::min(kSlabUnitsMax, limit / 4); ++units) {
    const std::uint64_t bytes = units * kUnitBytes;
    const double waste = static_cast<double>(bytes % slot_bytes) / static_cast<double>(bytes);
    if (waste < best_waste) {
      best = units;
      best_waste = waste;
    }
    if (best_waste <= 1.0 / 32) break;
  }
  return best;
}

}  // namespace

SlabPool::SlabPool(std::uint32_t units, std::uint32_t limit)
    : state_(units, Unit::cold), slab_of_unit_(units, kNoSlab), limit_(limit), end_(units) {}

std::optional<ClassId> SlabPool::class_of(std::uint64_t block_bytes) {
  const std::uint64_t bytes = slot_bytes(block_bytes);
  for (ClassId id = 0; id < classes_.size(); ++id)
    if (classes_[id].slot_bytes == bytes) return id;
  if (classes_.size() >= kClassesMax) return std::nullopt;
  return make_class(bytes, units_for(bytes, limit_));
}

std::optional<ClassId> SlabPool::class_with(std::uint64_t slot_bytes, std::uint32_t slab_units) {
  const std::uint64_t slab_bytes = slab_units * kUnitBytes;
  if (slot_bytes == 0 || slot_bytes % kPageBytes != 0 || slot_bytes > slab_bytes) return {};
  if (slab_units > state_.size() || slab_bytes / slot_bytes >= kEndOfList) return {};
  for (ClassId id = 0; id < classes_.size(); ++id) {
    if (classes_[id].slot_bytes != slot_bytes) continue;
    if (classes_[id].slab_units != slab_units) return {};
    return id;
  }
  if (classes_.size() >= kClassesMax) return {};
  return make_class(slot_bytes, slab_units);
}

ClassId SlabPool::make_class(std::uint64_t slot_bytes, std::uint32_t slab_units) {
  SizeClass made;
  made.slot_bytes = slot_bytes;
  made.slab_units = slab_units;
  made.slab_slots = static_cast<std::uint32_t>(slab_units * kUnitBytes / slot_bytes);
  classes_.push_back(made);
  return static_cast<ClassId>(classes_.size() - 1);
}

std::optional<Slot> SlabPool::take(ClassId id, std::uint32_t owner) {
  SizeClass& klass = classes_[id];
  if (klass.with_room == kNoSlab) return std::nullopt;
  const SlabId slab_id = klass.with_room;
  Slab& slab = *slabs_[slab_id];
  if (!slab.threaded) thread(slab);
  const std::uint32_t index = slab.free_head;
  const std::uint32_t link = slab.owners[index];
  KVP_CHECK((link & kFreeBit) != 0);
  slab.free_head = link & ~kFreeBit;
  slab.owners[index] = owner;
  ++slab.taken;
  ++klass.taken;
  if (slab.taken == klass.slab_slots) unlist(slab_id);
  return Slot{slab.first_unit * kUnitBytes + index * klass.slot_bytes, slab_id, index};
}

bool SlabPool::add_slab(ClassId id, std::vector<UnitRun>& punch) {
  const std::uint32_t count = classes_[id].slab_units;
  if (used_ + count > limit_) return false;
  const auto first = find_run(count);
  if (!first) return false;
  list(cut(id, *first));
  // The run joined the committed units; what is warm elsewhere makes room for its cold part.
  trim_to_limit(count, punch);
  return true;
}

bool SlabPool::can_add_slab(ClassId id) const {
  const std::uint32_t count = classes_[id].slab_units;
  return used_ + count <= limit_ && find_run(count).has_value();
}

// A full run of free units becomes a slab of free slots, not listed yet.
SlabId SlabPool::cut(ClassId id, std::uint32_t first) {
  SizeClass& klass = classes_[id];
  const std::uint32_t count = klass.slab_units;
  const std::uint32_t end = first + count;
  std::uint32_t cold = 0;
  for (std::uint32_t unit = first; unit < end; ++unit) {
    if (state_[unit] == Unit::cold) ++cold;
    state_[unit] = Unit::in_slab;
  }
  used_ += count;
  committed_ += cold;
  while (low_ < state_.size() && state_[low_] == Unit::in_slab) ++low_;
  high_ = std::max(high_, end);

  SlabId slab_id;
  if (!free_slab_ids_.empty()) {
    slab_id = free_slab_ids_.back();
    free_slab_ids_.pop_back();
    slabs_[slab_id] = std::make_unique<Slab>();
  } else {
    slab_id = static_cast<SlabId>(slabs_.size());
    slabs_.push_back(std::make_unique<Slab>());
  }
  Slab& slab = *slabs_[slab_id];
  slab.first_unit = first;
  slab.units = count;
  slab.klass = id;
  slab.pages = cold > 0 ? Pages::missing : Pages::present;
  slab.owners.assign(klass.slab_slots, kFreeBit);
  slab.threaded = false;
  std::fill_n(slab_of_unit_.begin() + first, count, slab_id);
  ++klass.slabs;
  klass.slots += klass.slab_slots;
  return slab_id;
}

// Links the free slots, lowest first.
void SlabPool::thread(Slab& slab) {
  std::uint32_t next = kEndOfList;
  for (auto index = static_cast<std::uint32_t>(slab.owners.size()); index-- > 0;) {
    if ((slab.owners[index] & kFreeBit) == 0) continue;
    slab.owners[index] = kFreeBit | next;
    next = index;
  }
  slab.free_head = next;
  slab.threaded = true;
}

// Takes a slot out of the middle of its slab's list, which is linked one way: so the links are
// dropped, and the next take() makes them anew from the free bits.
bool SlabPool::restore(ClassId id, std::uint32_t first_unit, std::uint32_t index,
                       std::uint32_t owner) {
  SizeClass& klass = classes_[id];
  if (first_unit >= state_.size() || index >= klass.slab_slots) return false;
  SlabId slab_id = slab_of_unit_[first_unit];
  if (slab_id == kNoSlab) {
    if (!may_cut(first_unit, klass.slab_units)) return false;
    slab_id = cut(id, first_unit);
    list(slab_id);
  }
  Slab& slab = *slabs_[slab_id];
  if (slab.klass != id || slab.first_unit != first_unit) return false;
  if ((slab.owners[index] & kFreeBit) == 0) return false;
  slab.owners[index] = owner;
  slab.threaded = false;
  ++slab.taken;
  ++klass.taken;
  if (slab.taken == klass.slab_slots) unlist(slab_id);
  return true;
}

// Are all units of the run free, before the end, and committed without breaking the limit?
bool SlabPool::may_cut(std::uint32_t first, std::uint32_t count) const {
  if (first >= end_ || count > end_ - first || used_ + count > limit_) return false;
  std::uint32_t cold = 0;
  for (std::uint32_t unit = first; unit < first + count; ++unit) {
    if (state_[unit] == Unit::in_slab || state_[unit] == Unit::warming) return false;
    cold += state_[unit] == Unit::cold;
  }
  return committed_ + cold <= limit_;
}

void SlabPool::give(const Slot& slot) {
  Slab& slab = *slabs_[slot.slab];
  SizeClass& klass = classes_[slab.klass];
  KVP_CHECK((slab.owners[slot.index] & kFreeBit) == 0);  // A slot given back twice is our bug.
  const bool was_full = slab.taken == klass.slab_slots;
  slab.owners[slot.index] = kFreeBit | (was_full ? kEndOfList : slab.free_head);
  slab.free_head = slot.index;
  --slab.taken;
  --klass.taken;
  if (slab.taken == 0)
    free_slab(slot.slab);
  else if (was_full && !slab.draining)
    list(slot.slab);
}

void SlabPool::set_owner(const Slot& slot, std::uint32_t owner) {
  std::uint32_t& now = slabs_[slot.slab]->owners[slot.index];
  KVP_CHECK(((now | owner) & kFreeBit) == 0);
  now = owner;
}

SlabPool::Pages SlabPool::claim_pages(SlabId id) {
  const Pages found = slabs_[id]->pages;
  if (found == Pages::missing) slabs_[id]->pages = Pages::being_made;
  return found;
}

void SlabPool::pages_made(SlabId id, bool made) {
  KVP_CHECK(slabs_[id]->pages == Pages::being_made);
  slabs_[id]->pages = made ? Pages::present : Pages::missing;
}

Slot SlabPool::slot_at(std::uint64_t offset) const {
  const SlabId id = slab_of_unit_[offset / kUnitBytes];
  KVP_CHECK(id != kNoSlab);
  const Slab& slab = *slabs_[id];
  const std::uint64_t within = offset - slab.first_unit * kUnitBytes;
  return {offset, id, static_cast<std::uint32_t>(within / classes_[slab.klass].slot_bytes)};
}

std::vector<SlabId> SlabPool::emptiest(ClassId id, std::size_t at_most) const {
  std::vector<SlabId> found;
  for (SlabId slab = 0; slab < slabs_.size(); ++slab)
    if (slabs_[slab] && slabs_[slab]->klass == id) found.push_back(slab);
  const auto fewer = [&](SlabId a, SlabId b) { return slabs_[a]->taken < slabs_[b]->taken; };
  const std::size_t kept = std::min(at_most, found.size());
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(kept), found.end(),
                    fewer);
  found.resize(kept);
  return found;
}

std::vector<std::uint32_t> SlabPool::owners(SlabId id) const {
  std::vector<std::uint32_t> taken;
  for (std::uint32_t owner : slabs_[id]->owners)
    if ((owner & kFreeBit) == 0) taken.push_back(owner);
  return taken;
}

void SlabPool::set_draining(SlabId id, bool draining) {
  Slab& slab = *slabs_[id];
  slab.draining = draining;
  if (draining && slab.listed) unlist(id);
  if (!draining && !slab.listed && slab.taken < classes_[slab.klass].slab_slots) list(id);
}

void SlabPool::trim_to_limit(std::uint32_t at_most, std::vector<UnitRun>& punch) {
  const std::uint32_t held = used_ + warming_;
  trim(held < limit_ ? limit_ - held : 0, at_most, punch);
}

void SlabPool::trim(std::uint32_t keep, std::uint32_t at_most, std::vector<UnitRun>& punch) {
  // From the high end, so that what stays is dense and low.
  for (auto unit = high_; unit-- > 0 && at_most > 0 && free_committed() > keep;) {
    if (state_[unit] != Unit::warm) continue;
    state_[unit] = Unit::cold;
    cold_from_ = std::min(cold_from_, unit);
    --committed_;
    --at_most;
    if (!punch.empty() && punch.back().first == unit + 1) {
      punch.back().first = unit;
      ++punch.back().count;
    } else {
      punch.push_back({unit, 1});
    }
  }
}

void SlabPool::set_end(std::uint32_t units) {
  end_ = std::min(units, static_cast<std::uint32_t>(state_.size()));
}

std::vector<SlabId> SlabPool::slabs_beyond(std::uint32_t unit) const {
  std::vector<SlabId> found;
  for (; unit < high_; ++unit) {
    const SlabId slab = slab_of_unit_[unit];
    if (slab != kNoSlab && (found.empty() || found.back() != slab)) found.push_back(slab);
  }
  return found;
}

std::optional<std::uint32_t> SlabPool::start_warming() {
  if (committed_ + warming_ >= limit_) return std::nullopt;
  for (auto unit = cold_from_; unit < end_; ++unit) {
    if (state_[unit] != Unit::cold) continue;
    state_[unit] = Unit::warming;
    cold_from_ = unit + 1;
    high_ = std::max(high_, unit + 1);
    ++warming_;
    return unit;
  }
  return std::nullopt;
}

bool SlabPool::warmed(std::uint32_t unit, bool has_pages) {
  KVP_CHECK(state_[unit] == Unit::warming);
  --warming_;
  const bool is_kept = has_pages && committed_ + warming_ < limit_;
  state_[unit] = is_kept ? Unit::warm : Unit::cold;
  if (is_kept)
    ++committed_;
  else
    cold_from_ = std::min(cold_from_, unit);
  return is_kept;
}

std::vector<UnitRun> SlabPool::empty_units() const {
  std::vector<UnitRun> runs;
  for (std::uint32_t unit = 0; unit < high_; ++unit) {
    if (state_[unit] != Unit::cold) continue;
    if (!runs.empty() && runs.back().first + runs.back().count == unit)
      ++runs.back().count;
    else
      runs.push_back({unit, 1});
  }
  return runs;
}

// First a run that is warm throughout, else the lowest run of free units.
std::optional<std::uint32_t> SlabPool::find_run(std::uint32_t count) const {
  std::optional<std::uint32_t> any;
  std::uint32_t run = 0, warm = 0, seen_warm = 0;
  const std::uint32_t warm_total = free_committed();
  for (std::uint32_t unit = low_; unit < end_; ++unit) {
    const bool is_warm = state_[unit] == Unit::warm;
    const bool is_free = is_warm || state_[unit] == Unit::cold;
    run = is_free ? run + 1 : 0;
    warm = is_warm ? warm + 1 : 0;
    if (is_warm) ++seen_warm;
    if (warm >= count) return unit + 1 - count;
    if (run >= count && !any) any = unit + 1 - count;
    if (any && seen_warm == warm_total) return any;  // no warm run can follow
  }
  return any;
}

void SlabPool::list(SlabId id) {
  SizeClass& klass = classes_[slabs_[id]->klass];
  Slab& slab = *slabs_[id];
  KVP_CHECK(!slab.listed);
  slab.listed = true;
  slab.previous = kNoSlab;
  slab.next = klass.with_room;
  if (slab.next != kNoSlab) slabs_[slab.next]->previous = id;
  klass.with_room = id;
}

void SlabPool::unlist(SlabId id) {
  Slab& slab = *slabs_[id];
  if (!slab.listed) return;
  slab.listed = false;
  if (slab.previous != kNoSlab)
    slabs_[slab.previous]->next = slab.next;
  else
    classes_[slab.klass].with_room = slab.next;
  if (slab.next != kNoSlab) slabs_[slab.next]->previous = slab.previous;
}

void SlabPool::free_slab(SlabId id) {
  unlist(id);
  Slab& slab = *slabs_[id];
  SizeClass& klass = classes_[slab.klass];
  for (std::uint32_t unit = slab.first_unit; unit < slab.first_unit + slab.units; ++unit) {
    state_[unit] = slab.pages == Pages::present ? Unit::warm : Unit::cold;
    slab_of_unit_[unit] = kNoSlab;
  }
  if (slab.pages != Pages::present) committed_ -= slab.units;
  used_ -= slab.units;
  klass.slots -= klass.slab_slots;
  --klass.slabs;
  low_ = std::min(low_, slab.first_unit);
  if (slab.pages != Pages::present) cold_from_ = std::min(cold_from_, slab.first_unit);
  slabs_[id].reset();
  free_slab_ids_.push_back(id);
}

// How many there are; where they are linked, the links lead to each of them once.
std::uint32_t SlabPool::check_free_slots(const Slab& slab) {
  std::uint32_t free = 0;
  for (const std::uint32_t owner : slab.owners) free += (owner & kFreeBit) != 0;
  if (!slab.threaded || free == 0) return free;
  std::uint32_t linked = 0;
  for (std::uint32_t at = slab.free_head; at != kEndOfList; at = slab.owners[at] & ~kFreeBit) {
    KVP_CHECK(at < slab.owners.size() && (slab.owners[at] & kFreeBit) != 0);
    KVP_CHECK(++linked <= free);
  }
  KVP_CHECK(linked == free);
  return free;
}

void SlabPool::check_invariants() const {
  std::vector<std::uint64_t> slots(classes_.size()), taken(classes_.size());
  std::vector<std::uint32_t> slabs(classes_.size());
  std::uint32_t used = 0;
  for (SlabId id = 0; id < slabs_.size(); ++id) {
    if (!slabs_[id]) continue;
    const Slab& slab = *slabs_[id];
    const SizeClass& klass = classes_[slab.klass];
    KVP_CHECK(slab.units == klass.slab_units && slab.owners.size() == klass.slab_slots);
    const std::uint32_t free = check_free_slots(slab);
    KVP_CHECK(slab.taken > 0 || slab.listed);  // only between add_slab() and take()
    KVP_CHECK(free + slab.taken == klass.slab_slots);
    KVP_CHECK(slab.listed == (free > 0 && !slab.draining));
    for (std::uint32_t unit = slab.first_unit; unit < slab.first_unit + slab.units; ++unit)
      KVP_CHECK(slab_of_unit_[unit] == id && state_[unit] == Unit::in_slab);
    used += slab.units;
    ++slabs[slab.klass];
    slots[slab.klass] += klass.slab_slots;
    taken[slab.klass] += slab.taken;
  }
  std::uint32_t warm = 0, warming = 0, in_slab = 0;
  for (Unit state : state_) {
    warm += state == Unit::warm;
    warming += state == Unit::warming;
    in_slab += state == Unit::in_slab;
  }
  KVP_CHECK(in_slab == used && used == used_ && warming == warming_);
  for (std::uint32_t unit = 0; unit < std::min<std::size_t>(cold_from_, state_.size()); ++unit)
    KVP_CHECK(state_[unit] != Unit::cold);
  for (std::uint32_t unit = high_; unit < state_.size(); ++unit)
    KVP_CHECK(state_[unit] == Unit::cold);
  KVP_CHECK(committed_ == used_ + warm && end_ <= state_.size());
  for (std::uint32_t unit = 0; unit < low_; ++unit) KVP_CHECK(state_[unit] == Unit::in_slab);
  for (ClassId id = 0; id < classes_.size(); ++id)
    KVP_CHECK(slots[id] == classes_[id].slots && taken[id] == classes_[id].taken &&
              slabs[id] == classes_[id].slabs);
}

}  // namespace kvpool
