// So many bytes per second: what is admitted, and what a client over the limit is told.
#include <atomic>
#include <random>
#include <thread>

#include "net/lease_ages.h"
#include "net/rate_limit.h"
#include "net_cases.h"
#include "traffic_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::key_of;
using test::keys_from;
using test::Kind;
using test::kKiB;
using test::kMiB;
using test::name;
using test::Pool;
using test::Served;

constexpr std::uint64_t kBlock = 16 * kKiB;
const RateLimit::Time kStart{1000h};

TEST_CASE("rate: without a limit everything is admitted") {
  RateLimit limit;
  for (int i = 0; i < 100; ++i) CHECK(limit.admit(~std::uint64_t{0}, kStart));
}

TEST_CASE("rate: a second's worth at once, then as much as time brings") {
  RateLimit limit(1000);
  for (int i = 0; i < 10; ++i) CHECK(limit.admit(100, kStart));
  CHECK(!limit.admit(1, kStart));
  CHECK(limit.admit(0, kStart));  // what brings no payload costs nothing
  CHECK(!limit.admit(1, kStart - 1s));
  CHECK(limit.admit(1, kStart + 1ms));
  CHECK(!limit.admit(1, kStart + 1ms));
  CHECK(limit.admit(500, kStart + 501ms));
  CHECK(!limit.admit(1, kStart + 501ms));
}

TEST_CASE("rate: a call larger than the bucket is admitted, and paid for by those after it") {
  RateLimit limit(1000);
  CHECK(limit.admit(5000, kStart));
  CHECK(!limit.admit(1, kStart + 3999ms));
  CHECK(limit.admit(1, kStart + 4001ms));
}

TEST_CASE("rate: what went out before its size was known is owed") {
  RateLimit limit(1000);
  CHECK(limit.has_room(kStart));
  limit.charge(2500, kStart);
  CHECK(!limit.has_room(kStart));
  CHECK(!limit.admit(1, kStart + 1499ms));
  limit.charge(1000, kStart);  // over the limit or not
  CHECK(!limit.has_room(kStart + 2499ms));
  CHECK(limit.has_room(kStart + 2501ms));
  RateLimit none;
  none.charge(1 << 30, kStart);
  CHECK(none.has_room(kStart));
}

TEST_CASE("rate: another rate keeps the debt in bytes and the bucket as full as it was") {
  RateLimit limit(1000);
  CHECK(limit.admit(3000, kStart));  // 2000 bytes of debt
  limit.set(4000, kStart);
  CHECK(!limit.admit(1, kStart + 499ms));
  CHECK(limit.admit(1, kStart + 501ms));
  limit.set(0, kStart + 501ms);
  CHECK(limit.admit(1 << 30, kStart + 501ms));
  limit.set(10, kStart + 10s);
  CHECK(limit.admit(11, kStart + 10s));
  CHECK(!limit.admit(1, kStart + 10s));
  limit.set(10, kStart + 10s);  // the same: nothing changes
  CHECK(!limit.admit(1, kStart + 10s));
}

TEST_CASE("rate: no debt lasts longer than an hour") {
  RateLimit limit(1);
  CHECK(limit.admit(~std::uint64_t{0}, kStart));
  CHECK(!limit.admit(1, kStart + 59min));
  CHECK(limit.admit(1, kStart + 61min));
}

TEST_CASE("rate: against a bucket as one would draw it, and never more than is promised") {
  test::Random random("rate");
  for (int round = 0; round < 50; ++round) {
    const auto rate = random.between<std::uint64_t>(1000, 1 << 20);
    const auto largest = random.between<std::uint64_t>(1, 1 << 21);
    const auto per_s = static_cast<double>(rate);
    RateLimit limit(rate);
    double level = per_s, admitted = 0, passed = 0;
    auto now = kStart;
    for (int i = 0; i < 400; ++i) {
      const auto step = std::chrono::microseconds(random.between<std::int64_t>(0, 300'000));
      now += step;
      passed += std::chrono::duration<double>(step).count();
      level = std::min(per_s, level + std::chrono::duration<double>(step).count() * per_s);
      const auto bytes = random.between<std::uint64_t>(1, largest);
      const bool is_admitted = limit.admit(bytes, now);
      if (std::abs(level) > per_s * 1e-5) REQUIRE(is_admitted == (level > 0));
      if (!is_admitted) continue;
      level -= static_cast<double>(bytes);
      admitted += static_cast<double>(bytes);
      REQUIRE(admitted <= per_s * (passed + 1.001) + static_cast<double>(largest));
    }
  }
}

TEST_CASE("rate: threads together get what one would") {
  RateLimit limit(10'000);
  std::atomic<int> admitted{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) admitted += limit.admit(10, kStart);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(admitted == 1000);
}

ServerOptions slow(std::uint64_t put_bytes_per_s, std::uint64_t get_bytes_per_s) {
  ServerOptions options;
  options.put_bytes_per_s = put_bytes_per_s;
  options.get_bytes_per_s = get_bytes_per_s;
  return options;
}

// One byte per second: the first call leaves a debt that outlasts any test.
TEST_CASE("rate: puts over streams are refused as a whole, and what is there is told as present") {
  for (const Kind kind : {Kind::unix_socket, Kind::tcp}) {
    Served served(Pool::plain(64 * kMiB), slow(1, 0));
    Namespace& of = served.pool.space(1, kBlock);
    Space space;
    name(space, of);
    const auto channel = served.channel(kind, 1);
    test::Tally tally;
    const auto put = [&](std::uint64_t first, std::size_t count) {
      const auto statuses = test::put(*channel, space, keys_from(first, count));
      tally.put(statuses);
      return statuses;
    };
    CHECK(test::all_are(put(0, 4), PutStatus::stored));
    const auto refused = put(10, 3);
    CHECK(refused[0] == PutStatus::limited);
    CHECK(refused[1] == PutStatus::chain_broken);
    CHECK(refused[2] == PutStatus::chain_broken);
    CHECK(!served.pool.has(of, key_of(10)));
    tally.looked(1, 0);
    CHECK(served.server->stats().closed_garbage == 0);  // its payload was taken off the stream
    // 20 blocks are more than is sent without a look first: those that are there are skipped.
    const auto behind = put(0, 20);
    CHECK(test::all_are(std::span(behind).first(4), PutStatus::present));
    CHECK(behind[4] == PutStatus::limited);
    CHECK(test::all_are(std::span(behind).subspan(5), PutStatus::chain_broken));
    CHECK(test::get(*channel, space, keys_from(0, 4)) == 4);
    tally.got(4, 4, Miss::none);
    served.server->set_rates(0, 0);
    CHECK(test::all_are(put(10, 3), PutStatus::stored));
    test::check_blocks(test::traffic_of(*served.pool.node, of), tally);
    channel->close();
    served.check_at_rest();
  }
}

TEST_CASE("rate: gets over streams end where the limit does") {
  Served served(Pool::plain(64 * kMiB), slow(0, 1));
  Namespace& of = served.pool.space(1, kBlock);
  Space space;
  name(space, of);
  const auto keys = keys_from(0, 100);
  served.put(of, keys);
  const auto channel = served.channel(Kind::tcp, 1);
  Miss why{};
  const std::size_t first = test::get(*channel, space, keys, why);
  CHECK(why == Miss::limited);
  CHECK(first > 0);  // a window, which was admitted as a whole
  CHECK(first < 100);
  CHECK(test::get(*channel, space, keys_from(0, 2), why) == 0);
  CHECK(why == Miss::limited);
  CHECK(test::get(*channel, space, keys_from(200, 2), why) == 0);
  CHECK(why == Miss::absent);
  served.server->set_rates(0, 0);
  CHECK(test::get(*channel, space, keys) == 100);
  const TrafficTotals totals = test::traffic_of(*served.pool.node, of);
  test::check_sums(totals);
  CHECK(totals.missed_for(Miss::limited) == 2);
  CHECK(totals.loaded_dram == first + 100);
  channel->close();
  served.check_at_rest();
}

// --- ages of leases ------------------------------------------------------------------------------

TEST_CASE("lease ages: counted by when they were acquired, whatever became of others") {
  test::Random random("lease ages");
  LeaseAges ages;
  struct Held {
    LeaseAges::Slot since;
    std::uint64_t count;
  };
  std::vector<Held> model;
  LeaseAges::Slot now = 1'000'000;
  std::size_t slots_max = 0;
  for (int step = 0; step < 20'000; ++step) {
    now += random.between<LeaseAges::Slot>(0, random.between(0, 50) == 0 ? 2000 : 3);
    if (random.coin()) {
      const auto count = random.between<std::uint64_t>(0, 5);
      ages.add(now, count);
      if (count > 0) model.push_back({now, count});
    } else if (!model.empty()) {
      Held& some = model[random.between<std::size_t>(0, model.size() - 1)];
      ages.take_off(some.since, 1);
      if (--some.count == 0) {
        some = model.back();
        model.pop_back();
      }
    }
    slots_max = std::max(slots_max, ages.slots());
    if (step % 50 != 0) continue;
    LeaseAges::Counts expected{}, counts{};
    for (const Held& held : model) {
      const LeaseAges::Slot age = now - held.since;
      expected[age < 10 ? 0 : age < 100 ? 1 : age < 600 ? 2 : age < 6000 ? 3 : 4] += held.count;
    }
    ages.add_counts(now, counts);
    REQUIRE(counts == expected);
  }
  CHECK(slots_max <= 6002);
  while (!model.empty()) {
    ages.take_off(model.back().since, model.back().count);
    model.pop_back();
  }
  CHECK(ages.slots() == 0);
}

TEST_CASE("lease ages: slots are tenths of a second") {
  const LeaseAges::Time time{12'345'678ms};
  CHECK(LeaseAges::slot_of(time + 1s) == LeaseAges::slot_of(time) + 10);
  CHECK(LeaseAges::slot_of(LeaseAges::Time{}) > 0);
}

}  // namespace
}  // namespace kvpool
