#include "node/ssd_books.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {
namespace {

// What a group may need at most: more free slots than that would only lie idle.
constexpr std::uint64_t kFreeSlotsMax = 256;
constexpr std::uint64_t kFreeBytesMax = 64 << 20;
// And never more than this part of a class, so that a small tier still holds something.
constexpr std::uint64_t kFreeShareInverse = 8;

PolicyKind policy_of(PolicyKind dram) {
  // Only these two keep chains, without which a suffix could outlive its parent.
  return dram == PolicyKind::temperature ? PolicyKind::temperature : PolicyKind::lru;
}

std::uint32_t units32(std::uint64_t units) { return static_cast<std::uint32_t>(units); }

}  // namespace

SsdBooks::SsdBooks(const SsdBooksOptions& options)
    : options_(options),
      slots_(units32(options.units_max), units32(options.facts.units)),
      heat_(make_policy(policy_of(options.policy), {.blocks_max = options.records_max,
                                                    .ghosts_max = options.ghosts_max,
                                                    .tau_s = options.tau_s})),
      places_(options.records_max),
      queue_(options.records_max),
      next_number_(options.facts.next_space) {
  slots_.set_end(units32(options.facts.units));
}

// --- slots ---------------------------------------------------------------------------------------

std::optional<ClassId> SsdBooks::class_of(std::uint64_t slot_bytes) {
  const std::uint32_t before = slots_.class_count();
  const auto klass = slots_.class_of(slot_bytes);
  if (!klass) return std::nullopt;
  doomed_in_class_.resize(slots_.class_count());
  if (slots_.class_count() > before)
    new_classes_.push_back({slot_bytes, slots_.slab_units(*klass)});
  return klass;
}

bool SsdBooks::restore_class(const SsdClass& found) {
  if (found.slab_units > options_.units_max) return false;
  const auto klass = slots_.class_with(found.slot_bytes, units32(found.slab_units));
  doomed_in_class_.resize(slots_.class_count());
  return klass.has_value();
}

bool SsdBooks::restore_slot(const SsdPlace& place, BlockId owner) {
  for (ClassId id = 0; id < slots_.class_count(); ++id)
    if (slots_.slot_bytes_of(id) == place.slot_bytes())
      return slots_.restore(id, place.slab_unit, place.slot, owner);
  return false;
}

std::optional<SsdPlace> SsdBooks::take(ClassId klass, BlockId owner, std::uint32_t bytes) {
  if (is_index_full()) return std::nullopt;
  std::vector<UnitRun> ignored;  // pages are an affair of DRAM
  if (!slots_.has_room(klass) && !slots_.add_slab(klass, ignored)) return std::nullopt;
  const auto slot = slots_.take(klass, owner);
  if (!slot) return std::nullopt;
  return SsdPlace{units32(slots_.slab_offset(slot->slab) / kUnitBytes), slot->index, bytes};
}

void SsdBooks::give(const SsdPlace& place) { slots_.give(slots_.slot_at(place.offset())); }

// The slot stays taken, so that nobody is given it.
void SsdBooks::quarantine(const SsdPlace& place) {
  slots_.set_owner(slots_.slot_at(place.offset()), kNobody);
  ++quarantined_;
}

bool SsdBooks::has_nobody(SlabId slab) const {
  return std::ranges::any_of(slots_.owners(slab), is_nobody);
}

void SsdBooks::give_up_nobodies(SlabId slab) {
  const ClassId klass = slots_.slab_class(slab);
  const std::uint64_t first = slots_.slab_offset(slab), step = slots_.slot_bytes_of(klass);
  const auto count = std::ranges::count_if(slots_.owners(slab), is_nobody);
  auto left = static_cast<std::uint64_t>(count);
  quarantined_ -= left;
  for (std::uint64_t at = first; left > 0; at += step) {  // with the last one the slab may go
    if (!is_nobody(slots_.owner(slots_.slot_at(at)))) continue;
    slots_.give(slots_.slot_at(at));
    --left;
  }
}

std::uint64_t SsdBooks::wanted_free(ClassId klass) const {
  const std::uint64_t slots = slots_.taken_slots(klass) + slots_.free_slots(klass);
  const std::uint64_t in_bytes = kFreeBytesMax / slots_.slot_bytes_of(klass);
  return std::clamp<std::uint64_t>(std::min(slots / kFreeShareInverse, in_bytes), 1, kFreeSlotsMax);
}

std::uint64_t SsdBooks::coming_free(ClassId klass) const {
  return slots_.free_slots(klass) + doomed_in_class_[klass];
}

void SsdBooks::set_place(BlockId record, const SsdPlace& place) {
  places_.reach(record + std::size_t{1});
  places_[record] = {place.slab_unit, place.slot};
}

// --- deleting ------------------------------------------------------------------------------------

void SsdBooks::doom(const BlockKey& key, const SsdPlace& place) {
  doomed_.push_back({key, place});
  ++doomed_in_class_[class_at(place)];
}

void SsdBooks::take_doomed(std::size_t at_most, std::vector<SsdDelete>& out) {
  const std::size_t count = std::min(at_most, doomed_.size());
  const auto from = doomed_.end() - static_cast<std::ptrdiff_t>(count);
  out.insert(out.end(), from, doomed_.end());
  doomed_.erase(from, doomed_.end());
}

void SsdBooks::done_deleting(std::span<const SsdDelete> deletes, bool committed) {
  if (!committed) {
    doomed_.insert(doomed_.end(), deletes.begin(), deletes.end());
    return;
  }
  // With `relaxed` a power cut may take this commit back: then the entries deleted by it are there
  // again, and their slots must not have been written meanwhile.
  for (const SsdPlace& place : free_next_) free_now(place);
  free_next_.clear();
  for (const SsdDelete& gone : deletes) {
    --doomed_in_class_[class_at(gone.place)];
    --entries_;
    left_by_move(gone.place);
  }
}

void SsdBooks::left_by_move(const SsdPlace& place) {
  if (options_.free_late)
    free_next_.push_back(place);
  else
    free_now(place);
}

void SsdBooks::free_now(const SsdPlace& place) {
  if (std::erase(condemned_, place) > 0)
    quarantine(place);
  else
    give(place);
}

ClassId SsdBooks::class_at(const SsdPlace& place) const {
  return slots_.slab_class(slots_.slot_at(place.offset()).slab);
}

void SsdBooks::set_facts(const SsdFacts& facts) {
  options_.facts = facts;
  // While what lies beyond a nearer end is being moved, its room is needed twice.
  slots_.set_limit(std::max(units32(facts.units), slots_.limit()));
  slots_.set_end(units32(facts.units));
}

// --- names ---------------------------------------------------------------------------------------

std::uint32_t SsdBooks::number(std::uint32_t incarnation) const {
  return incarnation < number_of_.size() ? number_of_[incarnation] : 0;
}

void SsdBooks::set_number(std::uint32_t incarnation, std::uint32_t number) {
  if (incarnation >= number_of_.size()) number_of_.resize(incarnation + std::size_t{1});
  number_of_[incarnation] = number;
}

void SsdBooks::restore_space(std::uint32_t incarnation, std::uint32_t number) {
  set_number(incarnation, number);
  ++spaces_;
}

void SsdBooks::forget_space(std::uint32_t number) {
  unused_.push_back(number);
  ++spaces_;
}

std::uint32_t SsdBooks::name_space(std::uint32_t incarnation, const Hash128& id,
                                   std::uint64_t block_bytes) {
  if (const std::uint32_t known = number(incarnation); known != 0) return known;
  const auto made = static_cast<std::uint32_t>(next_number_++);
  set_number(incarnation, made);
  new_spaces_.push_back({made, id, block_bytes});
  ++spaces_;
  return made;
}

void SsdBooks::drop_space(std::uint32_t incarnation) {
  const std::uint32_t known = number(incarnation);
  if (known == 0) return;
  const auto is_it = [&](const SsdSpace& space) { return space.number == known; };
  std::erase_if(new_spaces_, is_it);
  dropped_.push_back(known);
}

void SsdBooks::take_names(SsdGroup& group) {
  group.new_spaces.swap(new_spaces_);
  group.new_classes.swap(new_classes_);
  // All of them: a name that comes with this group may be that of one which was dropped.
  group.dropped_spaces.swap(dropped_);
  const std::size_t count = std::min(kNamesPerGroup, unused_.size());
  const auto from = unused_.end() - static_cast<std::ptrdiff_t>(count);
  group.dropped_spaces.insert(group.dropped_spaces.end(), from, unused_.end());
  unused_.erase(from, unused_.end());
  drops_in_group_ = group.dropped_spaces.size();
}

void SsdBooks::done_naming(const SsdGroup& group, bool committed) {
  drops_in_group_ = 0;
  if (committed) {
    spaces_ -= group.dropped_spaces.size();
    return;
  }
  new_classes_.insert(new_classes_.end(), group.new_classes.begin(), group.new_classes.end());
  for (const SsdSpace& space : group.new_spaces)  // but for those dropped meanwhile
    if (std::find(dropped_.begin(), dropped_.end(), space.number) == dropped_.end())
      new_spaces_.push_back(space);
  dropped_.insert(dropped_.end(), group.dropped_spaces.begin(), group.dropped_spaces.end());
}

// --- uses ----------------------------------------------------------------------------------------

bool SsdBooks::note_use(BlockId record) {
  if (used_.size() >= kStampsMax) return false;
  used_.push_back(record);
  return true;
}

std::optional<BlockId> SsdBooks::next_used() {
  if (used_.empty()) return std::nullopt;
  const BlockId record = used_.front();
  used_.pop_front();
  return record;
}

// --- facts ---------------------------------------------------------------------------------------

std::uint64_t SsdBooks::bytes_taken() const {
  std::uint64_t bytes = 0;
  for (ClassId id = 0; id < slots_.class_count(); ++id)
    bytes += slots_.taken_slots(id) * slots_.slot_bytes_of(id);
  return bytes;
}

std::uint64_t SsdBooks::bytes() const {
  return places_.bytes() + heat_->stats().bytes + queue_.bytes() +
         doomed_.size() * sizeof(SsdDelete) + number_of_.size() * sizeof(std::uint32_t);
}

void SsdBooks::check_invariants() const {
  slots_.check_invariants();
  heat_->check_invariants();
  std::uint64_t doomed = 0;
  for (const std::uint64_t count : doomed_in_class_) doomed += count;
  KVP_CHECK(doomed >= doomed_.size());  // more while a group is under way
}

}  // namespace kvpool
