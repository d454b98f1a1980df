// Every byte of the SSD tier's files; docs/formats.md shows the same for people.
//
//   DIR/lock             flock'ed by the one process that has the tier open; its pid, for messages
//   DIR/index.mdb        LMDB 0.9, one file, preallocated; databases meta, spaces, classes, blocks
//   DIR/index.mdb-lock   LMDB's own; no state
//   DIR/slabs            SlabHeader in the first kSsdDataOffset bytes, then units of 2 MiB
//   DIR/formatting       there while a format is under way: no tier yet, to be started over
//
// Little-endian, but for the space number in a key, which is big-endian so that LMDB's order keeps
// a namespace together. All structs are stored as they lie; sizes are asserted.
#pragma once
#include <cstdint>

#include "block/key.h"

namespace kvpool {

inline constexpr std::uint64_t kSsdMagic = 0x3144535350'564bull;  // "KVPSSD1"
inline constexpr std::uint32_t kSsdFormatVersion = 1;
inline constexpr std::uint64_t kSsdDataOffset = 64 << 10;  // of unit 0 in the slab file

// First bytes of the slab file; the rest up to kSsdDataOffset is zero.
struct SlabHeader {
  std::uint64_t magic = kSsdMagic;
  std::uint32_t version = kSsdFormatVersion;
  std::uint32_t align_bytes = 4096;
  std::uint8_t tier_id[16] = {};  // random at format; the same as in the index
  Hash128 sum;                    // checksum() of the bytes before it
};
static_assert(sizeof(SlabHeader) == 48);

// The one record of database "meta", key "tier".
struct TierMeta {
  std::uint64_t magic = kSsdMagic;
  std::uint32_t version = kSsdFormatVersion;
  std::uint32_t align_bytes = 4096;
  std::uint8_t tier_id[16] = {};
  std::uint8_t node_id[16] = {};     // stable name of the node that lives here
  std::uint64_t capacity_bytes = 0;  // all files together, as asked for
  std::uint64_t units = 0;           // of 2 MiB in the slab file
  std::uint64_t index_bytes = 0;     // size of index.mdb
  std::uint64_t next_space = 1;      // numbers are never given twice
  double tau_s = 0;                  // half-life of heat when last written
  std::uint64_t groups = 0;          // commits so far
  std::uint8_t reserved[16] = {};
  Hash128 sum;
};
static_assert(sizeof(TierMeta) == 128);

// Database "spaces": number (u32 little-endian) -> a namespace that has blocks here. A namespace
// that is dropped loses its record, and with it every block of that number, in one commit.
struct SpaceRecord {
  Hash128 id;
  std::uint64_t block_bytes = 0;
  std::uint64_t check = 0;  // low half of checksum() over number, id, block_bytes
};
static_assert(sizeof(SpaceRecord) == 32);

// Database "classes": slot bytes (u64) -> units in a slab of that class (u64). Says, with the
// number of slots that fit, where slot k of a slab lies.

// Database "blocks".
struct BlockKey {
  std::uint8_t space_big_endian[4] = {};
  std::uint8_t hash[16] = {};

  static BlockKey of(std::uint32_t space, const Hash128& hash) {
    BlockKey key;
    for (int i = 0; i < 4; ++i)
      key.space_big_endian[i] = static_cast<std::uint8_t>(space >> (24 - 8 * i));
    hash.to_bytes(key.hash);
    return key;
  }
  std::uint32_t space() const {
    std::uint32_t number = 0;
    for (const std::uint8_t byte : space_big_endian) number = number << 8 | byte;
    return number;
  }
  Hash128 hash128() const { return Hash128::from_bytes(hash); }
};
static_assert(sizeof(BlockKey) == 20 && alignof(BlockKey) == 1);

struct BlockEntry {
  std::uint32_t slab_unit = 0;   // first unit of its slab
  std::uint32_t slot = 0;        // in the slab; offset = slab_unit * 2 MiB + slot * slot bytes
  std::uint32_t bytes = 0;       // of payload; slot bytes = that, up to whole 4 KiB
  std::uint32_t stamp_s = 0;     // when heat was counted, seconds since 1970
  Hash128 sum;                   // checksum() of the payload
  Hash128 parent;                // hash of the block before it in the same space; zero = none known
  std::uint64_t generation = 0;  // the group that wrote it, from TierMeta::groups
  float heat = 0;                // uses, halved every tau_s, as of stamp_s
  std::uint32_t check = 0;       // low 32 bits of checksum() over the key and the bytes before
};
static_assert(sizeof(BlockEntry) == 64);

}  // namespace kvpool
