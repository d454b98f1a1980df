// 128-bit names: the prefix hash of a block inside its namespace, the id of a namespace, and the
// checksum of a payload.
//
// The 16 bytes are `low` then `high`, each little-endian. They are what is stored, sent and handed
// to Python, so they must not depend on the machine; the build refuses a big-endian one.
#pragma once
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvpool {

static_assert(std::endian::native == std::endian::little, "formats are written as they lie");

inline constexpr std::size_t kHashBytes = 16;

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  // `bytes`: kHashBytes readable bytes at any alignment.
  static Hash128 from_bytes(const void* bytes) {
    Hash128 hash;
    std::memcpy(&hash, bytes, kHashBytes);
    return hash;
  }
  void to_bytes(void* bytes) const { std::memcpy(bytes, this, kHashBytes); }

  friend bool operator==(const Hash128&, const Hash128&) = default;
  friend auto operator<=>(const Hash128&, const Hash128&) = default;
};
static_assert(sizeof(Hash128) == kHashBytes && offsetof(Hash128, high) == 8);

// Spreads every input bit over all output bits; a bijection, so it loses nothing by itself.
constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

// 64 bits that stand for a block after it is gone (heat of evicted blocks). Not a key: two blocks
// may share one, at 2^-64 per pair. A namespace that is dropped and made again has a new
// incarnation, so its old heat is not inherited.
constexpr std::uint64_t fingerprint(std::uint32_t incarnation, const Hash128& hash) {
  return mix64(hash.low + mix64(hash.high + mix64(incarnation + 1ull)));
}

}  // namespace kvpool
