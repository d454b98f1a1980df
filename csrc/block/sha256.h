// SHA-256 for short messages that arrive in pieces: prefix hashes and namespace ids.
//
// Promises: the digest of FIPS 180-4 on both paths, no allocation, no failure. One object
//           belongs to one thread at a time.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "block/key.h"

namespace kvpool {

enum class Sha256Path : std::uint8_t {
  portable,
  sha_ni,  // needs cpu_features().sha
};

// The fastest path of this processor.
Sha256Path sha256_path();

class Sha256 {
 public:
  static constexpr std::size_t kDigestBytes = 32;
  using Digest = std::array<std::byte, kDigestBytes>;

  explicit Sha256(Sha256Path path = sha256_path());

  void update(const void* data, std::size_t bytes);
  // Ends the message; the object is then spent until reset().
  Digest finish();
  // The first 16 bytes of the digest: the form in which kvpool uses SHA-256.
  Hash128 finish128() { return Hash128::from_bytes(finish().data()); }
  void reset();

 private:
  static constexpr std::size_t kChunkBytes = 64;
  using Compress = void (*)(std::uint32_t* state, const std::byte* chunks, std::size_t count);

  Compress compress_;
  std::uint64_t message_bytes_ = 0;
  std::size_t held_bytes_ = 0;  // < kChunkBytes between calls
  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, kChunkBytes> held_;
};

}  // namespace kvpool
