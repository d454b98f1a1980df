// Reading without asking: probe, read the record, copy, look at the generation again.
//
// Promises:  1. an accepted copy holds exactly the bytes committed under that key;
//            2. no lock, no system call, no store to the index or the arena.
// Why it is right: a writer stores generation 0 and fences before it touches a slot or a record.
// If any byte the reader copied came from such a write, the acquire fence before the last load of
// the generation makes that load see 0 or a later number, and numbers are never given twice.
// The second load before the fields are used makes (key, offset, bytes) one consistent triple.
// Thread rule: any thread, any number, beside one writer.
#pragma once
#include <cstddef>
#include <span>

#include "node/index_layout.h"

namespace kvpool {

struct Found {
  std::uint32_t record = 0;
  std::uint32_t bytes = 0;
  std::uint64_t generation = 0;
  std::uint64_t offset = 0;
  std::uint64_t tier = 0;
};

struct Looked {
  std::size_t present = 0;  // leading keys
  std::size_t on_ssd = 0;   // of these, on the SSD alone
  std::size_t remote = 0;   // of these, on other members alone; not from an index
};

class IndexReader {
 public:
  explicit IndexReader(const IndexView& view)
      : view_(view),
        records_max_(view.header().records_max),
        log2_max_(view.header().buckets_log2_max),
        arena_bytes_(view.header().arena_bytes),
        salt_(view.header().salt) {}

  bool find(const Hash128& key, std::uint32_t incarnation, Found& found) const;

  // Leading keys that are present, and the fastest tier of each (tiers: nullptr or keys.size()
  // bytes; 0 past the first miss). Groups of keys are prefetched, so cold lines cost about one miss
  // a group.
  Looked look(std::span<const Hash128> keys, std::uint32_t incarnation, std::uint8_t* tiers) const;
  std::size_t lookup(std::span<const Hash128> keys, std::uint32_t incarnation,
                     std::uint8_t* tiers) const {
    return look(keys, incarnation, tiers).present;
  }

  // The payload loads before this come before the generation load.
  bool still_there(const Found& found) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return view_.record(found.record).generation.load(std::memory_order_relaxed) ==
           found.generation;
  }
  const std::byte* payload(const Found& found) const { return view_.arena + found.offset; }

  // Copies one block to `destination` (found.bytes long, checked by the caller). False: it went
  // away meanwhile, and the destination holds garbage.
  bool copy(const Found& found, std::byte* destination) const;

  // Brings the index lines of up to kGroup keys towards the cache.
  static constexpr std::size_t kGroup = 16;
  void prefetch(std::span<const Hash128> keys, std::uint32_t incarnation) const;

 private:
  struct Group;
  void start(Group& group, std::span<const Hash128> keys, std::uint32_t incarnation) const;
  void approach(const Group& group) const;
  bool find_at(const Hash128& key, std::uint32_t incarnation, const KeyHash& hash,
               Found& found) const;

  enum class Read : std::uint8_t { no, yes, changing };
  Read read_record(std::uint32_t number, const Hash128& key, std::uint32_t incarnation,
                   Found& found) const;

  IndexView view_;
  std::uint64_t records_max_, log2_max_, arena_bytes_, salt_;
};

}  // namespace kvpool
