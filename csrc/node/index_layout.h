// The index in memory that other processes may map read-only: fixed offsets, ids, never pointers.
//
//   [Header 4 KiB][incarnations: 65,536 x 8 B][records: records_max x 64 B]
//   [tables: region k = [2^k, 2^(k+1)) x 64 B]
//
// A table entry is a HINT (hash tag -> record number). The record is the TRUTH (generation, key,
// place, length, checksum). Records never move, so a table may be torn, stale or half given back:
// a hint is checked against its record, and the worst it can cause is a false miss. Each table size
// has a region of its own, so the table a reader is in is never overwritten by the next one.
//
// Every shared word is 8 bytes. A reader does no read-modify-write (it would fault on a read-only
// mapping), and no 16-byte atomic (those write, even to read). Little-endian; docs/formats.md.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "block/key.h"

namespace kvpool {

inline constexpr std::uint64_t kIndexMagic = 0x3158444956'504bull;  // "KPVIDX1"
inline constexpr std::uint64_t kIndexVersion = 2;
inline constexpr std::uint32_t kHintsPerBucket = 7;
inline constexpr std::uint32_t kProbeMax = 64;  // buckets; the writer grows before it needs more
inline constexpr std::uint32_t kNamespacesMax = 1u << 16;
inline constexpr std::uint64_t kIndexHeaderBytes = 4096;
inline constexpr std::uint64_t kIncarnationsOffset = kIndexHeaderBytes;
inline constexpr std::uint64_t kRecordsOffset =
    kIncarnationsOffset + kNamespacesMax * sizeof(std::uint64_t);

enum TierBits : std::uint64_t { kTierDram = 1, kTierSsd = 2 };

struct alignas(64) Record {
  std::atomic<std::uint64_t> generation;  // 0 = not readable; else never given twice by a node
  std::atomic<std::uint64_t> key_low, key_high;
  std::atomic<std::uint64_t> namespace_and_bytes;  // incarnation << 32 | payload bytes
  std::atomic<std::uint64_t> offset;               // of the slot in the arena
  std::atomic<std::uint64_t> sum_low, sum_high;    // XXH3-128 of the payload
  std::atomic<std::uint64_t> tier;                 // TierBits
};
static_assert(sizeof(Record) == 64 && offsetof(Record, tier) == 56);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct alignas(64) Bucket {
  std::atomic<std::uint64_t> passed;                 // entries that went past this full bucket
  std::atomic<std::uint64_t> hint[kHintsPerBucket];  // 0 = empty; tag:28 << 32 | record + 1
};
static_assert(sizeof(Bucket) == 64);

struct alignas(64) IndexHeader {
  std::uint64_t magic, version;
  std::uint64_t records_max, buckets_log2_max;
  std::uint64_t records_offset, tables_offset;
  std::uint64_t arena_bytes;
  std::uint64_t salt;  // drawn by each node, so that nobody can choose keys that crowd one bucket
  alignas(64) std::atomic<std::uint64_t> root;  // table version << 8 | log2 of its buckets
  // Not 0: what is not here may be on other members, and the node asks them if it is asked itself.
  std::atomic<std::uint64_t> asks_elsewhere;
};
static_assert(sizeof(IndexHeader) == 128 && offsetof(IndexHeader, root) == 64);

// Where a key is looked for. Keys may come from an engine and be badly spread, hence the mixing.
struct KeyHash {
  std::uint64_t bucket;
  std::uint32_t tag;  // 28 bits

  static KeyHash of(const Hash128& key, std::uint32_t incarnation, std::uint64_t salt) {
    const std::uint64_t hash = mix64(key.low ^ mix64(key.high ^ salt) ^ incarnation);
    return {hash, static_cast<std::uint32_t>(hash >> 36)};
  }
};

inline std::uint64_t hint_of(std::uint32_t tag, std::uint32_t record) {
  return std::uint64_t{tag} << 32 | (std::uint64_t{record} + 1);
}
inline bool hint_matches(std::uint64_t hint, std::uint32_t tag) {
  return static_cast<std::uint32_t>(hint >> 32) == tag && static_cast<std::uint32_t>(hint) != 0;
}
inline std::uint32_t hint_record(std::uint64_t hint) {
  return static_cast<std::uint32_t>(hint) - 1;
}

// A mapping of index and arena, as either side sees it.
struct IndexView {
  std::byte* index = nullptr;
  std::byte* arena = nullptr;

  IndexHeader& header() const { return *reinterpret_cast<IndexHeader*>(index); }
  Record& record(std::uint32_t number) const {
    return reinterpret_cast<Record*>(index + header().records_offset)[number];
  }
  // The incarnation now of the namespace of that number, which is below kNamespacesMax. 0: none.
  std::atomic<std::uint64_t>& incarnation(std::uint32_t number) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(index + kIncarnationsOffset)[number];
  }
  // Regions are laid end to end by size: the one of 2^k buckets starts at bucket 2^k.
  Bucket* table(std::uint64_t root) const {
    return reinterpret_cast<Bucket*>(index + header().tables_offset) + buckets(root);
  }
  static std::uint64_t buckets(std::uint64_t root) { return 1ull << (root & 63); }
};

}  // namespace kvpool
