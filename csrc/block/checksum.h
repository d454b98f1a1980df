// XXH3-128 of payloads: what is stored beside a block, and compared when its bytes leave memory
// that we own. Finds damage, not malice.
//
// The value is that of XXH3_128bits with no seed: low64 in `low`, high64 in `high`. As bytes it is
// therefore the reverse of xxHash's canonical (big-endian) form; in Python,
// xxhash.xxh3_128_intdigest(data).to_bytes(16, "little").
// Thread-safe; one ChecksumStream belongs to one thread at a time. No allocation, no failure.
#pragma once
#include <cstddef>

#include "block/key.h"

namespace kvpool {

Hash128 checksum(const void* data, std::size_t bytes);

// The same value for a payload that comes in pieces of any size.
class ChecksumStream {
 public:
  ChecksumStream();
  void update(const void* data, std::size_t bytes);
  // Of all pieces so far; more may follow.
  Hash128 digest() const;
  void reset();

 private:
  static constexpr std::size_t kStateBytes = 576;
  alignas(64) std::byte state_[kStateBytes];
};

enum class Stores {
  cached,     // the destination is in cache, or will be read soon
  streaming,  // it is neither: non-temporal stores, 64-byte aligned destination is best
};

// Copies and returns the checksum of exactly what was stored, even if somebody writes into `src`
// meanwhile (a client's staging memory, an array of the caller): each 4 KiB goes through a private
// buffer that stays in the first cache, is hashed there and stored from there. `dst` may be under
// the eyes of racing readers. The caller fences (block/copy.h) before the block becomes readable.
Hash128 copy_with_checksum(void* dst, const void* src, std::size_t bytes, Stores stores);

}  // namespace kvpool
