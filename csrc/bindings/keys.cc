// Keys and checksums for Python. Buffers stay where they are; results are packed bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/memory.h"
#include "bindings/raise.h"
#include "block/checksum.h"
#include "block/prefix_hash.h"

namespace kvpool {
namespace {

using nb::literals::operator""_a;

// Releasing the GIL costs 0.1 us and may cost a turn of the others: not for less than 10 us.
constexpr std::size_t kHashesForGil = 128;       // chained or folded with SHA-256
constexpr std::size_t kBytesForGil = 256 << 10;  // summed with XXH3

template <typename Work>
void work_without_gil(bool is_long, Work work) {
  std::optional<GilReleased> released;
  if (is_long) released.emplace();
  work();
}

Hash128 seed_of(nb::handle object) {
  const Memory seed(object, Access::read, "seed");
  if (seed.bytes() != kHashBytes)
    raise_bad_argument("seed has " + std::to_string(seed.bytes()) + " bytes; it must have 16");
  return Hash128::from_bytes(seed.data());
}

// Room for `count` packed hashes. Nobody else has seen the object yet, so its bytes may be written,
// also without the GIL.
nb::bytes packed_hashes(std::size_t count) {
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kHashBytes));
  if (made == nullptr) throw nb::python_error();
  return nb::steal<nb::bytes>(made);
}

Hash128* hashes_in(const nb::bytes& packed) {
  void* data = PyBytes_AS_STRING(packed.ptr());
  KVP_CHECK(reinterpret_cast<std::uintptr_t>(data) % alignof(Hash128) == 0);
  return static_cast<Hash128*>(data);
}

// A contiguous one-dimensional array of integers, read in place.
class TokenBuffer {
 public:
  explicit TokenBuffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_ND | PyBUF_FORMAT) != 0) {
      const nb::python_error cause;
      raise_bad_type(std::string("tokens must be a contiguous integer array (numpy, array): ") +
                     cause.what());
    }
    const auto type = token_type();
    if (buffer_.ndim == 1 && type) {
      tokens_ = {buffer_.buf, static_cast<std::size_t>(buffer_.shape[0]), *type};
      return;
    }
    const std::string complaint =
        buffer_.ndim != 1
            ? "tokens have " + std::to_string(buffer_.ndim) + " dimensions; they must have 1"
            : "tokens have the item format '" + std::string(format()) +
                  "'; they must be int32, int64, uint32 or uint64";
    const bool is_shape = buffer_.ndim != 1;
    PyBuffer_Release(&buffer_);
    is_shape ? raise_bad_argument(complaint) : raise_bad_type(complaint);
  }
  ~TokenBuffer() { PyBuffer_Release(&buffer_); }
  TokenBuffer(const TokenBuffer&) = delete;
  TokenBuffer& operator=(const TokenBuffer&) = delete;

  const TokenArray& tokens() const { return tokens_; }

 private:
  // As the struct module writes it; a missing one means bytes.
  const char* format() const { return buffer_.format == nullptr ? "B" : buffer_.format; }

  std::optional<TokenType> token_type() const {
    const char* code = format();
    if (std::strchr("@=<", *code) != nullptr && *code != '\0') ++code;  // little-endian, all three
    if (std::strlen(code) != 1) return std::nullopt;
    const bool is_wide = buffer_.itemsize == 8;
    if (!is_wide && buffer_.itemsize != 4) return std::nullopt;
    if (std::strchr("ilqn", *code) != nullptr) return is_wide ? TokenType::int64 : TokenType::int32;
    if (std::strchr("ILQN", *code) != nullptr)
      return is_wide ? TokenType::uint64 : TokenType::uint32;
    return std::nullopt;
  }

  Py_buffer buffer_{};
  TokenArray tokens_;
};

nb::bytes prefix_hash_of(nb::handle seed, nb::handle tokens, std::int64_t block_tokens,
                         nb::handle extra, const std::string& algorithm) {
  const auto known = hash_algorithm(algorithm);
  if (!known) raise_bad_argument("algorithm is '" + algorithm + "'; it can be 'sha256' or 'xxh3'");
  if (block_tokens < 1)
    raise_bad_argument("block_tokens is " + std::to_string(block_tokens) +
                       "; it must be at least 1");
  const Hash128 first = seed_of(seed);
  const Memory extra_bytes(extra, Access::read, "extra");
  const TokenBuffer buffer(tokens);
  const PrefixRule rule{
      *known, static_cast<std::size_t>(block_tokens), {extra_bytes.data(), extra_bytes.bytes()}};
  const std::size_t count = buffer.tokens().count / rule.block_tokens;
  nb::bytes packed = packed_hashes(count);

  Result<void> checked;
  const std::size_t hashed_bytes = 4 * buffer.tokens().count + count * extra_bytes.bytes();
  work_without_gil(count >= kHashesForGil || hashed_bytes >= kBytesForGil, [&] {
    std::vector<std::uint32_t> scratch;
    const auto words = tokens_as_u32(buffer.tokens(), scratch);
    if (words) {
      prefix_hash(first, *words, rule, hashes_in(packed));
    } else {
      checked = std::unexpected(words.error());
    }
  });
  value_or_raise(std::move(checked));
  return packed;
}

nb::bytes fold_of(nb::handle seed, nb::handle hashes, std::int64_t hash_bytes) {
  const Hash128 first = seed_of(seed);
  const Memory memory(hashes, Access::read, "hashes");
  if (hash_bytes < 1)
    raise_bad_argument("hash_bytes is " + std::to_string(hash_bytes) + "; it must be at least 1");
  const auto record_bytes = static_cast<std::size_t>(hash_bytes);
  if (memory.bytes() % record_bytes != 0)
    raise_bad_argument("hashes have " + std::to_string(memory.bytes()) +
                       " bytes; that is no multiple of hash_bytes, " + std::to_string(hash_bytes));
  const std::size_t count = memory.bytes() / record_bytes;
  nb::bytes packed = packed_hashes(count);
  work_without_gil(count >= kHashesForGil || memory.bytes() >= kBytesForGil, [&] {
    fold(first, {memory.data(), memory.bytes()}, record_bytes, hashes_in(packed));
  });
  return packed;
}

nb::bytes checksum_of(nb::handle object) {
  const Memory memory(object, Access::read, "data");
  nb::bytes packed = packed_hashes(1);
  work_without_gil(memory.bytes() >= kBytesForGil,
                   [&] { *hashes_in(packed) = checksum(memory.data(), memory.bytes()); });
  return packed;
}

}  // namespace

void bind_keys(nb::module_& m) {
  m.def("prefix_hash", &prefix_hash_of, "seed"_a.none(), "tokens"_a.none(), "block_tokens"_a,
        "extra"_a.none(), "algorithm"_a,
        "Chained keys of the whole blocks of `tokens`, 16 bytes each, packed.\n\n"
        "seed: 16 bytes, the namespace id or the last key of the chain that goes on. tokens: a\n"
        "contiguous 1-D buffer of int32, int64, uint32 or uint64 in 0..2^32-1. algorithm:\n"
        "'sha256' or 'xxh3'. Raises BadArgument with the first bad token. Releases the GIL when\n"
        "there is much to do; int32 and int64 are converted once, uint32 is read in place.");
  m.def("fold", &fold_of, "seed"_a.none(), "hashes"_a.none(), "hash_bytes"_a,
        "SHA-256(seed || hash)[:16] for each record of `hash_bytes` bytes in `hashes`, packed.\n\n"
        "Raises BadArgument for lengths that do not fit. Releases the GIL when there is much to\n"
        "do; no copy.");
  m.def("checksum", &checksum_of, "data"_a.none(),
        "XXH3-128 of a contiguous buffer as 16 bytes: the low half, then the high half, each\n"
        "little-endian. Releases the GIL from 256 KiB on; no copy.");
}

}  // namespace kvpool
