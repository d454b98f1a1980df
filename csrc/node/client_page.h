// What a client of the same host tells the node without asking: which blocks it reads in place, and
// which it has used. Lies in memory that the client writes and the node reads.
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

// For the node's statistics; added to by the client's threads.
struct ClientCounters {
  alignas(64) std::atomic<std::uint64_t> gets, get_blocks, get_bytes, missed_absent,
      missed_moved, views, view_blocks;
};

struct ClientTotals {
  std::uint64_t gets = 0, get_blocks = 0, get_bytes = 0, missed_absent = 0, missed_moved = 0,
                views = 0, view_blocks = 0;

  void add(const ClientCounters& from) {
    const auto read = [](const std::atomic<std::uint64_t>& word) {
      return word.load(std::memory_order_relaxed);
    };
    gets += read(from.gets);
    get_blocks += read(from.get_blocks);
    get_bytes += read(from.get_bytes);
    missed_absent += read(from.missed_absent);
    missed_moved += read(from.missed_moved);
    views += read(from.views);
    view_blocks += read(from.view_blocks);
  }
};

// What the node does about a client that names more than it may: its own library keeps it within
// `pin_bytes`, so it is broken or hostile, and all it names is kept from everybody.
struct ClientLimit {
  std::uint64_t pin_bytes = ~0ull;
  // Called under the node's lock, which it must not take: ends the client soon.
  std::function<void()> end;
};

struct ClientPage {
  Hazards hazards;
  ClientCounters counters;
  TouchRing touches;
};

}  // namespace kvpool
