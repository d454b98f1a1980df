// A device that fails: every operation says so or goes on without it, the books add up, and what
// cannot be read is a miss that is not asked for again.
#include <algorithm>
#include <atomic>
#include <thread>

#include "node/node.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using test::key_of;
using test::keys_from;
using test::kKiB;
using test::SsdPool;

constexpr std::uint64_t kBlock = 64 * kKiB;

const char* const kPoints[] = {"ssd.write", "ssd.write.short", "ssd.sync",      "ssd.commit",
                               "ssd.read",  "ssd.read.short",  "ssd.read.flip", "ssd.direct"};

// Puts, evictions, gets and leases of chains; then a restart. Everything that is delivered is
// compared on its way.
void live_through(SsdPool& pool, const std::string& point, std::uint64_t times,
                  std::uint64_t skip) {
  Namespace& space = pool.space(1, kBlock);
  pool.node->faults().fail(point, times, skip);
  std::size_t stored = 0;
  for (std::uint64_t chain = 0; chain < 12; ++chain) {
    const auto keys = keys_from(chain * 100, 8);
    for (const PutStatus status : pool.put(space, keys)) {
      REQUIRE((status <= PutStatus::present || status == PutStatus::not_durable));
      ++stored;
    }
    pool.node->flush(test::never_hung());
    pool.node->check_invariants();
  }
  REQUIRE(stored == 96);
  for (std::uint64_t chain = 0; chain < 12; ++chain) {
    const auto keys = keys_from(chain * 100, 8);
    pool.get(space, keys);
    std::vector<Lease> leases(8);
    leases.resize(pool.node->acquire(space, keys, leases.data()));
    for (std::size_t i = 0; i < leases.size(); ++i)
      REQUIRE(test::is_payload(pool.node->arena() + leases[i].offset, kBlock, keys[i]));
    pool.node->release(leases);
    pool.node->check_invariants();
  }
  pool.check_at_rest();
  REQUIRE(pool.node->stats().pinned == 0);
}

TEST_CASE("node ssd fault: each fault at each step is survived, and the books add up") {
  for (const Durability durability : {Durability::async, Durability::durable, Durability::relaxed})
    for (const std::string point : kPoints) {
      std::uint64_t hits = 0;
      for (const std::uint64_t skip : {0, 3, 40})
        for (const std::uint64_t times : {1, 1000}) {
          CAPTURE(point);
          CAPTURE(skip);
          CAPTURE(times);
          NodeOptions options = SsdPool::small(1, 6);
          options.ssd.durability = durability;
          SsdPool pool(options);
          live_through(pool, point, times, skip);
          hits += pool.node->faults().hits(point);
          pool.node->faults().clear();
          const std::uint64_t on_ssd = pool.node->stats().ssd_blocks;
          const bool is_read_only = pool.node->stats().ssd_read_only;
          pool.reopen(/*flushes=*/false);
          const NodeStats after = pool.node->stats();
          if (is_read_only)  // what was taken away since could not be told
            REQUIRE(after.store.restored + after.store.restored_orphans >= on_ssd);
          else
            REQUIRE(after.store.restored + after.store.restored_orphans == on_ssd);
          Namespace& space = pool.space(1, kBlock);
          std::uint64_t delivered = 0;
          for (std::uint64_t chain = 0; chain < 12; ++chain)
            delivered += pool.get(space, keys_from(chain * 100, 8));
          REQUIRE(delivered == after.store.restored);
          pool.check_at_rest();
        }
      // A file in memory may have no O_DIRECT to refuse.
      if (point != "ssd.direct") CHECK_MESSAGE(hits > 0, point);
    }
}

TEST_CASE("node ssd fault: what the device did not take is tried again by a flush") {
  for (const char* point : {"ssd.write", "ssd.commit"}) {
    SsdPool pool(SsdPool::small(4, 8));
    Namespace& space = pool.space(1, kBlock);
    pool.node->faults().fail(point, 2, 0);
    const Hash128 key = key_of(1);
    pool.put(space, key);
    // A flush tries twice, and the first try may have come before it was asked for.
    int refused = 0;
    while (!pool.node->flush(test::never_hung())) {
      CHECK(pool.node->stats().ssd_blocks == 0);
      ++refused;
    }
    CHECK(refused <= 1);
    CHECK(pool.node->stats().ssd_blocks == 1);
    CHECK(pool.node->faults().hits(point) == 2);
    pool.check_at_rest();
  }
}

// One block of many that the device refuses goes with the others that it takes.
TEST_CASE("node ssd fault: a block that was refused beside others goes to another slot") {
  SsdPool pool(SsdPool::small(4, 8));
  Namespace& space = pool.space(1, kBlock);
  pool.node->faults().fail("ssd.write", 1, 3);
  pool.put(space, keys_from(0, 12));
  pool.flush();
  CHECK(pool.node->stats().ssd_blocks == 12);
  CHECK(pool.node->stats().ssd_quarantined == 1);
  pool.check_at_rest();
}

TEST_CASE("node ssd fault: a tier that only reads serves, and lets nobody wait") {
  NodeOptions options = SsdPool::small(2, 8);
  SsdPool pool(options);
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 20);
  pool.put(space, keys);
  pool.flush();
  pool.node->faults().fail("ssd.sync", 1, 0);
  pool.put(space, key_of(500));
  CHECK_FALSE(pool.node->flush(test::never_hung()));
  REQUIRE(pool.node->stats().ssd_read_only);
  // Growing, shrinking and dropping are refused at once; the node lives on.
  for (const std::uint64_t units : {4, 12}) {
    const auto resized = pool.node->resize_ssd(test::capacity_of(units), test::never_hung());
    CHECK_FALSE(resized.has_value());
  }
  CHECK(pool.node->stats().ssd_facts.units == 8);
  CHECK(pool.get(space, keys) == 20);
  CHECK(pool.put(space, key_of(600)) == PutStatus::stored);
  CHECK(pool.node->stats().ssd_queued == 0);
  CHECK_FALSE(pool.node->flush(test::never_hung()));
  CHECK_FALSE(pool.node->drop_namespace(space, test::never_hung()).has_value());
  CHECK(pool.count(space, keys) == 0);
  pool.check_at_rest();
}

// The SSD's copy of a block that also lies in DRAM turns out to be unreadable, and others hang on
// it: it is written anew and the chain stays whole.
TEST_CASE("node ssd fault: an inner block whose copy is unreadable is written again") {
  SsdPool pool(SsdPool::small(4, 8));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 6);
  pool.put(space, keys);
  Namespace& cold = pool.cold(1, kBlock);
  REQUIRE(pool.tier(cold, keys[0]) == kTierSsd);
  // Two readers of one block at once: the lease brings it into DRAM, the other one fails.
  FaultPoints& faults = pool.node->faults();
  faults.pause("ssd.read", std::chrono::minutes(1));
  std::size_t leased = 0, delivered = 0;
  Lease lease;
  std::thread first([&] { leased = pool.node->acquire(cold, {keys.data(), 1}, &lease); });
  test::wait_for_waiter(*pool.node, "ssd.read");
  std::thread second([&] { delivered = pool.get(cold, {keys.data(), 1}); });
  while (faults.waiting("ssd.read") < 2) std::this_thread::yield();
  faults.fail("ssd.read.flip", 1, 0);
  faults.resume("ssd.read");
  first.join();
  second.join();
  CHECK(leased + delivered == 1);  // one of them met the flipped byte
  if (leased == 1) pool.node->release({&lease, 1});
  pool.node->check_invariants();
  pool.flush();
  pool.check_at_rest();
  if (leased == 1) {
    CHECK(pool.get(cold, keys) == 6);
    CHECK(pool.node->stats().ssd_blocks == 6);
    // Where the lease came last, its bytes were the proof that the slot is good.
    CHECK(pool.node->stats().ssd_quarantined == pool.node->stats().store.ssd_lost);
    pool.reopen(/*flushes=*/false);
    CHECK(pool.node->stats().store.restored_orphans == 0);
    CHECK(pool.get(pool.space(1, kBlock), keys) == 6);
  }
}

// A read takes so long that its block has moved, and another lies where it was, or nothing does any
// more: neither is the device's fault.
TEST_CASE("node ssd fault: a slot that is read too late is not taken for damaged") {
  for (const bool is_cut_off : {false, true}) {
    CAPTURE(is_cut_off);
    SsdPool pool(SsdPool::small(2, 8));
    const auto keys = keys_from(0, 100);
    for (const Hash128& key : keys) {
      pool.put(pool.space(1, kBlock), key);
      pool.flush();
    }
    Namespace& cold = pool.cold(1, kBlock);
    const Hash128 last = keys.back();  // lies in the slab that is furthest behind
    REQUIRE(pool.tier(cold, last) == kTierSsd);
    FaultPoints& faults = pool.node->faults();
    faults.pause("ssd.read", std::chrono::minutes(1), 1);
    std::size_t delivered = 0;
    std::thread reader([&] { delivered = pool.get(cold, {&last, 1}); });
    test::wait_for_waiter(*pool.node, "ssd.read");
    REQUIRE(pool.node->resize_ssd(test::capacity_of(2), test::never_hung()).has_value());
    if (!is_cut_off) {
      REQUIRE(pool.node->resize_ssd(test::capacity_of(8), test::never_hung()).has_value());
      for (const Hash128& key : keys_from(1000, 150)) {
        pool.put(cold, key);
        pool.flush();
      }
    }
    faults.resume("ssd.read");
    reader.join();
    CHECK(delivered == 1);
    const NodeStats stats = pool.node->stats();
    CHECK(stats.ssd.damaged == 0);
    CHECK(stats.ssd.read_faults == 0);
    CHECK(stats.store.ssd_lost == 0);
    pool.check_at_rest();
  }
}

TEST_CASE("node ssd fault: a shrink goes past slots that are damaged or quarantined") {
  for (const Durability durability : {Durability::async, Durability::relaxed}) {
    NodeOptions options = SsdPool::small(2, 8);
    options.ssd.durability = durability;
    SsdPool pool(options);
    Namespace& space = pool.space(1, kBlock);
    const auto keys = keys_from(0, 200);
    pool.node->faults().fail("ssd.write", 3, 170);
    for (const Hash128& key : keys) {
      pool.put(space, key);
      pool.node->flush(test::never_hung());
    }
    REQUIRE(pool.node->stats().ssd_quarantined == 3);
    // Some of what must move cannot be read.
    pool.node->faults().fail("ssd.read", 4, 2);
    const auto resized = pool.node->resize_ssd(test::capacity_of(4), test::never_hung());
    REQUIRE(resized.has_value());
    CHECK(*resized == test::capacity_of(4));
    pool.check_at_rest();
    const NodeStats stats = pool.node->stats();
    CHECK(stats.ssd_facts.units <= 4);
    CHECK(stats.store.ssd_lost == 4);
    CHECK(stats.ssd_read_only == false);
    CHECK(stats.ssd_blocks > 60);
    for (const Hash128& key : keys) pool.get(space, {&key, 1});
    pool.options.ssd.capacity_bytes = 0;
    pool.reopen(/*flushes=*/false);
    CHECK(pool.node->stats().ssd_facts.units <= 4);
    for (const Hash128& key : keys) pool.get(pool.space(1, kBlock), {&key, 1});
  }
}

// What is being written is pinned: never so much of DRAM that puts find nothing to evict.
TEST_CASE("node ssd fault: a device that takes its time does not hold up puts") {
  for (const std::uint64_t blocks_limit : {0, 16}) {
    NodeOptions options = SsdPool::small(1, 8);
    options.store.blocks_limit = blocks_limit;
    SsdPool pool(options);
    Namespace& space = pool.space(1, kBlock);
    FaultPoints& faults = pool.node->faults();
    faults.pause("ssd.write", std::chrono::minutes(1));
    // All that DRAM holds at once, so that they come into one group if they may.
    pool.put(space, keys_from(0, blocks_limit == 0 ? 32 : blocks_limit));
    test::wait_for_waiter(*pool.node, "ssd.write");
    for (std::uint64_t n = 100; n < 200; ++n)
      CHECK(pool.put(space, key_of(n)) == PutStatus::stored);
    CHECK(pool.node->stats().store.evicted_unwritten > 0);
    faults.clear();
    pool.flush();
    pool.check_at_rest();
  }
}

TEST_CASE("node ssd fault: who wants a block that somebody else is reading waits for it") {
  SsdPool pool(SsdPool::small(4, 8));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 4);
  pool.put(space, keys);
  Namespace& cold = pool.cold(1, kBlock);
  FaultPoints& faults = pool.node->faults();
  faults.pause("ssd.read", std::chrono::minutes(1));
  std::atomic<std::size_t> leased{0}, delivered{0};
  const auto lease_all = [&] {
    std::vector<Lease> leases(4);
    leases.resize(pool.node->acquire(cold, keys, leases.data()));
    leased += leases.size();
    pool.node->release(leases);
  };
  std::thread first(lease_all);
  test::wait_for_waiter(*pool.node, "ssd.read");
  std::thread second(lease_all);
  std::thread third([&] { delivered += pool.get(cold, keys); });
  while (pool.node->stats().pinned < 12) std::this_thread::yield();
  faults.clear();
  first.join();
  second.join();
  third.join();
  CHECK(leased == 8);
  CHECK(delivered == 4);
  pool.check_at_rest();
}

TEST_CASE(
    "node ssd fault: a device that does not answer in time is a miss, and is cleaned up after") {
  NodeOptions options = SsdPool::small(4, 8);
  options.ssd_timeout = std::chrono::milliseconds(20);
  SsdPool pool(options);
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 8);
  pool.put(space, keys);
  Namespace& cold = pool.cold(1, kBlock);
  pool.node->faults().pause("ssd.read", std::chrono::minutes(1));
  CHECK(pool.get(cold, keys) == 0);
  std::vector<Lease> leases(8);
  CHECK(pool.node->acquire(cold, keys, leases.data()) == 0);
  CHECK(pool.node->stats().pinned > 0);
  CHECK(pool.node->stats().ssd_timeouts > 0);
  pool.node->faults().clear();
  while (pool.node->stats().pinned > 0) std::this_thread::yield();
  pool.check_at_rest();
  CHECK(pool.get(cold, keys) == 8);
}

}  // namespace
}  // namespace kvpool
