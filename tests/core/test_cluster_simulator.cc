// The simulated cluster: of one node against the simulator of one pool, by hand, and its books.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "cluster/cluster_simulator.h"
#include "policy/simulator.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;
using Name = BlockNames::Name;
using Trace = std::vector<std::vector<Name>>;

// Paths from the root of a random tree, as in test_simulator.cc.
Trace random_trace(Random& random, BlockNames& names, int requests) {
  std::vector<std::vector<std::uint64_t>> chains{{}};
  std::uint64_t next_id = 1;
  Trace trace;
  for (int i = 0; i < requests; ++i) {
    auto chain =
        chains[chains.size() - 1 - random.below(std::min<std::uint64_t>(chains.size(), 12))];
    if (!chain.empty() && random.one_in(3)) chain.resize(1 + random.below(chain.size()));
    for (std::uint64_t more = random.below(4); more > 0; --more) chain.push_back(next_id++);
    if (chain.size() > 12) chain.resize(12);
    chains.push_back(chain);
    trace.emplace_back();
    for (const std::uint64_t id : chain) trace.back().push_back(names.intern(id * 1'000'003));
  }
  return trace;
}

void replay(ClusterSimulator& cluster, const Trace& trace) {
  Seconds now = 0;
  for (const auto& request : trace) cluster.request(request, now += 1);
  cluster.finish();
  cluster.check_invariants();
}

ClusterReport replay(const ClusterOptions& options, const BlockNames& names, const Trace& trace) {
  ClusterSimulator cluster(options, names);
  replay(cluster, trace);
  return cluster.report();
}

std::uint64_t sum(const std::vector<std::uint64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::uint64_t{0});
}

// Names 0 .. count-1.
BlockNames some_names(std::uint64_t count) {
  BlockNames names;
  for (std::uint64_t id = 0; id < count; ++id) names.intern(id);
  return names;
}

TEST_CASE("cluster simulator: of one node it is the simulator of one pool") {
  Random random(testing::seed());
  for (int run = 0; run < 10; ++run) {
    BlockNames names;
    const Trace trace = random_trace(random, names, 300);
    for (const PolicyKind kind : kPolicyKinds)
      for (const BlockId capacity : {1u, 7u, 20u, 60u, 5000u}) {
        CAPTURE(policy_name(kind));
        CAPTURE(capacity);
        const auto single = make_simulator({kind, capacity}, names);
        Seconds now = 0;
        for (const auto& request : trace) single->request(request, now += 1);
        const SimulatorReport expected = single->report();
        const ClusterReport got = replay({.nodes = 1,
                                          .capacity_blocks = capacity,
                                          .policy = kind,
                                          .replicate_above = 2,
                                          .spare_last = 4},
                                         names, trace);
        REQUIRE(got.requests == expected.requests);
        REQUIRE(got.blocks == expected.blocks);
        REQUIRE(got.local_hits == expected.hit_blocks);
        REQUIRE(got.evictions == expected.evictions);
        REQUIRE(got.tau_s == expected.tau_s);
        REQUIRE(got.remote_hits + got.replicas + got.sources + sum(got.sent) == 0);
        for (const ShardCounts& counts : {got.by_key, got.by_run})
          REQUIRE(counts.asks + counts.publishes + counts.withdraws + counts.busiest == 0);
      }
  }
}

TEST_CASE("cluster simulator: a block is a hit here, a hit there or put, whatever the options") {
  Random random(testing::seed());
  for (int run = 0; run < 60; ++run) {
    BlockNames names;
    const Trace trace = random_trace(random, names, 300);
    ClusterOptions options;
    options.nodes = 2 + static_cast<std::uint32_t>(random.below(9));
    options.capacity_blocks = options.nodes * (1 + static_cast<BlockId>(random.below(30)));
    options.policy = kPolicyKinds[random.below(kPolicyKinds.size())];
    options.route = static_cast<Route>(random.below(3));
    options.keep = static_cast<KeepCopies>(random.below(3));
    options.pick = static_cast<PickHolder>(random.below(2));
    options.replicate_above = random.one_in(2) ? 0 : 1.5;
    options.spare_last = static_cast<std::uint32_t>(random.below(4));
    CAPTURE(options.nodes);
    CAPTURE(options.capacity_blocks);
    const ClusterReport got = replay(options, names, trace);
    std::uint64_t blocks = 0;
    for (const auto& request : trace) blocks += request.size();
    REQUIRE(got.blocks == blocks);
    REQUIRE(got.local_hits + got.remote_hits <= blocks - names.size());  // each is new once
    REQUIRE(got.kept + got.aside == got.remote_hits);
    REQUIRE(sum(got.sent) == got.remote_hits + got.replicas);
    REQUIRE(sum(got.routed) == trace.size());
    REQUIRE(got.last_evicted <= got.evictions);
    REQUIRE(got.sources <= got.remote_hits);
    for (const ShardCounts& counts : {got.by_key, got.by_run}) {
      REQUIRE(counts.asks <= counts.asked_keys);
      REQUIRE(counts.asks_p99 <= counts.asks_max);
      REQUIRE(counts.asks_max < options.nodes);
    }
  }
}

TEST_CASE("cluster simulator: with room for all, whatever was ever put is a hit") {
  Random random(testing::seed());
  BlockNames names;
  const Trace trace = random_trace(random, names, 400);
  const auto roomy = static_cast<BlockId>(names.size());
  for (const Route route : {Route::round_robin, Route::random, Route::prefix}) {
    const ClusterReport got =
        replay({.nodes = 4, .capacity_blocks = 4 * roomy, .route = route}, names, trace);
    CHECK(got.local_hits + got.remote_hits == got.blocks - names.size());
    CHECK(got.evictions == 0);
    CHECK(got.hidden == 0);
    CHECK(got.aside == 0);
  }
}

TEST_CASE("cluster simulator: two nodes, counted by hand") {
  const BlockNames names = some_names(4);
  ClusterSimulator cluster({.nodes = 2, .capacity_blocks = 8, .policy = PolicyKind::lru}, names);
  cluster.request(std::vector<Name>{0, 1, 2}, 1);     // put on 0
  cluster.request(std::vector<Name>{0, 1, 2}, 2);     // 1 fetches three
  cluster.request(std::vector<Name>{0, 1, 2, 3}, 3);  // 0 has three, puts one
  cluster.request(std::vector<Name>{0, 1, 2, 3}, 4);  // 1 has three by now, fetches one
  cluster.finish();
  cluster.check_invariants();
  const ClusterReport got = cluster.report();
  CHECK(got.blocks == 14);
  CHECK(got.local_hits == 6);
  CHECK(got.remote_hits == 4);
  CHECK(got.kept == 4);
  CHECK(got.sources == 2);
  CHECK(got.routed == std::vector<std::uint64_t>{2, 2});
  CHECK(got.sent == std::vector<std::uint64_t>{4, 0});
  CHECK(got.busiest_window == 4);
  // All four are of one run: one owner has them all, which the other node asks twice, and tells
  // twice, too, since its two batches lie seconds apart.
  CHECK(got.by_run.asks == 2);
  CHECK(got.by_run.asks_max == 1);
  CHECK(got.by_run.publishes == 2);
  CHECK(got.by_run.told_keys == 4);
  CHECK(got.by_run.withdraws == 0);
}

TEST_CASE("cluster simulator: a copy that is not kept is fetched again") {
  const BlockNames names = some_names(2);
  const Trace trace{{0, 1}, {0, 1}, {}, {0, 1}, {}, {0, 1}};
  for (const KeepCopies keep : {KeepCopies::never, KeepCopies::always}) {
    const ClusterReport got =
        replay({.nodes = 2, .capacity_blocks = 4, .keep = keep}, names, trace);
    const std::uint64_t fetches = keep == KeepCopies::never ? 3 : 1;
    CHECK(got.remote_hits == 2 * fetches);
    CHECK(got.local_hits == 6 - 2 * fetches);
    CHECK(got.aside == (keep == KeepCopies::never ? got.remote_hits : 0));
  }
}

TEST_CASE("cluster simulator: a block that others have goes before a last copy") {
  const BlockNames names = some_names(3);
  // 1 is the oldest on node 0 when room for 2 is needed; 0 is on both.
  const Trace trace{{1}, {0}, {0}, {}, {2}, {}, {1}};
  for (const std::uint32_t spared : {0u, 1u, 5u}) {
    const ClusterReport got =
        replay({.nodes = 2, .capacity_blocks = 4, .policy = PolicyKind::lru, .spare_last = spared},
               names, trace);
    CHECK(got.last_evicted == (spared == 0 ? 1 : 0));
    CHECK(got.local_hits == (spared == 0 ? 0 : 1));
    CHECK(got.remote_hits == 1);
  }
}

TEST_CASE("cluster simulator: a hot block gets replicas, no more than asked for") {
  const BlockNames names = some_names(1);
  const Trace trace(20, std::vector<Name>{0});
  for (const std::uint32_t most : {0u, 1u, 3u}) {
    const ClusterReport got = replay({.nodes = 5,
                                      .capacity_blocks = 10,
                                      .tau_s = 1000,
                                      .route = Route::prefix,
                                      .replicate_above = 4,
                                      .replicas_max = most},
                                     names, trace);
    CHECK(got.replicas == most);
    CHECK(sum(got.sent) == most);
    CHECK(got.local_hits == 19);
    CHECK(*std::ranges::max_element(got.routed) == 20);
  }
}

TEST_CASE("cluster simulator: holders beyond what an entry has room for are not known") {
  const BlockNames names = some_names(1);
  const ClusterReport got =
      replay({.nodes = 8, .capacity_blocks = 8}, names, Trace(8, std::vector<Name>{0}));
  CHECK(got.remote_hits == 7);
  CHECK(got.crowded == 8 - kHoldersPerKey);
}

TEST_CASE("cluster simulator: uniform traffic is spread evenly") {
  Random random(testing::seed());
  constexpr std::uint64_t kChains = 2000, kBlocks = 4;
  const BlockNames names = some_names(kChains * kBlocks);
  for (const Route route : {Route::round_robin, Route::random}) {
    Trace trace;
    for (int i = 0; i < 20'000; ++i) {
      const auto first = static_cast<Name>(random.below(kChains) * kBlocks);
      trace.push_back({first, first + 1, first + 2, first + 3});
    }
    const ClusterReport got =
        replay({.nodes = 8, .capacity_blocks = 16000, .route = route, .keep = KeepCopies::never},
               names, trace);
    const auto skew = [](const std::vector<std::uint64_t>& each) {
      return static_cast<double>(*std::ranges::max_element(each)) *
             static_cast<double>(each.size()) / static_cast<double>(sum(each));
    };
    CHECK(skew(got.routed) < 1.1);
    CHECK(skew(got.sent) < 1.2);
    const double asked = static_cast<double>(got.by_key.asks) / 8;
    CHECK(static_cast<double>(got.by_key.busiest) < 1.3 * asked);
  }
}

TEST_CASE("shard traffic: a request asks each owner once, by key and by run") {
  constexpr std::uint64_t kChain = 200;
  const BlockNames names = some_names(kChain);
  std::vector<Name> chain(kChain);
  std::iota(chain.begin(), chain.end(), Name{0});
  SimulatedDirectory directory(16, names);
  directory.learn(chain);
  directory.ask(3, std::span(chain).subspan(10));
  directory.ask(3, {});
  for (const ShardTraffic* traffic : {&directory.by_key(), &directory.by_run()}) {
    std::set<std::uint32_t> owners;
    std::uint64_t keys = 0;
    for (std::size_t i = 10; i < kChain; ++i) {
      if (traffic->owner(chain[i]) == 3) continue;
      owners.insert(traffic->owner(chain[i]));
      ++keys;
    }
    CHECK(traffic->counts().asks == owners.size());
    CHECK(traffic->counts().asked_keys == keys);
    CHECK(traffic->counts().asks_max == owners.size());
  }
  for (std::size_t i = 0; i < kChain; ++i)
    CHECK(directory.by_run().owner(chain[i]) == directory.by_run().owner(chain[i - i % 64]));
  CHECK(directory.by_run().counts().asks <= 4);
  CHECK(directory.by_key().counts().asks > 4);
}

TEST_CASE("shard traffic: a batch waits 20 ms or is full, and tells of a key what came last") {
  constexpr std::uint64_t kMany = 12'000;
  const BlockNames names = some_names(kMany);
  std::vector<Name> chain(kMany);
  std::iota(chain.begin(), chain.end(), Name{0});
  SimulatedDirectory directory(2, names);
  directory.learn(chain);
  const ShardTraffic& traffic = directory.by_key();
  std::uint64_t others = 0;
  for (const Name name : chain) others += traffic.owner(name) != 0;
  REQUIRE(others > kKeysPerBatch);
  REQUIRE(others < 2 * kKeysPerBatch);
  for (const Name name : chain) directory.came(0, name, 1);
  CHECK(traffic.counts().publishes == 1);
  directory.advance(1.01);
  CHECK(traffic.counts().publishes == 1);
  directory.advance(1.05);
  CHECK(traffic.counts().publishes == 2);
  CHECK(traffic.counts().told_keys == others);
  const auto told =
      *std::ranges::find_if(chain, [&](Name name) { return traffic.owner(name) != 0; });
  directory.went(0, told, 2);
  directory.came(0, told, 2);
  directory.went(0, told, 2);
  directory.finish();
  CHECK(traffic.counts().withdraws == 1);
  CHECK(traffic.counts().publishes == 2);
  CHECK(traffic.counts().told_keys == others + 1);
}

}  // namespace
}  // namespace kvpool
