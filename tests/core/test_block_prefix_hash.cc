// Keys are the ones that the formula gives in any language, whatever type the tokens come in.
#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "block/prefix_hash.h"
#include "block_random.h"

namespace kvpool {
namespace {

using Tokens = std::vector<std::uint32_t>;

const Hash128 kSeed = [] {
  std::array<unsigned char, kHashBytes> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i);
  return Hash128::from_bytes(bytes.data());
}();

std::string hex(const Hash128& hash) {
  std::array<unsigned char, kHashBytes> bytes;
  hash.to_bytes(bytes.data());
  return test::hex(bytes);
}

std::vector<std::string> keys(const Hash128& seed, const Tokens& tokens, HashAlgorithm algorithm,
                              std::size_t block_tokens, std::string_view extra = "") {
  std::vector<Hash128> hashes(tokens.size() / block_tokens);
  prefix_hash(seed, tokens, {algorithm, block_tokens, std::as_bytes(std::span(extra))},
              hashes.data());
  std::vector<std::string> text;
  for (const auto& hash : hashes) text.push_back(hex(hash));
  return text;
}

// The constants of this file were computed with Python's hashlib and xxhash; more of them are in
// tests/data/golden_keys.json.
TEST_CASE("prefix hash: golden keys") {
  Tokens counting(35);
  for (std::size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::uint32_t>(i + 1);
  CHECK(keys(kSeed, counting, HashAlgorithm::sha256, 16) ==
        std::vector<std::string>{"b6a9fd79582438187ff4b9c18ea7c1e9",
                                 "c46c79a2c0d4e32da64514c75b69b985"});
  CHECK(keys(kSeed, counting, HashAlgorithm::xxh3, 16) ==
        std::vector<std::string>{"fa7f6073c3b2f2943a61672610789489",
                                 "864f42197d6bab4db0d90686a1736731"});

  const std::string longer = std::string(37, 'x');
  Tokens squares(64);
  for (std::size_t i = 0; i < squares.size(); ++i) squares[i] = static_cast<std::uint32_t>(i * i);
  CHECK(keys(kSeed, squares, HashAlgorithm::sha256, 64, longer) ==
        std::vector<std::string>{"54d051fca95c93d47ae227931b0ccccd"});
  CHECK(keys(kSeed, squares, HashAlgorithm::xxh3, 64, longer) ==
        std::vector<std::string>{"2451770a9577057011b47ca64eaa78ac"});
}

TEST_CASE("prefix hash: blocks too long for one piece") {
  std::array<unsigned char, kHashBytes> id = {0x21, 0x41, 0xa4, 0x77, 0x28, 0x6b, 0x98, 0xc4,
                                              0x74, 0xb8, 0x93, 0x7e, 0x19, 0x65, 0x26, 0x71};
  Tokens tokens(600);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::uint32_t>(i * 2654435761u % 150000);
  }
  const std::string_view extra("\x00\xff", 2);
  const Hash128 seed = Hash128::from_bytes(id.data());
  CHECK(keys(seed, tokens, HashAlgorithm::sha256, 300, extra) ==
        std::vector<std::string>{"4b47e5d757c950eeaf44a0d03c1de545",
                                 "a8cfc969cb36d77631989df7e86f9da8"});
  CHECK(keys(seed, tokens, HashAlgorithm::xxh3, 300, extra) ==
        std::vector<std::string>{"f3161956dd0640e350b16db709682fcd",
                                 "688598359cb8e320e3757be2df285a76"});
}

TEST_CASE("prefix hash: a chain goes on from its last key, and only whole blocks count") {
  test::Random random("prefix hash");
  for (const HashAlgorithm algorithm : {HashAlgorithm::sha256, HashAlgorithm::xxh3}) {
    Tokens tokens(97);
    for (auto& token : tokens) token = random.between<std::uint32_t>(0, 0xffffffff);
    const PrefixRule rule{algorithm, 8, {}};
    std::vector<Hash128> whole(12);
    prefix_hash(kSeed, tokens, rule, whole.data());

    std::vector<Hash128> parts(12);
    prefix_hash(kSeed, std::span(tokens).first(40), rule, parts.data());
    prefix_hash(parts[4], std::span(tokens).subspan(40), rule, parts.data() + 5);
    CHECK(parts == whole);

    tokens[90] ^= 1;
    std::vector<Hash128> changed(12);
    prefix_hash(kSeed, tokens, rule, changed.data());
    CHECK(std::equal(whole.begin(), whole.begin() + 11, changed.begin()));
    CHECK(whole[11] != changed[11]);
  }
}

TEST_CASE("fold: golden keys, one for each engine hash") {
  std::vector<std::byte> hashes;
  for (int i = 0; i < 64; ++i) hashes.push_back(static_cast<std::byte>(i));
  std::array<Hash128, 2> out;
  fold(kSeed, hashes, 32, out.data());
  // hashlib.sha256(bytes(range(16)) + bytes(range(32))).digest()[:16], then range(32, 64).
  CHECK(hex(out[0]) == "95e66ce408bcb45134e08d159c51e1f4");
  CHECK(hex(out[1]) == "2d9321773e79c1120423c9ac6dfe0b77");
}

template <typename Token>
std::string first_refusal(std::vector<Token> tokens, TokenType type) {
  std::vector<std::uint32_t> scratch;
  const auto result = tokens_as_u32({tokens.data(), tokens.size(), type}, scratch);
  if (!result) {
    CHECK(result.error().code == Code::bad_argument);
    return result.error().message;
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    CHECK((*result)[i] == static_cast<std::uint32_t>(tokens[i]));
  }
  return "";
}

TEST_CASE("tokens: every type gives the same u32, and what does not fit is named") {
  CHECK(first_refusal<std::int32_t>({0, 5, 0x7fffffff}, TokenType::int32) == "");
  CHECK(first_refusal<std::int64_t>({0, 5, 0xffffffff}, TokenType::int64) == "");
  CHECK(first_refusal<std::uint32_t>({0, 5, 0xffffffff}, TokenType::uint32) == "");
  CHECK(first_refusal<std::uint64_t>({0, 5, 0xffffffff}, TokenType::uint64) == "");

  const std::string limit = "; a token id must be in 0 .. 4294967295";
  CHECK(first_refusal<std::int32_t>({1, -7, -8}, TokenType::int32) == "token 1 is -7" + limit);
  CHECK(first_refusal<std::int64_t>({1, 2, -1}, TokenType::int64) == "token 2 is -1" + limit);
  CHECK(first_refusal<std::int64_t>({1ll << 32, -1}, TokenType::int64) ==
        "token 0 is 4294967296" + limit);
  CHECK(first_refusal<std::uint64_t>({3, ~0ull}, TokenType::uint64) ==
        "token 1 is 18446744073709551615" + limit);
}

TEST_CASE("tokens: any alignment") {
  std::array<unsigned char, 64> raw;
  const Tokens tokens = {1, 0x01020304, 0xfffffffe};
  for (std::size_t offset = 0; offset < 8; ++offset) {
    std::memcpy(raw.data() + offset, tokens.data(), tokens.size() * 4);
    std::vector<std::uint32_t> scratch;
    const auto result =
        tokens_as_u32({raw.data() + offset, tokens.size(), TokenType::uint32}, scratch);
    REQUIRE(result.has_value());
    CHECK(std::ranges::equal(*result, tokens));
  }
}

TEST_CASE("key: bytes are low then high, little-endian; fingerprints tell incarnations apart") {
  CHECK(hex({0x0706050403020100, 0x0f0e0d0c0b0a0908}) == "000102030405060708090a0b0c0d0e0f");
  CHECK(kSeed == Hash128{0x0706050403020100, 0x0f0e0d0c0b0a0908});

  std::set<std::uint64_t> seen;
  std::size_t made = 0;
  for (std::uint32_t incarnation : {0u, 1u, 2u, 0xffffffffu}) {
    for (std::uint64_t i = 0; i < 1000; ++i) {
      seen.insert(fingerprint(incarnation, {i, 0}));
      seen.insert(fingerprint(incarnation, {0, i + 1}));
      made += 2;
    }
  }
  CHECK(seen.size() == made);
}

}  // namespace
}  // namespace kvpool
