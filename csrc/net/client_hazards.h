// The client's side of its hazard words (node/client_page.h): which blocks its threads read in
// place.
//
// A word that is claimed belongs to one reader until it is released; the bitmap that tells the node
// which words may be set is the free list as well.
// Thread rule: any thread.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <span>

#include "node/client_page.h"
#include "node/index_reader.h"

namespace kvpool {

class ClientHazards {
 public:
  using Word = std::uint16_t;
  explicit ClientHazards(Hazards& shared) : shared_(shared) {}

  // As many of `wanted` as are free.
  std::size_t claim(std::size_t wanted, Word* words) {
    std::size_t got = 0;
    for (std::size_t group = 0; group < shared_.in_use.size() && got < wanted; ++group) {
      auto& bits = shared_.in_use[group];
      std::uint64_t free = ~bits.load(std::memory_order_relaxed);
      std::uint64_t mine = 0;
      for (std::size_t left = wanted - got; left > 0 && free != 0; --left, free &= free - 1)
        mine |= free & -free;
      if (mine == 0) continue;
      // Acquire: whoever had the word before has cleared it.
      for (mine &= ~bits.fetch_or(mine, std::memory_order_acquire); mine != 0; mine &= mine - 1)
        words[got++] =
            static_cast<Word>(group * 64 + static_cast<unsigned>(std::countr_zero(mine)));
    }
    return got;
  }
  // The slot at that offset of the arena; before settle(), and anything is read.
  void name(Word word, std::uint64_t offset) {
    shared_.word[word].store(Hazards::word_of(offset), std::memory_order_relaxed);
  }
  // Between the naming and the look whether the block is still there: the node stores and looks the
  // other way round.
  static void settle() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  void release(std::span<const Word> words) {
    for (const Word word : words) {
      // Release: what was read in place was read before.
      shared_.word[word].store(0, std::memory_order_release);
      shared_.in_use[word / 64].fetch_and(~(std::uint64_t{1} << word % 64),
                                          std::memory_order_release);
    }
  }

 private:
  Hazards& shared_;
};

}  // namespace kvpool
