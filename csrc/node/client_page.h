// What a client of the same host tells the node without asking: which blocks it reads in place,
// which it has used, and how much it has read. Lies in memory that the client writes and the node
// reads.
//
// Pin:  client  reads the record: generation, slot -> in_use bit -> word = slot -> FULL fence -> is
//               the generation still the record's? yes: the slot keeps its bytes until the word is
//               cleared
//       node    another generation (or 0) in the record -> FULL fence -> reads the words: a slot
//               that is named is kept as it is
// Both fences are needed, also on x86: each side stores, then loads what the other stores. The slot
// is named and not the generation, since a block that is moved has, for a moment, its new slot
// under its old generation: who pinned that one would hold the node back from the old slot only.
// Promise:   whatever a client writes here harms its own reads only.
// Thread rule: words are handed out to threads of the client by the client; the node reads all.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

#include "node/miss.h"
#include "node/touch_ring.h"

namespace kvpool {

inline constexpr std::uint32_t kHazards = 256;

struct Hazards {
  // Bit i: word i may be set. So a client that reads nothing in place costs the node one line.
  alignas(64) std::array<std::atomic<std::uint64_t>, kHazards / 64> in_use;
  alignas(64) std::array<std::atomic<std::uint64_t>, kHazards> word;  // word_of(slot), 0 = none

  // `offset`: of the slot in the arena.
  static std::uint64_t word_of(std::uint64_t offset) { return offset + 1; }
  // All slots that are named, if a client says what is true.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::uint32_t group = 0; group < in_use.size(); ++group)
      for (std::uint64_t left = in_use[group].load(std::memory_order_relaxed); left != 0;
           left &= left - 1) {
        const auto bit = static_cast<std::uint32_t>(__builtin_ctzll(left));
        const std::uint64_t said = word[group * 64 + bit].load(std::memory_order_relaxed);
        if (said != 0) visit(said - word_of(0));
      }
  }
  bool names(std::uint64_t offset) const {
    for (std::uint32_t group = 0; group < in_use.size(); ++group)
      for (std::uint64_t left = in_use[group].load(std::memory_order_relaxed); left != 0;
           left &= left - 1) {
        const auto bit = static_cast<std::uint32_t>(__builtin_ctzll(left));
        if (word[group * 64 + bit].load(std::memory_order_relaxed) == word_of(offset)) return true;
      }
    return false;
  }
};

// What a client has looked for in one namespace without asking the node, and what it found.
struct alignas(64) TrafficRow {
  enum Word : std::uint32_t {
    space = 0,  // Namespace::number + 1; 0: nobody's
    lookups = 1,
    lookup_dram,  // blocks
    lookup_ssd,
    lookup_missed,  // lookups that ended at a block that is missing
    lookup_behind,  // blocks that were asked for behind those
    gets = 8,       // that copy out
    loaded,         // blocks that they delivered from DRAM
    views,
    view_blocks,
    missed = 16,  // blocks of gets and views that were not found, by Miss
  };
  static constexpr std::uint32_t kWords = 32;
  static constexpr std::uint64_t kAnySpace = ~std::uint64_t{0};

  std::atomic<std::uint64_t>& operator[](std::uint32_t at) { return word[at]; }
  const std::atomic<std::uint64_t>& operator[](std::uint32_t at) const { return word[at]; }
  std::array<std::atomic<std::uint64_t>, kWords> word;
};
static_assert(TrafficRow::missed + kMisses <= TrafficRow::kWords);
inline constexpr std::uint32_t kTrafficRows = 64;

// The client hands rows out to namespaces as it meets them; the last one is for all others.
struct ClientTraffic {
  // Bit i: row i is somebody's. So a client costs the node the lines that it uses.
  alignas(64) std::atomic<std::uint64_t> in_use;
  std::array<TrafficRow, kTrafficRows> rows;

  TrafficRow& operator[](std::uint32_t at) { return rows[at]; }
  const TrafficRow& operator[](std::uint32_t at) const { return rows[at]; }
};
static_assert(kTrafficRows == 64);

// What the node does about a client that names more than it may: its own library keeps it within
// `pin_bytes`, so it is broken or hostile, and all it names is kept from everybody.
struct ClientLimit {
  std::uint64_t pin_bytes = ~0ull;
  // Called under the node's lock, which it must not take: ends the client soon.
  std::function<void()> end;
};

struct ClientPage {
  Hazards hazards;
  ClientTraffic traffic;
  TouchRing touches;
};

}  // namespace kvpool
