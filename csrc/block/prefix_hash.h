// Token ids -> the chained 128-bit hashes that name blocks inside a namespace.
//
//   h[i] = H(h[i-1] || tokens[i*B .. (i+1)*B) as little-endian u32 || extra)     h[-1] = the seed
//
// The seed is the namespace id, or the last hash of the chain that the tokens continue. H is
// SHA-256 cut to its first 16 bytes, or XXH3-128 (`low` then `high`, little-endian; see
// block/checksum.h).
// Promises: the same hashes in every process, version and language (docs/formats.md, golden
//           vectors); whole blocks only; no allocation but the caller's scratch.
// SHA-256 is safe between tenants. XXH3 is five times as fast, but who chooses tokens can build two
// prefixes with one hash: for a single tenant only. Pure, thread-safe.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "block/key.h"

namespace kvpool {

enum class HashAlgorithm : std::uint8_t { sha256, xxh3 };

std::optional<HashAlgorithm> hash_algorithm(std::string_view name);  // "sha256", "xxh3"

enum class TokenType : std::uint8_t { int32, int64, uint32, uint64 };

// Borrowed; any alignment.
struct TokenArray {
  const void* data = nullptr;
  std::size_t count = 0;
  TokenType type = TokenType::uint32;
};

// Every token as u32, in place where it is one already, else in `scratch`. A negative token or one
// of 2^32 and more is refused: bad_argument with the first position, its value and the limit.
Result<std::span<const std::uint32_t>> tokens_as_u32(const TokenArray& tokens,
                                                     std::vector<std::uint32_t>& scratch);

struct PrefixRule {
  HashAlgorithm algorithm = HashAlgorithm::sha256;
  std::size_t block_tokens = 0;  // B, at least 1
  std::span<const std::byte>
      extra;  // what else separates blocks (an image, an adapter); often empty
};

// Writes tokens.size() / block_tokens hashes to `out`; the tokens after the last whole block count
// for nothing.
void prefix_hash(const Hash128& seed, std::span<const std::uint32_t> tokens, const PrefixRule& rule,
                 Hash128* out);

// An engine's own block hashes, made ours: SHA-256(namespace id || engine hash)[:16] for each of
// the hashes.size() / hash_bytes records of `hashes`. They are not chained: the engine's already
// are.
void fold(const Hash128& namespace_id, std::span<const std::byte> hashes, std::size_t hash_bytes,
          Hash128* out);

}  // namespace kvpool
