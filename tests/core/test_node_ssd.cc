// Blocks sink to the SSD and come back: what is kept, what survives a restart, what the durable
// contract waits for, and that a pool with nothing to do does nothing.
#include <ctime>

#include "node/node.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using test::key_of;
using test::keys_from;
using test::kKiB;
using test::SsdPool;

constexpr std::uint64_t kBlock = 64 * kKiB;  // 32 to a unit

NodeOptions durable_options(std::uint64_t dram_units, std::uint64_t ssd_units) {
  NodeOptions options = SsdPool::small(dram_units, ssd_units);
  options.ssd.durability = Durability::durable;
  return options;
}

TEST_CASE("node ssd: blocks that leave DRAM are read from the SSD, and survive a restart") {
  SsdPool pool(SsdPool::small(1, 8));
  const auto keys = keys_from(0, 100);  // three times the DRAM
  {
    Namespace& space = pool.space(1, kBlock);
    for (const Hash128& key : keys) {
      REQUIRE(pool.put(space, key) == PutStatus::stored);
      pool.flush();
    }
    REQUIRE(pool.count(space, keys) == 100);
    for (const Hash128& key : keys) REQUIRE(pool.gets(space, key));
    const NodeStats stats = pool.node->stats();
    CHECK(stats.ssd_blocks == 100);
    CHECK(stats.store.demotions >= 68);
    CHECK(stats.store.evicted_unwritten == 0);
    CHECK(stats.ssd_hits >= 68);
    pool.check_at_rest();
  }
  for (int round = 0; round < 2; ++round) {
    pool.reopen();
    Namespace& space = pool.space(1, kBlock);
    const NodeStats stats = pool.node->stats();
    CHECK(stats.store.restored == 100);
    CHECK(stats.blocks == 100);
    REQUIRE(pool.count(space, keys) == 100);
    for (const Hash128& key : keys) REQUIRE(pool.gets(space, key));
    CHECK(pool.node->stats().store.restored_hits >= 100);
  }
}

// Inner blocks that the SSD has may leave DRAM before the blocks behind them.
TEST_CASE("node ssd: a durable chain may be longer than DRAM") {
  for (const PolicyKind policy : {PolicyKind::temperature, PolicyKind::lru}) {
    NodeOptions options = durable_options(1, 16);
    options.store.policy = policy;
    SsdPool pool(options);
    Namespace& space = pool.space(1, kBlock);
    const auto keys = keys_from(0, 150);
    for (std::size_t i = 0; i < keys.size(); ++i)
      REQUIRE(pool.put(space, keys[i], i == 0 ? nullptr : &keys[i - 1]) == PutStatus::stored);
    CHECK(pool.count(space, keys) == 150);
    CHECK(pool.get(space, keys) == 150);
    CHECK(pool.node->stats().ssd_blocks == 150);
    pool.reopen();
    CHECK(pool.get(pool.space(1, kBlock), keys) == 150);
    CHECK(pool.node->stats().store.restored_orphans == 0);
  }
}

TEST_CASE("node ssd: a chain that does not fit at once is delivered by one get") {
  SsdPool pool(durable_options(1, 16));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 200);
  for (std::size_t i = 0; i < keys.size(); ++i)
    REQUIRE(pool.put(space, keys[i], i == 0 ? nullptr : &keys[i - 1]) == PutStatus::stored);
  Namespace& cold = pool.cold(1, kBlock);
  CHECK(pool.get(cold, keys) == 200);
  std::vector<Lease> leases(200);
  leases.resize(pool.node->acquire(cold, keys, leases.data()));
  CHECK(leases.size() > 0);
  CHECK(leases.size() <= 32);  // as many as DRAM holds
  for (std::size_t i = 0; i < leases.size(); ++i)
    CHECK(test::is_payload(pool.node->arena() + leases[i].offset, kBlock, keys[i]));
  pool.node->release(leases);
  pool.check_at_rest();
}

TEST_CASE("node ssd: a durable put that answers present is durable too") {
  const Hash128 key = key_of(1);
  for (const bool by_reservation : {false, true}) {
    SsdPool pool(durable_options(4, 8));
    Namespace& space = pool.space(1, kBlock);
    // In DRAM alone: the device refused it once.
    pool.node->faults().fail("ssd.write", 1, 0);
    REQUIRE(pool.put(space, key) == PutStatus::not_durable);
    REQUIRE(pool.node->stats().ssd_blocks == 0);
    Ticket ticket;
    const PutStatus status =
        by_reservation ? pool.node->reserve({space, {&key, 1}, nullptr, test::never_hung()}, ticket)
                       : pool.put(space, key);
    CHECK(status == PutStatus::present);
    CHECK(pool.node->stats().ssd_blocks == 1);
    pool.reopen(/*flushes=*/false);
    CHECK(pool.gets(pool.space(1, kBlock), key));
  }
}

// Block 0 of a call goes while block 1 is being made.
class RemovingSource final : public BlockSource {
 public:
  RemovingSource(SsdPool& pool, Namespace& space, std::span<const Hash128> keys)
      : pool_(pool), space_(space), keys_(keys), source_(keys, space.block_bytes) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    if (index == 1) CHECK(pool_.node->remove(space_, {keys_.data(), 1}) == 1);
    return source_.fill(index, slot, sum);
  }

 private:
  SsdPool& pool_;
  Namespace& space_;
  std::span<const Hash128> keys_;
  test::SumSource source_;
};

TEST_CASE("node ssd: a block may be removed while its durable put goes on") {
  NodeOptions options = durable_options(4, 8);
  SsdPool pool(options);
  Namespace& space = pool.space(1, kBlock);
  for (std::uint64_t n = 0; n < 20; ++n) {
    const auto keys = keys_from(n * 10, 3);
    RemovingSource source(pool, space, keys);
    PutStatus statuses[3];
    // The device is slow to take the first block, or has it by then.
    if (n % 2 == 0) pool.node->faults().pause("ssd.write", std::chrono::milliseconds(5));
    pool.node->put({space, keys, nullptr, test::never_hung()}, source, statuses);
    pool.node->faults().clear();
    CHECK((statuses[0] == PutStatus::stored || statuses[0] == PutStatus::not_durable));
    CHECK(statuses[1] == PutStatus::stored);
    CHECK(statuses[2] == PutStatus::stored);
    CHECK(pool.tier(space, keys[0]) == 0);
  }
  pool.flush();
  pool.check_at_rest();
  CHECK(pool.node->stats().ssd_blocks == 40);
}

TEST_CASE("node ssd: what was dropped or removed is not back after a restart") {
  SsdPool pool(SsdPool::small(2, 8));
  const auto keys = keys_from(0, 40);
  for (int round = 0; round < 3; ++round) {
    Namespace& dropped = pool.space(1, kBlock);
    Namespace& kept = pool.space(2, kBlock);
    const auto version = static_cast<std::uint64_t>(round);
    REQUIRE(pool.count(dropped, keys) == 0);
    for (const Hash128& key : keys) {
      pool.put(dropped, key, nullptr, version);
      pool.put(kept, key);
    }
    pool.flush();
    REQUIRE(pool.node->drop_namespace(dropped, test::never_hung()).has_value());
    // Of the next incarnation, under a number of its own.
    pool.put(dropped, keys[0], nullptr, version + 100);
    pool.flush();
    pool.node->remove(kept, {keys.data(), 1});
    pool.reopen(/*flushes=*/false);
    Namespace& after = pool.space(1, kBlock);
    CHECK(pool.count(after, keys) == 1);
    CHECK(pool.gets(after, keys[0], version + 100));
    CHECK(pool.tier(pool.space(2, kBlock), keys[0]) == 0);
    CHECK(pool.count(pool.space(2, kBlock), keys) > 0);
    REQUIRE(pool.node->drop_namespace(after, test::never_hung()).has_value());
    pool.check_at_rest();
    pool.reopen(/*flushes=*/false);
  }
}

// A suffix whose parent was removed could never be reached: it goes at the next open.
TEST_CASE("node ssd: a chain that lost its middle comes back up to there") {
  SsdPool pool(SsdPool::small(2, 8));
  const auto keys = keys_from(0, 10);
  pool.put(pool.space(1, kBlock), keys);
  pool.flush();
  pool.node->remove(pool.space(1, kBlock), {&keys[4], 1});
  pool.reopen(/*flushes=*/false);
  CHECK(pool.count(pool.space(1, kBlock), keys) == 4);
  CHECK(pool.node->stats().store.restored_orphans == 5);
  CHECK(pool.node->stats().store.restored == 4);
  pool.check_at_rest();
  pool.reopen();
  CHECK(pool.node->stats().store.restored_orphans == 0);
  CHECK(pool.node->stats().blocks == 4);
}

// Entries whose parents go round in a circle, as only damage can make them.
TEST_CASE("node ssd: a circle of parents in the index is no chain") {
  SsdPool pool(SsdPool::small(2, 8));
  pool.close();
  {
    auto tier = Ssd::open(pool.options.ssd);
    REQUIRE(tier.has_value());
    const test::Pages page(kBlock, 1);
    SsdGroup group;
    group.new_spaces = {{1, key_of(~1ull), kBlock}};
    group.new_classes = {{kBlock, 1}};
    for (std::uint32_t i = 0; i < 6; ++i) {
      SsdWrite write;
      write.key = BlockKey::of(1, key_of(i));
      write.place = {0, i, kBlock};
      write.sum = checksum(page.data(), kBlock);
      write.payload = page.data();
      // 0 -> 1 -> 2 -> 0; 3 -> 0; 4 -> 4; 5 is a chain of its own
      if (i < 5) write.parent = i < 3 ? key_of((i + 1) % 3) : i == 3 ? key_of(0) : key_of(4);
      group.writes.push_back(write);
    }
    REQUIRE((*tier)->commit(group));
  }
  pool.open();
  CHECK(pool.node->stats().blocks == 1);
  CHECK(pool.node->stats().store.restored_orphans == 5);
  CHECK(pool.tier(pool.space(1, kBlock), key_of(5)) == kTierSsd);
  pool.check_at_rest();
}

TEST_CASE("node ssd: a pool with an SSD and nothing to do uses no CPU") {
  SsdPool pool(SsdPool::small(2, 8));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 100);
  for (const Hash128& key : keys) pool.put(space, key);
  pool.flush();
  pool.settle();
  const std::clock_t before = std::clock();  // of all threads
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const double used_s = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  CHECK(used_s < 0.05);
}

TEST_CASE("node ssd: only blocks worth it are written, unless all are asked for") {
  NodeOptions options = SsdPool::small(4, 8);
  options.ssd_admit = SsdAdmit::second_use;
  SsdPool pool(options);
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 20);
  for (const Hash128& key : keys) pool.put(space, key);
  pool.flush();
  CHECK(pool.node->stats().ssd_blocks == 0);
  CHECK(pool.gets(space, keys[3]));
  CHECK(pool.put(space, keys[4]) == PutStatus::present);
  pool.flush();
  CHECK(pool.node->stats().ssd_blocks == 2);
  // A chain: the block that is used again takes its parents with it.
  const auto chain = keys_from(100, 5);
  pool.put(space, chain);
  CHECK(pool.put(space, chain[4]) == PutStatus::present);
  pool.flush();
  CHECK(pool.node->stats().ssd_blocks == 7);
}

}  // namespace
}  // namespace kvpool
