// What a node answers about single blocks: where they are, why they are not, and which are hot.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>

#include "node/hot_prefixes.h"
#include "node_cases.h"
#include "node_ssd_cases.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::uint64_t kBlock = 64 * kKiB;

Node::Explained explain(Node& node, const Namespace& space, const Hash128& key) {
  return node.explain(space, {&key, 1})[0];
}
Gone why(Node& node, const Namespace& space, const Hash128& key) {
  const auto answer = explain(node, space, key);
  REQUIRE(answer.block.tiers == 0);
  REQUIRE(answer.block.gone.has_value());
  return answer.block.gone->why;
}

double hits_up_to(const ReuseCurve& curve, double bytes) {
  double hits = 0;
  for (std::size_t i = 0; i < curve.counts.size() && curve.bounds_bytes[i] <= bytes; ++i)
    hits += curve.counts[i];
  return hits;
}

}  // namespace

TEST_CASE("explain: a block that is here") {
  Pool pool(Pool::plain(8 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 3);
  pool.put(space, keys);
  pool.clock->set(10);
  REQUIRE(pool.get(space, {keys.data(), 2}) == 2);
  Lease lease;
  REQUIRE(pool.node->acquire(space, {&keys[0], 1}, &lease) == 1);
  pool.clock->set(30);
  const auto answers = pool.node->explain(space, keys);
  REQUIRE(answers.size() == 3);
  for (const auto& answer : answers) {
    CHECK(answer.block.tiers == kTierDram);
    CHECK_FALSE(answer.block.gone);
    CHECK_FALSE(answer.block.ghost_heat);
  }
  CHECK(answers[0].block.pins == 1);
  CHECK(answers[1].block.pins == 0);
  CHECK(answers[0].block.heat > answers[1].block.heat);
  CHECK(answers[1].block.heat > answers[2].block.heat);
  CHECK(answers[1].block.temperature > answers[2].block.temperature);
  REQUIRE(answers[2].block.idle_s);
  CHECK(*answers[1].block.idle_s == doctest::Approx(20));
  CHECK(*answers[2].block.idle_s == doctest::Approx(30));
  pool.node->release({&lease, 1});
  // To ask is no use: the same answers again.
  const auto again = pool.node->explain(space, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) CHECK(again[i].block.heat == answers[i].block.heat);
  pool.check_at_rest();
}

TEST_CASE("explain: why a block is not here") {
  Pool pool(Pool::plain(8 * kMiB, /*blocks_limit=*/4));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 8);
  const Hash128 never = key_of(999);
  CHECK(explain(*pool.node, space, never).block.tiers == 0);
  CHECK_FALSE(explain(*pool.node, space, never).block.gone);

  // Evicted: with the heat that it had, and what it would go on from.
  pool.put(space, keys[0]);
  REQUIRE(pool.get(space, {keys.data(), 1}) == 1);
  for (std::size_t i = 1; i < 4; ++i)
    for (int uses = 0; uses < 5; ++uses) pool.put(space, keys[i]);
  pool.clock->set(5);
  pool.put(space, keys[4]);
  pool.clock->set(25);
  const auto evicted = explain(*pool.node, space, keys[0]);
  REQUIRE(evicted.block.gone.has_value());
  CHECK(evicted.block.gone->why == Gone::evicted);
  CHECK_FALSE(evicted.block.gone->was_on_ssd);
  CHECK(evicted.ago_s == doctest::Approx(20));
  CHECK(evicted.block.gone->heat > 1);
  REQUIRE(evicted.block.ghost_heat.has_value());
  CHECK(*evicted.block.ghost_heat < evicted.block.gone->heat);

  // Removed: no ghost.
  pool.node->remove(space, {&keys[1], 1});
  CHECK(why(*pool.node, space, keys[1]) == Gone::removed);
  CHECK_FALSE(explain(*pool.node, space, keys[1]).block.ghost_heat);

  // Here again: nothing is said of the time before.
  pool.put(space, keys[0]);
  CHECK(explain(*pool.node, space, keys[0]).block.tiers == kTierDram);
  CHECK_FALSE(explain(*pool.node, space, keys[0]).block.gone);

  // Dropped with its namespace, before the sweep and after it; the one evicted before was evicted.
  pool.node->drop_namespace(space, never_hung());
  CHECK(why(*pool.node, space, keys[2]) == Gone::dropped);
  pool.settle();
  CHECK(why(*pool.node, space, keys[2]) == Gone::dropped);
  CHECK(why(*pool.node, space, keys[1]) == Gone::removed);
  CHECK_FALSE(explain(*pool.node, space, never).block.gone);
  pool.check_at_rest();
}

TEST_CASE("explain: a put that was refused says with which status") {
  Pool pool(Pool::plain(8 * kMiB, /*blocks_limit=*/4));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 400), held = keys_from(1000, 4);
  pool.put(space, held);
  std::vector<Lease> leases(4);
  REQUIRE(pool.node->acquire(space, held, leases.data()) == 4);
  const auto statuses = pool.put(space, keys);
  REQUIRE(statuses[0] == PutStatus::pool_pinned);
  const auto first = explain(*pool.node, space, keys[0]);
  REQUIRE(first.block.gone.has_value());
  CHECK(first.block.gone->why == Gone::refused);
  CHECK(first.block.gone->status == static_cast<std::uint8_t>(PutStatus::pool_pinned));
  const auto second = explain(*pool.node, space, keys[1]);
  REQUIRE(second.block.gone.has_value());
  CHECK(second.block.gone->status == static_cast<std::uint8_t>(PutStatus::chain_broken));
  CHECK_FALSE(explain(*pool.node, space, keys[399]).block.gone);  // not all of a long call

  Ticket ticket;
  REQUIRE(pool.node->reserve({space, {&keys[300], 1}, nullptr, never_hung()}, ticket) ==
          PutStatus::pool_pinned);
  CHECK(why(*pool.node, space, keys[300]) == Gone::refused);
  pool.node->release(leases);
  pool.check_at_rest();
}

TEST_CASE("explain: blocks of a tier on disk") {
  SsdPool pool(SsdPool::small(2, 8));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 16);
  for (const Hash128& key : keys) pool.put(space, key);
  pool.flush();
  CHECK(explain(*pool.node, space, keys[0]).block.tiers == (kTierDram | kTierSsd));
  Namespace& cold = pool.cold(1, kBlock);
  pool.clock->set(40);
  const auto answer = explain(*pool.node, cold, keys[3]);
  CHECK(answer.block.tiers == kTierSsd);
  CHECK(answer.block.heat > 0);
  CHECK(std::isfinite(answer.block.temperature));
  CHECK(answer.block.idle_s == 40);

  // More than the tier holds: those that left it say so. Ones used often stay.
  const auto more = keys_from(100, 400);
  for (std::size_t i = 0; i < more.size(); ++i) {
    pool.clock->set(41.0 + static_cast<double>(i));  // what comes later is warmer
    pool.put(cold, more[i]);
    pool.flush();
  }
  pool.rest();
  std::set<Gone> reasons;
  for (const Hash128& key : more) {
    const auto gone = explain(*pool.node, cold, key);
    if (gone.block.tiers != 0) continue;
    REQUIRE(gone.block.gone.has_value());
    reasons.insert(gone.block.gone->why);
    CHECK(gone.block.gone->was_on_ssd == (gone.block.gone->why == Gone::evicted_ssd));
  }
  CHECK(reasons.contains(Gone::evicted_ssd));
  CHECK_FALSE(reasons.contains(Gone::removed));
  pool.check_at_rest();
}

TEST_CASE("explain: too cold for the disk") {
  SsdPool pool(SsdPool::small(4, 2));
  Namespace& space = pool.space(1, kBlock);
  // The tier is nearly full of blocks used again and again; then come more new ones at once than
  // it keeps slots free for.
  const auto hot = keys_from(0, 60), cold = keys_from(1000, 60), late = keys_from(2000, 110);
  for (int uses = 0; uses < 20; ++uses)
    for (const Hash128& key : hot) pool.put(space, key);
  pool.flush();
  FaultPoints& faults = pool.node->faults();
  faults.pause("ssd.write", std::chrono::minutes(1));  // so that all of them come into one group
  for (const Hash128& key : cold) pool.put(space, key);
  faults.clear();
  pool.flush();
  REQUIRE(pool.node->stats().store.not_worth > 0);
  pool.clock->set(100);
  for (const Hash128& key : late) pool.put(space, key);
  pool.rest();
  const auto count = std::ranges::count_if(cold, [&](const Hash128& key) {
    const auto gone = explain(*pool.node, space, key).block.gone;
    return gone && gone->why == Gone::not_worth;
  });
  CHECK(count > 0);
  pool.check_at_rest();
}

TEST_CASE("hottest: the ends of the prefixes in use") {
  Pool pool(Pool::plain(64 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Namespace& other = pool.space(2, 2 * kBlock);
  // A system prompt of 4 blocks; 10 questions go on from it, one of them asked all the time.
  const auto prompt = keys_from(0, 4);
  pool.put(space, prompt);
  std::vector<std::vector<Hash128>> asked;
  for (std::uint64_t n = 0; n < 10; ++n) {
    auto keys = prompt;
    for (const Hash128& key : keys_from(100 + 10 * n, 3)) keys.push_back(key);
    pool.put(space, keys);
    asked.push_back(keys);
  }
  for (std::size_t i = 0; i < 100; ++i) REQUIRE(pool.get(space, asked[i % 10]) == 7);
  for (int i = 0; i < 30; ++i) REQUIRE(pool.get(space, asked[3]) == 7);
  const auto lonely = keys_from(500, 2);
  pool.put(other, lonely);

  const auto found = pool.node->hottest(1000);
  // The prompt, the question asked all the time, the other nine, and the other namespace's chain.
  REQUIRE(found.size() == 12);
  CHECK(std::ranges::is_sorted(found, std::greater<>(), &HotPrefix::heat));
  const auto at = [&](const Hash128& key) -> const HotPrefix& {
    const auto it = std::ranges::find(found, key, &HotPrefix::key);
    REQUIRE(it != found.end());
    return *it;
  };
  CHECK(at(asked[3][6]).depth == 7);
  CHECK(at(asked[3][6]).children == 0);
  CHECK(at(asked[3][6]).number == space.number);
  CHECK(at(asked[3][6]).tiers == kTierDram);
  CHECK(at(lonely[1]).number == other.number);
  CHECK(at(lonely[1]).depth == 2);
  // 130 gets and 11 puts of the prompt, 40 and 1 of its hottest child.
  CHECK(at(prompt[3]).children == 10);
  CHECK(at(prompt[3]).heat == doctest::Approx(141).epsilon(0.01));
  CHECK(found[0].key == prompt[3]);
  CHECK(found[1].key == asked[3][6]);

  const auto three = pool.node->hottest(3);
  REQUIRE(three.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) CHECK(three[i].key == found[i].key);
  pool.node->drop_namespace(space, never_hung());
  CHECK(pool.node->hottest(10).size() == 1);
  pool.check_at_rest();
}

TEST_CASE("hottest: an empty pool, and one that changes meanwhile") {
  Pool pool(Pool::plain(16 * kMiB));
  CHECK(pool.node->hottest(10).empty());
  Namespace& space = pool.space(1, 4 * kKiB);
  pool.stride = 4096;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::uint64_t n = 0; !stop; n += 16) pool.put(space, keys_from(n, 16));
  });
  for (int i = 0; i < 20; ++i)
    for (const HotPrefix& prefix : pool.node->hottest(50)) {
      REQUIRE(prefix.number == space.number);
      REQUIRE(prefix.depth >= 1);
      REQUIRE(prefix.depth <= 16);
    }
  stop = true;
  writer.join();
  pool.check_at_rest();
}

TEST_CASE("reuse: a get that hits and a put that brings a block count, once each") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 10);
  pool.put(space, keys);                 // 10 first uses
  REQUIRE(pool.get(space, keys) == 10);  // 10 uses at distances of 1 to 10 blocks
  pool.put(space, keys);                 // all there: nobody asked for them
  const auto curves = pool.node->reuse();
  CHECK(curves.all.references == doctest::Approx(20));
  CHECK(curves.all.cold == doctest::Approx(10));
  CHECK(curves.all.samples == 10);
  CHECK(curves.all.seen_bytes == doctest::Approx(10 * kBlock));
  REQUIRE(curves.spaces.size() == 1);
  CHECK(curves.spaces[0].first == space.number);
  CHECK(curves.spaces[0].second.references == doctest::Approx(20));
  CHECK(curves.bytes < 4 * kMiB);
  // The get reports its blocks tail first, so the tail is the one that was used last before.
  CHECK(hits_up_to(curves.all, 11 * kBlock) == doctest::Approx(10));
  CHECK(hits_up_to(curves.all, 0.9 * kBlock) == doctest::Approx(0));

  // A removed block comes as new; one that was evicted has a distance.
  pool.node->remove(space, {&keys[0], 1});
  pool.put(space, keys[0]);
  CHECK(pool.node->reuse().all.cold == doctest::Approx(11));
  pool.check_at_rest();
}

TEST_CASE("reuse: the curve of a pool that is too small says what a larger one would do") {
  // 40 blocks in turn: a pool of 32 never hits, one of 64 would always.
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 40);
  std::size_t wanted = 0;
  for (int round = 0; round < 20; ++round)
    for (const Hash128& key : keys) {
      ++wanted;
      if (pool.get(space, {&key, 1}) == 1) continue;
      pool.put(space, key);
      // The node makes room ahead in a thread of its own, and a use that is still on its way when
      // its block leaves is lost (touch_ring.h): so the thread rests before anything is used.
      pool.settle();
    }
  const ReuseCurve curve = pool.node->reuse().all;
  CHECK(curve.references == doctest::Approx(static_cast<double>(wanted)));
  CHECK(curve.cold == doctest::Approx(40));
  CHECK(hits_up_to(curve, 2.0 * kMiB) == 0);
  CHECK(hits_up_to(curve, 4.0 * kMiB) == doctest::Approx(static_cast<double>(wanted - 40)));
  pool.check_at_rest();
}
