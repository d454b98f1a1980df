// What a node tells of blocks that come and go, and a walk over those that are here.
#include <map>
#include <set>

#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 4096;

std::vector<Resident> walked(Node& node) {
  ResidentWalk walk;
  std::vector<Resident> found;
  while (node.walk(walk, found)) {
  }
  return found;
}

std::multiset<Hash128> keys_of(std::span<const Resident> found) {
  std::multiset<Hash128> keys;
  for (const Resident& each : found) keys.insert(each.key);
  return keys;
}

TEST_CASE("node changes: what comes and goes, in its order") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  pool.put(space, key_of(1));  // nobody listens
  std::vector<Change> changes;
  CHECK(pool.node->take_changes(nullptr, changes));
  CHECK(changes.empty());
  Changes* const heard = pool.node->listen(100);
  CHECK(!pool.node->take_changes(heard, changes));  // what was here before is no change
  pool.put(space, key_of(2));
  pool.put(space, key_of(2));  // present
  pool.put(space, key_of(3));
  pool.node->remove(space, keys_from(1, 2));
  pool.put(space, key_of(2));
  CHECK(pool.node->take_changes(heard, changes));
  const std::vector<std::pair<std::uint64_t, bool>> wanted{
      {2, true}, {3, true}, {1, false}, {2, false}, {2, true}};
  REQUIRE(changes.size() == wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CHECK(changes[i].space == &space);
    CHECK(changes[i].key == key_of(wanted[i].first));
    CHECK(changes[i].came() == wanted[i].second);
  }
  CHECK(pool.node->take_changes(heard, changes));
  CHECK(changes.empty());
  pool.node->stop_listening(heard);
  pool.put(space, key_of(9));
  CHECK(pool.node->take_changes(heard, changes));
  CHECK(changes.empty());
}

TEST_CASE("node changes: too many, and a namespace that is dropped, are said to be lost") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Changes* const heard = pool.node->listen(10);
  std::vector<Change> changes;
  pool.node->take_changes(heard, changes);
  for (std::uint64_t i = 0; i < 11; ++i) pool.put(space, key_of(i));
  CHECK(!pool.node->take_changes(heard, changes));
  CHECK(changes.size() == 10);
  REQUIRE(pool.node->drop_namespace(space, never_hung()).has_value());
  pool.put(space, key_of(100));
  pool.settle();
  CHECK(!pool.node->take_changes(heard, changes));
  REQUIRE(changes.size() == 1);  // those that were dropped are swept in silence
  CHECK((changes[0].key == key_of(100) && changes[0].came()));
  CHECK(keys_of(walked(*pool.node)) == std::multiset{key_of(100)});
  REQUIRE(pool.node->drop_namespace(pool.space(2, kBlock), never_hung()).has_value());
  CHECK(pool.node->take_changes(heard, changes));  // it was empty
}

TEST_CASE("node changes: changes and a walk add up to what is here, whatever is evicted") {
  Random random("node changes");
  Pool pool(Pool::plain(4 * kMiB));
  Namespace* spaces[] = {&pool.space(1, kBlock), &pool.space(2, 3 * kBlock)};
  Changes* const heard = pool.node->listen(1 << 16);
  std::set<std::pair<std::uint32_t, Hash128>> told, here;
  std::vector<Change> changes;
  pool.node->take_changes(heard, changes);
  for (int step = 0; step < 6000; ++step) {
    Namespace& space = *spaces[random.between(0, 1)];
    const Hash128 key = key_of(random.between<std::uint64_t>(0, 1999));
    if (random.between(0, 9) < 8)
      pool.put(space, key);
    else
      pool.node->remove(space, {&key, 1});
  }
  CHECK(pool.node->take_changes(heard, changes));
  for (const Change& each : changes) {
    const std::pair name{each.space->number, each.key};
    REQUIRE((each.came() ? told.insert(name).second : told.erase(name) == 1));
  }
  for (const Resident& each : walked(*pool.node))
    REQUIRE(here.emplace(each.space->number, each.key).second);
  CHECK(told == here);
  CHECK(here.size() == pool.node->stats().blocks);
}

TEST_CASE("node changes: several listen, and none costs the others anything") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  std::vector<Changes*> heard;
  for (std::size_t i = 0; i < Listeners::kMax; ++i) heard.push_back(pool.node->listen(4));
  CHECK(pool.node->listen(4) == nullptr);
  std::vector<Change> changes;
  for (Changes* each : heard) CHECK(!pool.node->take_changes(each, changes));
  for (std::uint64_t i = 0; i < 8; ++i) {
    pool.put(space, key_of(i));
    if (i % 3 == 2) {  // only the first one takes in time
      CHECK(pool.node->take_changes(heard[0], changes));
      CHECK(changes.size() == 3);
    }
  }
  CHECK(pool.node->take_changes(heard[0], changes));
  CHECK(changes.size() == 2);
  CHECK(!pool.node->take_changes(heard[1], changes));
  CHECK(changes.size() == 4);
  pool.node->stop_listening(heard[1]);
  pool.node->stop_listening(heard[1]);  // nobody's any more
  Changes* const late = pool.node->listen(4);
  REQUIRE(late != nullptr);
  CHECK(!pool.node->take_changes(late, changes));
  pool.node->remove(space, keys_from(0, 1));
  for (Changes* each : {heard[0], late}) {
    CHECK(pool.node->take_changes(each, changes));
    CHECK((changes.size() == 1 && changes[0].key == key_of(0) && !changes[0].came()));
  }
  for (Changes* each : {heard[0], heard[2], heard[3], late}) pool.node->stop_listening(each);
}

TEST_CASE("node changes: who hears of moves is told tiers and chains, others of blocks alone") {
  constexpr std::uint64_t kLarge = 64 * kKiB;  // 32 to a unit
  Random random("node moves");
  SsdPool pool(SsdPool::small(2, 5));
  Namespace& space = pool.space(1, kLarge);
  Changes* const blocks = pool.node->listen(1 << 16);
  Changes* const moves = pool.node->listen(1 << 16, Hears::moves);
  std::vector<Change> changes;
  pool.node->take_changes(blocks, changes);
  pool.node->take_changes(moves, changes);
  std::map<Hash128, std::uint8_t> tiers;
  std::map<Hash128, Hash128> parents;
  std::set<Hash128> here;
  std::size_t chained = 0;
  const auto follow = [&] {
    REQUIRE(pool.node->take_changes(blocks, changes));
    for (const Change& each : changes) {
      REQUIRE((each.before == 0 || each.after == 0));
      REQUIRE((each.came() ? here.insert(each.key).second : here.erase(each.key) == 1));
    }
    REQUIRE(pool.node->take_changes(moves, changes));
    for (const Change& each : changes) {
      REQUIRE(tiers[each.key] == each.before);
      REQUIRE(each.before != each.after);
      tiers[each.key] = each.after;
      if (each.parent == Hash128{}) continue;
      ++chained;
      CHECK(each.parent == parents[each.key]);
    }
  };
  for (int step = 0; step < 600; ++step) {
    const std::uint64_t chain = random.between<std::uint64_t>(0, 99) * 100;
    const auto keys = keys_from(chain, random.between<std::uint64_t>(1, 5));
    for (std::size_t i = 1; i < keys.size(); ++i) parents[keys[i]] = keys[i - 1];
    if (random.between(0, 9) < 6)
      pool.put(space, keys);
    else if (random.between(0, 9) < 8)
      pool.get(space, keys);
    else
      pool.node->remove(space, keys);
    if (random.between(0, 49) == 0) pool.flush();
    if (random.between(0, 9) == 0) follow();
  }
  pool.rest();
  follow();
  std::erase_if(tiers, [](const auto& each) { return each.second == 0; });
  ResidentWalk walk(Hears::moves);
  std::vector<Resident> found;
  while (pool.node->walk(walk, found)) {
  }
  std::map<Hash128, std::uint8_t> there;
  for (const Resident& each : found) there[each.key] = each.tiers;
  CHECK(there == tiers);
  CHECK(here.size() == tiers.size());
  CHECK(chained > 0);
  const StoreCounters counters = pool.node->stats().store;
  CHECK((counters.demotions > 0 && counters.promotions > 0 && counters.ssd_evictions > 0));
}

TEST_CASE("node changes: a piece of a walk is short") {
  Pool pool(Pool::plain(96 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  pool.stride = kBlock;
  const std::size_t count = scaled(20'000);
  pool.put(space, keys_from(0, count));
  ResidentWalk walk;
  std::vector<Resident> found;
  double worst = 0;
  for (bool is_more = true; is_more;) {
    const auto before = std::chrono::steady_clock::now();
    is_more = pool.node->walk(walk, found);
    const std::chrono::duration<double, std::milli> took =
        std::chrono::steady_clock::now() - before;
    worst = std::max(worst, took.count());
  }
  CHECK(found.size() == count);
  std::printf("walk over %zu blocks: worst piece %.3f ms\n", count, worst);
}

}  // namespace
}  // namespace kvpool
