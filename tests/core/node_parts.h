// What the tests of the node share: keys, payloads that can be recognised, an index without a node.
#pragma once
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "block/copy.h"
#include "block_random.h"
#include "core_build.h"
#include "node/index_reader.h"
#include "node/index_writer.h"

namespace kvpool::test {

inline constexpr std::uint64_t kKiB = 1 << 10, kMiB = 1 << 20;

inline Hash128 key_of(std::uint64_t n) {
  return {mix64(n + 0x9e37'79b9'7f4a'7c15), mix64(~n ^ 0x5bf0'3635'0da1'e2b7)};
}

// Payload: word i is a function of the key, the version of its bytes, and i. A word that belongs
// to another block, another version or another place is therefore seen.
inline std::uint64_t payload_word(const Hash128& key, std::uint64_t version, std::size_t i) {
  return mix64(key.low ^ mix64(key.high + version) ^ (i * 0x2545'f491'4f6c'dd1d));
}

inline void make_payload(std::byte* to, std::size_t bytes, const Hash128& key,
                         std::uint64_t version = 0) {
  for (std::size_t at = 0; at < bytes; at += 8) {
    const std::uint64_t word = payload_word(key, version, at / 8);
    std::memcpy(to + at, &word, std::min<std::size_t>(8, bytes - at));
  }
}

inline std::vector<std::byte> payload_of(const Hash128& key, std::size_t bytes,
                                         std::uint64_t version = 0) {
  std::vector<std::byte> made(bytes);
  make_payload(made.data(), bytes, key, version);
  return made;
}

// Every word, or one in `stride` bytes.
inline bool is_payload(const std::byte* at, std::size_t bytes, const Hash128& key,
                       std::uint64_t version = 0, std::size_t stride = 8) {
  for (std::size_t i = 0; i < bytes; i += stride) {
    const std::uint64_t word = payload_word(key, version, i / 8);
    if (std::memcmp(at + i, &word, std::min<std::size_t>(8, bytes - i)) != 0) return false;
  }
  return true;
}

inline std::chrono::steady_clock::time_point after(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}
// A deadline for what must not take long but may on a busy machine: reached means hung.
inline std::chrono::steady_clock::time_point never_hung() {
  return after(std::chrono::seconds(60));
}

// An index and an arena as a node makes them, without the node.
struct Index {
  std::unique_ptr<Arena> memory, payload;
  std::unique_ptr<IndexWriter> writer;

  Index(std::uint64_t records_max, std::uint64_t payload_bytes, std::uint64_t salt) {
    auto index = Arena::create("kvpool-test-index", IndexWriter::index_bytes(records_max));
    auto arena = Arena::create("kvpool-test-arena", payload_bytes);
    REQUIRE((index && arena));
    memory = std::move(*index);
    payload = std::move(*arena);
    writer = std::make_unique<IndexWriter>(*memory, *payload, records_max, salt);
  }
  IndexReader reader() const { return IndexReader(writer->view()); }
  std::uint64_t root() const { return writer->view().header().root.load(); }
};

}  // namespace kvpool::test
