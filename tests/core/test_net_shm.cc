// Every operation of an shm channel against a node and its server in the same process; what takes
// processes is in test_net_shm_process.cc.
#include <algorithm>

#include "net/lane_call.h"
#include "net/shm_use.h"
#include "net_shm.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using test::after;
using test::all_are;
using test::get_through;
using test::keys_from;
using test::kKiB;
using test::kMiB;
using test::NamedSpace;
using test::never_hung;
using test::put_through;
using test::ShmHost;

constexpr std::uint64_t kBytes = 64 * kKiB;

NodeOptions pool_of(std::uint64_t units) { return test::Pool::plain(units * kUnitBytes); }

void check_at_rest(const ShmHost& host) {
  REQUIRE(host.comes_to_rest(std::chrono::seconds(10)));
  host.node->check_invariants();
  CHECK(host.server->stats().last_closed == "");
}

TEST_CASE("shm: what was put is found, copied out and seen in place") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  const auto channel = host.channel();
  const auto keys = keys_from(1, 20);
  CHECK(all_are(put_through(*channel, space, keys), PutStatus::stored));
  CHECK(all_are(put_through(*channel, space, keys), PutStatus::present));

  Miss why = Miss::fault;
  std::vector<std::uint8_t> tiers(25, 9);
  CHECK(channel->lookup(space, keys_from(1, 25), tiers.data(), why) == 20);
  CHECK(why == Miss::absent);
  CHECK(tiers[19] == kTierDram);
  CHECK(tiers[20] == 0);
  CHECK(channel->lookup(space, keys, nullptr, why) == 20);
  CHECK(why == Miss::none);

  std::size_t wrong = 0;
  CHECK(get_through(*channel, space, keys_from(1, 25), wrong, why) == 20);
  CHECK(why == Miss::absent);
  CHECK(wrong == 0);
  {
    const auto pins = channel->acquire(space, keys_from(1, 25), why);
    CHECK(why == Miss::absent);
    REQUIRE(pins->places.size() == 20);
    for (std::size_t i = 0; i < 20; ++i)
      CHECK(test::is_payload(pins->base + pins->places[i].offset, pins->places[i].bytes, keys[i]));
  }
  host.node->settle(never_hung());
  const NodeStats stats = host.node->stats();
  CHECK(stats.gets == 1);
  CHECK(stats.get_blocks == 20);
  CHECK(stats.views == 1);
  CHECK(stats.view_blocks == 20);
  check_at_rest(host);
}

TEST_CASE("shm: a chain is put in pieces, each behind the one before") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, 4 * kKiB));
  const auto channel = host.channel();
  for (const std::size_t count :
       {kKeysPerLane - 1u, kKeysPerLane + 0u, kKeysPerLane + 1u, 2'500u}) {
    const auto keys = keys_from(count * 10'000, count);
    CHECK(all_are(put_through(*channel, space, keys), PutStatus::stored));
    std::size_t wrong = 0;
    Miss why = Miss::fault;
    CHECK(get_through(*channel, space, keys, wrong, why) == count);
    CHECK(why == Miss::none);
    CHECK(wrong == 0);
  }
  check_at_rest(host);
}

TEST_CASE("shm: blocks of every size pass a window, also those that are larger than it") {
  const ShmHost host(pool_of(48));
  const auto channel = host.channel();
  std::uint64_t number = 1;
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{63}, 4 * kKiB, 4 * kKiB + 8,
                                    100 * kKiB + 24, kMiB, 3 * kMiB, 9 * kMiB + 40}) {
    CAPTURE(bytes);
    const NamedSpace space(host.space(number, bytes));
    const auto keys = keys_from(number++ * 1000, 3);
    CHECK(all_are(put_through(*channel, space, keys), PutStatus::stored));
    std::size_t wrong = 0;
    Miss why = Miss::fault;
    CHECK(get_through(*channel, space, keys, wrong, why) == 3);
    CHECK(wrong == 0);
    ShmUse use{.client = host.client(), .space = space, .deadline = never_hung()};
    use.number = space.number;
    test::KeySink sink(keys, bytes);
    const LaneGot got = get_by_lane(use, keys, 0, sink);  // as if they lay elsewhere
    CHECK(got.delivered == 3);
    CHECK(got.why == Miss::none);
    CHECK(sink.wrong == 0);
    const LaneGot none = get_by_lane(use, keys_from(1, 1), 0, sink);
    CHECK(none.delivered == 0);
    CHECK(none.why == Miss::absent);
  }
  check_at_rest(host);
}

TEST_CASE("shm: a source that has no place fills the window itself, and may fail") {
  const ShmHost host(pool_of(8));
  const auto channel = host.channel();
  for (const std::uint64_t bytes : {kBytes, 3 * kMiB}) {
    CAPTURE(bytes);
    const NamedSpace space(host.space(bytes, bytes));
    const auto keys = keys_from(bytes, 2);
    test::KeySource source(keys, bytes);
    CHECK(all_are(put_through(*channel, space, keys, source), PutStatus::stored));
    std::size_t wrong = 0;
    Miss why = Miss::none;
    CHECK(get_through(*channel, space, keys, wrong, why) == 2);
    CHECK(wrong == 0);

    const auto others = keys_from(bytes + 100, 3);
    test::KeySource failing(others, bytes);
    failing.refuses = true;
    const auto statuses = put_through(*channel, space, others, failing);
    CHECK(statuses[0] == PutStatus::failed);
    CHECK(statuses[1] == PutStatus::chain_broken);
    CHECK(statuses[2] == PutStatus::chain_broken);
  }
  check_at_rest(host);
}

TEST_CASE("shm: payload that was thought present and is not is asked for") {
  const ShmHost host(pool_of(8));
  Namespace& own = host.space(1, kBytes);
  const NamedSpace space(own);
  const auto client = host.client();
  const auto keys = keys_from(1, 4);
  ClientLane* const lane = client->take_lane(never_hung());
  REQUIRE(lane != nullptr);
  LaneCall call(*client, *lane, never_hung());
  call.ask({.op = LaneOp::put,
            .space = space.number,
            .keys = keys,
            .skip = 2,
            .window_offset = lane->window.offset(),
            .ring_bytes = 2 * kBytes});
  CHECK(call.wait_for_answer());
  CHECK(call.refusal() == Refusal::none);
  CHECK(call.status(0) == PutStatus::payload_due);
  CHECK(call.status(1) == PutStatus::chain_broken);
  CHECK(host.node->lookup(own, keys, nullptr) == 0);
  check_at_rest(host);
}

TEST_CASE("shm: one key put by many at once is stored once") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  std::vector<std::unique_ptr<ShmChannel>> channels;
  for (int i = 0; i < 2; ++i) channels.push_back(host.channel());
  constexpr std::size_t kRounds = 60;
  std::atomic<std::size_t> stored{0}, present{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::size_t round = 0; round < test::scaled(kRounds); ++round)
        for (const PutStatus status :
             put_through(*channels[t % 2], space, keys_from(round * 100, 3))) {
          stored += status == PutStatus::stored;
          present += status == PutStatus::present;
        }
    });
  for (auto& thread : threads) thread.join();
  CHECK(stored == test::scaled(kRounds) * 3);
  CHECK(stored + present == test::scaled(kRounds) * 3 * 4);
  check_at_rest(host);
}

TEST_CASE("shm: more threads than lanes put, get and view through one client") {
  const ShmHost host(pool_of(3));  // room for 96 of the blocks below
  const NamedSpace space(host.space(1, kBytes));
  const auto channel = host.channel();
  std::atomic<std::size_t> wrong{0}, delivered{0}, seen{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 5; ++t)
    threads.emplace_back([&, t] {
      Miss why = Miss::none;
      for (std::uint64_t n = 0; n < test::scaled(200); ++n) {
        const auto keys = keys_from((t * 7919 + n * 104'729) % 300, 4);
        if (n % 3 != 0) put_through(*channel, space, keys);
        std::size_t bad = 0;
        delivered += get_through(*channel, space, keys, bad, why);
        wrong += bad;
        const auto pins = channel->acquire(space, keys, why);
        for (std::size_t i = 0; i < pins->places.size(); ++i)
          wrong += !test::is_payload(pins->base + pins->places[i].offset, kBytes, keys[i]);
        seen += pins->places.size();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(delivered > 0);
  CHECK(seen > 0);
  CHECK(host.node->stats().store.evictions > 0);
  check_at_rest(host);
}

TEST_CASE(
    "shm: a view keeps its bytes, whatever happens to the block, and counts against a limit") {
  ServerOptions options = ShmHost::small();
  options.pin_bytes = 10 * kBytes;
  const ShmHost host(pool_of(1), options);  // 32 slots
  Namespace& own = host.space(1, kBytes);
  const NamedSpace space(own);
  const auto channel = host.channel();
  const auto keys = keys_from(1, 8);
  REQUIRE(all_are(put_through(*channel, space, keys), PutStatus::stored));
  Miss why = Miss::none;
  auto pins = channel->acquire(space, keys, why);
  REQUIRE(pins->places.size() == 8);
  REQUIRE(all_are(put_through(*channel, space, keys_from(100, 10)), PutStatus::stored));
  {
    const auto more = channel->acquire(space, keys_from(100, 10), why);
    CHECK(more->places.size() == 2);
    CHECK(why == Miss::pin_limit);
  }
  CHECK(host.node->remove(own, keys) == 8);
  put_through(*channel, space, keys_from(1000, 60));
  for (std::size_t i = 0; i < 8; ++i)
    CHECK(test::is_payload(pins->base + pins->places[i].offset, kBytes, keys[i]));
  pins.reset();
  host.node->settle(never_hung());
  CHECK(channel->acquire(space, keys_from(100, 0), why)->places.empty());
  check_at_rest(host);
}

TEST_CASE("shm: every hazard word can be used, and is free again") {
  const ShmHost host(pool_of(4));
  const NamedSpace space(host.space(1, 4 * kKiB));
  const auto channel = host.channel();
  const auto keys = keys_from(1, kHazards + 20);
  REQUIRE(all_are(put_through(*channel, space, keys), PutStatus::stored));
  for (int round = 0; round < 3; ++round) {
    Miss why = Miss::none;
    const auto pins = channel->acquire(space, keys, why);
    CHECK(pins->places.size() == kHazards);
    CHECK(why == Miss::pin_limit);
    CHECK(channel->acquire(space, keys, why)->places.empty());
    std::size_t wrong = 0;
    CHECK(get_through(*channel, space, keys, wrong, why) == keys.size());
    CHECK(wrong == 0);
  }
  check_at_rest(host);
}

TEST_CASE("shm: payload is born in staging memory") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  const auto channel = host.channel();
  PutStatus status = PutStatus::failed;
  Miss why = Miss::none;
  std::size_t wrong = 0;
  const auto keys = keys_from(1, 12);
  auto blocks = channel->reserve_many(space, 12, status);
  REQUIRE(blocks != nullptr);
  for (int round = 0; round < 2; ++round) {  // the same memory, used again
    const auto round_keys = keys_from(1 + static_cast<std::uint64_t>(round) * 6, 12);
    for (std::size_t i = 0; i < 12; ++i)
      test::make_payload(blocks->memory(i), kBytes, round_keys[i]);
    std::vector<PutStatus> statuses(12);
    channel->put_staged({space, round_keys, nullptr, never_hung()}, *blocks, statuses.data());
    CHECK(std::ranges::count(statuses, PutStatus::stored) == (round == 0 ? 12 : 6));
    CHECK(get_through(*channel, space, round_keys, wrong, why) == 12);
  }
  CHECK(wrong == 0);
  CHECK(channel->reserve_many(space, 100, status) == nullptr);
  CHECK(status == PutStatus::too_large);
  CHECK(channel->reserve_many(space, 25, status) == nullptr);
  CHECK(status == PutStatus::pool_pinned);  // what is left of the staging memory
  blocks.reset();

  const Hash128 key = test::key_of(500);
  auto room = channel->reserve({space, {&key, 1}, &keys[11], never_hung()}, status);
  REQUIRE(room != nullptr);
  CHECK(reinterpret_cast<std::uintptr_t>(room->memory) % kPageBytes == 0);
  test::make_payload(room->memory, kBytes, key);
  CHECK(room->commit(never_hung()) == PutStatus::stored);
  CHECK(get_through(*channel, space, {&key, 1}, wrong, why) == 1);
  CHECK(wrong == 0);
  CHECK(channel->reserve({space, {&key, 1}, nullptr, never_hung()}, status) == nullptr);
  CHECK(status == PutStatus::present);
  check_at_rest(host);
}

TEST_CASE("shm: a client that is dropped misses at once, sees what it pinned, and comes back") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  const auto channel = std::make_unique<ShmChannel>(nullptr);
  test::ShmTicket ticket = host.ticket();
  const std::uint64_t number = ticket.client;
  channel->attach(*ticket.attach());
  const auto keys = keys_from(1, 4);
  REQUIRE(all_are(put_through(*channel, space, keys), PutStatus::stored));
  Miss why = Miss::none;
  const auto pins = channel->acquire(space, keys, why);
  REQUIRE(pins->places.size() == 4);

  host.server->drop_client(number);
  CHECK(channel->wait_until_broken(never_hung()));
  std::size_t wrong = 0;
  CHECK(get_through(*channel, space, keys, wrong, why) == 0);
  CHECK(why == Miss::disconnected);
  CHECK(channel->lookup(space, keys, nullptr, why) == 0);
  CHECK(why == Miss::disconnected);
  CHECK(all_are(put_through(*channel, space, keys), PutStatus::disconnected));
  CHECK(host.comes_to_rest(std::chrono::seconds(10)));

  channel->detach();
  channel->attach(host.client());
  CHECK(get_through(*channel, space, keys, wrong, why) == 4);
  CHECK(wrong == 0);
  CHECK(pins->base != channel->acquire(space, keys, why)->base);
  channel->close();
  CHECK(channel->lookup(space, keys, nullptr, why) == 0);
  check_at_rest(host);
}

TEST_CASE(
    "shm: a put whose node waits for another writer ends by its deadline, and so does a get") {
  const ShmHost host(pool_of(8));
  Namespace& own = host.space(1, kBytes);
  const NamedSpace space(own);
  const auto channel = host.channel();
  const auto keys = keys_from(1, 1);
  Ticket ticket;
  REQUIRE(host.node->reserve({own, keys, nullptr, never_hung()}, ticket) == PutStatus::stored);
  test::PlacedSource source(keys, kBytes);
  const auto begin = std::chrono::steady_clock::now();
  const auto status =
      put_through(*channel, space, keys, source, nullptr, after(std::chrono::milliseconds(50)));
  CHECK(status[0] == PutStatus::timed_out);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
  host.node->abort(ticket);
  CHECK(all_are(put_through(*channel, space, keys), PutStatus::stored));
  check_at_rest(host);
}

TEST_CASE("shm: what lies on the SSD alone comes through a lane, amid what is in DRAM") {
  constexpr std::uint64_t kUnits = 6;
  test::SsdPool pool(test::SsdPool::small(kUnits, kUnits));
  const auto keys = keys_from(1, 40);
  REQUIRE(all_are(pool.put(pool.space(1, kBytes), keys), PutStatus::stored));
  pool.cold(1, kBytes);
  pool.close();
  const ShmHost host(pool.options);
  Namespace& own = host.space(1, kBytes);
  const NamedSpace space(own);
  const auto channel = host.channel();
  std::size_t wrong = 0;
  Miss why = Miss::fault;
  CHECK(host.node->stats().ssd_hits == 0);
  CHECK(get_through(*channel, space, keys_from(11, 10), wrong, why) == 10);
  CHECK(get_through(*channel, space, keys_from(14, 2), wrong, why) == 2);
  CHECK(get_through(*channel, space, keys_from(1, 50), wrong, why) == 40);
  CHECK(why == Miss::absent);
  CHECK(wrong == 0);
  CHECK(host.node->stats().ssd_hits >= 40);
  CHECK(channel->acquire(space, keys, why)->places.size() <= 40);
  check_at_rest(host);
}

// A ring still has what came before.
TEST_CASE(
    "shm: a node that ends refuses what has to come through a lane, and nothing is delivered") {
  constexpr std::uint64_t kUnits = 6;
  test::SsdPool pool(test::SsdPool::small(kUnits, kUnits));
  const auto keys = keys_from(1, 40);
  REQUIRE(all_are(pool.put(pool.space(1, kBytes), keys), PutStatus::stored));
  pool.cold(1, kBytes);
  pool.close();
  const ShmHost host(pool.options);
  const NamedSpace space(host.space(1, kBytes));
  const auto channel = host.channel();
  std::size_t wrong = 0;
  Miss why = Miss::fault;
  CHECK(get_through(*channel, space, keys_from(1, 10), wrong, why) == 10);
  CHECK(host.node->stats().ssd_hits >= 10);
  host.server->drain(std::chrono::steady_clock::now());
  CHECK(get_through(*channel, space, keys_from(21, 5), wrong, why) == 0);
  CHECK(why == Miss::disconnected);
  CHECK(wrong == 0);
  check_at_rest(host);
}

}  // namespace
}  // namespace kvpool
