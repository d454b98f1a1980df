// A whole node for a test: opened small, filled from keys, read back and compared.
#pragma once
#include <thread>

#include "node/node.h"
#include "node_parts.h"

namespace kvpool::test {

// Writes what the key says: every word, or (where only the coming and going of blocks matters) one
// in `stride` bytes.
class KeySource final : public BlockSource {
 public:
  KeySource(std::span<const Hash128> keys, std::size_t block_bytes, std::uint64_t version = 0)
      : keys_(keys), made_(block_bytes), version_(version) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    if (stride == 8) {
      make_payload(made_.data(), made_.size(), keys_[index], version_);
      racy_fill(slot, made_.data(), made_.size());
    }
    for (std::size_t at = 0; stride > 8 && at + 8 <= made_.size(); at += stride) {
      const std::uint64_t word = payload_word(keys_[index], version_, at / 8);
      racy_fill(slot + at, &word, 8);
    }
    sum = {version_, index};
    ++filled;
    return !refuses;
  }
  std::size_t filled = 0;
  std::size_t stride = 8;
  bool refuses = false;

 private:
  std::span<const Hash128> keys_;
  std::vector<std::byte> made_;
  std::uint64_t version_;
};

// Copies each block out and counts those whose bytes are not those of its key.
class KeySink final : public BlockSink {
 public:
  KeySink(std::span<const Hash128> keys, std::size_t block_bytes, std::uint64_t version = 0)
      : keys_(keys), copy_(block_bytes), version_(version) {}
  bool deliver(std::size_t index, const IndexReader& reader, const Found& found) override {
    if (found.bytes != copy_.size()) {
      ++wrong;
      return false;
    }
    if (!reader.copy(found, copy_.data())) return false;
    wrong += !is_payload(copy_.data(), copy_.size(), keys_[index], version_);
    return true;
  }
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override {
    wrong += payload.size() != copy_.size() ||
             !is_payload(payload.data(), payload.size(), keys_[index], version_);
    return true;
  }
  std::size_t wrong = 0;

 private:
  std::span<const Hash128> keys_;
  std::vector<std::byte> copy_;
  std::uint64_t version_;
};

inline std::vector<Hash128> keys_from(std::uint64_t first, std::size_t count) {
  std::vector<Hash128> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

struct Pool {
  std::size_t stride = 8;  // of the words that put() writes
  std::shared_ptr<ManualClock> clock = std::make_shared<ManualClock>();
  std::unique_ptr<Node> node;

  // `bytes` of ordinary pages, nothing ahead of need: what happens is what was asked for.
  static NodeOptions plain(std::uint64_t bytes, std::uint64_t blocks_limit = 0) {
    NodeOptions options;
    options.store.bytes_limit = bytes;
    options.store.blocks_limit = blocks_limit;
    options.store.salt = 17;
    options.prefault = Prefault::off;
    options.huge_pages = false;
    return options;
  }
  explicit Pool(const NodeOptions& options) {
    auto opened = Node::open(options, clock);
    REQUIRE(opened.has_value());
    node = std::move(*opened);
  }
  Namespace& space(std::uint64_t n, std::uint64_t block_bytes) {
    auto opened = node->open_namespace(key_of(~n), block_bytes);
    REQUIRE(opened.has_value());
    return **opened;
  }
  std::vector<PutStatus> put(Namespace& to, std::span<const Hash128> keys,
                             const Hash128* parent = nullptr, std::uint64_t version = 0) {
    KeySource source(keys, to.block_bytes, version);
    source.stride = stride;
    std::vector<PutStatus> statuses(keys.size());
    node->put({to, keys, parent, never_hung()}, source, statuses.data());
    return statuses;
  }
  PutStatus put(Namespace& to, const Hash128& key, const Hash128* parent = nullptr,
                std::uint64_t version = 0) {
    return put(to, std::span(&key, 1), parent, version)[0];
  }
  // Leading blocks delivered; every one of them is compared.
  std::size_t get(const Namespace& from, std::span<const Hash128> keys, std::uint64_t version = 0) {
    KeySink sink(keys, from.block_bytes, version);
    const std::size_t count = node->get(from, keys, sink);
    REQUIRE(sink.wrong == 0);
    return count;
  }
  bool has(const Namespace& from, const Hash128& key) const {
    return node->lookup(from, {&key, 1}, nullptr) == 1;
  }
  void settle() { REQUIRE(node->settle(never_hung())); }
  // Nobody holds anything: slots in use are those of resident blocks.
  void check_at_rest() {
    settle();
    node->check_invariants();
    const NodeStats stats = node->stats();
    REQUIRE(stats.reserved == 0);
    REQUIRE(stats.pinned == 0);
    REQUIRE(stats.zombies == 0);
    REQUIRE(stats.dead == 0);
    REQUIRE(stats.bytes_committed <= stats.bytes_limit);
  }
};

// Until somebody waits at the point; the deadline is for a test that would hang.
inline void wait_for_waiter(Node& node, const char* point) {
  const auto deadline = never_hung();
  while (node.faults().waiting(point) == 0) {
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
}

}  // namespace kvpool::test
