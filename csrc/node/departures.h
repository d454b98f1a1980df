// Why blocks are not here any more: of those that left, or were refused, most lately.
//
// Relies on: one caller at a time (the node's lock).
// Promises:  1. memory is fixed: 16 bytes an entry, pages of them only as they are used;
//            2. the latest departure of a block is the one that is remembered;
//            3. a call looks at one line of memory: four entries, of which the oldest makes room.
//               What is forgotten is thus old, but not exactly the oldest: of the latest
//               entries_max / 8 departures, 998 of 1000 are remembered.
// Two blocks may be taken for the same, which gives a wrong reason: at 2^-30 for each look.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/lazy_array.h"
#include "policy/policy.h"

namespace kvpool {

// Of the wire and of the Python API: numbers stay.
enum class Gone : std::uint8_t {
  evicted = 0,      // room was needed in DRAM, and it was nowhere else
  not_worth = 1,    // so, and the SSD had only warmer blocks when it was to be written there
  evicted_ssd = 2,  // room was needed on the SSD, and it was nowhere else
  removed = 3,      // somebody asked for it
  dropped = 4,      // with its namespace
  lost = 5,         // its copy on the SSD could not be read, or what it hangs on could not
  refused = 6,      // it never came: the status of the put says why
};
inline constexpr std::uint8_t kGoneReasons = 7;

struct Departure {
  Gone why = Gone::evicted;
  bool was_on_ssd = false;
  std::uint8_t status = 0;  // refused: the PutStatus
  float heat = 0;           // when it left
  Seconds when = 0;
};

class Departures {
 public:
  // `entries_max`: a power of two, 4 at least.
  Departures(std::uint32_t entries_max, std::uint64_t salt);
  // What a pool of so many bytes remembers: 1/256 of that, between 16 KiB and 4 MiB.
  static std::uint32_t entries_for(std::uint64_t pool_bytes);

  // Ahead of note(), by the time of a few cold lines.
  void prefetch(Fingerprint name) const { __builtin_prefetch(&sets_[set_of(hashed(name))], 1); }
  void note(Fingerprint name, const Departure& departure);
  std::optional<Departure> look(Fingerprint name) const;

  std::size_t bytes() const { return sets_.bytes(); }

 private:
  struct Entry {
    std::uint32_t tag;
    float when;  // since origin_; to a thousandth of a second for some hours, to 1 s for a year
    float heat;
    std::uint8_t why_plus_one;  // 0: nobody is here
    bool was_on_ssd;
    std::uint8_t status;
  };
  static_assert(sizeof(Entry) == 16);
  struct alignas(64) Set {
    std::array<Entry, 4> entries;
  };

  // Names are spread well, but whoever puts blocks can choose them: not so that they crowd one set.
  std::uint64_t hashed(Fingerprint name) const { return (name ^ salt_) * 0x9e37'79b9'7f4a'7c15u; }
  std::size_t set_of(std::uint64_t hash) const { return (hash >> 32) & (sets_.length_max() - 1); }
  static std::uint32_t tag_of(std::uint64_t hash);

  std::uint64_t salt_;
  LazyArray<Set> sets_;
  std::optional<Seconds> origin_;
};

}  // namespace kvpool
