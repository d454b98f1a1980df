// What a node promises to one caller: the bytes that were put or a miss, readable on return, pinned
// while read, and an answer that says why when a block is not stored.
#include <algorithm>
#include <future>

#include "node/node.h"
#include "node_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::key_of;
using test::keys_from;
using test::kKiB;
using test::kMiB;
using test::Pool;

constexpr std::uint64_t kBlock = 64 * kKiB;

bool all_are(const std::vector<PutStatus>& statuses, PutStatus wanted) {
  return std::all_of(statuses.begin(), statuses.end(), [&](PutStatus s) { return s == wanted; });
}

TEST_CASE("node: what put answered stored is there, whole, for everybody at once") {
  test::Random random("node sizes");
  Pool pool(Pool::plain(64 * kMiB));
  std::uint64_t n = 0;
  for (const std::uint64_t bytes : {1ul, 7ul, 4095ul, 4096ul, 4097ul, 65'537ul, 3'460'300ul}) {
    Namespace& space = pool.space(bytes, bytes);
    const auto keys = keys_from(n, 3);
    n += 3;
    REQUIRE(all_are(pool.put(space, keys), PutStatus::stored));
    CHECK(pool.node->lookup(space, keys, nullptr) == 3);
    CHECK(pool.get(space, keys) == 3);
    CHECK(std::async(std::launch::async, [&] { return pool.get(space, keys); }).get() == 3);
    REQUIRE(all_are(pool.put(space, keys), PutStatus::present));
  }
  CHECK(pool.node->stats().blocks == n);
  pool.check_at_rest();
}

TEST_CASE("node: get and lookup stop at the first block that is not there") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, 4 * kKiB);
  const auto keys = keys_from(0, 400);
  REQUIRE(all_are(pool.put(space, keys), PutStatus::stored));
  REQUIRE(pool.node->remove(space, {&keys[300], 1}) == 1);
  CHECK(pool.get(space, keys) == 300);
  CHECK(pool.node->lookup(space, keys, nullptr) == 300);
  CHECK(pool.get(space, std::span(keys).subspan(301)) == 99);
  CHECK(pool.get(space, {}) == 0);
  std::vector<Lease> leases(keys.size());
  CHECK(pool.node->acquire(space, keys, leases.data()) == 300);
  pool.node->release(std::span(leases).first(300));
  CHECK(pool.node->remove(space, keys) == 399);
  CHECK(pool.get(space, keys) == 0);
  pool.check_at_rest();
}

TEST_CASE("node: the same key in two namespaces names two blocks") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace &one = pool.space(1, kBlock), &other = pool.space(2, kBlock);
  REQUIRE(pool.put(one, key_of(1), nullptr, 10) == PutStatus::stored);
  CHECK_FALSE(pool.has(other, key_of(1)));
  REQUIRE(pool.put(other, key_of(1), nullptr, 20) == PutStatus::stored);
  const Hash128 key = key_of(1);
  CHECK(pool.get(one, {&key, 1}, 10) == 1);
  CHECK(pool.get(other, {&key, 1}, 20) == 1);
  CHECK(pool.node->remove(one, {&key, 1}) == 1);
  CHECK(pool.get(other, {&key, 1}, 20) == 1);
}

TEST_CASE("node: a pinned block keeps its bytes through remove and drop and resize and pressure") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace &space = pool.space(1, kBlock), &others = pool.space(2, kBlock),
            &long_ones = pool.space(3, 2 * kMiB);
  const auto keys = keys_from(0, 40);
  REQUIRE(all_are(pool.put(space, keys), PutStatus::stored));
  std::vector<Lease> leases(keys.size());
  REQUIRE(pool.node->acquire(space, keys, leases.data()) == keys.size());
  const auto unchanged = [&] {
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (!test::is_payload(pool.node->arena() + leases[i].offset, leases[i].bytes, keys[i]))
        return false;
    return true;
  };
  REQUIRE(pool.node->remove(space, std::span(keys).first(10)) == 10);
  CHECK(unchanged());
  // The keys that are free again get other bytes, in other slots.
  REQUIRE(all_are(pool.put(space, std::span(keys).first(10), nullptr, 5), PutStatus::stored));
  CHECK(unchanged());
  for (std::uint64_t n = 0; n < 500; ++n) pool.put(others, key_of(1000 + n));
  for (std::uint64_t n = 0; n < 20; ++n) pool.put(long_ones, key_of(2000 + n));
  CHECK(unchanged());
  REQUIRE(pool.node->resize(4 * kMiB, 0, test::never_hung()));
  pool.settle();
  CHECK(unchanged());
  pool.node->drop_namespace(space, test::never_hung());
  pool.settle();
  pool.node->trim();
  CHECK(unchanged());
  pool.node->check_invariants();
  CHECK(pool.node->stats().pinned == keys.size());
  pool.node->release(leases);
  pool.check_at_rest();
  CHECK(pool.node->stats().bytes_committed <= 4 * kMiB);
}

TEST_CASE("node: the slot of a removed block is used again only after its last release") {
  Pool pool(Pool::plain(2 * kMiB));  // one slab of 32 slots
  Namespace& space = pool.space(1, kBlock);
  REQUIRE(all_are(pool.put(space, keys_from(0, 32)), PutStatus::stored));
  const Hash128 key = key_of(0);
  Lease first, second;
  REQUIRE(pool.node->acquire(space, {&key, 1}, &first) == 1);
  REQUIRE(pool.node->acquire(space, {&key, 1}, &second) == 1);
  REQUIRE(pool.node->remove(space, {&key, 1}) == 1);
  CHECK(pool.node->stats().zombies == 1);
  pool.node->release({&first, 1});
  for (std::uint64_t n = 100; n < 200; ++n) {
    REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
    REQUIRE(test::is_payload(pool.node->arena() + second.offset, kBlock, key));
  }
  CHECK(pool.node->stats().blocks == 31);
  pool.node->release({&second, 1});
  CHECK(pool.node->stats().zombies == 0);
  for (std::uint64_t n = 200; n < 232; ++n)
    REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
  CHECK(pool.node->stats().blocks == 32);
  pool.check_at_rest();
}

TEST_CASE("node: a pool full of pins says so, and takes blocks again after a release") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 32);
  REQUIRE(all_are(pool.put(space, keys), PutStatus::stored));
  std::vector<Lease> leases(32);
  REQUIRE(pool.node->acquire(space, keys, leases.data()) == 32);
  for (int i = 0; i < 5; ++i) CHECK(pool.put(space, key_of(99)) == PutStatus::pool_pinned);
  CHECK(pool.get(space, keys) == 32);
  CHECK(pool.node->stats().not_stored == 5);
  pool.node->release(std::span(leases).last(1));
  CHECK(pool.put(space, key_of(99)) == PutStatus::stored);
  CHECK_FALSE(pool.has(space, keys[31]));
  CHECK(pool.put(space, key_of(98)) == PutStatus::stored);  // 99 goes for it
  pool.node->release(std::span(leases).first(31));
  pool.check_at_rest();
}

// A chain longer than the pool: the blocks of the call itself are never evicted for its later ones.
TEST_CASE("node: a chain longer than the pool keeps its head and says where it broke") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  REQUIRE(all_are(pool.put(space, keys_from(500, 20)), PutStatus::stored));
  const auto keys = keys_from(0, 40);
  const auto statuses = pool.put(space, keys);
  CHECK(std::count(statuses.begin(), statuses.end(), PutStatus::stored) == 32);
  CHECK(statuses[32] == PutStatus::pool_pinned);
  CHECK(all_are({statuses.begin() + 33, statuses.end()}, PutStatus::chain_broken));
  CHECK(pool.get(space, keys) == 32);
  pool.check_at_rest();
}

TEST_CASE("node: never more blocks than the limit, to the block") {
  for (const std::uint64_t limit : {1ul, 2ul, 10ul, 100ul}) {
    CAPTURE(limit);
    Pool pool(Pool::plain(16 * kMiB, limit));
    Namespace &small = pool.space(1, 4 * kKiB), &large = pool.space(2, kBlock);
    std::uint64_t most = 0;
    for (std::uint64_t n = 0; n < 300; ++n) {
      pool.put(n % 3 == 0 ? large : small, key_of(n));
      most = std::max(most, pool.node->stats().blocks);
    }
    CHECK(most == limit);
    CHECK(pool.node->stats().blocks == limit);
    REQUIRE(pool.node->resize(16 * kMiB, (limit + 1) / 2, test::never_hung()));
    CHECK(pool.node->stats().blocks == (limit + 1) / 2);
    REQUIRE(pool.node->resize(16 * kMiB, 0, test::never_hung()));
    for (std::uint64_t n = 1000; n < 1150; ++n) pool.put(small, key_of(n));
    CHECK(pool.node->stats().blocks == (limit + 1) / 2 + 150);
    pool.check_at_rest();
  }
}

TEST_CASE("node: a reservation counts against the limit of blocks") {
  Pool pool(Pool::plain(16 * kMiB, 2));
  Namespace& space = pool.space(1, kBlock);
  Ticket tickets[3];
  for (std::uint64_t i = 0; i < 3; ++i) {
    const Hash128 key = key_of(i);
    const auto status =
        pool.node->reserve({space, {&key, 1}, nullptr, test::never_hung()}, tickets[i]);
    CHECK(status == (i < 2 ? PutStatus::stored : PutStatus::pool_pinned));
  }
  pool.node->abort(tickets[0]);
  pool.node->abort(tickets[1]);
  pool.check_at_rest();
}

TEST_CASE("node: dropping makes every key a miss at once, and the memory comes back") {
  Pool pool(Pool::plain(64 * kMiB));
  Namespace &space = pool.space(1, 4 * kKiB), &other = pool.space(2, 4 * kKiB);
  const auto keys = keys_from(0, 8'000);
  REQUIRE(all_are(pool.put(space, keys), PutStatus::stored));
  REQUIRE(all_are(pool.put(other, keys), PutStatus::stored));
  CHECK(pool.node->drop_namespace(space, test::never_hung()).value() == 8'000);
  CHECK(pool.node->lookup(space, keys, nullptr) == 0);
  CHECK(pool.get(space, std::span(keys).subspan(4'000)) == 0);
  CHECK(pool.node->drop_namespace(space, test::never_hung()).value() == 0);
  CHECK(pool.get(other, keys) == 8'000);
  pool.settle();
  CHECK(pool.node->stats().blocks == 8'000);
  CHECK(pool.node->stats().bytes_taken == 8'000 * 4 * kKiB);
  REQUIRE(all_are(pool.put(space, std::span(keys).first(100), nullptr, 9), PutStatus::stored));
  CHECK(pool.get(space, std::span(keys).first(100), 9) == 100);
  pool.check_at_rest();
}

TEST_CASE("node: a reservation across a drop is dropped, and so is a chain") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const Hash128 key = key_of(1);
  Ticket ticket;
  REQUIRE(pool.node->reserve({space, {&key, 1}, nullptr, test::never_hung()}, ticket) ==
          PutStatus::stored);
  pool.node->drop_namespace(space, test::never_hung());
  CHECK(pool.put(space, key, nullptr, 2) == PutStatus::stored);  // the new incarnation is another
  CHECK(pool.node->commit(ticket, {}, test::never_hung()) == PutStatus::dropped);
  CHECK(pool.get(space, {&key, 1}, 2) == 1);

  struct DropsAtTwo final : BlockSource {
    DropsAtTwo(Pool& p, Namespace& s) : pool(p), space(s) {}
    bool fill(std::size_t index, std::byte*, Hash128&) override {
      if (index == 2) pool.node->drop_namespace(space, test::never_hung());
      return true;
    }
    Pool& pool;
    Namespace& space;
  } source(pool, space);
  const auto keys = keys_from(10, 5);
  std::vector<PutStatus> statuses(5);
  pool.node->put({space, keys, nullptr, test::never_hung()}, source, statuses.data());
  CHECK(statuses[1] == PutStatus::stored);
  CHECK(statuses[2] == PutStatus::dropped);
  CHECK(statuses[3] == PutStatus::chain_broken);
  CHECK(pool.node->lookup(space, keys, nullptr) == 0);
  CHECK_FALSE(pool.has(space, keys[3]));
  pool.check_at_rest();
  CHECK(pool.node->stats().blocks == 0);
}

TEST_CASE("node: a second writer of a key waits, and finds it present") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  pool.node->faults().pause("put.copy", 60s);
  auto first = std::async(std::launch::async, [&] { return pool.put(space, key_of(1)); });
  test::wait_for_waiter(*pool.node, "put.copy");
  CHECK_FALSE(pool.has(space, key_of(1)));
  CHECK(pool.node->stats().reserved == 1);
  auto second = std::async(std::launch::async, [&] { return pool.put(space, key_of(1)); });
  pool.node->faults().resume("put.copy");
  CHECK(first.get() == PutStatus::stored);
  CHECK(second.get() == PutStatus::present);
  pool.check_at_rest();
  CHECK(pool.node->stats().blocks == 1);
}

TEST_CASE("node: a writer that gives up is taken over by the one that waits") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const Hash128 key = key_of(1);
  Ticket ticket;
  REQUIRE(pool.node->reserve({space, {&key, 1}, nullptr, test::never_hung()}, ticket) ==
          PutStatus::stored);
  std::vector<std::future<PutStatus>> others;
  for (int i = 0; i < 3; ++i)
    others.push_back(std::async(std::launch::async, [&] { return pool.put(space, key); }));
  pool.node->abort(ticket);
  int stored = 0;
  for (auto& other : others) {
    const PutStatus status = other.get();
    CHECK(status <= PutStatus::present);
    stored += status == PutStatus::stored;
  }
  CHECK(stored == 1);
  CHECK(pool.get(space, {&key, 1}) == 1);
  pool.check_at_rest();
}

TEST_CASE("node: a writer waits no longer than its deadline") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 3);
  Ticket ticket;
  REQUIRE(pool.node->reserve({space, {&keys[1], 1}, nullptr, test::never_hung()}, ticket) ==
          PutStatus::stored);
  for (const auto wait : {-1000ms, 0ms, 30ms}) {
    test::KeySource source(keys, kBlock);
    std::vector<PutStatus> statuses(3);
    const auto deadline = test::after(wait);
    pool.node->put({space, keys, nullptr, deadline}, source, statuses.data());
    CHECK(std::chrono::steady_clock::now() >= deadline);
    CHECK(statuses[0] <= PutStatus::present);
    CHECK(statuses[1] == PutStatus::timed_out);
    CHECK(statuses[2] == PutStatus::chain_broken);
    Ticket second;
    CHECK(pool.node->reserve({space, {&keys[1], 1}, &keys[0], deadline}, second) ==
          PutStatus::timed_out);
    CHECK(pool.node->stats().pinned == 0);
  }
  pool.node->abort(ticket);
  CHECK(all_are(pool.put(space, std::span(keys).subspan(1)), PutStatus::stored));
  pool.check_at_rest();
}

TEST_CASE("node: a source that fails leaves no block, and breaks the chain there") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 4);
  test::KeySource source(keys, kBlock);
  source.refuses = true;
  std::vector<PutStatus> statuses(4);
  pool.node->put({space, keys, nullptr, test::never_hung()}, source, statuses.data());
  CHECK(statuses[0] == PutStatus::failed);
  CHECK(all_are({statuses.begin() + 1, statuses.end()}, PutStatus::chain_broken));
  CHECK(source.filled == 1);
  CHECK_FALSE(pool.has(space, keys[0]));
  CHECK(pool.node->stats().bytes_taken == 0);
  CHECK(all_are(pool.put(space, keys), PutStatus::stored));
  pool.check_at_rest();
}

TEST_CASE("node: a reservation filled in place is readable once it is committed") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 2);
  REQUIRE(pool.put(space, keys[0]) == PutStatus::stored);
  Ticket ticket;
  REQUIRE(pool.node->reserve({space, {&keys[1], 1}, &keys[0], test::never_hung()}, ticket) ==
          PutStatus::stored);
  CHECK(pool.node->stats().pinned == 1);  // its parent stays while it is written
  const auto made = test::payload_of(keys[1], kBlock);
  racy_fill(pool.node->slot(ticket), made.data(), kBlock);
  CHECK_FALSE(pool.has(space, keys[1]));
  CHECK(pool.node->commit(ticket, {}, test::never_hung()) == PutStatus::stored);
  CHECK(pool.get(space, keys) == 2);
  Ticket again;
  CHECK(pool.node->reserve({space, {&keys[1], 1}, &keys[0], test::never_hung()}, again) ==
        PutStatus::present);
  pool.check_at_rest();
}

TEST_CASE("node: a closed pool refuses puts, ends waits, and lets what is held go") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 2);
  Lease lease;
  Ticket ticket;
  REQUIRE(pool.put(space, keys[0]) == PutStatus::stored);
  REQUIRE(pool.node->acquire(space, {&keys[0], 1}, &lease) == 1);
  REQUIRE(pool.node->reserve({space, {&keys[1], 1}, nullptr, test::never_hung()}, ticket) ==
          PutStatus::stored);
  auto waiting = std::async(std::launch::async, [&] { return pool.put(space, keys[1]); });
  pool.node->close({});
  CHECK(waiting.get() == PutStatus::failed);
  CHECK(pool.put(space, key_of(9)) == PutStatus::failed);
  CHECK(test::is_payload(pool.node->arena() + lease.offset, kBlock, keys[0]));
  pool.node->release({&lease, 1});
  pool.node->abort(ticket);
  pool.node->check_invariants();
  pool.node->close({});
  CHECK(pool.node->is_closed());
}

}  // namespace
}  // namespace kvpool
