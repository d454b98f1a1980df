#include "node/departures.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kEntryBytes = 16, kEntriesPerSet = 4;
constexpr std::uint64_t kShareInverse = 256;  // of the pool's memory
constexpr std::uint64_t kEntriesMin = 1 << 10, kEntriesMost = 1 << 18;

}  // namespace

std::uint32_t Departures::entries_for(std::uint64_t pool_bytes) {
  const std::uint64_t entries = pool_bytes / kShareInverse / kEntryBytes;
  return static_cast<std::uint32_t>(std::bit_floor(std::clamp(entries, kEntriesMin, kEntriesMost)));
}

Departures::Departures(std::uint32_t entries_max, std::uint64_t salt)
    : salt_(salt), sets_(entries_max / kEntriesPerSet) {
  KVP_CHECK(std::has_single_bit(entries_max) && entries_max >= kEntriesPerSet);
  sets_.reach(sets_.length_max());
}

// The set is the high half's, so the tag is the low half, with what that lacks of the high one.
std::uint32_t Departures::tag_of(std::uint64_t hash) {
  return static_cast<std::uint32_t>(hash ^ hash >> 50);
}

void Departures::note(Fingerprint name, const Departure& departure) {
  if (!origin_) origin_ = departure.when;
  const std::uint64_t hash = hashed(name);
  const std::uint32_t tag = tag_of(hash);
  auto& entries = sets_[set_of(hash)].entries;
  Entry* oldest = &entries[0];
  for (Entry& entry : entries) {
    if (entry.why_plus_one == 0 || entry.tag == tag) {  // a set fills from the front
      oldest = &entry;
      break;
    }
    if (entry.when < oldest->when) oldest = &entry;
  }
  *oldest = {.tag = tag,
             .when = static_cast<float>(departure.when - *origin_),
             .heat = departure.heat,
             .why_plus_one = static_cast<std::uint8_t>(static_cast<int>(departure.why) + 1),
             .was_on_ssd = departure.was_on_ssd,
             .status = departure.status};
}

std::optional<Departure> Departures::look(Fingerprint name) const {
  const std::uint64_t hash = hashed(name);
  for (const Entry& entry : sets_[set_of(hash)].entries) {
    if (entry.why_plus_one == 0) break;
    if (entry.tag != tag_of(hash)) continue;
    return Departure{.why = static_cast<Gone>(entry.why_plus_one - 1),
                     .was_on_ssd = entry.was_on_ssd,
                     .status = entry.status,
                     .heat = entry.heat,
                     .when = static_cast<double>(entry.when) + *origin_};
  }
  return std::nullopt;
}

}  // namespace kvpool
