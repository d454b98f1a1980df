// A part of a directory: a table of who holds which key, that grows up to a limit and then lets go
// of what was neither told nor asked for the longest.
//
// A key lies in one of two sets of four entries, so a table is some nine tenths full before the
// first key finds no place. An entry is 16 bytes: 64 bits of the key, four holders of 12 bits, and
// when it was last told or asked for.
// Promises:  1. memory is entries * 16 bytes, and of what it was for the moment in which it grows;
//            2. a call costs two cold lines; one that grows the table copies it.
// Thread rule: lock() for everything.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "block/key.h"
#include "net/frame.h"

namespace kvpool {

// Who of the numbers 1..4095 is a holder; 0 is nobody. Odd: alive. A number that is taken again has
// another life, so that nothing that was said of the holder before is taken for its.
class HolderLives {
 public:
  static constexpr std::uint32_t kNumbers = 4096;
  bool is_alive(std::uint32_t number) const { return (life(number) & 1) != 0; }
  std::uint32_t life(std::uint32_t number) const {
    return lives_[number].load(std::memory_order_acquire);
  }
  void next(std::uint32_t number) { lives_[number].fetch_add(1, std::memory_order_acq_rel); }

 private:
  std::array<std::atomic<std::uint32_t>, kNumbers> lives_{};
};

struct Holder {
  std::uint16_t number = 0;
  std::uint32_t life = 0;
};

class DirectorySegment {
 public:
  static constexpr std::uint32_t kWays = 4;
  static constexpr std::uint32_t kSetBytes = 64;
  using Numbers = std::array<std::uint16_t, kHoldersPerKey>;  // 0 behind the last

  struct Counters {
    std::uint64_t entries = 0;  // of which some may be of holders that are gone, until swept
    std::uint64_t evicted = 0;  // keys that made room for others
    std::uint64_t crowded = 0;  // holders of a key that has kHoldersPerKey already
    std::uint64_t bytes = 0;
  };

  // Before anything else.
  void init(std::uint32_t sets_max, std::uint64_t salt, const HolderLives* lives) {
    sets_max_ = sets_max;
    salt_ = salt;
    lives_ = lives;
  }
  static std::uint64_t hash_of(std::uint64_t tag, std::uint64_t salt) { return mix64(tag ^ salt); }
  std::mutex& lock() { return mutex_; }

  // `hash`: hash_of(tag); `tag`: of the key.
  void prefetch(std::uint64_t hash) const;
  // False: nothing was changed, since the holder's life is over or the key has enough holders.
  bool add(std::uint64_t hash, std::uint64_t tag, Holder holder);
  bool remove(std::uint64_t hash, std::uint64_t tag, Holder holder);
  Numbers find(std::uint64_t hash, std::uint64_t tag);
  // Lets go of the holders that are gone, and of all entries for which `is_over(tag)`.
  template <typename IsOver>
  void sweep(IsOver is_over) {
    for (std::uint32_t i = 0; i < sets_; ++i)
      for (Entry& entry : table_[i].entries) {
        if (entry.is_empty()) continue;
        if (is_over(entry.tag))
          entry.forget_holders();
        else
          forget_dead(entry);
        counters_.entries -= entry.is_empty();
      }
  }
  const Counters& counters() const { return counters_; }

 private:
  struct Entry {
    std::uint64_t tag = 0;
    std::uint64_t rest = 0;  // holders from the low end; the upper 16 bits: when

    static constexpr std::uint64_t kHolderBits = 12, kHolderMask = (1u << kHolderBits) - 1;
    static constexpr std::uint64_t kHoldersMask = (1ull << (kHolderBits * kHoldersPerKey)) - 1;
    bool is_empty() const { return (rest & kHoldersMask) == 0; }
    void forget_holders() { rest &= ~kHoldersMask; }
    std::uint16_t holder(std::size_t i) const {
      return static_cast<std::uint16_t>((rest >> (i * kHolderBits)) & kHolderMask);
    }
    void set_holder(std::size_t i, std::uint64_t number) {
      rest &= ~(kHolderMask << (i * kHolderBits));
      rest |= number << (i * kHolderBits);
    }
    std::uint16_t when() const { return static_cast<std::uint16_t>(rest >> 48); }
    void set_when(std::uint16_t now) { rest = (rest & kHoldersMask) | std::uint64_t{now} << 48; }
  };
  static_assert(sizeof(Entry) == 16);
  struct alignas(64) Set {
    std::array<Entry, kWays> entries;
  };

  static_assert(sizeof(Set) == kSetBytes);

  std::array<Set*, 2> sets_of(std::uint64_t hash) const;
  Entry* look(std::uint64_t hash, std::uint64_t tag) const;
  bool add_holder(Entry& entry, Holder holder);
  void forget_dead(Entry& entry);
  Entry* empty_place(std::uint64_t hash);
  Entry& coldest(std::uint64_t hash);
  Entry& make_place(std::uint64_t hash);
  Entry* displace(std::uint64_t hash);
  bool grow();
  bool refill(std::uint32_t sets);
  std::uint16_t now() const;

  std::mutex mutex_;
  std::unique_ptr<Set[]> table_;
  std::uint32_t sets_ = 0, sets_max_ = 0;
  std::uint64_t salt_ = 0;
  const HolderLives* lives_ = nullptr;
  std::uint64_t told_ = 0;  // keys: the clock by which entries are old
  Counters counters_;
};

}  // namespace kvpool
