// Blocks of several sizes on one SSD, an SSD that grows and shrinks, and an index that is full.
#include <atomic>
#include <thread>
#include <utility>

#include "node/node.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using test::key_of;
using test::keys_from;
using test::kKiB;
using test::SsdPool;

std::uint64_t put_all(SsdPool& pool, Namespace& space, std::span<const Hash128> keys) {
  for (const Hash128& key : keys) {
    pool.put(space, key);
    pool.flush();
  }
  return pool.count(space, keys);
}

// A slab of the size that is wanted now comes from the size that nobody uses any more.
TEST_CASE("node ssd sizes: a block size that comes late takes slabs from a colder one") {
  SsdPool pool(SsdPool::small(2, 6));
  Namespace& small = pool.space(1, 64 * kKiB);
  Namespace& large = pool.space(2, 700 * kKiB);
  const auto old = keys_from(0, 220), young = keys_from(1000, 12);
  CHECK(put_all(pool, small, old) > 100);
  REQUIRE(pool.node->stats().ssd_blocks > 150);  // the SSD is full of them
  pool.clock->set(1000);
  CHECK(put_all(pool, large, young) >= 10);  // DRAM holds four of them
  const NodeStats stats = pool.node->stats();
  CHECK(stats.store.ssd_evictions > 0);
  pool.check_at_rest();
  for (const Hash128& key : old) pool.gets(small, key);
  pool.reopen();
  CHECK(pool.count(pool.space(2, 700 * kKiB), young) >= 8);
  for (const Hash128& key : young) pool.gets(pool.space(2, 700 * kKiB), key);
  for (const Hash128& key : old) pool.gets(pool.space(1, 64 * kKiB), key);
  pool.check_at_rest();
}

TEST_CASE("node ssd sizes: an SSD grows and shrinks under reads and writes") {
  test::Random random("node ssd grow and shrink");
  SsdPool pool(SsdPool::small(2, 6));
  Namespace& space = pool.space(1, 64 * kKiB);
  Namespace& other = pool.space(2, 300 * kKiB);
  std::atomic<bool> is_over{false};
  std::atomic<std::uint64_t> wrong{0}, delivered{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, seed = random.engine()()] {
      std::mt19937_64 engine(seed);
      while (!is_over) {
        Namespace& to = engine() % 4 == 0 ? other : space;
        const auto keys = keys_from(engine() % 40 * 10, 6);
        test::SumSource source(keys, to.block_bytes);
        std::vector<PutStatus> statuses(6);
        pool.node->put({to, keys, nullptr, test::never_hung()}, source, statuses.data());
        test::KeySink sink(keys, to.block_bytes);
        delivered += pool.node->get(to, keys, sink);
        wrong += sink.wrong;
      }
    });
  for (std::size_t round = 0; round < test::scaled(20); ++round) {
    const auto units = random.between<std::uint64_t>(4, 20);
    const auto resized = pool.node->resize_ssd(test::capacity_of(units), test::never_hung());
    REQUIRE(resized.has_value());
    CHECK(*resized == test::capacity_of(units));
    CHECK(pool.node->stats().ssd_facts.units <= units);
    CHECK(pool.node->stats().ssd_facts.units + 2 >= units);
    pool.node->check_invariants();
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(delivered > 0);
  pool.flush();
  pool.check_at_rest();
  CHECK(pool.node->stats().ssd.damaged == 0);
}

TEST_CASE("node ssd sizes: a shrink keeps what fits, whatever lies where") {
  SsdPool pool(SsdPool::small(1, 12));
  Namespace& space = pool.space(1, 64 * kKiB);
  const auto keys = keys_from(0, 300);
  CHECK(put_all(pool, space, keys) == 300);
  REQUIRE(pool.node->resize_ssd(test::capacity_of(6), test::never_hung()).has_value());
  pool.check_at_rest();
  // 192 slots are left; some stay free for what comes.
  CHECK(pool.node->stats().ssd_blocks > 90);
  CHECK(pool.node->stats().ssd_blocks <= 192);
  std::size_t delivered = 0;
  for (const Hash128& key : keys) delivered += pool.gets(space, key);
  CHECK(delivered > 100);
  // And it is full again soon, but no more than full.
  pool.clock->set(1000);
  CHECK(put_all(pool, space, keys_from(1000, 150)) > 60);
  CHECK(pool.node->stats().ssd_blocks <= 192);
  CHECK(pool.node->stats().ssd_facts.units <= 6);
}

TEST_CASE("node ssd sizes: sizes that cannot be are refused, and change nothing") {
  SsdPool pool(SsdPool::small(2, 6));
  Namespace& space = pool.space(1, 64 * kKiB);
  const auto keys = keys_from(0, 50);
  CHECK(put_all(pool, space, keys) == 50);
  for (const std::uint64_t capacity :
       {std::uint64_t{0}, std::uint64_t{4096}, test::capacity_of(26), std::uint64_t{1} << 60})
    CHECK_FALSE(pool.node->resize_ssd(capacity, test::never_hung()).has_value());
  CHECK(pool.node->stats().ssd_facts.units == 6);
  CHECK(pool.get(space, {keys.data(), 1}) == 1);
  // Wishes of the past do not stand in the way of later ones.
  REQUIRE(pool.node->resize_ssd(test::capacity_of(24), test::never_hung()).has_value());
  (void)pool.node->resize_ssd(test::capacity_of(4), Node::Deadline{});
  const auto last = pool.node->resize_ssd(test::capacity_of(8), test::never_hung());
  REQUIRE(last.has_value());
  CHECK(*last == test::capacity_of(8));
  CHECK(pool.node->stats().ssd_facts.units >= 6);
  CHECK(pool.count(space, keys) == 50);
  pool.check_at_rest();
}

TEST_CASE("node ssd sizes: a restart with less memory, or less SSD, keeps what it can") {
  SsdPool pool(SsdPool::small(4, 10));
  {
    Namespace& space = pool.space(1, 64 * kKiB);
    CHECK(put_all(pool, space, keys_from(0, 200)) == 200);
  }
  pool.options.store.bytes_limit = kUnitBytes;
  pool.reopen();
  CHECK(pool.count(pool.space(1, 64 * kKiB), keys_from(0, 200)) == 200);
  pool.options.ssd.capacity_bytes = test::capacity_of(5);  // shrunk by the writer, in its time
  pool.reopen();
  Namespace& space = pool.space(1, 64 * kKiB);
  const auto deadline = test::never_hung();
  while (pool.node->stats().ssd_facts.units > 5) {
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    pool.get(space, keys_from(0, 200));
  }
  const std::size_t left = pool.count(space, keys_from(0, 200));
  CHECK(left > 60);
  CHECK(left <= 160 + 32);
  pool.check_at_rest();
  // A block larger than the memory there is now is refused by name.
  pool.reopen();
  CHECK_FALSE(pool.node->open_namespace(key_of(1), 3 << 20).has_value());
}

// The index holds few entries where the files are small; pages of DRAM are as small as blocks.
TEST_CASE("node ssd sizes: a full index makes room for any size") {
  SsdPool pool(SsdPool::small(4, 24));  // 12,288 slots of 4 KiB
  Namespace& tiny = pool.space(1, 4 * kKiB);
  Namespace& other = pool.space(2, 8 * kKiB);
  const std::uint64_t entries_max = pool.node->stats().ssd_facts.entries_max;
  REQUIRE(entries_max < 12'000);
  for (std::uint64_t n = 0; n < entries_max + 500; n += 100) {
    for (const Hash128& key : keys_from(n, 100)) pool.put(tiny, key);
    pool.flush();
    REQUIRE(pool.node->stats().ssd_blocks <= entries_max);
  }
  CHECK(pool.node->stats().ssd.commit_faults == 0);
  CHECK(pool.node->stats().ssd_blocks > entries_max / 2);
  pool.clock->set(1000);
  CHECK(put_all(pool, other, keys_from(100'000, 40)) == 40);
  pool.reopen();
  CHECK(pool.count(pool.space(2, 8 * kKiB), keys_from(100'000, 40)) == 40);
  CHECK(pool.node->stats().blocks <= entries_max);
  CHECK(pool.node->stats().ssd_read_only == false);
  pool.check_at_rest();
}

// More blocks at once than there are slots: those that find none wait for the group before them.
TEST_CASE("node ssd sizes: a burst larger than the SSD passes through it") {
  for (const Durability durability : {Durability::async, Durability::durable}) {
    NodeOptions options = SsdPool::small(16, 1);  // groups of 64 blocks, and 32 slots
    options.ssd.durability = durability;
    SsdPool pool(options);
    Namespace& space = pool.space(1, 64 * kKiB);
    for (std::uint64_t n = 0; n < 200; ++n) {
      pool.clock->set(static_cast<double>(n));
      const PutStatus status = pool.put(space, key_of(n));
      CHECK(status == PutStatus::stored);
    }
    pool.flush();
    const NodeStats stats = pool.node->stats();
    CHECK(stats.not_durable == 0);
    CHECK(stats.store.ssd_no_room == 0);
    CHECK(stats.ssd_blocks > 16);
    CHECK(stats.ssd_blocks <= 32);
    pool.check_at_rest();
  }
}

// A class that was made for a block which no longer fits is only in the way if it is needed.
TEST_CASE("node ssd sizes: after a shrink below an old block size the directory opens") {
  constexpr std::uint64_t kLarge = 40 << 20;
  SsdPool pool(SsdPool::small(30, 44));  // two slots of them: one is kept free
  REQUIRE(pool.put(pool.space(1, kLarge), key_of(1)) == PutStatus::stored);
  pool.put(pool.space(2, 64 * kKiB), key_of(2));
  pool.flush();
  REQUIRE(pool.node->stats().ssd_blocks == 2);
  const std::uint64_t small = test::capacity_of(5);
  REQUIRE(pool.node->resize_ssd(small, test::never_hung()).has_value());
  REQUIRE(pool.node->stats().ssd_facts.units * 4 < kLarge / kUnitBytes);
  pool.options.ssd.capacity_bytes = small;
  pool.reopen();
  CHECK(pool.gets(pool.space(2, 64 * kKiB), key_of(2)));
  CHECK(pool.put(pool.space(1, kLarge), key_of(3)) == PutStatus::stored);  // in DRAM alone
  CHECK(pool.put(pool.space(2, 64 * kKiB), key_of(4)) == PutStatus::stored);
  pool.node->flush(test::never_hung());
  const NodeStats stats = pool.node->stats();
  CHECK(stats.store.ssd_no_room > 0);
  CHECK(stats.ssd_blocks == 2);
  CHECK_FALSE(stats.ssd_read_only);
  pool.reopen();
  CHECK(pool.gets(pool.space(2, 64 * kKiB), key_of(4)));
  pool.check_at_rest();
}

TEST_CASE("node ssd sizes: entries of a class that cannot be are forgotten, the others stay") {
  SsdPool pool(SsdPool::small(2, 6));
  pool.put(pool.space(1, 64 * kKiB), keys_from(0, 5));
  pool.put(pool.space(2, 100 * kKiB), keys_from(100, 3));
  pool.flush();
  pool.close();
  {
    auto tier = Ssd::open(pool.options.ssd);
    REQUIRE(tier.has_value());
    SsdGroup group;
    group.new_classes = {{64 * kKiB, 1000}};
    REQUIRE((*tier)->commit(group));
  }
  pool.open();
  CHECK(pool.count(pool.space(1, 64 * kKiB), keys_from(0, 5)) == 0);
  CHECK(pool.get(pool.space(2, 100 * kKiB), keys_from(100, 3)) == 3);
  CHECK(pool.node->stats().ssd_blocks == 3);
  pool.put(pool.space(1, 64 * kKiB), keys_from(0, 5));
  pool.flush();
  pool.reopen();
  CHECK(pool.get(pool.space(1, 64 * kKiB), keys_from(0, 5)) == 5);
  CHECK(pool.node->stats().ssd_blocks == 8);
  pool.check_at_rest();
}

TEST_CASE("node ssd sizes: blocks too large for DRAM refuse by path and remedy, if there are any") {
  constexpr std::uint64_t kLarge = 3 << 20;
  SsdPool pool(SsdPool::small(8, 10));
  pool.put(pool.space(1, kLarge), key_of(1));
  pool.put(pool.space(2, 64 * kKiB), key_of(2));
  pool.flush();
  pool.close();
  const std::uint64_t dram = std::exchange(pool.options.store.bytes_limit, kUnitBytes);
  const std::uint64_t most = std::exchange(pool.options.store.bytes_max, kUnitBytes);
  const auto refused = Node::open(pool.options, pool.clock);
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error().code == Code::bad_argument);
  CHECK(refused.error().message.starts_with("SSD tier in " + pool.options.ssd.path + ": "));
  CHECK(refused.error().message.find("more DRAM") != std::string::npos);
  pool.options.store.bytes_limit = dram;
  pool.options.store.bytes_max = most;
  pool.open();  // nothing was lost by the trial
  CHECK(pool.gets(pool.space(1, kLarge), key_of(1)));
  REQUIRE(pool.node->remove(pool.space(1, kLarge), keys_from(1, 1)) == 1);
  pool.close();
  pool.options.store.bytes_limit = pool.options.store.bytes_max = kUnitBytes;
  pool.open();
  CHECK(pool.gets(pool.space(2, 64 * kKiB), key_of(2)));
}

// One namespace per tenant, each with a block that soon goes: their names must not fill the index.
TEST_CASE("node ssd sizes: names of namespaces never fill the index, and idle ones go at open") {
  constexpr std::uint64_t kBlock = 4 * kKiB;
  SsdPool pool(SsdPool::small(2, 6));
  const std::uint64_t entries_max = pool.node->stats().ssd_facts.entries_max;
  const auto names_in_index = [&] {
    pool.close();
    auto tier = Ssd::open(pool.options.ssd);
    REQUIRE(tier.has_value());
    return (*tier)->spaces().size();
  };
  const std::uint64_t tenants = entries_max;  // twice what is named
  REQUIRE(tenants < 12'000);
  for (std::uint64_t n = 0; n < tenants; ++n) {
    Namespace& space = pool.space(n, kBlock);
    REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
    if (n % 100 != 99) continue;
    pool.node->flush(test::never_hung());
    for (std::uint64_t old = n - 99; old < n; ++old)
      pool.node->remove(pool.space(old, kBlock), keys_from(old, 1));
  }
  pool.node->flush(test::never_hung());
  const NodeStats stats = pool.node->stats();
  CHECK(stats.ssd.commit_faults == 0);
  CHECK_FALSE(stats.ssd_read_only);
  CHECK(stats.store.ssd_no_room > 0);
  CHECK(stats.ssd_blocks > 0);
  // One that has its name still writes.
  pool.put(pool.space(0, kBlock), key_of(tenants));
  pool.flush();
  CHECK(pool.node->stats().ssd_blocks == stats.ssd_blocks + 1);
  CHECK(names_in_index() == entries_max / 2);
  pool.open();
  pool.flush();
  const std::uint64_t left = pool.node->stats().ssd_blocks;
  CHECK(left == stats.ssd_blocks + 1);
  pool.put(pool.space(tenants, kBlock), key_of(tenants));  // a new one finds room again
  pool.flush();
  CHECK(pool.node->stats().ssd_blocks == left + 1);
  const auto hung_at = test::never_hung();  // the idle names go with the groups of an idle writer
  while (pool.node->stats().ssd.groups < entries_max / 2 / SsdBooks::kNamesPerGroup + 1)
    REQUIRE(std::chrono::steady_clock::now() < hung_at);
  CHECK(names_in_index() == left + 1);  // each block had a namespace of its own
}

}  // namespace
}  // namespace kvpool
