#include "cluster/directory_segment.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "block/key.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kSetsAtFirst = 16;
// Above this nothing is moved about for a place: looking for one would cost more than it is worth.
constexpr std::uint64_t kFullPercent = 95;
// So many periods in the life of a full table: 16 bits of them go round after some 64 of its lives,
// when nothing is left of the first.
constexpr std::uint64_t kPeriods = 1024;

std::uint32_t scaled(std::uint64_t hash32, std::uint32_t sets) {
  return static_cast<std::uint32_t>((hash32 * sets) >> 32);
}

}  // namespace

// Two sets for each key, from the low 48 bits of its hash: those above chose the segment.
std::array<DirectorySegment::Set*, 2> DirectorySegment::sets_of(std::uint64_t hash) const {
  const std::uint64_t one = hash & 0xffff'ffff, other = mix64(hash) >> 32;
  return {&table_[scaled(one, sets_)], &table_[scaled(other, sets_)]};
}

void DirectorySegment::prefetch(std::uint64_t hash) const {
  if (sets_ == 0) return;
  for (const Set* set : sets_of(hash)) __builtin_prefetch(set, 1);
}

DirectorySegment::Entry* DirectorySegment::look(std::uint64_t hash, std::uint64_t tag) const {
  if (sets_ == 0) return nullptr;
  for (Set* set : sets_of(hash))
    for (Entry& entry : set->entries)
      if (entry.tag == tag && !entry.is_empty()) return &entry;
  return nullptr;
}

std::uint16_t DirectorySegment::now() const {
  const std::uint64_t period = std::max<std::uint64_t>(1, sets_max_ * kWays / kPeriods);
  return static_cast<std::uint16_t>(told_ / period);
}

bool DirectorySegment::add(std::uint64_t hash, std::uint64_t tag, Holder holder) {
  // Under the lock, so that no number is given to another while it is being written: its sweep
  // takes this lock first.
  if (lives_->life(holder.number) != holder.life) return false;
  ++told_;
  if (Entry* known = look(hash, tag); known != nullptr) {
    known->set_when(now());
    return add_holder(*known, holder);
  }
  Entry& entry = make_place(hash);
  entry = {.tag = tag, .rest = holder.number};
  entry.set_when(now());
  ++counters_.entries;
  return true;
}

bool DirectorySegment::add_holder(Entry& entry, Holder holder) {
  std::size_t place = kHoldersPerKey;
  for (std::size_t i = 0; i < kHoldersPerKey; ++i) {
    const std::uint16_t there = entry.holder(i);
    if (there == holder.number) return true;
    if (there == 0 || !lives_->is_alive(there)) place = i;
  }
  if (place == kHoldersPerKey) {
    ++counters_.crowded;
    return false;
  }
  entry.set_holder(place, holder.number);
  return true;
}

bool DirectorySegment::remove(std::uint64_t hash, std::uint64_t tag, Holder holder) {
  if (lives_->life(holder.number) != holder.life) return false;
  Entry* entry = look(hash, tag);
  if (entry == nullptr) return false;
  for (std::size_t i = 0; i < kHoldersPerKey; ++i) {
    if (entry->holder(i) != holder.number) continue;
    entry->set_holder(i, 0);
    counters_.entries -= entry->is_empty();
    return true;
  }
  return false;
}

DirectorySegment::Numbers DirectorySegment::find(std::uint64_t hash, std::uint64_t tag) {
  Numbers numbers{};
  Entry* entry = look(hash, tag);
  if (entry == nullptr) return numbers;
  std::size_t count = 0;
  for (std::size_t i = 0; i < kHoldersPerKey; ++i) {
    const std::uint16_t there = entry->holder(i);
    if (there != 0 && lives_->is_alive(there)) numbers[count++] = there;
  }
  if (count > 0) entry->set_when(now());
  return numbers;
}

void DirectorySegment::forget_dead(Entry& entry) {
  for (std::size_t i = 0; i < kHoldersPerKey; ++i)
    if (entry.holder(i) != 0 && !lives_->is_alive(entry.holder(i))) entry.set_holder(i, 0);
}

// In the emptier of the two sets.
DirectorySegment::Entry* DirectorySegment::empty_place(std::uint64_t hash) {
  if (sets_ == 0) return nullptr;
  Entry* best = nullptr;
  std::size_t best_count = 0;
  for (Set* set : sets_of(hash)) {
    Entry* found = nullptr;
    std::size_t count = 0;
    for (Entry& entry : set->entries) {
      if (!entry.is_empty()) continue;
      found = &entry;
      ++count;
    }
    if (count <= best_count) continue;
    best = found;
    best_count = count;
  }
  return best;
}

DirectorySegment::Entry& DirectorySegment::coldest(std::uint64_t hash) {
  const std::uint16_t time = now();
  Entry* oldest = nullptr;
  std::uint16_t age_max = 0;
  for (Set* set : sets_of(hash))
    for (Entry& entry : set->entries) {
      forget_dead(entry);
      if (entry.is_empty()) return entry;
      const auto age = static_cast<std::uint16_t>(time - entry.when());
      if (oldest != nullptr && age <= age_max) continue;
      oldest = &entry;
      age_max = age;
    }
  return *oldest;
}

// One of those in the way goes to the other of its two sets, if that has room.
DirectorySegment::Entry* DirectorySegment::displace(std::uint64_t hash) {
  if (sets_ == 0 || counters_.entries * 100 >= std::uint64_t{sets_} * kWays * kFullPercent)
    return nullptr;
  for (Set* set : sets_of(hash))
    for (Entry& entry : set->entries)
      for (Set* other : sets_of(hash_of(entry.tag, salt_))) {
        if (other == set) continue;
        for (Entry& place : other->entries) {
          if (!place.is_empty()) continue;
          place = entry;
          entry.forget_holders();
          return &entry;
        }
      }
  return nullptr;
}

DirectorySegment::Entry& DirectorySegment::make_place(std::uint64_t hash) {
  do {
    if (Entry* empty = empty_place(hash); empty != nullptr) return *empty;
    if (Entry* empty = displace(hash); empty != nullptr) return *empty;
  } while (grow());
  Entry& victim = coldest(hash);
  counters_.evicted += !victim.is_empty();
  --counters_.entries;  // one whose holders were all gone had still been counted
  return victim;
}

// False: it has its full size.
bool DirectorySegment::grow() {
  if (sets_ == sets_max_) return false;
  std::uint32_t larger = sets_;
  do {
    larger = std::min(std::max(kSetsAtFirst, larger + larger / 4), sets_max_);
  } while (!refill(larger) && larger < sets_max_);
  counters_.bytes = std::uint64_t{sets_} * kSetBytes;
  return true;
}

// Into a table of so many sets. False: some were left over, and all is as before; but at the full
// size they are forgotten.
bool DirectorySegment::refill(std::uint32_t sets) {
  auto table = std::make_unique<Set[]>(sets);
  table.swap(table_);
  const std::uint32_t before = std::exchange(sets_, sets);
  counters_.entries = 0;
  std::uint64_t left_over = 0;
  for (std::uint32_t i = 0; i < before; ++i)
    for (Entry& entry : table[i].entries) {
      forget_dead(entry);
      if (entry.is_empty()) continue;
      const std::uint64_t hash = hash_of(entry.tag, salt_);
      Entry* place = empty_place(hash);
      if (place == nullptr) place = displace(hash);
      if (place == nullptr) {
        ++left_over;
        continue;
      }
      *place = entry;
      ++counters_.entries;
    }
  if (left_over > 0 && sets < sets_max_) {
    table.swap(table_);
    sets_ = before;
    counters_.entries += left_over;
    return false;
  }
  counters_.evicted += left_over;
  return true;
}

}  // namespace kvpool
