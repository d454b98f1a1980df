#include "block/prefix_hash.h"

#include <array>
#include <concepts>
#include <cstring>
#include <limits>
#include <string>

#include "base/check.h"
#include "block/checksum.h"
#include "block/sha256.h"

namespace kvpool {
namespace {

// A message of this size or less is laid out whole and hashed at once, which XXH3 does much faster
// than in pieces. 1 KiB holds a block of 128 tokens with its seed and 496 bytes of extra.
constexpr std::size_t kMessageBytes = 1024;

template <std::integral Token>
constexpr bool fits_u32(Token token) {
  return std::in_range<std::uint32_t>(token);
}

template <std::integral Token>
Token load(const std::byte* at) {
  Token token;
  std::memcpy(&token, at, sizeof token);
  return token;
}

template <std::integral Token>
std::unexpected<Error> refuse(const std::byte* data) {
  std::size_t i = 0;
  while (fits_u32(load<Token>(data + i * sizeof(Token)))) ++i;
  return fail(Code::bad_argument, "token " + std::to_string(i) + " is " +
                                      std::to_string(load<Token>(data + i * sizeof(Token))) +
                                      "; a token id must be in 0 .. " +
                                      std::to_string(std::numeric_limits<std::uint32_t>::max()));
}

// Converts all and then asks whether all did fit, so that the loop has no exit and vectorises.
template <std::integral Token>
Result<std::span<const std::uint32_t>> convert(const std::byte* data, std::size_t count,
                                               std::vector<std::uint32_t>& scratch) {
  scratch.resize(count);
  Token seen = 0;  // the bits above 31 of any token; the sign as well
  for (std::size_t i = 0; i < count; ++i) {
    const Token token = load<Token>(data + i * sizeof(Token));
    seen |= token;
    scratch[i] = static_cast<std::uint32_t>(token);
  }
  if (!fits_u32(seen)) return refuse<Token>(data);
  return std::span<const std::uint32_t>(scratch);
}

Hash128 sha256_block(const Hash128& before, std::span<const std::byte> tokens,
                     std::span<const std::byte> extra) {
  Sha256 sha;
  sha.update(&before, kHashBytes);
  sha.update(tokens.data(), tokens.size());
  sha.update(extra.data(), extra.size());
  return sha.finish128();
}

Hash128 xxh3_block(const Hash128& before, std::span<const std::byte> tokens,
                   std::span<const std::byte> extra) {
  const std::size_t bytes = kHashBytes + tokens.size() + extra.size();
  if (bytes <= kMessageBytes) {
    std::array<std::byte, kMessageBytes> message;
    before.to_bytes(message.data());
    std::memcpy(message.data() + kHashBytes, tokens.data(), tokens.size());
    if (!extra.empty()) {
      std::memcpy(message.data() + kHashBytes + tokens.size(), extra.data(), extra.size());
    }
    return checksum(message.data(), bytes);
  }
  ChecksumStream stream;
  stream.update(&before, kHashBytes);
  stream.update(tokens.data(), tokens.size());
  stream.update(extra.data(), extra.size());
  return stream.digest();
}

}  // namespace

std::optional<HashAlgorithm> hash_algorithm(std::string_view name) {
  if (name == "sha256") return HashAlgorithm::sha256;
  if (name == "xxh3") return HashAlgorithm::xxh3;
  return std::nullopt;
}

Result<std::span<const std::uint32_t>> tokens_as_u32(const TokenArray& tokens,
                                                     std::vector<std::uint32_t>& scratch) {
  const auto* data = static_cast<const std::byte*>(tokens.data);
  switch (tokens.type) {
    case TokenType::int32:
      return convert<std::int32_t>(data, tokens.count, scratch);
    case TokenType::int64:
      return convert<std::int64_t>(data, tokens.count, scratch);
    case TokenType::uint64:
      return convert<std::uint64_t>(data, tokens.count, scratch);
    case TokenType::uint32:
      break;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(tokens.data);
  if (address % alignof(std::uint32_t) != 0) {
    return convert<std::uint32_t>(data, tokens.count, scratch);
  }
  return std::span(static_cast<const std::uint32_t*>(tokens.data), tokens.count);
}

void prefix_hash(const Hash128& seed, std::span<const std::uint32_t> tokens, const PrefixRule& rule,
                 Hash128* out) {
  KVP_CHECK(rule.block_tokens > 0);
  const std::size_t blocks = tokens.size() / rule.block_tokens;
  auto* const hash = rule.algorithm == HashAlgorithm::sha256 ? sha256_block : xxh3_block;
  Hash128 before = seed;
  for (std::size_t i = 0; i < blocks; ++i) {
    const auto block = tokens.subspan(i * rule.block_tokens, rule.block_tokens);
    before = hash(before, std::as_bytes(block), rule.extra);
    out[i] = before;
  }
}

void fold(const Hash128& namespace_id, std::span<const std::byte> hashes, std::size_t hash_bytes,
          Hash128* out) {
  KVP_CHECK(hash_bytes > 0 && hashes.size() % hash_bytes == 0);
  for (std::size_t at = 0; at < hashes.size(); at += hash_bytes) {
    Sha256 sha;
    sha.update(&namespace_id, kHashBytes);
    sha.update(hashes.data() + at, hash_bytes);
    *out++ = sha.finish128();
  }
}

}  // namespace kvpool
