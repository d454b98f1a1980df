// Why blocks are not here any more: of those that left, or were refused, most lately.
//
// Relies on: one caller at a time (the node's lock).
// Promises:  1. at most entries_max are remembered; past it exactly the oldest is forgotten;
//            2. the latest departure of a block is the one that is remembered;
//            3. O(1) a call, 28 bytes an entry, pages of them only as they are used.
// Two blocks of one fingerprint are taken for the same: a wrong reason, at 2^-64 a pair.
#pragma once
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
  // `entries_max`: a power of two.
  Departures(std::uint32_t entries_max, std::uint64_t salt);
  // What a pool of so many bytes remembers: 1/256 of that, between 28 KiB and 3.5 MiB.
  static std::uint32_t entries_for(std::uint64_t pool_bytes);

  void note(Fingerprint name, const Departure& departure);
  std::optional<Departure> look(Fingerprint name) const;

  std::uint64_t size() const { return size_; }
  std::size_t bytes() const { return entries_.bytes() + table_.bytes(); }
  void check_invariants() const;

 private:
#pragma pack(push, 4)
  struct Entry {
    std::uint64_t name;
    float when;  // since origin_; seconds to a thousandth for some hours, to a second for a year
    float heat;
    Gone why;
    bool was_on_ssd;
    std::uint8_t status;
    bool is_used;
  };
#pragma pack(pop)
  static_assert(sizeof(Entry) == 20);

  std::uint64_t home(Fingerprint name) const;
  std::uint64_t find(Fingerprint name) const;
  void take_out(std::uint64_t at);

  std::uint32_t entries_max_;
  std::uint64_t salt_;
  LazyArray<Entry> entries_;        // a ring, oldest at next_
  LazyArray<std::uint32_t> table_;  // name -> place in the ring + 1; at most half full
  std::uint32_t next_ = 0;
  std::uint64_t size_ = 0;
  std::optional<Seconds> origin_;
};

}  // namespace kvpool
