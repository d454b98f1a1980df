// What the node says it was asked is what it was asked, to the block.
#include <atomic>
#include <random>
#include <thread>

#include "node/traffic.h"
#include "node_ssd_cases.h"
#include "traffic_cases.h"

namespace kvpool {
namespace {

using test::key_of;
using test::keys_from;
using test::kKiB;
using test::kMiB;
using test::Pool;
using test::Tally;
using test::traffic_of;

constexpr std::uint64_t kBlock = 64 * kKiB;

std::uint64_t missed(const TrafficTotals& totals, Miss why) { return totals.missed_for(why); }

TEST_CASE("traffic: every call is counted once, by what became of its blocks") {
  Pool pool(Pool::plain(8 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Namespace& other = pool.space(2, 4 * kKiB);
  pool.put(space, keys_from(0, 10));
  pool.put(space, keys_from(5, 10));
  CHECK(pool.node->lookup(space, keys_from(0, 20), nullptr) == 15);
  CHECK(pool.node->lookup(space, keys_from(0, 3), nullptr) == 3);
  CHECK(pool.get(space, keys_from(10, 10)) == 5);
  std::vector<Lease> leases(4);
  CHECK(pool.node->acquire(space, keys_from(0, 4), leases.data()) == 4);
  pool.node->release(leases);
  CHECK(pool.node->acquire(space, keys_from(90, 2), leases.data()) == 0);

  const TrafficTotals totals = traffic_of(*pool.node, space);
  test::check_sums(totals);
  CHECK(totals.lookups == 2);
  CHECK(totals.lookup_blocks == 23);
  CHECK(totals.lookup_dram == 18);
  CHECK(totals.lookup_missed == 1);
  CHECK(totals.lookup_behind == 4);
  CHECK(totals.gets == 3);
  CHECK(totals.get_blocks == 16);
  CHECK(totals.loaded_dram == 9);
  CHECK(totals.views == 2);
  CHECK(totals.view_blocks == 4);
  CHECK(missed(totals, Miss::absent) == 2);
  CHECK(missed(totals, Miss::behind) == 5);
  CHECK(totals.put_blocks == 20);
  CHECK(totals.put_as(PutStatus::stored) == 15);
  CHECK(totals.put_as(PutStatus::present) == 5);
  CHECK(traffic_of(*pool.node, other).put_blocks == 0);

  const NodeStats stats = pool.node->stats();
  CHECK(stats.gets == 1);
  CHECK(stats.get_blocks == 5);
  CHECK(stats.get_bytes == 5 * kBlock);
  CHECK(stats.put_bytes == 15 * kBlock);
  CHECK(stats.not_stored == 0);
}

TEST_CASE("traffic: a reservation counts when it is known what became of it") {
  Pool pool(Pool::plain(8 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Ticket ticket;
  const auto reserve = [&](std::uint64_t n) {
    const Hash128 key = key_of(n);
    return pool.node->reserve({space, {&key, 1}, nullptr, test::never_hung()}, ticket);
  };
  REQUIRE(reserve(1) == PutStatus::stored);
  CHECK(traffic_of(*pool.node, space).put_blocks == 0);
  CHECK(pool.node->commit(ticket, {}, test::never_hung()) == PutStatus::stored);
  CHECK(reserve(1) == PutStatus::present);
  REQUIRE(reserve(2) == PutStatus::stored);
  pool.node->abort(ticket);
  REQUIRE(reserve(3) == PutStatus::stored);
  REQUIRE(pool.node->drop_namespace(space, test::never_hung()).has_value());
  CHECK(pool.node->commit(ticket, {}, test::never_hung()) == PutStatus::dropped);

  const TrafficTotals totals = traffic_of(*pool.node, space);
  test::check_sums(totals);
  CHECK(totals.put_blocks == 4);
  for (const auto status :
       {PutStatus::stored, PutStatus::present, PutStatus::failed, PutStatus::dropped})
    CHECK(totals.put_as(status) == 1);
  CHECK(pool.node->stats().not_stored == 2);
}

TEST_CASE("traffic: a drop leaves the counters of the namespace as they are") {
  Pool pool(Pool::plain(8 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  pool.put(space, keys_from(0, 4));
  pool.get(space, keys_from(0, 4));
  REQUIRE(pool.node->drop_namespace(space, test::never_hung()).has_value());
  CHECK(pool.get(space, keys_from(0, 4)) == 0);
  const TrafficTotals totals = traffic_of(*pool.node, space);
  CHECK(totals.gets == 2);
  CHECK(totals.loaded_dram == 4);
  CHECK(missed(totals, Miss::absent) == 1);
  CHECK(missed(totals, Miss::behind) == 3);
  CHECK(totals.put_as(PutStatus::stored) == 4);
}

TEST_CASE("traffic: blocks of the SSD count as such, until they are in DRAM") {
  test::SsdPool pool(test::SsdPool::small(8, 8));
  pool.put(pool.space(1, kBlock), keys_from(0, 6));
  Namespace& space = pool.cold(1, kBlock);
  std::vector<std::uint8_t> tiers(8);
  CHECK(pool.node->lookup(space, keys_from(0, 8), tiers.data()) == 6);
  CHECK(pool.get(space, keys_from(0, 2)) == 2);
  std::vector<Lease> leases(2);
  CHECK(pool.node->acquire(space, keys_from(2, 2), leases.data()) == 2);
  pool.node->release(leases);
  CHECK(pool.get(space, keys_from(2, 2)) == 2);  // a lease brings them to DRAM
  const TrafficTotals totals = traffic_of(*pool.node, space);
  test::check_sums(totals);
  CHECK(totals.lookup_ssd == 6);
  CHECK(totals.lookup_dram == 0);
  CHECK(totals.loaded_ssd == 4);
  CHECK(totals.loaded_dram == 2);
  CHECK(pool.node->stats().ssd_hits == 4);
}

// One thread at anything, and what it was told.
class Asker {
 public:
  Asker(Pool& pool, std::span<Namespace* const> spaces, std::uint64_t seed)
      : pool_(pool), spaces_(spaces), engine_(seed), tallies(spaces.size()) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) step();
  }

 private:
  std::uint64_t below(std::uint64_t end) { return engine_() % end; }

  void step() {
    const std::size_t which = below(spaces_.size());
    Namespace& space = *spaces_[which];
    const auto keys = keys_from(below(120), 1 + below(8));
    switch (below(8)) {
      case 0:
      case 1:
        return put(space, keys, tallies[which]);
      case 2:
        return reserve(space, keys[0], tallies[which]);
      case 3:
        return acquire(space, keys, tallies[which]);
      case 4:
        return arm();
      case 5:
        if (below(20) == 0) (void)pool_.node->drop_namespace(space, test::never_hung());
        return tallies[which].looked(keys.size(), pool_.node->lookup(space, keys, nullptr));
      default:
        return get(space, keys, tallies[which]);
    }
  }
  void put(Namespace& space, std::span<const Hash128> keys, Tally& tally) {
    test::KeySource source(keys, space.block_bytes);
    source.refuses = below(10) == 0;
    std::vector<PutStatus> statuses(keys.size());
    pool_.node->put({space, keys, nullptr, test::after(std::chrono::milliseconds(below(20)))},
                    source, statuses.data());
    tally.put(statuses);
  }
  void reserve(Namespace& space, const Hash128& key, Tally& tally) {
    Ticket ticket;
    const PutStatus status = pool_.node->reserve(
        {space, {&key, 1}, nullptr, test::after(std::chrono::milliseconds(1))}, ticket);
    if (status != PutStatus::stored) return tally.put(status);
    test::make_payload(pool_.node->slot(ticket), space.block_bytes, key);
    if (below(3) != 0) return tally.put(pool_.node->commit(ticket, {}, test::never_hung()));
    pool_.node->abort(ticket);
    tally.put(PutStatus::failed);
  }
  void acquire(Namespace& space, std::span<const Hash128> keys, Tally& tally) {
    std::vector<Lease> leases(keys.size());
    Miss why{};
    leases.resize(pool_.node->acquire(space, keys, leases.data(), &why));
    tally.got(keys.size(), leases.size(), why);
    pool_.node->release(leases);
  }
  void get(Namespace& space, std::span<const Hash128> keys, Tally& tally) {
    test::KeySink sink(keys, space.block_bytes);
    Miss why{};
    const std::size_t done = pool_.node->get(space, keys, sink, &why);
    wrong += sink.wrong;
    tally.got(keys.size(), done, why);
  }
  void arm() {
    constexpr const char* kPoints[] = {"get.lookup", "get.copy",  "get.acquire", "get.deliver",
                                       "put.copy",   "put.pages", "put.commit",  "put.reserve"};
    pool_.node->faults().fail(kPoints[below(std::size(kPoints))], 1 + below(4), below(4));
  }

  Pool& pool_;
  std::span<Namespace* const> spaces_;
  std::mt19937_64 engine_;

 public:
  std::vector<Tally> tallies;
  std::uint64_t wrong = 0;
};

TEST_CASE("traffic: threads, faults, evictions and drops: every block that was asked for is told") {
  test::Random random("traffic threads");
  // A third of what there is to put: between two drops some always has to go.
  Pool pool(Pool::plain(3 * kMiB));
  Namespace* const spaces[] = {&pool.space(1, kBlock), &pool.space(2, 20 * kKiB)};
  std::vector<Asker> askers;
  for (int i = 0; i < 6; ++i) askers.emplace_back(pool, spaces, random.engine()());
  std::vector<std::thread> threads;
  for (Asker& asker : askers) threads.emplace_back([&] { asker.run(test::scaled(3000)); });
  for (std::thread& thread : threads) thread.join();
  pool.node->faults().clear();
  NodeStats expected;
  for (std::size_t which = 0; which < std::size(spaces); ++which) {
    CAPTURE(which);
    Tally tally;
    for (const Asker& asker : askers) tally.add(asker.tallies[which]);
    const TrafficTotals totals = traffic_of(*pool.node, *spaces[which]);
    test::check_blocks(totals, tally);
    CHECK(totals.gets == tally.gets);
    CHECK(totals.loaded_ssd == 0);
    expected.missed_absent += tally.missed[static_cast<std::size_t>(Miss::absent)];
    expected.missed_fault += tally.missed[static_cast<std::size_t>(Miss::fault)];
    expected.gets += tally.gets - totals.views;
    expected.get_blocks += tally.loaded - totals.view_blocks;
    expected.put_bytes += tally.put_status[0] * spaces[which]->block_bytes;
  }
  const NodeStats stats = pool.node->stats();
  CHECK(stats.missed_absent == expected.missed_absent);
  CHECK(stats.missed_fault == expected.missed_fault);
  CHECK(stats.gets == expected.gets);
  CHECK(stats.get_blocks == expected.get_blocks);
  CHECK(stats.put_bytes == expected.put_bytes);
  CHECK(stats.store.evictions > 0);
  for (const Asker& asker : askers) CHECK(asker.wrong == 0);
  pool.check_at_rest();
}

// --- pages of clients ----------------------------------------------------------------------------

struct AttachedPage {
  Pool& pool;
  std::unique_ptr<ClientPage> page = std::make_unique<ClientPage>();
  explicit AttachedPage(Pool& of) : pool(of) {
    page->traffic.in_use = ~std::uint64_t{0};
    pool.node->attach(*page);
  }
  ~AttachedPage() { pool.node->detach(*page); }
  void say(std::uint32_t row, std::uint32_t word, std::uint64_t value) const {
    page->traffic[row][word] = value;
  }
};

TEST_CASE("traffic: what a client counts in its page is of the namespace, also when it has left") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  {
    const AttachedPage client(pool);
    client.say(5, TrafficRow::space, space.number + 1);
    client.say(5, TrafficRow::lookups, 2);
    client.say(5, TrafficRow::lookup_dram, 30);
    client.say(5, TrafficRow::lookup_ssd, 4);
    client.say(5, TrafficRow::lookup_missed, 1);
    client.say(5, TrafficRow::lookup_behind, 7);
    client.say(5, TrafficRow::gets, 3);
    client.say(5, TrafficRow::loaded, 20);
    TrafficTotals totals = traffic_of(*pool.node, space);
    test::check_sums(totals);
    CHECK(totals.lookup_blocks == 42);
    CHECK(totals.get_blocks == 20);
    CHECK(pool.node->client_totals(*client.page).get_bytes == 20 * kBlock);
    client.say(5, TrafficRow::views, 2);
    client.say(5, TrafficRow::view_blocks, 5);
    client.say(5, TrafficRow::missed + static_cast<std::uint32_t>(Miss::pin_limit), 1);
    client.say(5, TrafficRow::missed + static_cast<std::uint32_t>(Miss::behind), 6);
    client.say(5, TrafficRow::loaded, 21);
    client.say(9, TrafficRow::space, 77);  // there is no such namespace
    client.say(9, TrafficRow::gets, 10);
    client.say(9, TrafficRow::loaded, 100);
    client.say(63, TrafficRow::space, TrafficRow::kAnySpace);
    client.say(63, TrafficRow::loaded, 1000);
  }
  const TrafficTotals totals = traffic_of(*pool.node, space);
  test::check_sums(totals);
  CHECK(totals.gets == 5);
  CHECK(totals.loaded_dram == 26);
  CHECK(totals.view_blocks == 5);
  CHECK(totals.get_blocks == 33);
  CHECK(missed(totals, Miss::pin_limit) == 1);
  const NodeStats stats = pool.node->stats();
  CHECK(stats.gets == 13);
  CHECK(stats.get_blocks == 1121);
  CHECK(stats.get_bytes == 21 * kBlock);
  CHECK(stats.views == 2);
  CHECK(stats.view_blocks == 5);
}

TEST_CASE("traffic: what a client takes back, or counts beyond all measure, tells nothing") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const AttachedPage client(pool);
  client.say(0, TrafficRow::space, space.number + 1);
  client.say(0, TrafficRow::loaded, 50);
  CHECK(traffic_of(*pool.node, space).loaded_dram == 50);
  client.say(0, TrafficRow::loaded, 10);
  CHECK(traffic_of(*pool.node, space).loaded_dram == 50);
  client.say(0, TrafficRow::loaded, 51);
  CHECK(traffic_of(*pool.node, space).loaded_dram == 51);
  client.say(0, TrafficRow::loaded, ~std::uint64_t{0});
  CHECK(traffic_of(*pool.node, space).loaded_dram == PageTraffic::kWordMax);
  client.say(0, TrafficRow::loaded, ~std::uint64_t{0} - 1);
  CHECK(traffic_of(*pool.node, space).loaded_dram == PageTraffic::kWordMax);
}

TEST_CASE("traffic: a client that scribbles over its page spoils no sum, and nobody else's count") {
  test::Random random("traffic: garbage");
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& named = pool.space(1, kBlock);  // 1 + 1: what the client may name
  Namespace& own = pool.space(2, kBlock);
  REQUIRE(named.number == 0);
  Tally tally;
  {
    const AttachedPage hostile(pool);
    const AttachedPage honest(pool);
    honest.say(0, TrafficRow::space, own.number + 1);
    std::atomic<bool> ends{false};
    std::thread scribbler([&, seed = random.engine()()] {
      std::mt19937_64 any(seed);
      while (!ends.load()) {
        TrafficRow& row = hostile.page->traffic[static_cast<std::uint32_t>(any() % kTrafficRows)];
        row[static_cast<std::uint32_t>(1 + any() % (TrafficRow::kWords - 1))] =
            any() % 4 == 0 ? any() : any() % 1000;
        const std::uint64_t name = any() % 3;  // nobody, or `named`, or one that is none
        row[TrafficRow::space] = name == 2 ? any() | 4 : name;
      }
    });
    std::uint64_t before = 0;
    for (std::size_t i = 0; i < test::scaled(2000); ++i) {
      const auto keys = keys_from(random.between<std::uint64_t>(0, 30), 3);
      tally.put(pool.put(own, keys));
      tally.looked(3, pool.node->lookup(own, keys, nullptr));
      honest.page->traffic[0][TrafficRow::gets] += 1;
      honest.page->traffic[0][TrafficRow::loaded] += 3;
      tally.got(3, 3, Miss::none);
      if (i % 8 != 0) continue;
      test::check_blocks(traffic_of(*pool.node, own), tally);
      const TrafficTotals spoilt = traffic_of(*pool.node, named);
      test::check_sums(spoilt);
      REQUIRE(spoilt.get_blocks >= before);
      before = spoilt.get_blocks;
    }
    ends = true;
    scribbler.join();
    CHECK(before > 0);
  }
  test::check_blocks(traffic_of(*pool.node, own), tally);
  test::check_sums(traffic_of(*pool.node, named));
  pool.check_at_rest();
}

TEST_CASE("traffic: what it adds to a lookup and a get is little") {
  Traffic traffic;
  constexpr int kCalls = 1'000'000;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) traffic.count_lookup(256, {256, 0});
  const auto middle = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) traffic.count_get(16, {.dram = 16});
  const auto end = std::chrono::steady_clock::now();
  const auto ns = [&](auto time) {
    return std::chrono::duration<double, std::nano>(time).count() / kCalls;
  };
  MESSAGE("ns for a lookup ", ns(middle - begin), ", for a get ", ns(end - middle));
  CHECK(traffic.totals().lookup_dram == 256ull * kCalls);
  CHECK(traffic.totals().loaded_dram == 16ull * kCalls);
}

}  // namespace
}  // namespace kvpool
