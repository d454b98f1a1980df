// A whole node with an SSD tier for a test: small, on real files, closed and opened again at will.
#pragma once
#include <sys/stat.h>

#include <algorithm>

#include "block/checksum.h"
#include "node_cases.h"
#include "tier/index_store.h"
#include "tier_files.h"

namespace kvpool::test {

// Files in memory where there is such a place: what is tested here is not the disk.
inline std::string fast_directory() {
  struct stat facts{};
  const bool is_there = ::stat("/dev/shm", &facts) == 0 && S_ISDIR(facts.st_mode);
  return is_there ? "/dev/shm" : std::filesystem::temp_directory_path().string();
}

// All files of a new tier whose slab file has so many units. One that was larger before has kept
// its index, and room for a unit or two less.
inline std::uint64_t capacity_of(std::uint64_t units) {
  std::uint64_t bytes = (128 << 10) + units * kUnitBytes;
  const std::uint64_t rest = bytes;
  while (bytes < rest + IndexStore::bytes_for(bytes)) bytes += 4 << 10;
  return bytes;
}

// Every word says what the key says, and the sum is the true one.
class SumSource final : public BlockSource {
 public:
  SumSource(std::span<const Hash128> keys, std::size_t block_bytes, std::uint64_t version = 0)
      : keys_(keys), made_(block_bytes), version_(version) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    make_payload(made_.data(), made_.size(), keys_[index], version_);
    racy_fill(slot, made_.data(), made_.size());
    sum = checksum(made_.data(), made_.size());
    return true;
  }

 private:
  std::span<const Hash128> keys_;
  std::vector<std::byte> made_;
  std::uint64_t version_;
};

struct SsdPool {
  TempDirectory directory{fast_directory()};
  NodeOptions options;
  std::shared_ptr<ManualClock> clock = std::make_shared<ManualClock>();
  std::unique_ptr<Node> node;

  static NodeOptions small(std::uint64_t dram_units, std::uint64_t ssd_units) {
    NodeOptions options = Pool::plain(dram_units * kUnitBytes);
    options.has_ssd = true;
    options.ssd.capacity_bytes = capacity_of(ssd_units);
    options.ssd.io_threads = 4;
    options.ssd_admit = SsdAdmit::all;
    options.ssd_timeout = std::chrono::seconds(60);
    return options;
  }
  explicit SsdPool(const NodeOptions& wanted) : options(wanted) {
    options.ssd.path = directory / "tier";
    open();
  }
  void open() {
    auto opened = Node::open(options, clock);
    REQUIRE_MESSAGE(opened.has_value(), opened.error().message);
    node = std::move(*opened);
  }
  void close(bool flushes = true) {
    node->close(flushes ? never_hung() : Node::Deadline{});
    node->check_invariants();
    node.reset();
  }
  void reopen(bool flushes = true) {
    close(flushes);
    open();
  }

  Namespace& space(std::uint64_t n, std::uint64_t block_bytes) {
    auto opened = node->open_namespace(key_of(~n), block_bytes);
    REQUIRE(opened.has_value());
    return **opened;
  }
  std::vector<PutStatus> put(Namespace& to, std::span<const Hash128> keys,
                             const Hash128* parent = nullptr, std::uint64_t version = 0) {
    SumSource source(keys, to.block_bytes, version);
    std::vector<PutStatus> statuses(keys.size());
    node->put({to, keys, parent, never_hung()}, source, statuses.data());
    return statuses;
  }
  PutStatus put(Namespace& to, const Hash128& key, const Hash128* parent = nullptr,
                std::uint64_t version = 0) {
    return put(to, std::span(&key, 1), parent, version)[0];
  }
  std::size_t get(const Namespace& from, std::span<const Hash128> keys, std::uint64_t version = 0) {
    KeySink sink(keys, from.block_bytes, version);
    const std::size_t count = node->get(from, keys, sink);
    REQUIRE(sink.wrong == 0);
    return count;
  }
  bool gets(const Namespace& from, const Hash128& key, std::uint64_t version = 0) {
    return get(from, {&key, 1}, version) == 1;
  }
  // 0 = nowhere; else the fastest.
  std::uint8_t tier(const Namespace& from, const Hash128& key) const {
    std::uint8_t tier = 0;
    node->lookup(from, {&key, 1}, &tier);
    return tier;
  }
  std::size_t count(const Namespace& from, std::span<const Hash128> keys) const {
    return static_cast<std::size_t>(
        std::ranges::count_if(keys, [&](const Hash128& key) { return tier(from, key) != 0; }));
  }
  void settle() { REQUIRE(node->settle(never_hung())); }
  void flush() { REQUIRE(node->flush(never_hung())); }
  // Until the writer moves and evicts nothing either, which a flush does not wait for. Nobody may
  // hold anything: what is pinned can be in its way for ever.
  void rest() {
    settle();
    flush();
    const auto deadline = never_hung();
    while (node->stats().ssd_busy) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // The same pool with nothing in DRAM, all of it on the SSD.
  Namespace& cold(std::uint64_t n, std::uint64_t block_bytes) {
    flush();
    reopen(/*flushes=*/false);
    return space(n, block_bytes);
  }
  // Nobody holds anything.
  void check_at_rest() {
    settle();
    node->check_invariants();
    const NodeStats stats = node->stats();
    REQUIRE(stats.reserved == 0);
    REQUIRE(stats.zombies == 0);
    REQUIRE(stats.dead == 0);
  }
};

}  // namespace kvpool::test
