#include "node/departures.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kEntryBytes = 28;
constexpr std::uint64_t kShareInverse = 256;  // of the pool's memory
constexpr std::uint64_t kEntriesMin = 1 << 10, kEntriesMost = 1 << 17;

}  // namespace

std::uint32_t Departures::entries_for(std::uint64_t pool_bytes) {
  const std::uint64_t entries = pool_bytes / kShareInverse / kEntryBytes;
  return static_cast<std::uint32_t>(std::bit_floor(std::clamp(entries, kEntriesMin, kEntriesMost)));
}

Departures::Departures(std::uint32_t entries_max, std::uint64_t salt)
    : entries_max_(entries_max),
      salt_(salt),
      entries_(entries_max),
      table_(std::size_t{2} * entries_max) {
  KVP_CHECK(std::has_single_bit(entries_max));
  table_.reach(table_.length_max());
}

// Names are spread well, but whoever puts blocks can choose them: not so that they crowd one place.
std::uint64_t Departures::home(Fingerprint name) const {
  return ((name ^ salt_) * 0x9e37'79b9'7f4a'7c15u >> 32) & (2 * std::uint64_t{entries_max_} - 1);
}

std::uint64_t Departures::find(Fingerprint name) const {
  const std::uint64_t mask = 2 * std::uint64_t{entries_max_} - 1;
  std::uint64_t at = home(name);
  while (table_[at] != 0 && entries_[table_[at] - 1].name != name) at = (at + 1) & mask;
  return at;
}

void Departures::note(Fingerprint name, const Departure& departure) {
  if (!origin_) origin_ = departure.when;
  // Whoever had this place is the oldest, unless it has left again since and has a later one.
  Entry& entry = entries_[next_];
  if (entry.is_used) {
    const std::uint64_t old = find(entry.name);
    if (table_[old] == next_ + 1) {
      take_out(old);
      --size_;
    }
  }
  entry = {.name = name,
           .when = static_cast<float>(departure.when - *origin_),
           .heat = departure.heat,
           .why = departure.why,
           .was_on_ssd = departure.was_on_ssd,
           .status = departure.status,
           .is_used = true};
  entries_.reach(next_ + 1);
  const std::uint64_t at = find(name);
  if (table_[at] == 0) ++size_;
  table_[at] = next_ + 1;
  next_ = (next_ + 1) % entries_max_;
}

std::optional<Departure> Departures::look(Fingerprint name) const {
  const std::uint64_t at = find(name);
  if (table_[at] == 0) return std::nullopt;
  const Entry& entry = entries_[table_[at] - 1];
  return Departure{.why = entry.why,
                   .was_on_ssd = entry.was_on_ssd,
                   .status = entry.status,
                   .heat = entry.heat,
                   .when = static_cast<double>(entry.when) + *origin_};
}

// What was pushed past the emptied place moves back, so that no search ends too early.
void Departures::take_out(std::uint64_t at) {
  const std::uint64_t mask = 2 * std::uint64_t{entries_max_} - 1;
  std::uint64_t hole = at;
  for (std::uint64_t next = (at + 1) & mask; table_[next] != 0; next = (next + 1) & mask) {
    const std::uint64_t from = home(entries_[table_[next] - 1].name);
    if (((next - from) & mask) < ((next - hole) & mask)) continue;
    table_[hole] = table_[next];
    hole = next;
  }
  table_[hole] = 0;
}

void Departures::check_invariants() const {
  std::uint64_t found = 0;
  for (std::uint64_t at = 0; at < table_.length_max(); ++at) {
    if (table_[at] == 0) continue;
    ++found;
    const Entry& entry = entries_[table_[at] - 1];
    KVP_CHECK(entry.is_used && find(entry.name) == at);
  }
  KVP_CHECK(found == size_ && size_ <= entries_max_);
}

}  // namespace kvpool
